"""What failed of a robot that a thread of its driver asks in rounds."""

from __future__ import annotations

ROUNDS = 2  # that failed in a row: a fault


class Failures:
    """A fault that lasts until it is cleared, and rounds that failed in a row.

    Written by the driver's thread; the loop's clears what lasts.
    """

    def __init__(self) -> None:
        self.lasting = ""
        self._rounds, self._why = 0, ""

    def failed(self, why: str) -> None:
        self._why = why
        self._rounds += 1

    def worked(self) -> None:
        self._rounds = 0

    @property
    def silent(self) -> str:
        """Why the last rounds failed; empty while it is fewer than ROUNDS."""
        return self._why if self._rounds >= ROUNDS else ""
