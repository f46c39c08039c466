"""Connections that send what is no message: after too many, they are not listened to until they have calmed down."""

from __future__ import annotations

import collections
import time

from serl_chunk.transport.stats import Clock

FORGIVEN_PER_S = 1.0  # malformed messages of a connection that are forgotten again in a second
_REMEMBERED = 1024  # connections; the one blamed least recently makes room


class Offenders:
    """Counts malformed messages by connection, and forgets them with time. Used by one thread.

    A peer is a connection and not an address: an honest actor may share the address, behind a tunnel for instance.
    A message that is dropped unread does not count, so that a flood costs one decoding a second.
    """

    def __init__(self, limit: int, clock: Clock = time.monotonic) -> None:
        """`limit`: malformed messages that a connection may send at once."""
        self._limit, self._clock = limit, clock
        self._levels: collections.OrderedDict[tuple[str, bytes], tuple[float, float]] = collections.OrderedDict()

    def blame(self, channel: str, identity: bytes) -> bool:
        """Count a malformed message; True where the connection is not listened to from now on."""
        key, now = (channel, identity), self._clock()
        level = self._level(key, now) + 1
        self._levels[key] = level, now
        self._levels.move_to_end(key)
        if len(self._levels) > _REMEMBERED:
            self._levels.popitem(last=False)
        return level >= self._limit

    def ignores(self, channel: str, identity: bytes) -> bool:
        """Whether what comes from this connection is to be dropped unread."""
        key = (channel, identity)
        if key not in self._levels:
            return False
        level = self._level(key, self._clock())
        if level <= 0:
            del self._levels[key]
        return level >= self._limit

    def _level(self, key: tuple[str, bytes], now: float) -> float:
        level, at = self._levels.get(key, (0.0, now))
        return max(0.0, level - FORGIVEN_PER_S * (now - at))
