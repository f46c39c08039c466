"""TOML files whose every key is checked: an error names the file, the key, its value and what is valid."""

from __future__ import annotations

import difflib
import math
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from serl_chunk_robot.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib  # novermin
else:
    import tomli as tomllib

ANY = -math.inf, math.inf, ""


class Table:
    """A table of a TOML file. Every reader raises ConfigError where the value is not what it must be.

    Args:
        file: named in errors.
        name: dotted, of the table; empty for the file itself.
        valid: the keys; another one is refused. None: all are valid.
    """

    def __init__(self, file: Path, name: str, values: Dict[str, Any], valid: Optional[Sequence[str]]) -> None:
        self.file, self.name, self.values = file, name, values
        for key in values:
            if valid is not None and key not in valid:
                raise unknown(self.dotted(key), key, valid, f"unknown key ({values[key]!r} in {file})")

    def dotted(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def wrong(self, key: str, expected: str) -> ConfigError:
        """The error of a value that is not `expected`, or missing."""
        got = repr(self.values[key]) if key in self.values else "missing"
        return ConfigError(f"{got} in {self.file}, expected {expected}", parameter=self.dotted(key))

    def text(self, key: str, default: Optional[str] = None) -> str:
        """A string that is not empty. Without a default it is required."""
        value = self.values.get(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text")
        return value

    def number(self, key: str, default: float, low: float = -math.inf, high: float = math.inf, why: str = "") -> float:
        """A number from `low` to `high`. `why`: no other one is valid."""
        value = self.values.get(key, default)
        if not _is_number(value) or not low <= value <= high:
            raise self.wrong(key, "a number" + _between(low, high, why))
        return float(value)

    def whole(self, key: str, default: int, low: float, high: float, why: str = "") -> int:
        """A whole number from `low` to `high`. `why`: no other one is valid."""
        value = self.values.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, "a whole number" + _between(low, high, why))
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def numbers(
        self, key: str, size: int, *, sign: int = 0, one: bool = True, within: Tuple[float, float, str] = ANY
    ) -> Optional[np.ndarray]:
        """float64[size]; None where the key is not there.

        Args:
            sign: 1: all are above 0. 0: any.
            one: whether a single number stands for all.
            within: the least, the most, and why no other one is valid.
        """
        value = self.values.get(key)
        if value is None:
            return None
        given = [value] * size if one and not isinstance(value, list) else value
        fits = isinstance(given, list) and len(given) == size and all(map(_is_number, given))
        if not fits or (sign and min(given) <= 0):
            positive = "positive " if sign else ""
            raise self.wrong(key, f"a list of {size} {positive}numbers" + (", or one for all" if one else ""))
        if size and not within[0] <= min(given) <= max(given) <= within[1]:
            raise self.wrong(key, "numbers" + _between(*within))
        return np.array(given, np.float64)

    def vector(self, key: str, size: int, within: Tuple[float, float, str] = ANY) -> np.ndarray:
        """float64[size] of a list that is required; see `numbers`."""
        vector = self.numbers(key, size, one=False, within=within)
        if vector is None:
            raise self.wrong(key, f"a list of {size} numbers")
        return vector

    def table(self, key: str, valid: Optional[Sequence[str]] = None) -> Table:
        """A table in the table; an empty one where the key is not there."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, f"a table [{self.dotted(key)}]")
        return Table(self.file, self.dotted(key), value, valid)

    def tables(self, key: str, valid: Optional[Sequence[str]]) -> List[Table]:
        """A list of tables, numbered from 0 in errors; an empty one where the key is not there."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise self.wrong(key, f"tables [[{self.dotted(key)}]]")
        return [Table(self.file, f"{self.dotted(key)}[{k}]", each, valid) for k, each in enumerate(value)]


def read_toml(path: Path, valid: Sequence[str]) -> Table:
    """Read a file. Raises ConfigError, as every reader of the table: missing, no TOML, an unknown key."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: not readable ({e.strerror or e}). Pass the path of a robot's TOML file.") from e
    except ValueError as e:  # of TOML, or of UTF-8
        raise ConfigError(f"{path}: no TOML file ({e})") from e
    return Table(path, "", values, valid)


def create(path: Path, text: str, parameter: str) -> None:
    """Write a file that is not there yet. Raises ConfigError, which names `parameter`."""
    try:
        with path.open("x", encoding="utf-8") as f:
            f.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists, and is not overwritten. Choose another name.", parameter=parameter) from None
    except OSError as e:
        raise ConfigError(f"{path} cannot be written ({e.strerror or e})", parameter=parameter) from e


def unknown(parameter: str, word: str, valid: Sequence[str], what: str) -> ConfigError:
    """The error of a word that is none of `valid`, with the nearest one."""
    near = difflib.get_close_matches(word, valid, 1)
    hint = f"Did you mean {near[0]}?" if near else "Valid: {}.".format(", ".join(sorted(valid)) or "none")
    return ConfigError(f"{what}. {hint}", parameter=parameter)


def _between(low: float, high: float, why: str) -> str:
    span = f" from {low:.10g}" + (f" to {high:.10g}" if high < math.inf else "") if low > -math.inf else ""
    return span + (f" ({why})" if why else "")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
