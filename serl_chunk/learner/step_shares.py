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

    def __init__(self, session: str, delivered: int) -> None:
        self.session = session
        self.delivered = self.granted = delivered
        self.polled_at, self.moved_at, self.granted_at = -math.inf, 0.0, 0.0
        self.noticed, self.notice_until = 0, 0.0  # what it was granted before it was taken back, and until when
        self.idle_until = 0.0


class StepShares:
    """The allowances of all sessions, whose steps that are not delivered stay together within `steps_left()`.

    A session gets an equal share, and more once it has used half of it; of what is scarce, the one that got some least
    recently. A session that is silent for `gone_s`, or closed, gives its unused share back. One that records nothing
    does so once another waits. For any thread.

    A session's record or poll looks at that session alone, unless it waits for steps of which there may not be enough
    for all: then at all of them.

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
        self._shares: dict[str, _Share] = {}  # that polled or moved within `gone_s`, the latest to do so last
        self._live: dict[str, _Share] = {}  # of these, that polled within it, the latest last; the others hold nothing
        self._held = 0  # steps that are granted and not delivered, what was taken back excepted
        self._largest = 0  # no session holds more
        self._notice_until = 0.0  # none that was taken back may be used later
        self._idle_at = math.inf  # no session has held what it holds for IDLE_S before
        self._lock = threading.Lock()

    def delivered(self, session: str, steps: int) -> None:
        """Count steps that came from a session, and that `steps_left` counts already."""
        with self._lock:
            share = self._seen(session)
            if (held := share.granted - share.delivered) > 0:
                self._held -= min(held, steps)
            share.delivered += steps
            share.moved_at, share.idle_until = self._clock(), 0.0

    def _seen(self, session: str) -> _Share:
        share = self._shares.pop(session, None)
        if share is None:
            share = _Share(session, self._steps_of(session))
            share.moved_at = self._clock()
        self._shares[session] = share
        return share

    def closed(self, session: str) -> None:
        """Take back what a session has not used that left, or fell silent."""
        with self._lock:
            self._live.pop(session, None)
            if (share := self._shares.pop(session, None)) is not None:
                self._take_back(share)

    def _take_back(self, share: _Share) -> None:
        if (held := share.granted - share.delivered) > 0:
            self._held -= held
            share.granted = share.delivered

    def allowed(self, session: str) -> int | None:
        """Return the steps that a live session may have recorded in all; None: no limit. Poll it often."""
        with self._lock:
            now, left = self._clock(), self._steps_left()
            share = self._seen(session)
            share.polled_at = now
            self._live.pop(session, None)
            self._live[session] = share
            if next(iter(self._live.values())).polled_at < now - self._gone_s or len(self._shares) > len(self._live):
                self._forget(now - self._gone_s)
            if not left:  # None, or nothing
                self._take_back(share)
            if left is None:
                return None
            fair = max(1, left // len(self._live))
            held = max(0, share.granted - share.delivered)
            if held <= fair // 2:
                if share.idle_until or now < self._notice_until or self._is_scarce(left, fair):
                    if left > self._held or now >= self._idle_at:  # else there is nothing to give or to take
                        self._share_out(left, fair, now)
                else:
                    self._held += fair - held
                    self._grant(share, fair - held, now)
                    self._largest, self._idle_at = max(self._largest, fair), min(self._idle_at, now + IDLE_S)
            return max(share.granted, share.delivered) if left else share.delivered

    def _is_scarce(self, left: int, fair: int) -> bool:
        """Whether some session might get less than it waits for: a fair share for each may be more than is left."""
        n = len(self._live)
        return left <= 0 or (n > 1 and n * max(fair, self._largest) > left)

    @staticmethod
    def _grant(share: _Share, steps: int, now: float) -> None:
        share.granted = max(share.granted, share.delivered) + steps
        share.granted_at = share.moved_at = now

    def _forget(self, before: float) -> None:
        """Take back what sessions hold that have not polled since `before`; forget those that did not move either."""
        while (share := next(iter(self._live.values()))).polled_at < before:
            del self._live[share.session]
            self._take_back(share)
            share.notice_until = 0.0
        # One that moved is not forgotten: `steps_of` may lack its newest record.
        while (share := next(iter(self._shares.values()))).polled_at < before and share.moved_at < before:
            del self._shares[share.session]

    def _share_out(self, left: int, fair: int, now: float) -> None:
        """Give all that wait their part of what is free; where that is nothing, take back what is idle."""
        free = left
        waiting: list[tuple[bool, float, int, int, _Share]] = []
        for share in self._live.values():
            most = max(share.granted, share.noticed) if now < share.notice_until else share.granted
            out = max(0, most - share.delivered)  # what it may have recorded or may still record, and is not here
            free -= out
            if out <= fair // 2:
                waiting.append((now < share.idle_until, share.granted_at, len(waiting), out, share))
        waiting.sort()
        starved = False
        for _, _, _, out, share in waiting:
            # One that was idle gets a step, and the rest once it has recorded that.
            give = min(free, (1 if share.idle_until else fair) - out)
            if give > 0:
                self._grant(share, give, now)
                free -= give
            else:
                starved |= out == 0
        self._held, self._largest, self._idle_at = 0, 0, math.inf
        for share in self._live.values():
            held = share.granted - share.delivered
            if held > 0 and starved and free <= 0 and now - share.moved_at > IDLE_S:
                share.noticed, share.notice_until = share.granted, now + NOTICE_S
                share.granted, share.idle_until = share.delivered, now + TURN_S
                self._notice_until = share.notice_until
            elif held > 0:
                self._held, self._largest = self._held + held, max(self._largest, held)
                self._idle_at = min(self._idle_at, share.moved_at + IDLE_S)
