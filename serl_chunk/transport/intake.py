"""Where the learner takes records in: each exactly once and in order, then acknowledged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from serl_chunk.transport import handshake, kinds, records, wire
from serl_chunk.transport.routers import Routers, plain_bytes
from serl_chunk.transport.sessions import Gap, Session, SessionInfo, Sessions
from serl_chunk.transport.stats import Counters, Rate
from serl_chunk.transport.wire import Frame, Limits, WireError
from serl_chunk.types import DataError, Record, StepBlock

log = logging.getLogger(__name__)


class Intake:
    """The data channel. Used by the server's thread, which calls every callback given here."""

    def __init__(
        self,
        routers: Routers,
        sessions: Sessions,
        counters: Counters,
        limits: Limits,
        *,
        on_record: Callable[[SessionInfo, Record], None],
        on_silent: Callable[[SessionInfo], None],
        allowance: Callable[[str], int | None],
    ) -> None:
        """See LearnerServer for the callbacks."""
        self.rate = Rate()
        self.insert_s = 0.0  # time spent in on_record
        self._routers, self._sessions, self._counters, self._limits = routers, sessions, counters, limits
        self._on_record, self._on_silent, self._allowance = on_record, on_silent, allowance
        self._touched: set[Session] = set()  # sent something since the last acknowledgement

    def receive(self, identity: bytes, frames: list[Frame]) -> None:
        """Take in a message; raises WireError for one that is none."""
        if not frames:
            raise WireError("no frames")
        session = self._sessions.by_token(plain_bytes(frames[0]))
        if session is None:
            self._counters["stale"] += 1
            return
        session.hear()
        if session not in self._touched:
            self._touched.add(session)
            session.data_id = identity
        try:
            message = wire.decode(frames[1:], self._limits)
            first, record = records.decode_record(message)
        except WireError as e:
            # It holds a valid token, so this is no stranger's garbage: the actor would resend it for ever.
            self.refuse(session, f"record after {session.expected} of this session is malformed: {e}")
            raise
        self._counters["received_bytes"] += message.nbytes
        self._take(session, first, record)

    def _take(self, session: Session, first: int, record: Record) -> None:
        before = session.duplicates
        try:
            new = session.trim(first, record)
        except Gap as e:
            self._counters["gaps"] += 1
            self._routers.complain("data", session.info.peer, f"gap: {e}")
            if session.gap_told != session.expected:  # once: what is in flight has the same gap
                session.gap_told = session.expected
                self._acknowledge(session, gap=True)
            return
        self._counters["duplicates"] += session.duplicates - before
        if new is None:
            return
        follows = session.follows(new)
        if follows:
            start = time.monotonic()
            try:
                # A journal's write belongs here, before the insert; the acknowledgement follows both.
                self._on_record(session.info, new)
            except DataError as e:
                self._counters["rejected"] += 1
                self.refuse(session, str(e))
                return
            self.insert_s += time.monotonic() - start
        else:
            what = f"orphans of {session.info.actor_id}: their episode is not open here"
            self._routers.complain("data", session.info.peer, what)
            self._counters["orphans"] += records.count_of(new)
        session.advance(new, delivered=follows)
        self._counters["records"] += records.count_of(new) if follows else 0
        if follows and isinstance(new, StepBlock):
            self._counters["steps"] += new.n
            self.rate.add(new.n)

    def acknowledge(self) -> None:
        """Answer every session that has sent something since the last call."""
        for session in self._touched:
            self._acknowledge(session)
        self._touched.clear()

    def _acknowledge(self, session: Session, *, gap: bool = False) -> None:
        """Cumulative: everything below `next` was taken."""
        if not session.refused:
            fields = {"next": session.expected, "gap": gap, "allowance": self.allowed(session)}
            self._routers.send("data", session.data_id, wire.encode(kinds.ACK, fields))

    def allowed(self, session: Session) -> int | None:
        """The session's allowance in its actor's own count of steps."""
        allowed = self._allowance(session.info.session)
        session.allowance_told = None if allowed is None else allowed + session.steps_offset
        return session.allowance_told

    def refuse(self, session: Session, reason: str) -> None:
        """End a session for good: what it sends cannot be taken, and going on would lose it."""
        log.error("actor %s (%s) is refused: %s", session.info.actor_id, session.info.peer, reason)
        self._counters["refused"] += 1
        session.refused = reason
        self._routers.send("control", session.control_id, handshake.refusal(reason))
        self._sessions.fence(session)
        self._sessions.leave(session)
        self.close_episode(session)

    def close_episode(self, session: Session) -> None:
        """The session's open episode ends here, once."""
        if not session.closed:
            session.closed = True
            session.open_episode = None
            self._on_silent(session.info)
