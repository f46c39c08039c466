"""Whether a sample of the measured state can be believed. A doubtful one is never a target; two in a row stop."""

from __future__ import annotations

from typing import NamedTuple, Optional

import numpy as np

STALE = 0.1  # s
STILL_TARGET = 0.02  # rad; a robot whose target moves further while its sample repeats is not being read
JUMP = 1.5  # times the largest velocity
DOUBTFUL_IN_A_ROW = 2


class Sample(NamedTuple):
    """One reading of all arms: float64[J] each, and the moment on the loop's clock, s, at which it was taken."""

    q: np.ndarray
    dq: np.ndarray
    effort: np.ndarray
    stamp: float


class Measured:
    """Judges samples in the order they are read.

    Args:
        low, high: what the mechanism can reach, float64[J].
        velocity: the largest the mechanism can move at, float64[J].
    """

    def __init__(self, low: np.ndarray, high: np.ndarray, velocity: np.ndarray) -> None:
        self._low, self._high, self._velocity = low, high, velocity
        self.good: Optional[Sample] = None  # the newest that was believed
        self.doubtful = 0  # in a row
        self.reason = "nothing was measured yet"
        self._good_at = 0.0
        self._last: Optional[Sample] = None
        self._same_since = 0.0
        self._same_target = self._low

    def forget(self) -> None:
        self.__init__(self._low, self._high, self._velocity)  # type: ignore[misc]

    def judge(self, sample: Sample, now: float, target: np.ndarray) -> bool:
        """Whether `sample` is believed; `good` is it then, else `reason` says why not.

        `target`: the set point at `now`.
        """
        frozen = self._frozen(sample, now, target)
        self.reason = self._fault(sample, now) or frozen
        if self.reason:
            self.doubtful += 1
            return False
        self.doubtful, self.good, self._good_at = 0, sample, now
        return True

    @property
    def lost(self) -> bool:
        return self.doubtful >= DOUBTFUL_IN_A_ROW

    def _fault(self, sample: Sample, now: float) -> str:
        shape = self._low.shape
        for name in ("q", "dq", "effort"):
            values = getattr(sample, name)
            if values.shape != shape or values.dtype.kind != "f" or not np.isfinite(values).all():
                return f"{name} is not {shape[0]} finite numbers"
        outside = (sample.q < self._low) | (sample.q > self._high)
        if outside.any():
            joint = int(np.argmax(outside))
            return f"joint {joint} reads {sample.q[joint]:.3f}, which the mechanism cannot reach"
        if not now - STALE <= sample.stamp <= now + STALE:
            return f"the newest sample is {1e3 * (now - sample.stamp):.0f} ms old"
        good = self.good
        if good is not None:
            # By the loop's clock where stamps stand still. Never more than STALE, or a wrong pose that persists would
            # be believed in the end: after a longer gap only `forget` helps.
            elapsed = min(max(sample.stamp - good.stamp, now - self._good_at, 0.0), STALE)
            jumped = np.abs(sample.q - good.q) > JUMP * self._velocity * elapsed + 1e-9
            if jumped.any():
                joint = int(np.argmax(jumped))
                return f"joint {joint} jumped from {good.q[joint]:.3f} to {sample.q[joint]:.3f}"
        return ""

    def _frozen(self, sample: Sample, now: float, target: np.ndarray) -> str:
        last, self._last = self._last, sample
        same = last is not None and all(np.array_equal(a, b) for a, b in zip(sample[:3], last[:3]))
        if not same:
            self._same_since, self._same_target = now, np.array(target)
        elif now - self._same_since >= STALE and np.abs(target - self._same_target).max() > STILL_TARGET:
            return f"the sample has repeated for {1e3 * (now - self._same_since):.0f} ms while the target moved"
        return ""
