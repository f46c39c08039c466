"""Small programs as jobs of a fleet."""

from __future__ import annotations

import sys

from serl_chunk.fleet.engines import Job

FOREVER = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: (print('drained'), sys.exit(0))); "
FOREVER += "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1}); "
FOREVER += "print('ready', flush=True); time.sleep(60)"


def job(code: str, name: str = "sim-1", **changes: object) -> Job:
    return Job(name, (), program=(sys.executable, "-c", code))._replace(**changes)
