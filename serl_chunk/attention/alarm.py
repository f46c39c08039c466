"""An alarm on a fall of Q: its file, and the watch that compares one decision after the other with it.

A critic's value of the chosen chunk rises towards a success. The alarm is on its *fall*, as a share of what it had
reached since the policy began to act:

    fall_n = (p_n - q_n) / max(p_n - low, (high - low) / 10),   p_n = max of q_1..q_n

`low` and `high` are the range of the recorded values, so that neither their scale nor their offset matters. A value
that has hardly risen above `low` cannot fall far: that is what the tenth is for.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.io import atomic_write, os_reason
from serl_chunk.types import ConfigError, DataError

FORMAT = 1
_REFIT = "Write it again with `serl-chunk attention fit`"
_LEAST_SCALE = 0.1  # of the range, below which no fall is measured


@dataclasses.dataclass(frozen=True)
class FittedRun:
    """A run that an alarm was fitted on."""

    path: str  # as it was given
    run_id: str


@dataclasses.dataclass(frozen=True)
class Alarm:
    """An alarm as `serl-chunk attention fit` writes it.

    Args:
        fall: share above which a fall of Q raises the alarm.
        low, high: range of Q in the recorded episodes.
        false_alarms: share of successful episodes that was allowed an alarm.
        runs: those that it was fitted on.
        fitted: figures on their episodes (`fit.Figures.to_json`).
    """

    fall: float
    low: float
    high: float
    false_alarms: float
    runs: tuple[FittedRun, ...] = ()
    fitted: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def save(self, file: Path) -> None:
        """Write it as JSON. Raises DataError."""
        try:
            atomic_write(file, json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")
        except OSError as error:
            raise DataError(f"{file}: cannot write the alarm ({os_reason(error)})") from error

    @classmethod
    def read(cls, file: str | Path, parameter: str = "") -> Alarm:
        """Read what `save` wrote. Raises ConfigError for `parameter`: absent, damaged, or of a later format."""
        file = Path(file).expanduser()
        try:
            saved = json.loads(file.read_text())
            if isinstance(saved, dict) and isinstance(number := saved.get("format"), int) and number > FORMAT:
                what = f"{file}: has format {number}, expected at most {FORMAT}. Use a later version of serl_chunk"
                raise ConfigError(what, parameter=parameter)
            return cls._from_json(saved)
        except FileNotFoundError:
            raise ConfigError(f"{file}: no such file. {_REFIT}", parameter=parameter) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{file}: is no alarm ({os_reason(error)}). {_REFIT}", parameter=parameter) from error

    @classmethod
    def _from_json(cls, saved: Mapping[str, Any]) -> Alarm:
        numbers = {name: float(saved[name]) for name in ("fall", "low", "high", "false_alarms")}
        if not all(map(math.isfinite, numbers.values())) or not numbers["low"] < numbers["high"]:
            raise ValueError("it needs finite numbers, and low below high")
        return cls(**numbers, runs=tuple(FittedRun(**run) for run in saved["runs"]), fitted=saved["fitted"])


class Watch:
    """Compares the decisions of a policy with an alarm, in their order.

    `restart` begins anew: at an episode's beginning, and whenever the policy no longer acted, for the robot was
    elsewhere then. So does an alarm: a further one needs a further fall.
    """

    def __init__(self, alarm: Alarm) -> None:
        self._alarm = alarm
        self.restart()

    def restart(self) -> None:
        """Forget the values before."""
        self._peak = -math.inf

    def fall(self, q: float) -> float:
        """Return the fall at the next decision, of value `q`; 0 where it did not fall."""
        self._peak = max(self._peak, q)
        least = _LEAST_SCALE * (self._alarm.high - self._alarm.low)
        return (self._peak - q) / max(self._peak - self._alarm.low, least)

    def decided(self, record: Mapping[str, Any]) -> str:
        """Look at the record of the next decision; return what the operator should know, or an empty text."""
        if "q" not in record:
            return ""
        q = float(np.max(record["q"]))
        if not self.fall(q) > self._alarm.fall:
            return ""
        text = f"Q fell from {self._peak:.2g} to {q:.2g}"
        self.restart()
        return text
