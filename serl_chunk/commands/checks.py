"""What `serl-chunk doctor` says about one thing, and sizes in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from serl_chunk.types import ConfigError

Status = Literal["ok", "warning", "FAIL", "-"]  # "-": could not be tried


class Check(NamedTuple):
    """One line. Whatever is not ok has a remedy."""

    name: str
    status: Status
    said: str
    remedy: str = ""
    figures: Mapping[str, float] = {}  # bytes, seconds, bytes per second; for `--json`

    def __str__(self) -> str:
        line = f"{self.status:8}{self.name:23}{self.said}"
        indent = "\n" + " " * 31
        return line + indent + "-> " + self.remedy.replace("\n", indent) if self.remedy else line

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**self._asdict(), "figures": dict(self.figures)}


def failed(name: str, sentence: str, remedy: str = "") -> Check:
    """A failure out of one of our own sentences, whose last part is what to do where no `remedy` is given."""
    said, _, last = sentence.rpartition(". ")
    if remedy or not said:
        return Check(name, "FAIL", sentence, remedy or "the sentence says what to change")
    return Check(name, "FAIL", said, last)


def per_second(nbytes: float) -> str:
    """A rate, in the units that links are sold in (10^6)."""
    return f"{nbytes / 1e6:.1f} MB/s" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB/s"


def duration(seconds: float) -> str:
    """Seconds with a unit that leaves few digits."""
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s"


def require_free(name: str, path: str) -> None:
    """Raise ConfigError where `path` of the flag `name` cannot be a file to write."""
    try:
        with open(path, "a"):
            pass
    except OSError as e:
        raise ConfigError(f"--{name}={path} cannot be written: {e.strerror}") from e
