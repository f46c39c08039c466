"""Measures by how much this process grows while a test runs."""

from __future__ import annotations

import os
import threading


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Growth:
    """The most that this process grew by since it was made; looked at every millisecond by a thread."""

    def __init__(self) -> None:
        self.base = resident()
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.most = max(self.most, resident() - self.base)

    def close(self) -> int:
        """Stop; returns bytes."""
        self._over.set()
        self._thread.join()
        print(f"grew by {self.most / 2**20:.0f} MiB")
        return self.most
