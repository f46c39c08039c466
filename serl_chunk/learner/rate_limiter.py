"""How many updates the recorded steps entitle the learner to, and how far ahead an actor may run."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass
class RateLimiter:
    """Keeps critic updates near `utd_ratio` times the online steps recorded since `start`.

    Before `start` nothing is limited (pretraining has its own lengths; the warm-up is counted in episodes).
    """

    utd_ratio: float  # critic updates per online step
    max_lag_steps: int  # steps an actor may record beyond those the updates so far account for
    _base_steps: int | None = None
    updates: int = 0  # critic updates done since `start`

    def start(self, online_steps: int) -> None:
        """Begin to count from here."""
        self._base_steps = online_steps
        self.updates = 0

    def restore(self, online_steps: int, updates: int, owed: float = 0.0) -> None:
        """Continue after a resume: of the updates that `online_steps` entitle to, `updates` were done, `owed` not."""
        self._base_steps = online_steps - round((updates + owed) / self.utd_ratio)
        self.updates = updates

    def owed(self, online_steps: int) -> float | None:
        """What `restore` needs to go on as if nothing had been: updates, also parts of one; None before `start`."""
        if self._base_steps is None:
            return None
        return (online_steps - self._base_steps) * self.utd_ratio - self.updates

    def entitled(self, online_steps: int) -> int | None:
        """Critic updates since `start` that so many steps entitle to, those done included; None before `start`."""
        if self._base_steps is None:
            return None
        return max(0, math.floor((online_steps - self._base_steps) * self.utd_ratio + 1e-6))

    def may_update(self, online_steps: int, count: int) -> bool:
        """Whether `count` more critic updates are covered by the steps recorded so far."""
        if self._base_steps is None:
            return False
        # 100 steps at 0.29 entitle to 29 updates, not to the 28 that rounding leaves.
        return self.updates + count <= (online_steps - self._base_steps) * self.utd_ratio + 1e-6

    def steps_missing(self, online_steps: int, count: int) -> int:
        """How many more steps `count` more critic updates wait for; 0 where they are covered, or before `start`."""
        if self._base_steps is None:
            return 0
        need = math.ceil((self.updates + count - 1e-6) / self.utd_ratio)
        return max(0, self._base_steps + need - online_steps)

    def updates_due(self, online_steps: int) -> int:
        """Critic updates that the steps recorded so far entitle to and that are not done; 0 before `start`."""
        return max(0, (self.entitled(online_steps) or 0) - self.updates)

    def did_update(self, count: int) -> None:
        """Account for `count` critic updates."""
        self.updates += count

    def steps_allowed(self, online_steps: int) -> int | None:
        """How many more steps lockstep actors may record now; None without a limit (before `start`)."""
        if self._base_steps is None:
            return None
        # Rounded up: a fraction of a step less could be what the next update waits for, while the actor waits for it.
        limit = self._base_steps + math.ceil(self.updates / self.utd_ratio + self.max_lag_steps)
        return max(0, limit - online_steps)
