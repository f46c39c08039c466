"""Free ports for a learner, or a robot's server and its streams, in a benchmark or a test."""

from __future__ import annotations

import contextlib
import os
import random
import socket

_RANDOM = random.SystemRandom()  # a seeded generator gives two processes the same ports


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port p such that p, p+1 and p+2 can be bound now. Another process may still take it first."""
    for _ in range(200):
        # Outgoing connections get ports from 32768 up, so that none takes these. Workers of a test run share none.
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4
        port = 10000 + 5500 * worker + _RANDOM.randrange(5490)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for offset in range(3):
                s = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
                s.bind((host, port + offset))
            return port
    raise RuntimeError(f"no three consecutive free ports found on {host}")
