"""Whether a learner's three ports can be reached at all, before anything is said to it."""

from __future__ import annotations

import errno
import socket
import threading
import time
from typing import Literal, NamedTuple

from serl_chunk.transport.key_exchange import mechanism_at
from serl_chunk.transport.sockets import CHANNELS

Trouble = Literal["", "no host", "refused", "silent", "mute", "unreachable"]


class Reach(NamedTuple):
    """What came of connecting to one port."""

    channel: str  # of CHANNELS
    port: int
    trouble: Trouble  # empty where something of ours, as far as one can tell, listens there
    detail: str  # the system's words for it
    seconds: float  # to connect, name look-up included


def reach(host: str, port: int, timeout: float) -> list[Reach]:
    """Connect to `port` and the two after it, all at once; takes at most `timeout` seconds, whatever the host does.

    Data and snapshots must also greet as ZeroMQ does: a tunnel accepts connections that lead nowhere, and is called
    "mute". (The control port, which is asked everything else, shows that by its answers.)
    """
    silent = f"no answer in {timeout:g} s"
    found = {c: Reach(c, port + i, "silent", silent, timeout) for i, c in enumerate(CHANNELS)}
    threads = []

    def knock(channel: str) -> None:
        found[channel] = _knock(host, found[channel], timeout / 2, greet=channel != "control")

    for channel in CHANNELS:
        # Daemons: the system's look-up of a name can take longer than anybody waits, and cannot be stopped.
        threads.append(threading.Thread(target=knock, args=(channel,), daemon=True))
        threads[-1].start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [found[c] for c in CHANNELS]


def _knock(host: str, place: Reach, timeout: float, *, greet: bool) -> Reach:
    start = time.monotonic()

    def outcome(trouble: Trouble, detail: str) -> Reach:
        return Reach(place.channel, place.port, trouble, detail, seconds)

    try:
        socket.create_connection((host, place.port), timeout).close()
    except UnicodeError as e:  # no name of a host can be like that
        seconds = time.monotonic() - start
        return outcome("no host", str(e))
    except OSError as e:
        seconds = time.monotonic() - start
        if isinstance(e, socket.gaierror):
            return outcome("no host", e.strerror or str(e))
        if isinstance(e, TimeoutError):
            return outcome("silent", f"no answer in {timeout:g} s")
        return outcome("refused" if e.errno == errno.ECONNREFUSED else "unreachable", e.strerror or str(e))
    seconds = time.monotonic() - start
    if greet and mechanism_at(host, place.port, timeout) is None:
        return outcome("mute", "it accepts connections and does not greet")
    return outcome("", "")
