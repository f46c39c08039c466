"""Who held, stopped, cleared, or let a robot go on: a line each, in a file of its server, synced by a thread."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
from collections import deque
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Deque, Dict, List, Optional

logger = logging.getLogger(__name__)

RECENT = 20  # entries that `status --history` shows
WAITING = 256  # entries that are not written yet; further ones are only counted: no client may fill the memory


class History:
    """Entries of one robot, the newest last. `path`: JSON lines, appended to; None: nothing is written."""

    def __init__(self, path: Optional[Path]) -> None:
        self._path = path
        self._recent: Deque[Dict[str, Any]] = deque(maxlen=RECENT)
        self._left_out = 0
        self._queue: queue.Queue[Optional[Dict[str, Any]]] = queue.Queue(WAITING)
        if path is not None:
            self._recent.extend(_tail(path))
            self._thread = threading.Thread(target=self._write, name="history", daemon=True)
            self._thread.start()

    def add(self, op: str, *, by: str, address: str, generation: int) -> None:
        """Note what a client requested. Never waits."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        entry = {"time": now, "op": op, "by": by, "address": address, "generation": generation}
        self._recent.append(entry)
        if self._path is None:
            return
        try:
            self._queue.put_nowait({**entry, **({"left_out": self._left_out} if self._left_out else {})})
            self._left_out = 0
        except queue.Full:
            self._left_out += 1

    def recent(self) -> List[Dict[str, Any]]:
        """Return the newest entries, the newest last: time (UTC), op, by, address, generation."""
        return list(self._recent)

    def close(self) -> None:
        if self._path is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=1.0)
            self._thread.join(2.0)

    def _write(self) -> None:
        assert self._path is not None
        failed = ""
        while (entry := self._queue.get()) is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                failed = ""
            except OSError as e:
                if str(e) != failed:
                    logger.error("the history cannot be written: %s: %s", self._path, e.strerror)
                failed = str(e)


def _tail(path: Path) -> List[Dict[str, Any]]:
    """Return the newest entries of a file; lines that are none are left out."""
    entries = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-RECENT:]:
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    entries.append({key: entry.get(key) for key in ("time", "op", "by", "address", "generation")})
    return entries
