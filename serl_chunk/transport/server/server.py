"""The learner's end of the transport."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.security.server import ServerKeys
from serl_chunk.transport.server.control_channel import ControlChannel, SnapshotChannel
from serl_chunk.transport.server.record_channel import RecordReceiver
from serl_chunk.transport.server.sessions import ServerHandler, Session, Sessions
from serl_chunk.transport.server.sockets import ServerSockets
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.wire.handshake import ActorState, check_port
from serl_chunk.types import ConfigError, SerlChunkError
from serl_chunk_robot.wire import sockets

logger = logging.getLogger(__name__)

_POLL_S = 0.02  # how long a changed allowance waits at most where `push_allowances` is not called


class LearnerServer:
    """Receives the actors' records exactly once and in order; sends snapshots and allowances.

    The data thread takes records in: where the handler or the journal is slow, acknowledgements wait and nothing else.
    The control thread answers heartbeats, hellos and pulls. An unforeseen exception, the handler's included, stops
    both: then `check` raises.
    """

    def __init__(
        self,
        config: TransportConfig,
        handler: ServerHandler,
        *,
        bind: str,
        port: int,
        contract: dict[str, str],
        run_id: str | None = None,
        episode_timeout: float | None = None,
        insecure: bool = False,
        store: RecordStore | None = None,
        keys: ServerKeys | None = None,
    ) -> None:
        """
        Args:
            bind, port: address to listen on.
            contract: named values an actor must share.
            run_id: the same for every learner of one run, resumed or not; random by default.
            episode_timeout: seconds of silence after which a session counts as silent (default `config.timeout_s`).
            store: where records are written before the handler has them (see `resume`); a full disk stops
                acknowledgements.
            keys: admit machines that have joined with them, and no others; all is encrypted.
            insecure: without keys, permit an address that other machines reach.

        Raises ConfigError for a port in use, an address that is not this machine's, or a refused bind.
        """
        check_port(port)
        if keys is None and not insecure and not sockets.is_loopback(bind):
            raise ConfigError(
                f"{bind} lets other machines connect, without encryption or authentication. Make keys with "
                "`serl-chunk keys init`, use 127.0.0.1 for actors on this machine, or set `insecure` if every machine "
                "on that network may be trusted",
                parameter="bind",
            )
        self.run_id = run_id or uuid.uuid4().hex
        self._store = store
        self._error: BaseException | None = None
        self._stop = False
        self._sockets = ServerSockets(config, bind, port, keys)
        self._sessions = Sessions(
            dict(contract), self.run_id, self._sockets.max_sessions, store.states.get if store else lambda s: None
        )
        self._snapshots = SnapshotChannel(self._sockets, self._sessions, self.run_id, handler, self.check)
        self.publish = self._snapshots.publish
        self._receiver = RecordReceiver(self._sockets, self._sessions, store, handler)
        self.correct = self._receiver.correct_later  # not before `resume`
        self.refuse = self._receiver.refuse_later
        timeout = config.timeout_s if episode_timeout is None else episode_timeout
        self._control = ControlChannel(self._receiver, self._snapshots, handler, episode_timeout=timeout)
        self._threads = [
            threading.Thread(target=self._run, args=(serve,), name=f"serl-chunk-{name}", daemon=True)
            for name, serve in (("server", self._serve_data), ("control", self._serve_control))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def resume(self) -> None:
        """Continue the sessions in the store. Call it after their states were found, before `welcome` admits one."""
        if self._store is not None:
            self._sessions.restore(self._store.states.values(), time.monotonic())

    def trim(self) -> None:
        """Drop what the store need not keep from now on. Call it after the store was read back."""
        self._receiver.trim_at = 0.0

    def finish(self, reason: str) -> None:
        """Send every actor, and any that still connects, the reason why training is over."""
        self._control.finished = reason
        self.push_allowances()

    @property
    def stalled(self) -> str:
        return self._receiver.stalled

    def push_allowances(self) -> None:
        self._sockets.wakers["control"].wake()

    def check(self) -> None:
        """Raise SerlChunkError if the server's threads have stopped on an error."""
        if self._error is not None:
            raise SerlChunkError(f"the transport stopped: {type(self._error).__name__}: {self._error}") from self._error

    def stats(self) -> dict[str, float]:
        data, control = self._sockets.counters["data"], self._sockets.counters["control"]
        return {
            **{name: data[name] + control[name] for name in (*data, *control)},
            "sessions": sum(s.live for s in self._sessions),
            "stalled": float(bool(self._receiver.stalled)),
            "snapshot_version": self._snapshots.version,
        }

    def actor_states(self) -> list[ActorState]:
        return self._control.actor_states()

    def sessions(self) -> list[Session]:
        return list(self._sessions)

    def close(self) -> None:
        """Stop serving and release the port; what was not acknowledged stays with the actors."""
        self._halt()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._snapshots.close()
        self._sockets.close()

    def _halt(self) -> None:
        self._stop = True
        for waker in self._sockets.wakers.values():
            waker.wake()

    def _run(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except BaseException as e:
            self._error = self._error or e
            self._halt()  # an actor whose records go nowhere must not receive that all is well
            raise

    def _serve_data(self) -> None:
        while not self._stop:
            self._sockets.wait_data(_POLL_S)
            self._receiver.do_noted()
            self._sockets.deliver("data", self._receiver.receive)
            self._receiver.acknowledge()
            self._receiver.maintain(time.monotonic())

    def _serve_control(self) -> None:
        while not self._stop:
            self._sockets.wait_control(_POLL_S)
            self._sockets.deliver("control", self._control.receive)
            self._control.tick()
