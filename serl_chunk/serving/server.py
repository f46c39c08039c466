"""A server of policies by openpi-client's protocol: one request and one reply at a time on each connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from serl_chunk.io import os_reason
from serl_chunk.serving import codec
from serl_chunk.serving.endpoint import is_authorized, websockets
from serl_chunk.types import ConfigError, SerlChunkError
from serl_chunk_robot.wire.codec import shown

logger = logging.getLogger(__name__)

CLIENTS = 64  # connections at once
IDLE_S = 300.0  # since its last request, after which a client gives its place to a newcomer
OPENING_S = 5.0  # for a handshake
BEYOND = 4  # times the largest message: what a client may send and still get the reason as a text
PING_S, SILENT_S = 20.0, 60.0  # between pings; until a client that answers none is dropped
CLOSING_S = 2.0  # for the clients' own goodbye
FAILED = 1011  # close code of a refused request, as openpi's server has it
CROWDED = 1013  # close code of a client that gives its place to another
MAX_ERROR = 2000  # characters of an error that is sent
Item = TypeVar("Item")


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Return the sizes that batches are padded to: powers of two, and `largest`."""
    return tuple(sorted({*(1 << i for i in range(largest.bit_length()) if 1 << i <= largest), largest}))


class BatchThread(Generic[Item]):
    """Decides what has come since the batch before, `largest` at most, in one call.

    No request waits for others: while one batch is computed, the next one gathers. `decide`: returns an answer, or the
    error of one, for each item. It gets as many items as one of `batch_sizes`: the first item again for each that is
    missing, whose answers are dropped.
    """

    def __init__(self, decide: Callable[[Sequence[Item]], Sequence[Answer | SerlChunkError]], largest: int) -> None:
        self.sizes = batch_sizes(largest)
        self.counts = dict.fromkeys(range(1, largest + 1), 0)
        """Number of items -> batches of so many, padding not counted."""
        self._decide = decide
        self._waiting: queue.SimpleQueue[tuple[Item, Future[Answer]] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def submit(self, item: Item) -> Future[Answer]:
        """Return the answer to come. It holds a SerlChunkError for an item that cannot be decided."""
        future: Future[Answer] = Future()
        self._waiting.put((item, future))
        return future

    def close(self) -> None:
        """End the thread after the batch under way; what waits is cancelled."""
        self._closed = True
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            batch = [entry] if (entry := self._waiting.get()) is not None else []
            while len(batch) < self.sizes[-1]:
                try:
                    following = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if following is not None:
                    batch.append(following)
            # A client that left meanwhile has cancelled its own.
            if batch := [each for each in batch if each[1].set_running_or_notify_cancel()]:
                self._answer(batch)
        while not self._waiting.empty():
            if (left := self._waiting.get()) is not None:
                left[1].cancel()

    def _answer(self, batch: list[tuple[Item, Future[Answer]]]) -> None:
        items = [item for item, _ in batch]
        size = next(size for size in self.sizes if size >= len(items))
        answers: Sequence[Answer | BaseException]
        try:
            answers = self._decide([*items, *[items[0]] * (size - len(items))])
        except Exception as error:  # of all of them: this thread decides for the clients after these too
            logger.exception("a batch could not be decided")
            answers = [error] * len(items)
        self.counts[len(items)] += 1
        for (_, future), answer in zip(batch, answers, strict=False):
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)


class Answer(NamedTuple):
    """A decision for a client."""

    actions: np.ndarray  # float32[H, A], robot units
    seconds: float  # that the batch took, with the device's work
    figures: Mapping[str, float]  # further entries of the reply


class Policy(NamedTuple, Generic[Item]):
    """What a server needs of a policy.

    `prepare` is called for each request on any thread, and raises SerlChunkError for a bad one. `decide` is called for
    a batch of what it returned, on one thread.
    """

    prepare: Callable[[dict[str, Any]], Item]
    decide: Callable[[Sequence[Item]], Sequence[Answer | SerlChunkError]]
    metadata: Mapping[str, Any]  # sent to each client first


class PolicyServer(Generic[Item]):
    """Serves a policy from threads of its own, from `start` to `close`, or in a with-block.

    `GET /healthz` answers without a key. A request that is refused is answered by a text, and its connection is
    closed; it reaches no other client.

    `max_bytes`: of a request. `largest`: batch, see `BatchThread`. `key`: that clients must send; empty: none.
    """

    def __init__(
        self, policy: Policy[Item], *, host: str, port: int, max_bytes: int, largest: int = 8, key: str = ""
    ) -> None:
        self._websockets = websockets()  # refuses a missing library before anything is started
        self._policy, self._host, self._port, self._max_bytes, self._key = policy, host, port, max_bytes, key
        self._metadata = codec.pack(dict(policy.metadata))
        self._batches: BatchThread[Item] = BatchThread(policy.decide, largest)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._listening: threading.Event = threading.Event()
        self._error: BaseException | None = None
        self._clients: dict[Any, float] = {}  # connection -> time of its last good request, -inf before the first
        self._leaving: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="policy server", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        """The port, also where 0 chose a free one."""
        return self._port

    @property
    def batch_counts(self) -> dict[int, int]:
        return {size: count for size, count in self._batches.counts.items() if count}

    def start(self) -> None:
        """Listen. Raises ConfigError where the address cannot be listened on."""
        self._thread.start()
        self._listening.wait()
        if self._error is not None:
            self.close()
            reason = os_reason(self._error) if isinstance(self._error, OSError) else str(self._error)
            raise ConfigError(
                f"{self._host}:{self._port} cannot be listened on ({reason}). Give an address of this machine, and a "
                "port that nothing has",
                parameter="bind" if isinstance(self._error, socket.gaierror) else "port",
            ) from self._error

    def close(self) -> None:
        """Close the connections, then end the threads."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it ended by itself
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._batches.close()

    # -- on the event loop -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
            if self._listening.is_set():
                logger.exception("the policy server ended")
        finally:
            self._listening.set()
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self) -> None:
        quiet = logging.getLogger(f"{__name__}.connections")
        quiet.setLevel(logging.CRITICAL)  # handshakes that are none, as of port scanners, would fill the log
        async with self._websockets.asyncio.server.serve(
            self._client, self._host, self._port, compression=None, max_size=BEYOND * self._max_bytes, max_queue=1,
            process_request=self._admit, open_timeout=OPENING_S, ping_interval=PING_S, ping_timeout=SILENT_S,
            close_timeout=CLOSING_S, logger=quiet,
        ) as server:  # fmt: skip
            self._port = server.sockets[0].getsockname()[1]
            self._listening.set()
            await self._stopping.wait()

    def _admit(self, connection: Any, request: Any) -> Any:
        """Answer what is no client of the policy by plain HTTP; None admits a client."""
        if request.path.partition("?")[0] == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        if request.headers.get_all("Origin"):  # a web page, which a browser lets connect to this machine's servers
            logger.warning(f"client refused: {_peer(connection)} is a web page in a browser")
            return connection.respond(HTTPStatus.FORBIDDEN, "this policy server is not for web pages\n")
        headers = request.headers.get_all("Authorization")
        if not is_authorized(headers[0] if len(headers) == 1 else None, self._key):
            logger.warning(f"client refused: {_peer(connection)} sent {'another' if headers else 'no'} API key")
            needs = "this policy server needs its API key. Send it as the header 'Authorization: Api-Key KEY'\n"
            return connection.respond(HTTPStatus.UNAUTHORIZED, needs)
        if not self._has_room():
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{CLIENTS} clients are connected. Try later\n")
        return None

    def _has_room(self) -> bool:
        """Return whether a newcomer has a place; a client without a good request, or an idle one, gives it its own."""
        if len(self._clients) < CLIENTS:
            return True
        oldest = min(self._clients, key=lambda connection: self._clients[connection])
        if self._clients[oldest] > time.monotonic() - IDLE_S:
            return False
        del self._clients[oldest]
        logger.warning(f"client dropped: {_peer(oldest)} sends no request, and {CLIENTS} clients are connected")
        task = self._loop.create_task(oldest.close(CROWDED, "others wait, and it sends no request"))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return True

    async def _client(self, connection: Any) -> None:
        self._clients[connection] = -math.inf
        logger.info(f"client connected: {_peer(connection)}")
        try:
            with contextlib.suppress(self._websockets.exceptions.ConnectionClosed):
                await connection.send(self._metadata)
                await self._answer_requests(connection)
        finally:
            self._clients.pop(connection, None)
            logger.info(f"client left: {_peer(connection)}")

    async def _answer_requests(self, connection: Any) -> None:
        before: float | None = None  # seconds of the reply before
        async for message in connection:
            began = time.perf_counter()
            try:
                reply = await self._reply(message, began, before)
            except Exception as error:
                if not isinstance(error, SerlChunkError):
                    logger.exception(f"a request of {_peer(connection)} failed")
                known = isinstance(error, SerlChunkError)
                text = str(error) if known else f"the server failed ({type(error).__name__}). See its log"
                logger.warning(f"request refused: {_peer(connection)}: {shown(text[:300])}")
                await connection.send(text[:MAX_ERROR])
                await connection.close(FAILED, "the request was refused")
                return
            if connection in self._clients:
                self._clients[connection] = time.monotonic()
            await connection.send(reply)
            before = time.perf_counter() - began

    async def _reply(self, message: bytes | str, began: float, before: float | None) -> bytes:
        # Decoding and what is before the network take milliseconds in which others would wait.
        item = await asyncio.to_thread(self._prepared, message)
        answer = await asyncio.wrap_future(self._batches.submit(item))
        timing = {"infer_ms": 1e3 * (time.perf_counter() - began)}
        if before is not None:
            timing["prev_total_ms"] = 1e3 * before
        reply = {
            "actions": np.asarray(answer.actions, np.float32),
            "policy_timing": {"infer_ms": 1e3 * answer.seconds},
            "server_timing": timing,
            **{name: float(value) for name, value in answer.figures.items()},
        }
        return codec.pack(reply)

    def _prepared(self, message: bytes | str) -> Item:
        if isinstance(message, str):
            raise ConfigError("the request is text (expected a binary frame of msgpack). Pack it as openpi-client does")
        return self._policy.prepare(codec.unpack(message, self._max_bytes))


def _peer(connection: Any) -> str:
    address = connection.remote_address
    return f"{address[0]}:{address[1]}" if address else "a client that left"
