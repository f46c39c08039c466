"""`--learner --actor`: both processes on this machine, each in its own operating system session."""

from __future__ import annotations

import codecs
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

from serl_chunk.logs import LIVE, Screen, current_screen
from serl_chunk.signals import INTERRUPTED, SIGNALS, exit_at_once_while, never, note_signal

PROGRAM = (sys.executable, "-m", "serl_chunk")
STOP_GRACE = 60.0  # seconds a child has for its last checkpoint or its last records
DONE_GRACE = 5.0  # seconds an actor has to end after its learner; an unconnected one would wait forever
OUTPUT_GRACE = 2.0  # seconds for the output of ended processes; a grandchild may hold their pipe open
WATCH_PERIOD = 0.1  # seconds between looks at the processes
READ_BYTES = 1 << 16
PIECES = re.compile(r"([^\r\n]*)(\r\n|\r|\n|$)")  # of a read: text, and what ended it

logger = logging.getLogger(__name__)


def core_sets(pin: bool) -> tuple[set[int] | None, set[int] | None]:
    """Return the cores of the learner (all but the last) and of the actor (the last); None for no restriction."""
    if not pin:
        return None, None
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        logger.warning("--pin_cores has no effect: it needs Linux and two cores that this process may use")
        return None, None
    return set(cores[:-1]), {cores[-1]}


def run_both(arguments: Sequence[str], *, pin: bool, ip: str, program: Sequence[str] = PROGRAM) -> int:
    """Start `serl-chunk ARGUMENTS` with --learner and with --actor, show their output, and end both when one fails.

    `pin`: reserve a core for the actor. `ip`: the learner's address for the actor. Returns the exit status of the
    process that failed first, else 0; 130 where a signal ended one during its start.
    """
    exit_at_once_while(never)  # the children end first
    relay = Relay(current_screen())
    pair = _Pair(relay)
    # as under nohup
    signals_taken = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, pair.stop) for number in signals_taken}
    try:
        learner_cores, actor_cores = core_sets(pin)
        pair.start("learner", [*program, *arguments, "--learner"], learner_cores)
        pair.start("actor", [*program, *arguments, "--actor", "--ip", ip], actor_cores)
        return pair.watch()
    finally:
        pair.kill()
        relay.close(OUTPUT_GRACE)
        for number, handler in before.items():
            signal.signal(number, handler)


class _Pair:
    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = False

    def start(self, name: str, command: list[str], cores: set[int] | None) -> None:
        if self._stopping:
            return
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if self._relay.screen.live:
            environment[LIVE] = "1"
        # A terminal's Ctrl-C would reach the whole foreground group in addition to the parent's signal.
        child = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._children[name] = child
        assert child.stdout is not None
        self._relay.follow(name, child.stdout)
        if cores is not None:
            os.sched_setaffinity(child.pid, cores)
        if self._stopping:  # a signal came before the child was known to `stop`
            child.send_signal(signal.SIGTERM)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on as SIGTERM. It must not log, because it may interrupt the thread that logs."""
        self._stopping = True
        note_signal(number)
        for child in self._children.values():
            child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        for child in self._children.values():
            if child.poll() is None:
                child.kill()
            child.wait()

    def watch(self) -> int:
        first = ""  # the process that failed before the other
        deadline = 0.0  # for an actor whose learner is done
        while any(c.poll() is None for c in self._children.values()):
            time.sleep(WATCH_PERIOD)
            for name, child in self._children.items():
                other = "actor" if name == "learner" else "learner"
                if self._stopping or child.poll() is None or self._children[other].poll() is not None:
                    continue
                if child.returncode != 0:
                    first = name
                    logger.error(f"the {name} {_end(child.returncode)}: stopping the other process")
                    self._end_one(other)
                elif name == "learner":  # its connected actor is about to end; another would wait forever
                    deadline = deadline or time.monotonic() + DONE_GRACE
                    if time.monotonic() >= deadline:
                        logger.info("the learner is done and the actor has not ended: stopping the actor")
                        self._end_one(other)
                        status = _status(self._children[other].returncode)
                        return 0 if status == INTERRUPTED else status
        if first:
            return _status(self._children[first].returncode)
        statuses = [_status(c.returncode) for c in self._children.values()]
        return next((s for s in statuses if s), 0 if len(statuses) == 2 else INTERRUPTED)

    def _end_one(self, name: str) -> None:
        self._stopping = True
        child = self._children[name]
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(STOP_GRACE)
        except subprocess.TimeoutExpired:
            logger.warning(f"the {name} did not end within {STOP_GRACE:g} s: killing it")
            child.kill()
            child.wait()


class Relay:
    """Copies the output of several processes to a screen, line by line, as `NAME | LINE`.

    What ends in a carriage return is a state, kept at the screen's bottom; a line feed right after makes it stay.
    """

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self._lock = threading.Lock()
        self._states: dict[str, str] = {}  # name -> its state; the last one is shown
        self._threads: list[threading.Thread] = []

    def follow(self, name: str, pipe: IO[bytes]) -> None:
        """Copy `pipe`, in a thread, until it ends; closes it."""
        thread = threading.Thread(target=self._copy, args=(name, pipe), name=f"relay-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self, timeout: float) -> None:
        """Wait for the end of every pipe, at most `timeout` seconds for each: a grandchild may hold one open."""
        for thread in self._threads:
            thread.join(timeout)

    def _copy(self, name: str, pipe: IO[bytes]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text, returned = "", False  # the line so far, and whether a carriage return was the last character
        with pipe:
            while data := os.read(pipe.fileno(), READ_BYTES):
                for part, ending in PIECES.findall(decoder.decode(data)):
                    text += part
                    with self._lock:
                        if "\r" in ending and text:
                            self._states.pop(name, None)
                            self._states[name] = text
                            self._show_state()
                        if "\n" in ending:
                            stays = "\r" in ending or (returned and not text)  # a read may cut "\r\n" in two
                            self._line(name, self._end_state(name) if stays else text)
                    if ending:
                        text, returned = "", ending == "\r"
        with self._lock:
            if last := text or self._end_state(name):
                self._line(name, last)

    def _line(self, name: str, text: str) -> None:
        self.screen.line(f"{name} | {text}".rstrip())

    def _end_state(self, name: str) -> str:
        if text := self._states.pop(name, ""):
            self._show_state()
        return text

    def _show_state(self) -> None:
        name, text = next(reversed(self._states.items()), ("", ""))
        self.screen.state(f"{name} | {text}" if text else "")


def _end(returncode: int) -> str:
    return f"ended with status {returncode}" if returncode > 0 else f"was ended by {signal.Signals(-returncode).name}"


def _status(returncode: int) -> int:
    """Return the exit status as in a shell; the launcher's SIGTERM during a start counts as an interruption."""
    return INTERRUPTED if returncode == -signal.SIGTERM else 128 - returncode if returncode < 0 else returncode
