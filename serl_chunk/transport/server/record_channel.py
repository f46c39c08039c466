"""Where the learner takes records in: each exactly once and in order, then acknowledged."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import time
from collections.abc import Callable

from serl_chunk.transport.server.sessions import NO_ACTOR, ServerHandler, Session, SessionInfo, Sessions
from serl_chunk.transport.server.sockets import ServerSockets
from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.record_store import RecordStore, Verdict
from serl_chunk.transport.wire import handshake, records
from serl_chunk.transport.wire.records import LOST, PART, Assembly, Item, Part, decode_part
from serl_chunk.types import Amend, DataError, Record, StepBlock
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, WireError, buffer_of

log = logging.getLogger(__name__)

_BOUND = 2**62  # of what is counted: sums of a few stay within 64 bits
FENCE_S = 1.0  # between looks whether the run is still this learner's
_RETRY_S = 1.0  # between looks at a full disk, and at the journal's size


class RecordReceiver:
    """The data channel. Used by the data thread.

    What the control thread notices comes through `end_later`, before whatever is received afterwards.
    """

    def __init__(
        self, sockets: ServerSockets, sessions: Sessions, store: RecordStore | None, handler: ServerHandler
    ) -> None:
        """With `durability="power"` only what is synced is acknowledged."""
        self.stalled = ""  # why nothing is taken now
        self.sockets, self.sessions, self._counters = sockets, sessions, sockets.counters["data"]
        self._handler = handler
        self.store, self._wait_for_disk = store, sockets.config.durability == "power" and store is not None
        self._later: collections.deque[tuple[Session | None, Callable[[], None]]] = collections.deque()
        self._retry_at = self._fence_at = 0.0
        self.trim_at = math.inf  # when old segments are dropped next; not before the store has been read back
        self._turned_at = time.monotonic()  # when the data thread last had nothing that it waited for
        self._touched: set[Session] = set()  # sent something since the last acknowledgement

    def receive(self, identity: bytes, frames: list[Frame]) -> None:
        self._turned_at = time.monotonic()
        self._look_for_another()
        self.do_noted()
        with self.sessions.taking(bytes(buffer_of(frames[0]))) as session:
            if session is None:
                self._counters["stale"] += 1
            else:
                self._receive(session, identity, frames)

    def _look_for_another(self) -> None:
        """Raise where another process has the run; looks where the last look is old, as after this one stood still."""
        if (now := time.monotonic()) >= self._fence_at:
            self._handler.fence()
            self._fence_at = now + FENCE_S

    def _receive(self, session: Session, identity: bytes, frames: list[Frame]) -> None:
        self._touched.add(session)
        session.connection.data_id = identity
        if self.stalled:
            return  # unacknowledged, the actor keeps it
        try:
            whole = frames[1:]
            message = codec.decode(whole, self.sockets.limits)
            if message.kind == handshake.PING:  # says whose connection this is; the acknowledgement is the answer
                return
            if message.kind == PART:
                assembled = self._assemble(session, decode_part(message, self.sockets.limits))
                if assembled is None:
                    return
                whole, message = assembled, codec.decode(assembled, self.sockets.limits)
            if message.kind == LOST:
                self._skip(session, *(codec.count(message.header, name) for name in ("first", "span", "steps")))
                return
            first, record = records.decode_record(message)
        except WireError as e:
            # It holds a valid token, so this is no stranger's garbage: the actor would resend it for ever.
            self.refuse(session, f"record after {session.state.expected} of this session is malformed: {e}")
            raise
        self._counters["received_bytes"] += message.nbytes
        self._take(session, first, record, whole)

    def _assemble(self, session: Session, part: Part) -> list[Frame] | None:
        self._counters["parts"] += 1
        expected = session.state.expected
        if part.end <= expected:  # of a record that is here
            return None
        if part.first > expected:
            self._gap(session, f"a part of record {part.first} came where {expected} was expected")
            return None
        if part.offset == 0:
            session.assembly = Assembly(part)
        assembly = session.assembly
        if assembly is None or not assembly.add(part):
            self._gap(session, f"a part of record {part.first} came whose predecessors did not")
            return None
        frames = assembly.frames()
        if frames is not None:
            session.assembly = None
        return frames

    def _gap(self, session: Session, what: str) -> None:
        self._counters["gaps"] += 1
        self.sockets.complain("data", session.info.peer, f"gap: {what}")
        if session.connection.tells_gap(session.arrived):
            self._acknowledge(session, gap=True)

    def _skip(self, session: Session, first: int, span: int, steps: int) -> None:
        if first + span >= _BOUND or session.state.steps_offset + steps >= _BOUND:
            raise WireError("a loss out of any bound")
        item = Item(LOST, first, span, lost_steps=steps)
        if not self._is_next(session, item):
            return
        session.advance(item, delivered=False)
        session.assembly = None
        self._counters["lost"] += span
        log.error("actor %s: %d records were lost on its disk", session.info.actor_id, span)
        self._settle(session)  # the rest of its episode are orphans

    def _take(self, session: Session, first: int, record: Record, frames: list[Frame]) -> None:
        item, expected = Item.of(record, first), session.state.expected
        if (known := min(item.span, expected - first)) > 0:
            self._counters["duplicates"] += known
        if not self._is_next(session, item):
            return
        if known and isinstance(record, StepBlock):  # its beginning is here already
            record = record.slice(known, item.span)
            frames = records.encode_record(record, expected)
        delivered, new = session.state.judge(item) is Verdict.NEW, item.end - expected
        if not self._journal(session, item, frames, delivered):
            return
        if delivered:
            try:
                self._handler.on_record(session.info, record)
            except DataError as e:
                session.advance(item, delivered=False)  # a successor goes on behind it
                self._reject(session, str(e))
                return
            self._counters["records"] += new
            if isinstance(record, StepBlock):
                self._counters["steps"] += new
        else:
            what = f"orphans of {session.info.actor_id}: their episode is not open here"
            self.sockets.complain("data", session.info.peer, what)
            self._counters["orphans"] += new
        session.advance(item, delivered=delivered)

    def _is_next(self, session: Session, item: Item) -> bool:
        verdict = session.state.judge(item)
        if verdict is Verdict.GAP:
            self._gap(session, f"record {item.first} came where {session.state.expected} was expected")
        return verdict in (Verdict.NEW, Verdict.ORPHAN)

    def _journal(self, session: Session, item: Item, frames: list[Frame], delivered: bool) -> bool:
        """Write a record down before anything else is done with it; False where that failed."""
        if self.store is None:
            return True
        try:
            number = self.store.append(session.state, item, frames, delivered=delivered)
        except JournalError as e:
            self._stall(f"the learner's disk takes no more: {e}")
            self._retry_at = time.monotonic() + _RETRY_S
            return False
        self._look_for_another()  # a write may have hung
        if self._wait_for_disk:
            session.unsynced.append((number, item.end))
        return True

    def waits(self, seconds: float) -> str:
        """Return why no record is taken now, for one a wait of so many `seconds`; empty where they are. Any thread."""
        waited = time.monotonic() - self._turned_at
        return self.stalled or (
            f"a record has been waiting for the learner's disk or replay for {waited:.0f} s" if waited > seconds else ""
        )

    def maintain(self, now: float) -> None:
        self._turned_at = now
        journal = None if self.store is None else self.store.journal
        backlog = self._handler.backlog()
        if journal is not None and self._wait_for_disk and journal.sync_error:
            journal.retire_doubtful()
            remedy = ", then start the learner again" if journal.lost else ""
            self._stall(
                f"an fsync of {journal.folder} failed ({journal.sync_error}): what was written may not be there, and "
                f"is not acknowledged. Check that disk{remedy}"
            )
            self._retry_at = now
        elif backlog:
            self._stall(self.stalled or backlog)
            self._retry_at = now
        elif self.stalled and now >= self._retry_at:
            self._retry_at = now + _RETRY_S
            if self.store is None or self.store.has_room:
                log.warning("the learner has room again, and takes records")
                self.stalled = ""
                self._request_again()
        if self.sockets.has_dropped():
            self._request_again()
        if self.store is None:
            return
        if now >= self.trim_at:
            self._look_for_another()
            self.trim_at = now + _RETRY_S
            self.store.trim()
        if self._wait_for_disk:
            for session in self.sessions:
                if session.live and session.unsynced and session.unsynced[0][0] < self.store.journal.synced:
                    self._acknowledge(session)

    def _request_again(self) -> None:
        """Request what came while nothing was taken."""
        for session in self.sessions:
            if session.live:
                self._acknowledge(session, gap=True)

    def _stall(self, why: str) -> None:
        if why != self.stalled:
            self.stalled = why
            log.error("%s. Actors keep their records until there is room", why)

    def acknowledge(self) -> None:
        for session in self._touched:
            self._acknowledge(session)
        self._touched.clear()

    def _acknowledge(self, session: Session, *, gap: bool = False) -> None:
        if not session.refused:
            fields = {"next": self.safe(session), "gap": gap, **self.allowance_fields(session), **session.arrived}
            self.sockets.send("data", session.connection.data_id, codec.encode(handshake.ACK, fields))

    def safe(self, session: Session) -> int:
        """Return the number below which the actor need not keep the session's records. For any thread."""
        if not self._wait_for_disk or self.store is None:
            return session.state.expected
        with self.sessions.lock:
            # Read first: the data thread notes a record as not synced before it counts it as expected.
            expected = session.state.expected
            while session.unsynced and session.unsynced[0][0] < self.store.journal.synced:
                session.synced = session.unsynced.popleft()[1]
            return session.synced if session.unsynced else expected

    def allowed(self, session: Session) -> int | None:
        """Return the session's allowance in its actor's own count of steps. For any thread."""
        if session.info.demonstrations:
            return None
        allowed = self._handler.allowance(session.info.session)
        return None if allowed is None else allowed + session.state.steps_offset

    def allowance_fields(self, session: Session) -> dict[str, int | None]:
        """Return the allowance for a message, numbered: two sockets carry it, and the older may come later."""
        with self.sessions.lock:
            session.connection.allowance_told = self.allowed(session)
            session.allowances += 1
            return {"allowance": session.connection.allowance_told, "allowance_number": session.allowances}

    def _reject(self, session: Session, reason: str) -> None:
        self._counters["rejected"] += 1
        if not session.refused:
            self.refuse(session, reason)

    def refuse_later(self, name: str, reason: str) -> None:
        """Note that a record of the session called `name`, acknowledged before, does not fit the replay; any thread."""
        session = next((s for s in self.sessions if s.info.session == name), None)
        if session is not None:  # else it is gone, and forgotten
            self._later.append((session, lambda: self._reject(session, reason)))
            self.sockets.wakers["data"].wake()

    def refuse(self, session: Session, reason: str) -> None:
        """End a session permanently: what it sends cannot be taken, and going on would lose it."""
        reason = codec.shown(reason)  # it may quote what the actor sent
        log.error("actor %s (%s) is refused: %s", session.info.actor_id, session.info.peer, reason)
        self._counters["refused"] += 1
        session.refused = reason
        # First: a heartbeat from then on would be answered by a request to connect again.
        self.sockets.send("data", session.connection.control_id, handshake.refusal(reason))
        self.sessions.fence(session)
        self.sessions.leave(session)
        if self.sessions.close(session, gone=True):
            self._end(session, gone=True)

    def end_later(self, session: Session, *, gone: bool, settle: bool = False, retire: bool = False) -> None:
        """Note, on the control thread, that a session fell silent, or is `gone`.

        `settle`: numbers were stepped over. `retire`: its actor has ended it, and all of it is here.
        """
        closes = not settle and self.sessions.close(session, gone=gone)

        def act() -> None:
            if settle:
                self._settle(session)
                return
            if retire and self.store is not None:
                self.store.retire(session.state)
            if closes and (gone or not session.live):  # else it is back already
                self._end(session, gone=gone)

        if settle or retire or closes:
            self._later.append((session, act))
            self.sockets.wakers["data"].wake()

    def correct_later(self, session: str, actor_id: str, amend: Amend, done: Callable[[str], None]) -> None:
        """Note a correction of a closed episode that comes from no actor; any thread, once the store was read back.

        The data thread writes it down, passes it to `on_record`, and calls `done` with why that failed, else "".
        """

        def act() -> None:
            try:
                if self.store is not None:
                    self.store.correct(session, actor_id, amend)
                self._handler.on_record(SessionInfo(session, actor_id, NO_ACTOR, "an operator"), amend)
            except (JournalError, DataError) as e:
                done(str(e))
            else:
                done("")

        self._later.append((None, act))
        self.sockets.wakers["data"].wake()

    def do_noted(self) -> None:
        """Do what other threads noted, on the data thread."""
        while self._later:
            session, act = self._later.popleft()
            with contextlib.nullcontext() if session is None else self.sessions.taking(session):
                act()

    def _end(self, session: Session, *, gone: bool) -> None:
        if gone and session.state.open_episode is not None:
            session.state = session.state._replace(open_episode=None)
            self._settle(session)
        else:
            self._handler.on_silent(session.info, gone)

    def _settle(self, session: Session) -> None:
        """Write down that a session's state changed without a record. An episode that was open ends there."""
        if self.store is not None:
            try:
                self.store.settle(session.state)
            except JournalError as e:  # then a restarted learner learns it from the actor once more
                log.error("%s", e)
        self._handler.on_silent(session.info, True)
