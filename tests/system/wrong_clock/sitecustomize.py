"""Imported by every Python process that has this folder on its path: its wall clock is off by what a file says.

WRONG_CLOCK names the file, which holds seconds; an absent or empty one is a right clock. Monotonic time is as it was:
that is what a jump of the system's clock, by a user or by NTP, does.
"""

import os
import time

_real, _real_ns, _FILE = time.time, time.time_ns, os.environ.get("WRONG_CLOCK", "")


def _offset() -> float:
    try:
        with open(_FILE) as file:
            return float(file.read() or 0.0)
    except OSError:
        return 0.0


if _FILE:
    time.time = lambda: _real() + _offset()
    time.time_ns = lambda: _real_ns() + round(1e9 * _offset())
