"""`--learner --actor`: both processes on this machine, each in its own session of the interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from serl_chunk.commands.setup import say

STOP_GRACE = 60.0  # seconds a child has for its last checkpoint or its last records


def core_sets(pin: bool) -> tuple[set[int] | None, set[int] | None]:
    """The cores of the learner and of the actor: all but one, and the last one; None leaves them alone."""
    if not pin or not hasattr(os, "sched_getaffinity"):
        return None, None
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None, None
    return set(cores[:-1]), {cores[-1]}


def run_both(arguments: Sequence[str], *, pin: bool) -> int:
    """Start `serl-chunk ARGUMENTS` twice, with --learner and with --actor; end both when one ends badly.

    Returns the learner's exit status, or the actor's where the learner's is 0.
    """
    learner_cores, actor_cores = core_sets(pin)
    base = [sys.executable, "-m", "serl_chunk", *arguments]
    learner = _start([*base, "--learner"], learner_cores)
    actor = _start([*base, "--actor", "--ip", "127.0.0.1"], actor_cores)
    children = {"learner": learner, "actor": actor}
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True
        for child in children.values():
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while any(c.poll() is None for c in children.values()):
        for name, child in children.items():
            other = children["actor" if name == "learner" else "learner"]
            if child.poll() not in (None, 0) and other.poll() is None and not stopping:
                say(f"the {name} ended with status {child.returncode}: stopping the other process")
                stopping = True
                other.send_signal(signal.SIGTERM)
                _wait(other)
        time.sleep(0.1)
    return learner.returncode or actor.returncode


def _start(command: list[str], cores: set[int] | None) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    # A terminal's Ctrl-C reaches the whole foreground group; one signal, sent by the parent, is enough.
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    if cores is not None:
        os.sched_setaffinity(child.pid, cores)
    return child


def _wait(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(STOP_GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
