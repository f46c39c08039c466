"""Publishing policy parameters without stopping the training loop."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.agents.base import Agent
from serl_chunk.io import fsync_path
from serl_chunk.types import DataError, PolicyOrigin, Snapshot

logger = logging.getLogger(__name__)

Publish = Callable[[Snapshot, dict[str, Any]], None]
VERSION_DIGITS = 12


class SnapshotPublisher:
    """Copies parameters on the device, then flattens and publishes them in a thread of its own.

    The copy is dispatched before the next update donates the state. Only the newest waiting copy is kept. With
    `threaded=False` (single-process mode) the call itself publishes, so that a seed reproduces a run.

    The version is written to `<run>/snapshot_version` before it is used: versions never go back, not even after a
    resume from an older checkpoint. One that cannot be written is not published: that is logged, and the next call
    tries again.
    """

    def __init__(self, agent: Agent, publish: Publish, run_dir: Path, *, threaded: bool) -> None:
        self._agent, self._publish = agent, publish
        self._file = Path(run_dir) / "snapshot_version"
        self.version = _read_version(self._file)
        self._version_file = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o644)
        self.failed_writes = 0  # versions that could not be written, and were not published
        self._writes = True  # the last one was
        if self._keep_version(self.version):
            with contextlib.suppress(OSError):  # each version is synced before it is published
                fsync_path(self._file.parent)
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        self.error: BaseException | None = None  # what stopped the thread
        self._waiting: deque[tuple[Snapshot, dict[str, Any]]] = deque(maxlen=1)  # not flattened, and its info
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher") if threaded else None

    def publish(self, params: Any, info: dict[str, Any], *, normaliser: str = "") -> int:
        """Publish a parameter tree under the next version; returns the newest version that was published.

        `normaliser`: digest of the one that acting with these parameters needs. Raises what stopped the thread.
        """
        if self.error is not None:
            raise self.error
        if not self._keep_version(self.version + 1):
            return self.version
        self.version += 1
        origin = PolicyOrigin(normaliser=normaliser)  # the transport adds the run
        snapshot = Snapshot(self.version, self._copy(params), origin=origin)
        if self._thread is None:
            self._hand_over(snapshot, info)
        else:
            self._waiting.append((snapshot, info))
            self._thread.submit(self._publish_waiting)
        return self.version

    def _keep_version(self, version: int) -> bool:
        """Write a version; False where that failed. The first failure in a row is logged."""
        try:
            # Digits of one width: a kill leaves the old version or the new one, and a full disk has the room.
            data = f"{version:0{VERSION_DIGITS}d}\n".encode()
            if os.pwrite(self._version_file, data, 0) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            self._complain(version, e)
            return False
        if not self._writes:
            logger.warning("snapshot versions are written again; %d snapshots were not published", self.failed_writes)
        self._writes = True
        return True

    def _complain(self, version: int, error: OSError) -> None:
        self.failed_writes += 1
        if self._writes:
            logger.warning(
                "snapshot %d is not published: its version cannot be written to %s (%s). Training continues, and "
                "the next snapshot tries again; if the disk is full, free some space",
                version, self._file, error.strerror,
            )  # fmt: skip
        self._writes = False

    def _hand_over(self, snapshot: Snapshot, info: dict[str, Any]) -> None:
        if self._thread is not None:  # actors of other machines remember it: a power cut must not set it back
            try:
                os.fsync(self._version_file)
            except OSError as e:
                self._complain(snapshot.version, e)
                return
        self._publish(snapshot._replace(params=self._agent.flatten_params(snapshot.params)), info)

    def _publish_waiting(self) -> None:
        try:
            if self._waiting and self.error is None:  # an earlier call may have published it
                self._hand_over(*self._waiting.pop())
        except BaseException as error:  # raised again in the training thread by the next publish
            self.error = error

    def close(self) -> None:
        """Publish the copy that waits, then stop the thread; `error` is set if that failed."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._version_file >= 0:
            os.close(self._version_file)
            self._version_file = -1


def _read_version(file: Path) -> int:
    """Return the last published version, 0 before the first. Raises DataError for anything but a number."""
    text = file.read_bytes().strip() if file.exists() else b""
    if text and not text.isdigit():
        raise DataError(
            f"{file} holds {text[:40]!r}, not the version of the last snapshot. Write a number above every version "
            "that was published into it: actors ignore snapshots that are not newer than theirs"
        )
    return int(text or 0)
