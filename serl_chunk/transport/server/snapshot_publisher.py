"""The learner's side of snapshots, off the learner's thread: hashing, manifests, checkpoints read on request."""

from __future__ import annotations

import collections
import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from serl_chunk.transport.wire import codec
from serl_chunk.transport.wire.snapshots import Published
from serl_chunk.types import ConfigError, SerlChunkError, Snapshot

log = logging.getLogger(__name__)

Fetch = Callable[[str], tuple[Snapshot, dict[str, Any]]]
"""Reads the checkpoint named "latest", "best" or by its step; raises SerlChunkError whose sentence is sent."""


class Fetched(NamedTuple):
    """The answer to one request for a checkpoint: `published`, or the sentence that says why not."""

    session: str
    request: int
    published: Published | None
    reason: str


class Publisher:
    """Prepares snapshots in worker threads and leaves the results where the server's thread finds them.

    A snapshot that arrives while another is prepared replaces any that still waits: only the newest matters.
    """

    def __init__(
        self,
        fetch: Fetch | None,
        wake: Callable[[], None],
        fail: Callable[[BaseException], None],
        *,
        run: str,
        dtype: str = "exact",
    ) -> None:
        """
        Args:
            run: id of the run, which every snapshot and checkpoint is sent with.
            wake: called when a result is ready.
            fail: called with an unforeseen error, in a worker thread.
            dtype: as `transport.snapshot_dtype`; fetched checkpoints travel as they are.
        """
        self.newest: Published | None = None
        self.version = -1  # newest handed over
        self.prepare_s = 0.0  # seconds the last snapshot took to prepare
        self.superseded = 0  # snapshots replaced before they were announced
        self.fetched: collections.deque[Fetched] = collections.deque()
        self._fetch, self._run, self._narrow = fetch, run, dtype == "bfloat16"
        self._wake = wake
        self._fail = fail
        self._lock = threading.Lock()
        self._waiting: tuple[Snapshot, dict[str, Any]] | None = None
        self._busy = False
        # Keys are unique to this process: a client of a predecessor is told that its pull is gone.
        self._instance = uuid.uuid4().hex[:12]
        # One thread prepares, one reads checkpoints: a slow disk delays no snapshot.
        self._preparing = ThreadPoolExecutor(1, "serl-chunk-publish")
        self._fetching = ThreadPoolExecutor(1, "serl-chunk-fetch")

    def publish(self, snapshot: Snapshot, info: dict[str, Any]) -> None:
        """Hand over a snapshot and return at once. Raises ConfigError where the version does not go up."""
        for path, value in snapshot.params.items():
            codec.dtype_name(value.dtype, path)
        codec.encode("info", info)  # complain here, not in the worker
        with self._lock:
            if snapshot.version <= self.version:
                raise ConfigError(
                    f"snapshot version {snapshot.version} does not follow {self.version}: they only go up"
                )
            self.version = snapshot.version
            self.superseded += self._waiting is not None
            self._waiting = (self._of_run(snapshot), info)
            if not self._busy:
                self._busy = True
                self._preparing.submit(self._guard, self._prepare)

    def _of_run(self, snapshot: Snapshot) -> Snapshot:
        return snapshot._replace(origin=snapshot.origin._replace(run=self._run))

    def _guard(self, task: Callable[..., None], *args: object) -> None:
        try:
            task(*args)
        except BaseException as e:
            self._fail(e)
            raise

    def _prepare(self) -> None:
        while True:
            with self._lock:
                if self._waiting is None:
                    self._busy = False
                    return
                (snapshot, info), self._waiting = self._waiting, None
            start = time.monotonic()
            self.newest = Published(
                f"{self._instance}/{snapshot.version}", snapshot, info, self.newest, narrow=self._narrow
            )
            self.prepare_s = time.monotonic() - start
            self._wake()

    def request(self, session: str, request: int, step: str) -> None:
        """Read a checkpoint for a session; the answer appears in `fetched`."""
        self._fetching.submit(self._guard, self._read, session, request, step)

    def _read(self, session: str, request: int, step: str) -> None:
        published, reason = None, "this learner does not hand out checkpoints"
        if self._fetch is not None:
            try:
                snapshot, info = self._fetch(step)
                key = f"{self._instance}/fetch/{session}/{request}"
                published = Published(key, self._of_run(snapshot), info, self.newest)
                reason = ""
            except SerlChunkError as e:
                reason = str(e)
            except Exception as e:  # nothing that an actor asks for ends the learner
                log.exception("checkpoint %r", step)
                reason = f"the learner cannot read checkpoint {step!r} ({type(e).__name__}): its own output says why"
        self.fetched.append(Fetched(session, request, published, reason))
        self._wake()

    def close(self) -> None:
        """Wait for work in progress and stop."""
        with self._lock:
            self._waiting = None
        self._preparing.shutdown(cancel_futures=True)
        self._fetching.shutdown(cancel_futures=True)
