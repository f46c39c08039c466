"""A client of policy servers that speak openpi-client's protocol; a lost server is connected to again."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from serl_chunk.io import Waiting
from serl_chunk.serving import codec
from serl_chunk.serving.endpoint import Address, authorization, websockets
from serl_chunk.types import ConfigError, SerlChunkError
from serl_chunk_robot.wire.codec import shown

logger = logging.getLogger(__name__)

REPLY_BYTES = 16 << 20  # of a reply, at most
CONNECT_S = 5.0  # for a connection and the first frame
FIRST_ANSWER_S = 180.0  # for the first reply of a connection, before which a server may compile
ANSWER_S = 10.0  # for each later one
SLOW_S = 1.0  # without a reply, after which that is logged
BACKOFF_S = (0.25, 5.0)  # before the first attempt after a loss; at most before each later one
CLOSING_S = 0.2  # for the thread that connects, until it is left alone
POLL_S = 0.1  # between looks at `interrupt` and `stop` while a reply is waited for
REPEAT_S = 30.0  # between lines that say that it cannot be reached
REMEDY = "Start that server, or correct its address in actor.policy"
REFUSALS = 3  # one after the other, until waiting is given up
_ENDED = "the wait for a reply was ended"


class ServerAwayError(SerlChunkError):
    """The policy server takes no request now; it may come back."""


class RefusedError(SerlChunkError):
    """The policy server refuses what it is sent, and would do so again."""


class PolicyClient:
    """Sends observations to a policy server and returns its replies.

    A thread connects, at the start and again after each loss, waiting longer each time. One other thread at a time may
    `infer`; any may call the other methods.

    Args:
        key: API key; empty: none.
        timeout: seconds without a first connection after which `RefusedError` ends the wait; 0: no limit.
        stop: polled while a reply is waited for; once True, the wait ends.
        check: raises RefusedError for the metadata of a server that is another than is needed.
    """

    def __init__(
        self, address: Address, *, key: str = "", timeout: float = 0.0, stop: Callable[[], bool] = lambda: False,
        check: Callable[[dict[str, Any]], None] = lambda metadata: None,
    ) -> None:  # fmt: skip
        self.address, self._key, self._stop, self._check = address, key, stop, check
        self._websockets = websockets()
        self._until = time.monotonic() + timeout if timeout else math.inf
        self._changed = threading.Condition()
        self._connection: Any = None
        self._answered = False  # on this connection
        self._refusals = 0
        self._interrupted = threading.Event()
        self._asked: Any = None  # the connection of the request under way
        self._asked_at: float | None = None  # when that began
        self._slow = False  # whether its silence was logged
        self._closed = False
        self._lost_at: float | None = None  # when a server that had answered was lost
        self._permanent: SerlChunkError | None = None
        self.metadata: dict[str, Any] | None = None
        """What the server sent first; None before the first connection."""
        self.waiting = f"the policy server at {address.named} has not answered yet"
        """Why it takes no request; empty where it does."""
        self._thread = threading.Thread(target=self._keep_connected, name="policy client", daemon=True)
        self._thread.start()

    def infer(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request.

        Raises ServerAwayError while the server is lost, or is lost meanwhile, RefusedError where it refuses the client
        or several requests in turn, and WireError for a request that no message can hold.
        """
        self._interrupted.clear()
        message = codec.pack(values)  # of many pixels it takes a while
        with self._changed:
            connection = self._connection
            if self._permanent is not None:
                raise self._permanent
            if connection is None:
                raise ServerAwayError(self.waiting)
        if self._interrupted.is_set():
            raise ServerAwayError(_ENDED)
        self._asked, self._asked_at = connection, time.monotonic()
        try:
            self._refuse_unrequested(connection)
            connection.send(message)
            reply = self._received(connection)
            if isinstance(reply, str):
                self._count_refusal(reply)
                raise ServerAwayError(f"{self._named} refused a request: {shown(reply[:500])}")
            answer = codec.unpack(reply, REPLY_BYTES)
        except BaseException as error:
            # A reply may still come on this connection, and would be taken for that of the next request.
            raise self._lost(connection, error) from error
        finally:
            self._asked = self._asked_at = None
        with self._changed:
            if self._slow:
                self._slow = False
                logger.info(f"{self._named} answers again")
                if self._connection is connection:
                    self.waiting = ""
                    self._changed.notify_all()
        self._answered, self._refusals, self._lost_at = True, 0, None
        return answer

    def wait(self, timeout: float) -> bool:
        """Wait until the server takes requests; False after `timeout` seconds. Raises RefusedError."""
        connection = self._connection
        if connection is not None and connection.state is not self._websockets.protocol.State.OPEN:
            self._lost(connection, ServerAwayError(f"{self._named} is lost (it closed the connection)"))
        with self._changed:
            self._changed.wait_for(lambda: not self.waiting or self._permanent is not None, timeout)
            if self._permanent is not None:
                raise self._permanent
            return not self.waiting

    def interrupt(self) -> None:
        """End another thread's request, whether it is sent or not: that thread raises ServerAwayError."""
        self._interrupted.set()
        if (connection := self._asked) is not None:  # which is dropped anyway; sending it may wait, too
            _disconnect(connection)

    def close(self) -> None:
        """Disconnect, and end the thread; one that connects ends soon after. No network is waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.interrupt()
        if self._connection is not None:
            _disconnect(self._connection)
        self._thread.join(CLOSING_S)

    @property
    def _named(self) -> str:
        return f"the policy server at {self.address.named}"

    def _refuse_unrequested(self, connection: Any) -> None:
        """Raise ServerAwayError where a message is there before the request: it would be taken for the reply."""
        try:
            connection.recv(timeout=0)
        except TimeoutError:
            return
        raise ServerAwayError(f"{self._named} sent a message that was not requested. Replies must be one a request")

    def _received(self, connection: Any) -> bytes | str:
        until = time.monotonic() + (ANSWER_S if self._answered else FIRST_ANSWER_S)
        while True:
            try:
                message: bytes | str = connection.recv(timeout=POLL_S)
                return message
            except TimeoutError:
                if self._interrupted.is_set() or self._closed or self._stop():
                    raise ServerAwayError(_ENDED) from None
                if time.monotonic() > until:
                    raise ServerAwayError(f"{self._named} did not answer in time") from None

    def _count_refusal(self, text: str) -> None:
        self._refusals += 1
        logger.error(f"{self._named} refused a request: {shown(text[:2000])}")
        if self._refusals >= REFUSALS:
            self._permanent = RefusedError(
                f"{self._named} refused {self._refusals} requests in turn: {shown(text[:500])}. Send what it needs: "
                "see actor.policy_observation, and the cameras and task of the experiment"
            )

    def _lost(self, connection: Any, error: BaseException) -> BaseException:
        """Drop a connection, so that the thread makes another; returns what to raise for `error`."""
        known = isinstance(error, ServerAwayError | OSError | self._websockets.exceptions.WebSocketException)
        reason = str(error) if isinstance(error, SerlChunkError) else f"{self._named} is lost ({_reason(error)})"
        ended = self._interrupted.is_set() or self._closed or self._stop()
        with self._changed:
            first = self._connection is connection  # to notice it: another thread may have, and there may be a new one
            if first:
                self._connection, self.waiting, self._slow = None, reason, False
                self._lost_at = self._lost_at or time.monotonic()
                self._changed.notify_all()
        _disconnect(connection)
        if known and first and not ended:
            logger.warning(f"{reason}. The robot holds until it is back")
        if self._permanent is not None:
            return self._permanent
        return ServerAwayError(reason) if known else error

    # -- on its own thread -----------------------------------------------------------------------------------

    def _keep_connected(self) -> None:
        pause, last, wait = 0.0, "", Waiting(logger, REPEAT_S, remedy_every=1)
        while self._rest(pause):
            try:
                connection, metadata = self._connect()
            except RefusedError as error:
                self._give_up(error)
                return
            except Exception as error:  # of whatever kind: without this thread, no server is ever found again
                reason = f"{self._named} cannot be reached ({_reason(error)})"
                if reason != last:
                    wait.end()
                if not isinstance(error, OSError | SerlChunkError | self._websockets.exceptions.WebSocketException):
                    logger.debug("unexpected error", exc_info=True)
                if self.metadata is None and time.monotonic() > self._until:
                    self._give_up(RefusedError(f"{reason}: the wait for it is over. {REMEDY}"))
                    return
                wait.log(f"{reason}; trying again", REMEDY, level=logging.WARNING)
                last = reason
                with self._changed:
                    self.waiting = reason
                pause = min(max(BACKOFF_S[0], 2 * pause), BACKOFF_S[1])
                continue
            if self._closed:
                _disconnect(connection)
                return
            again = "" if self._lost_at is None else f" again, after {time.monotonic() - self._lost_at:.1f} s"
            logger.info(f"{self._named} is connected{again}")
            # After a loss, too: a server that drops every request is not sent more without end.
            pause, last = BACKOFF_S[0], ""
            with self._changed:
                self.metadata, self._connection, self._answered, self.waiting = metadata, connection, False, ""
                self._changed.notify_all()

    def _give_up(self, error: RefusedError) -> None:
        logger.error(str(error))
        with self._changed:
            self._permanent, self.waiting = error, str(error)
            self._changed.notify_all()

    def _rest(self, pause: float) -> bool:
        """Wait while connected, then for `pause` seconds; False once closed."""
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._closed or self._permanent or self._connection is None, POLL_S
            ):
                self._notice_silence()
            self._changed.wait_for(lambda: self._closed, pause)
            return not self._closed and self._permanent is None

    def _notice_silence(self) -> None:
        """Log once that a reply is late: sending the request, or reading the reply, may wait for long."""
        began = self._asked_at
        if self._slow or began is None or time.monotonic() - began < SLOW_S:
            return
        self._slow, self.waiting = True, f"{self._named} has not answered for {SLOW_S:g} s"
        may = "it may have stopped, or the network between" if self._answered else "it may compile its policy"
        logger.warning(f"{self.waiting} ({may}). The robot holds. Look at that server, or start it again")

    def _connect(self) -> tuple[Any, dict[str, Any]]:
        """Return a connection and the server's metadata. Raises RefusedError where it refuses us for good."""
        try:
            connection = self._websockets.sync.client.connect(
                self.address.url, compression=None, max_size=REPLY_BYTES, open_timeout=CONNECT_S, close_timeout=0.5,
                ping_interval=None, proxy=None, additional_headers=authorization(self._key), logger=_QUIET,
            ).__enter__()  # fmt: skip
        except self._websockets.exceptions.InvalidStatus as error:
            if error.response.status_code not in (401, 403):
                raise
            text = bytes(error.response.body or b"").decode("utf-8", "replace").strip()
            raise RefusedError(
                f"{self._named} refuses this client ({error.response.status_code} {shown(text[:200])}). Where it wants "
                "another API key, give its file: --config.actor.policy_key=FILE"
            ) from error
        try:
            with contextlib.suppress(AttributeError, OSError):  # of Linux: else a send waits for minutes on a dead link
                connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * ANSWER_S))
            first = connection.recv(timeout=CONNECT_S)
            if isinstance(first, str):
                raise ConfigError(f"it sent an error first: {shown(first[:500])}")
            metadata = codec.unpack(first, REPLY_BYTES)
            self._check(metadata)
            if self.metadata is not None and (names := _differing(self.metadata, metadata)):
                raise RefusedError(
                    f"{self._named} came back as another one: {names} of its metadata differ, and its chunks would "
                    "become other commands. Start this process again"
                )
            return connection, metadata
        except BaseException:
            connection.close()
            raise


def _disconnect(connection: Any) -> None:
    """Drop a connection without waiting for its other end; its own thread ends on what it reads then."""
    with contextlib.suppress(OSError):
        connection.socket.shutdown(socket.SHUT_RDWR)


def _differing(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the names of the values that two servers' metadata have different, or one of them lacks."""
    names = [shown(n) for n in sorted(before | now) if codec.pack({n: before.get(n)}) != codec.pack({n: now.get(n)})]
    return ", ".join(names[:12])


_QUIET = logging.getLogger(f"{__name__}.connections")
_QUIET.setLevel(logging.CRITICAL)  # what happens to a connection is logged here


def _reason(error: BaseException) -> str:
    return shown(str(error)) or type(error).__name__  # a close reason is the other end's text
