"""The learner's three sockets: names, ports, and the types that their users share.

Data, snapshots and control have a socket each (ports p, p+1, p+2), so that acknowledgements and heartbeats never wait
behind a blob.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from serl_chunk.types import ConfigError

Clock = Callable[[], float]  # seconds
Counters = collections.Counter[str]  # written by one thread, read by any: a reader may be one event behind

DEFAULT_PORT = 5588
CHANNELS = ("data", "snapshots", "control")  # ports p, p + 1, p + 2


def check_port(port: int) -> None:
    """Raise ConfigError unless `port` and the two after it can exist."""
    last = 65535 - len(CHANNELS) + 1
    if not 1 <= port <= last:
        message = f"must be 1..{last}, got {port}: the transport uses that port and the two after it"
        raise ConfigError(message, parameter="port")
