"""The sessions of a learner's actors and their admission."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.transport.storage.record_store import SessionState
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import TOKEN_BYTES, TOKEN_MARK, Hello
from serl_chunk.transport.wire.records import Assembly, Item
from serl_chunk.transport.wire.tickets import TicketRequest
from serl_chunk.types import Grant, Record, SerlChunkError, Snapshot

_MAX_TIMEOUTS = 20  # time-outs that an actor may ask for: a dead one must not hold its id for ever
_RECORD_WAIT_S = 0.1  # how long a hello waits for a record of its session that is being taken
_REMEMBERED = 1000  # silent sessions with records: their actors may come back and go on


NO_ACTOR = 0  # incarnation in the `SessionInfo` of a correction that does not come from the session's actor


class SessionInfo(NamedTuple):
    """A session, as the learner's callbacks see it."""

    session: str  # one stream of records; survives reconnects
    actor_id: str
    incarnation: int
    peer: str  # network address
    demonstrations: bool = False  # it sends demonstrations alone: no actor, and without an allowance


class RefuseError(SerlChunkError):
    """An actor is not admitted. `retry`: waiting may help. `renew`: its session cannot go on, a new one can."""

    def __init__(self, reason: str, *, retry: bool = False, renew: bool = False) -> None:
        super().__init__(reason)
        self.retry, self.renew = retry, renew


@dataclasses.dataclass
class ActorConnection:
    """A session's connection, from the hello that opened it to that which opens the next; at first without identities.

    Written by the control thread, under the lock of `Sessions` where the data thread writes it too.
    """

    heard_at: float
    token: bytes = dataclasses.field(  # another one is stale
        default_factory=lambda: TOKEN_MARK + secrets.token_bytes(TOKEN_BYTES - 1)
    )
    key: str = ""  # its public key; empty without keys
    timeout_s: float = 0.0  # seconds that its heartbeats may take over its link, as its actor reports
    data_id: bytes = b""  # identities of the actor's three connections
    control_id: bytes = b""
    snapshots_id: bytes = b""
    finish_told: bool = False
    allowance_told: int | None = None
    tickets: TicketRequest | None = None  # the newest one
    grant_told: Grant | None = None
    version: int = -1  # newest snapshot that it reported
    unacknowledged: int = 0  # records, as it reported
    holds: int | None = None  # version of the snapshot it holds, while it waits for an announcement
    gap_told: dict[str, Any] | None = None  # what had arrived when a gap was last reported

    def is_silent(self, now: float, timeout_s: float) -> bool:
        return now - self.heard_at > min(max(timeout_s, self.timeout_s), _MAX_TIMEOUTS * timeout_s)

    def tells_gap(self, arrived: dict[str, Any]) -> bool:
        """Whether to report a gap behind what has `arrived`: once, for what is in flight has the same gap."""
        told, self.gap_told = self.gap_told == arrived, arrived
        return not told


class Session:
    """One stream of records and the state of its connection.

    The stream is written by the data thread, and by an admission while no record of it is being taken. The rest is
    written by the control thread, under the lock of `Sessions` where the data thread writes it too.
    """

    def __init__(self, state: SessionState, peer: str, now: float, *, new: bool = True) -> None:
        self.refused = ""  # why it is not welcome any more
        self.connect(SessionInfo(*state[:3], peer), now)
        self.live = new
        # The stream.
        self.state = state
        self.started_at = state.expected if new else -1  # `expected` before its first record here
        self.unsynced: collections.deque[tuple[int, int]] = collections.deque()  # (journal entry, `expected` behind it)
        self.synced = state.expected  # sequence numbers below it survive a power cut
        self.assembly: Assembly | None = None  # the record that arrives in parts
        self.allowances = 0  # how often one was sent
        self.fetch_request: int | None = None

    def connect(self, info: SessionInfo, now: float) -> None:
        self.info, self.connection = info, ActorConnection(now)
        self.live = True
        self.closed = False  # on_silent was called for the current silence
        self.gone = False  # and permanently: another took its place

    @property
    def arrived(self) -> dict[str, Any]:
        a = self.assembly
        return {"taken": self.state.expected, "partial": a and {"first": a.first, "received": a.received}}

    def advance(self, item: Item, *, delivered: bool) -> None:
        self.state = self.state.after(item, delivered=delivered)
        self.connection.gap_told = None


class Admission(NamedTuple):
    """The outcome of a hello."""

    session: Session
    known: bool  # the stream continues where this learner has it
    lost: int  # records this learner misses and the actor no longer has
    ousted: list[Session]  # silent sessions that this one replaced or that made room


class Sessions:
    """The table of sessions, and their admission. The lock is never held while a record waits for disk or replay.

    No admission changes the stream of a session that is `taking` a record: its welcome would name the record that is
    being written as the next one. `recall` returns the state of a session that is not in the table any more.
    """

    def __init__(
        self, contract: dict[str, str], run: str, limit: int, recall: Callable[[str], SessionState | None]
    ) -> None:
        self.contract, self._run, self._limit, self._recall = contract, run, limit, recall
        self._by_session: dict[str, Session] = {}
        self._by_token: dict[bytes, Session] = {}
        self.lock = threading.RLock()
        self._idle = threading.Condition(self.lock)
        self._taking: Session | None = None

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_session.values()))

    @contextlib.contextmanager
    def taking(self, of: Session | bytes) -> Iterator[Session | None]:
        """Keep the stream of a session for the data thread, which takes something in for it.

        `of`: the session, or the token of its current connection, from which a message came; None where none has it.
        """
        with self.lock:
            session = self._taking = self.by_token(of) if isinstance(of, bytes) else of
        try:
            yield session
        finally:
            with self.lock:
                self._taking = None
                self._idle.notify_all()

    def by_token(self, token: bytes) -> Session | None:
        """Return the session whose current connection has this token, and note that a message came from it."""
        with self.lock:
            if (session := self._by_token.get(token)) is not None:
                session.connection.heard_at = time.monotonic()
                if not session.live:
                    session.live, session.closed = True, False
            return session

    def restore(self, states: Iterable[SessionState], now: float) -> None:
        for state in states:
            # Not `closed`: where its last records are damaged it may be in an episode that its state does not name.
            self._by_session[state.session] = Session(state, "unknown", now, new=False)

    def check(self, hello: Hello) -> None:
        """Raise RefuseError, with the sentence to send, where both sides differ."""
        if hello.protocol == handshake.PROTOCOL and hello.run != self._run:
            raise RefuseError(f"this learner runs {self._run!r} now, not {hello.run!r}", retry=True)
        if sentence := handshake.compare_protocol(hello.protocol) or handshake.compare(self.contract, hello.contract):
            raise RefuseError(sentence)

    def admit(self, hello: Hello, peer: str, now: float) -> Admission:
        """Open or continue the session of a checked hello; raises RefuseError with the sentence to send."""
        with self.lock:
            old = self._by_session.get(hello.session)
            if old is None and (state := self._recall(hello.session)) is not None:
                old = self._by_session[hello.session] = Session(state, peer, now, new=False)
            if old is not None:
                self._check_return(old, hello)
                if self._taking is old:
                    self.fence(old)  # nothing more of its former connection is taken in
                    if not self._idle.wait_for(lambda: self._taking is not old, _RECORD_WAIT_S):
                        raise RefuseError("the learner is still writing down a record of this actor", retry=True)
                    self._check_return(old, hello)
            ousted = self._make_room(hello)
            lost = 0
            identity = hello.session, hello.actor_id, hello.incarnation
            if old is None:
                start = SessionState(*identity, hello.first, 0, hello.steps_before_first, None)
                session = self._by_session[hello.session] = Session(start, peer, now)
            else:
                session, state = old, old.state
                if hello.incarnation != old.info.incarnation:
                    old.assembly = None  # where a power cut took its newest records, others have their numbers now
                state = state._replace(actor_id=hello.actor_id, incarnation=hello.incarnation)
                if (lost := max(0, hello.first - state.expected)) > 0:
                    offset = hello.steps_before_first - state.steps
                    state = state._replace(expected=hello.first, steps_offset=offset, open_episode=None)
                    old.assembly = None
                old.state, old.refused = state, ""
                self.fence(old)
            session.connect(SessionInfo(*identity, peer, hello.demonstrations), now)
            self._by_token[session.connection.token] = session
            return Admission(session, old is not None, lost, ousted)

    def _check_return(self, old: Session, hello: Hello) -> None:
        if old.refused and hello.incarnation <= old.info.incarnation:
            raise RefuseError(old.refused)
        if hello.incarnation < old.info.incarnation:
            raise RefuseError(
                f"session {hello.session} of actor {hello.actor_id!r} was taken over by a newer process "
                f"(incarnation {old.info.incarnation}, this one is {hello.incarnation}): stop this one"
            )
        if hello.next < old.state.expected:
            raise RefuseError(
                f"the learner has {old.state.expected} records of session {hello.session}, the actor only "
                f"{hello.next}: its disk lost the newest ones, in a power cut perhaps. Nothing is missing here; a new "
                "session begins",
                retry=True,
                renew=True,
            )

    def _make_room(self, hello: Hello) -> list[Session]:
        others = [s for s in self if s.info.session != hello.session]
        for s in others:
            if s.live and s.info.actor_id == hello.actor_id:
                raise RefuseError(
                    f"another live session has the actor id {hello.actor_id!r} (from {s.info.peer}): stop that actor, "
                    "or give this one another actor id",
                    retry=True,
                )
        live = sum(s.live for s in others)
        if live >= self._limit:
            raise RefuseError(
                f"{live} actors are connected, and the learner takes {self._limit} "
                "(its transport.max_sessions, or its limit of open files: ulimit -n)",
                retry=True,
            )
        ousted = [s for s in others if s.info.actor_id == hello.actor_id]
        # Silent sessions are remembered, so that they can continue, but not without bound. One that never sent a record
        # (an evaluation's) has nothing to continue, and must not drive out one that has.
        silent = [s for s in others if not s.live and s is not self._taking]
        for kept, limit in ((False, self._limit), (True, _REMEMBERED)):
            group = [s for s in silent if (s.state.expected > s.started_at) is kept]
            group.sort(key=lambda s: s.connection.heard_at)
            for s in group[: max(0, len(group) - limit)]:
                del self._by_session[s.info.session]
                ousted.append(s)
        for s in ousted:
            self.fence(s)
            s.assembly = None
        return ousted

    def fence(self, session: Session) -> None:
        """Forget a session's current connection: what still comes from it is stale."""
        with self.lock:
            self._by_token.pop(session.connection.token, None)

    def leave(self, session: Session, *, keep_parts: int = 0) -> None:
        """End a session's connection: its actor id is free, its stream is remembered.

        `keep_parts`: bytes that all silent sessions may keep of records under assembly, the latest first: a large one
        would never arrive over a link that is away now and then.
        """
        with self.lock:
            session.live = False
            session.connection.holds = session.fetch_request = None
            if not keep_parts:
                session.assembly = None
                return
            silent = [(s, s.assembly) for s in self if s.assembly is not None and not s.live]
            for s, assembly in sorted(silent, key=lambda pair: -pair[0].connection.heard_at):
                keep_parts -= assembly.nbytes
                if keep_parts < 0:
                    s.assembly = None

    def close(self, session: Session, *, gone: bool) -> bool:
        """Note that a session fell silent, or is permanently `gone`; False where that was noted already."""
        with self.lock:
            if session.closed and (session.gone or not gone):
                return False
            session.closed, session.gone = True, gone  # should it come back, its episode goes on
            return True


class ServerHandler:
    """Takes what a server receives, and supplies what it sends; this one stores nothing and has no limits.

    The data thread calls `on_record` and `on_silent`: where they are slow, acknowledgements wait and nothing else. The
    control thread calls `welcome`, `digests`, `tickets` and `busy`, both call `allowance`, and `fetch` has a thread of
    its own. An unforeseen exception stops the server, but for one of `fetch`.
    """

    term = 0  # of this learner among those of its run: an actor that has heard of a higher one leaves

    def welcome(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Plain values and arrays for a new actor. A SerlChunkError refuses it for now."""
        return {}, {}

    def digests(self) -> np.ndarray | None:
        """Of the demonstrations that are there, uint8[N, 8], for a session that sends more; None: none is taken."""
        return None

    def on_record(self, info: SessionInfo, record: Record) -> None:
        """Take one record, which is acknowledged on return; its arrays are read-only views.

        A `Begin` may follow an episode without an `End`: the actor died in it. DataError refuses the session, and
        so does `LearnerServer.refuse` at any later time.
        """

    def fence(self) -> None:
        """Raise where another process has the run: then nothing is taken and acknowledged. Called once a second."""

    def backlog(self) -> str:
        """Why no record is to be taken now, and so none acknowledged; empty where they are. Called often."""
        return ""

    def on_silent(self, info: SessionInfo, gone: bool) -> None:
        """A session left, or was silent for long. With `gone` its open episode is over, else it may go on."""

    def allowance(self, session: str) -> int | None:
        """Steps, as delivered to `on_record`, that `session` may have recorded in all; None for no limit.

        Called often. Each change is sent: return the same while that suffices.
        """
        return None

    def tickets(self, session: str, version: int, held: Sequence[str], capacity: int) -> Grant | None:
        """Return the tickets that `session` shall hold, see `wire.tickets.TicketRequest`; None: there are none here.

        Called often with the newest request. Each change is sent: return the same while nothing changes.
        """
        return None

    def busy(self) -> str:
        """Why no allowance grows for minutes; empty where it may. The control thread calls it with each status."""
        return ""

    def fetch(self, step: str) -> tuple[Snapshot, dict[str, Any]]:
        """The checkpoint named "latest", "best" or by its step; a SerlChunkError is sent in its place."""
        raise SerlChunkError("this learner does not hand out checkpoints")
