"""Real-time priority of threads: of the control loop, and of the front that receives its requests."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import List

PRIORITY = 20  # of the loop in the real-time class, 1 to 99; the kernel's own threads have 50


def raise_priority(priority: int) -> str:
    """Let the calling thread, and no thread or process that it starts, run before all ordinary programs.

    So do the threads of libzmq that move messages: the newest command would wait for a busy computer there.
    Returns why the system does not permit that; empty where it does.
    """
    try:
        for thread in (0, *_message_threads()):
            os.sched_setscheduler(thread, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    except (AttributeError, OSError) as e:  # not Linux, or not permitted
        return str(getattr(e, "strerror", None) or e)
    return ""


def _message_threads() -> List[int]:
    """Return the threads of libzmq in this process, by the names that it gives them."""
    threads = []
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text().startswith("ZMQbg/"):
                threads.append(int(task.name))
    return threads
