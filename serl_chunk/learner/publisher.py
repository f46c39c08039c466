"""Publishing policy parameters without stopping the training loop."""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.agents.base import Agent
from serl_chunk.types import DataError, PolicyOrigin, Snapshot

log = logging.getLogger(__name__)

Publish = Callable[[Snapshot, dict[str, Any]], None]
VERSION_DIGITS = 12


class SnapshotPublisher:
    """Copies parameters on the device, then flattens and hands them over on a thread of its own.

    The copy is dispatched before the next update donates the state; everything after it needs no part of the
    training thread. Only the newest waiting copy is kept. With `threaded=False` (single-process mode) the
    hand-over happens in the call, so that a seed reproduces a run.

    The version is written to `<run>/snapshot_version` before it is used: versions never go back, not even
    after a resume from an older checkpoint. It is one `write` over digits of the same width: a kill leaves the old
    version or the new one, and a disk that is full by now has the room. Where it cannot be written nothing is
    published: that is logged and counted (`failed_writes`), training goes on, and the next call tries again.
    """

    def __init__(self, agent: Agent, publish: Publish, run_dir: Path, *, threaded: bool) -> None:
        self._agent, self._publish, self._threaded = agent, publish, threaded
        self._file = file = Path(run_dir) / "snapshot_version"
        self.version = _read_version(file)
        self._version_file = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
        self.failed_writes = 0  # versions that could not be written, and were not published
        self._writes = True  # the last one was
        self._keep_version(self.version)
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        self._waiting: queue.Queue[tuple[int, Any, dict[str, Any], str] | None] = queue.Queue(maxsize=1)
        self.error: BaseException | None = None  # what stopped the thread
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
            self._thread.start()

    def publish(self, params: Any, info: dict[str, Any], *, normaliser: str = "") -> int:
        """Publish a parameter tree under the next version; returns the newest version that was published.

        `normaliser`: digest of the one that acting with these parameters needs. Raises what stopped the thread.
        """
        if self.error is not None:
            raise self.error
        if not self._keep_version(self.version + 1):
            return self.version
        self.version += 1
        item = (self.version, self._copy(params), info, normaliser)
        if not self._threaded:
            self._hand_over(*item)
            return self.version
        while True:
            try:
                self._waiting.put_nowait(item)
                return self.version
            except queue.Full:  # an older copy not taken yet: only the newest matters
                try:
                    self._waiting.get_nowait()
                except queue.Empty:
                    continue

    def _keep_version(self, version: int) -> bool:
        """Write a version down; False where that failed, which the first time in a row is logged."""
        try:
            data = f"{version:0{VERSION_DIGITS}d}\n".encode()
            if os.pwrite(self._version_file, data, 0) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            self.failed_writes += 1
            if self._writes:
                log.warning(
                    "snapshot %d is not published: its version cannot be written to %s (%s). Training goes on, and the "
                    "next snapshot tries again; if the disk is full, free some space",
                    version, self._file, e.strerror,
                )  # fmt: skip
            self._writes = False
            return False
        if not self._writes:
            log.warning("snapshot versions are written again; %d snapshots were not published", self.failed_writes)
        self._writes = True
        return True

    def _hand_over(self, version: int, params: Any, info: dict[str, Any], normaliser: str) -> None:
        origin = PolicyOrigin(normaliser=normaliser)  # the transport adds the run
        self._publish(Snapshot(version, self._agent.flatten_params(params), origin=origin), info)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._hand_over(*item)
            except BaseException as error:  # raised again in the training thread by the next publish
                self.error = error
                return

    def close(self) -> None:
        """Hand over what waits, then stop the thread; `error` says if that failed."""
        if self._thread is not None:
            while self._thread.is_alive():
                try:
                    self._waiting.put(None, timeout=0.1)
                    break
                except queue.Full:
                    continue
            self._thread.join()
            self._thread = None
        if self._version_file >= 0:
            os.close(self._version_file)
            self._version_file = -1


def _read_version(file: Path) -> int:
    """The last published version, 0 before the first; raises DataError for anything but a number."""
    text = file.read_bytes().strip() if file.exists() else b""
    if text and not text.isdigit():
        raise DataError(
            f"{file} holds {text[:40]!r}, not the version of the last snapshot. Write a number above every version "
            "that was published into it: actors ignore snapshots that are not newer than theirs"
        )
    return int(text or 0)
