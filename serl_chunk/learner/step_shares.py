"""Distributes the steps that the training schedule allows among the sessions of lockstep actors."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

IDLE_S = 2.0  # without a step, after which a share is taken back where another session waits for one
NOTICE_S = 1.0  # how long a share that was taken back may still be used: until its actor has read so
TURN_S = 10.0  # how long a session whose share was taken back is the last in the queue


class _Share:
    """Steps of one session. It may have recorded `granted` in all, of which `delivered` are here."""

    def __init__(self, delivered: int) -> None:
        self.delivered = self.granted = delivered
        self.polled_at, self.moved_at, self.granted_at = -math.inf, 0.0, 0.0
        self.noticed, self.notice_until = 0, 0.0  # what it was granted before it was taken back, and until when
        self.idle_until = 0.0

    def outstanding(self, now: float) -> int:
        """Steps that it may have recorded or may still record, and that are not here."""
        most = max(self.granted, self.noticed) if now < self.notice_until else self.granted
        return max(0, most - self.delivered)


class StepShares:
    """The allowances of all sessions, whose steps that are not delivered stay together within `steps_left()`.

    A session gets an equal share, and more once it has used half of it; of what is scarce, the one that got some least
    recently. A session that is silent for `gone_s`, or closed, gives its unused share back. One that records nothing
    does so once another waits. For any thread.

    Args:
        steps_left: returns None without a limit.
        steps_of: returns the steps that a session has delivered, those of the record under way excepted. Called for
            one that comes, or comes back: those that are away hold nothing, and are not remembered here.
    """

    def __init__(
        self, steps_left: Callable[[], int | None], gone_s: float, clock: Callable[[], float] = time.monotonic,
        *, steps_of: Callable[[str], int],
    ) -> None:  # fmt: skip
        self._steps_left, self._gone_s, self._clock, self._steps_of = steps_left, gone_s, clock, steps_of
        self._shares: dict[str, _Share] = {}  # of sessions that polled or moved within `gone_s`
        self._lock = threading.Lock()

    def _share(self, session: str) -> _Share:
        if session not in self._shares:
            share = self._shares[session] = _Share(self._steps_of(session))
            share.moved_at = self._clock()
        return self._shares[session]

    def delivered(self, session: str, steps: int) -> None:
        """Count steps that came from a session, and that `steps_left` counts already."""
        with self._lock:
            share = self._share(session)
            share.delivered += steps
            share.moved_at, share.idle_until = self._clock(), 0.0

    def closed(self, session: str) -> None:
        """Take back what a session has not used that left, or fell silent."""
        with self._lock:
            self._shares.pop(session, None)

    def allowed(self, session: str) -> int | None:
        """Return the steps that a live session may have recorded in all; None: no limit. Poll it often."""
        with self._lock:
            now, left = self._clock(), self._steps_left()
            share = self._share(session)
            share.polled_at = now
            if left is None:
                share.granted = share.delivered
                return None
            if left == 0:
                share.granted = min(share.granted, share.delivered)
            self._share_out(left, now)
            return max(share.granted, share.delivered) if left else share.delivered

    def _share_out(self, left: int, now: float) -> None:
        silent, live = [], []
        for session, share in self._shares.items():
            if share.polled_at >= now - self._gone_s:
                live.append(share)
            else:
                silent.append(session)
                share.granted, share.notice_until = share.delivered, 0.0
        for session in silent:
            if self._shares[session].moved_at < now - self._gone_s:  # else `steps_of` may lack its newest record
                del self._shares[session]
        free = left - sum(share.outstanding(now) for share in live)
        fair = max(1, left // len(live))
        waiting = [s for s in live if s.outstanding(now) <= fair // 2]
        waiting.sort(key=lambda s: (now < s.idle_until, s.granted_at))
        for share in waiting:
            # One that was idle gets a step, and the rest once it has recorded that.
            give = min(free, (1 if share.idle_until else fair) - share.outstanding(now))
            if give > 0:
                share.granted = max(share.granted, share.delivered) + give
                share.granted_at = share.moved_at = now
                free -= give
        if free <= 0 and any(s.outstanding(now) == 0 for s in live):
            for share in live:
                if now - share.moved_at > IDLE_S and share.granted > share.delivered:
                    share.noticed, share.notice_until = share.granted, now + NOTICE_S
                    share.granted, share.idle_until = share.delivered, now + TURN_S
