"""The actor's end of the transport: a connection to a learner, with the calls of other threads."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serl_chunk.config.transport import TransportConfig
from serl_chunk.io import format_bytes
from serl_chunk.transport.client.connection import Address, Connection
from serl_chunk.transport.client.outbox import Outbox, Spools
from serl_chunk.transport.security.client import UnencryptedPeerError, enroll
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk.transport.wire.handshake import Hello, UnreachableError, Welcome, check_port
from serl_chunk.transport.wire.tickets import MAX_TICKETS
from serl_chunk.types import ConfigError, Grant, SerlChunkError, Snapshot, Step
from serl_chunk_robot.wire import sockets

log = logging.getLogger(__name__)

AWAY = 1.0  # seconds without a learner worth mentioning
MUCH = 16 << 20  # bytes worth mentioning though the learner is there: less is simply on its way
_REPORT_EVERY_S = 3.0  # how often a waiting actor reports it


def backlog_line(kept: int, limit: int, episode: int, away: float, stalled: str, *, begun: bool) -> str:
    """Describe a backlog, for example `learner away for 12 s, spool 34 MiB`; empty where the learner keeps up.

    Bytes are those not acknowledged, kept at most, and of the largest episode; `begun`: one is open, counted as such.
    """
    parts = []
    if away >= AWAY:
        parts.append(f"learner away for {away:.0f} s")
    elif stalled and not away:
        parts.append(f"the learner takes nothing now: {stalled}")
    holding = kept + (2 if begun else 1) * episode > limit
    if parts or holding or kept > max(episode, MUCH):
        parts.append(f"spool {format_bytes(kept)}")
    if holding:
        parts.append("holding after this episode" if begun else "holding until there is room")
    return ", ".join(parts)


class _Patience:
    """A wait for a learner: its time-out, and its reports."""

    def __init__(self, timeout: float | None, report: Callable[[str], None]) -> None:
        self._timeout, self._report = timeout, report
        self._start = self._reported_at = time.monotonic()

    @property
    def left(self) -> float:
        rest = math.inf if self._timeout is None else self._start + self._timeout - time.monotonic()
        return max(0.0, min(_REPORT_EVERY_S, rest))

    def check(self, why: str) -> float:
        """Report the reason for the wait where that is due. Returns `left`. Raises UnreachableError."""
        now = time.monotonic()
        if self._timeout is not None and now - self._start >= self._timeout:
            raise UnreachableError(
                f"{why} after {self._timeout:g} s. Start the learner, or check its address and port."
            )
        if now - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = now
            self._report(f"{why}; waiting ({now - self._start:.0f} s)")
        return self.left


class LearnerLink(Connection):
    """A RecordSink and SnapshotSource whose other end is a learner.

    Records are kept until the learner has them, and a learner that disappears is waited for. An error that waiting
    cannot cure stops the thread: `can_begin` and `flush` report it.
    """

    def __init__(
        self, config: TransportConfig, *, host: str, port: int, actor_id: str, contract: dict[str, str],
        spools: Spools | None = None, largest_episode_bytes: int = 0, keys: ClientKeys | None = None,
        demonstrations: bool = False, block_steps: int = 1, address_file: Path | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            contract: must equal the learner's.
            spools: opens the spool of a run; None for a link that sends no records and writes no files.
            largest_episode_bytes: an episode may begin only while the spool has room for that much.
            keys: of this machine; `connect` joins with them where that is due.
            demonstrations: it sends demonstrations alone: without an allowance, and no snapshot is pulled.
            address_file: names the address of a learner that moved; see `handshake.write_address`.
            block_steps: that may wait for one another before they are spooled and sent, 0.1 s at the longest.

        Raises ConfigError for a bad host, and for a spool that could never hold one episode.
        """
        check_port(port)
        if largest_episode_bytes > config.spool_bytes:
            raise ConfigError(
                f"{config.spool_bytes} bytes can never hold the episodes that run at once, up to "
                f"{largest_episode_bytes} bytes. Raise it, or lower robot.max_episode_steps, the cameras' size or "
                "--n_envs.",
                parameter="transport.spool_bytes",
            )
        if unknown := sockets.unknown_host(host):
            raise ConfigError(unknown, parameter="ip")
        out = Outbox(config, spools, largest_episode_bytes)
        address = Address(host, port, address_file)
        about = (uuid.uuid4().hex, 1, actor_id, dict(contract), "", -1, 0, 0, 0, 0)
        super().__init__(config, address, Hello(*about, demonstrations=demonstrations), out, keys)
        self._keys = keys
        # A RecordSink by its outbox: arrays are handed over, not copied, and must not change afterwards.
        self.act_for, self.begin, self.end, self.amend = out.act_for, out.begin, out.end, out.amend
        self._block_steps = block_steps
        self.latest = self._snapshots.latest

    def step(self, record: Step) -> None:
        self._out.step(record)
        allowance = self.allowance  # without more the actor waits for the learner, and the learner for these
        if self._out.queued >= self._block_steps or (allowance is not None and self.steps_recorded >= allowance):
            self._out.waker.wake()

    def connect(self, timeout: float | None = None, on_waiting: Callable[[str], None] = log.warning) -> Welcome:
        """Wait for the learner and introduce this actor.

        `on_waiting` receives the reason every few seconds: no learner yet, or another live session with this actor id.
        Raises RefusedError with the learner's reason, UnreachableError after `timeout` seconds.
        """
        patience = _Patience(timeout, on_waiting)
        self._join(patience)
        if self._thread.ident is None:
            self._thread.start()
        with self.news:
            while self.welcome is None:
                if self.error is not None:
                    raise self.error
                self.news.wait(patience.check(self.waiting))
            return self.welcome

    def _join(self, patience: _Patience) -> None:
        while self._keys is not None and self._keys.ticket is not None:
            try:
                self._keys = enroll(self._keys, self._config, *self._address[:2], max(0.1, patience.left))
            except UnencryptedPeerError:
                if sockets.is_loopback(self._address.host) and not self._keys.binding:
                    return
                raise
            except UnreachableError as e:
                time.sleep(min(1.0, patience.check(str(e))))

    def request_tickets(self, held: Sequence[str], capacity: int) -> None:
        """Request tickets: the answer is in `grant`, again whenever it changes, until the next request.

        A ticket of the answer that is not in `held` any more, because its episode ended, is answered until the learner
        has its records: an episode that was recorded is not run again.

        Args:
            held: ids of the tickets that the actor has, and whose episodes have not ended. It leaves out those of an
                older version than its policy's, and nothing else.
            capacity: tickets that it can hold in all, at most `wire.tickets.MAX_TICKETS`.
        """
        self._tickets.request(held, min(capacity, MAX_TICKETS))
        self._out.waker.wake()

    @property
    def grant(self) -> Grant | None:
        """The newest answer: all tickets that the actor shall hold. None: none has come from this run."""
        return self._tickets.grant

    def note_discard(self, episode_id: str) -> None:
        """See `actor.labels.DiscardNotes`: the note is on the disk of the spool a moment later."""
        self._out.note = episode_id
        self._out.waker.wake()

    @property
    def discard_noted(self) -> bool:
        spool = self._out.spool
        return spool is not None and spool.noted == self._out.note

    @property
    def steps_recorded(self) -> int:
        return self._out.steps_recorded

    @property
    def unacknowledged(self) -> int:
        """Records that the learner lacks."""
        return self._out.unacknowledged

    def can_begin(self) -> tuple[bool, str]:
        if self.error is not None:
            return False, str(self.error)
        if self.finished is not None:
            return False, self.finished
        if why := self._out.no_room():
            stalled = self.stalled and f" ({self.stalled})"
            return False, f"{why}: waiting for the learner at {self._address}{stalled}"
        return True, ""

    def backlog(self, *, begun: bool) -> str:
        kept, limit = self._out.kept_bytes, self._config.spool_bytes
        return backlog_line(kept, limit, self._out.largest_episode, self.away, self.stalled, begun=begun)

    def flush(self, timeout: float) -> bool:
        """Wait until the learner has every record; False after `timeout` seconds. Raises `error`."""
        return self.wait_until(lambda: self._out.flushed, timeout)

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until `condition()`, tried at every message of the learner; False on time-out. Raises `error`."""
        with self.news:
            self.news.wait_for(lambda: self.error is not None or condition(), timeout)
        if condition():
            return True
        if self.error is not None:
            raise self.error
        return False

    def fetch_checkpoint(self, step: str, timeout: float) -> tuple[Snapshot, dict[str, Any]]:
        """Return a checkpoint ("latest", "best" or its step) and plain values about it.

        Raises FetchError with the learner's reason, UnreachableError after `timeout` seconds.
        """
        request = self._snapshots.request_checkpoint(step)
        self._out.waker.wake()
        try:
            # An error of the connection ends the wait too.
            if not self.wait_until(request.done.is_set, timeout):
                raise UnreachableError(f"checkpoint {step!r} did not arrive within {timeout:g} s")
        finally:
            self._snapshots.forget_checkpoint()
        if isinstance(request.result, SerlChunkError):
            raise request.result
        assert request.result is not None
        return request.result

    def stats(self) -> dict[str, float]:
        snapshot, out, spool = self.latest(), self._out, self._out.spool
        away = self.away
        arrived = None if snapshot is None else snapshot.arrived
        return {
            "retransmitted": out.sender.retransmitted,
            **out.runs.counters,
            "steps_recorded": out.steps_recorded,
            "queued": out.queued,
            "inherited": out.runs.inherited,
            "unacked_records": 0 if spool is None else spool.next - spool.acked,
            "unacked_bytes": out.kept_bytes,
            "spool_bytes": 0 if spool is None else spool.nbytes,
            "in_flight_bytes": out.sender.in_flight_bytes,
            "incarnation": 0 if spool is None else spool.incarnation,
            "connected": float(away == 0),
            "connections": self.connections,
            "disconnected_s": self.waited_s,
            "away_s": away,
            "snapshot_version": self._snapshots.version,
            "snapshot_age_s": -1.0 if arrived is None else time.monotonic() - arrived,
            "snapshots": self._snapshots.pulled,
            "snapshot_bytes": self._snapshots.received_bytes,
        }
