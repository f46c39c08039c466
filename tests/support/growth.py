"""Measures by how much a process grows while a test runs."""

from __future__ import annotations

import os
import threading


def resident(process: int | str = "self") -> int:
    """Bytes of a process in memory."""
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Growth:
    """The most that a process grew by since this was made; looked at every millisecond by a thread."""

    def __init__(self, process: int | str = "self") -> None:
        self._process, self.base = process, resident(process)
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.most = max(self.most, resident(self._process) - self.base)

    def close(self) -> int:
        self._over.set()
        self._thread.join()
        print(f"grew by {self.most / 2**20:.0f} MiB")
        return self.most
