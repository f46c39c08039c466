"""Whether every profile of a robot's file holds its park pose and the places of its resets, whichever is in force."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional, Sequence, Tuple

import numpy as np

from serl_chunk_robot.control.motions import Step
from serl_chunk_robot.drivers.base import DriverSpec
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.geometry.kinematics import Arms
from serl_chunk_robot.robot_file.profiles import Profile
from serl_chunk_robot.safety.gate import Gate

if TYPE_CHECKING:
    from serl_chunk_robot.robot_file.config import RobotFile


def check_poses(file: RobotFile, spec: DriverSpec) -> None:
    """Compare the park pose and the places of resets, with all that may be drawn, with each profile's limits.

    A place that depends on where a reset begins is compared as far as it is known. Raises ConfigError with the profile,
    the joint and its values.
    """
    size = len(spec.low)
    still, steps = np.zeros(size), file.reset
    park = () if file.park is None else (("park", Step(file.park, still, still)),)
    if not steps and spec.home:
        steps = (Step(np.array(spec.home, np.float64), still, still),)
    for profile in file.profiles.values():
        way = _Way(file, profile, file.arms, size)
        for due in (park, *_resets(steps)):
            way.lead(due)


def _resets(steps: Sequence[Step]) -> List[Tuple[Tuple[str, Step], ...]]:
    """The different resets that steps make, by the number of the episode and for a new object."""
    every = {1, *(step.every for step in steps if step.every)}
    episodes = {0, *(a * b for a in every for b in every)}
    due = (tuple(k for k, step in enumerate(steps) if step.due(episode, new)) for episode in sorted(episodes)
           for new in (False, True))  # fmt: skip
    return [tuple((f"reset.step[{k}]", steps[k]) for k in each) for each in dict.fromkeys(due)]


class _Way:
    """Follows steps under a profile from a place that is not known."""

    def __init__(self, file: RobotFile, profile: Profile, arms: Optional[Arms], size: int) -> None:
        self._file, self._profile, self._limits, self._arms = file, profile, profile.limits, arms
        self._size = size
        self._gate = None if self._limits.workspace is None else Gate(self._limits, 1.0, arms)

    def lead(self, steps: Sequence[Tuple[str, Step]]) -> None:
        """Follow steps, each with its name in errors. Raises ConfigError."""
        low = high = np.full(self._size, np.nan)  # where each joint may be; nan: not known
        for name, step in steps:
            tips = {tip: self._led(name, step, tip, (low + high) / 2) for tip in step.tips}
            least = np.full(self._size, np.nan)
            if step.least is not None:
                least[np.isfinite(step.least)] = step.least[np.isfinite(step.least)]
            low, high = (step.goal(low, self._limits) - step.random, step.goal(high, self._limits) + step.random)
            for tip, there in tips.items():
                assert self._arms is not None
                joints = self._arms.joints[tip]
                low[joints] = high[joints] = there
            self._check(name, np.fmax(least, low), np.fmax(least, high))
            if step.relieve:
                joints = ~np.isin(np.arange(self._size), step.grippers)
                low[joints] = high[joints] = np.nan

    def _led(self, name: str, step: Step, tip: int, place: np.ndarray) -> np.ndarray:
        """Where a step leads the joints of an arm by its tip, from `place`, float64[J]; nan where that is not known."""
        assert self._arms is not None
        joints = self._arms.joints[tip]
        if np.isnan(place[joints]).any():
            return np.full(len(joints), np.nan)
        start = np.where(np.isnan(place), (self._limits.low + self._limits.high) / 2, place)
        try:
            return step._replace(tips=(tip,)).way(name, start, self._limits, self._arms)[-1, joints]  # type: ignore[no-any-return]
        except ConfigError as e:
            raise self._wrong(name, e.message) from e

    def _check(self, name: str, low: np.ndarray, high: np.ndarray) -> None:
        limits = self._limits
        outside = (low < limits.low) | (high > limits.high)  # not where it is not known
        if outside.any():
            j = int(np.argmax(outside))
            there = f"{low[j]:.4g}" if low[j] == high[j] else f"{low[j]:.4g} to {high[j]:.4g}"
            raise self._wrong(name, f"joint {j} would go to {there}, expected a place within this profile's "
                              f"{limits.low[j]:.4g} to {limits.high[j]:.4g}")  # fmt: skip
        if self._gate is not None and self._gate.outside((low + high)[None] / 2)[0] > 0:
            raise self._wrong(name, "the arms would leave this profile's workspace")

    def _wrong(self, name: str, what: str) -> ConfigError:
        ends = ": `end` could not park under it" if name == "park" else ""
        return ConfigError(f"{name}: {what}{ends}. Widen the profile's limits in {self._file.path}, or change {name}",
                           parameter=f"profile.{self._profile.name}")  # fmt: skip
