"""`--learner --actor`: all processes on this machine, each in its own operating system session."""

from __future__ import annotations

import codecs
import dataclasses
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

LEARNER = "learner"
PROGRAM = (sys.executable, "-m", "serl_chunk")
STOP_GRACE = 60.0  # seconds a child has for its last checkpoint or its last records
DONE_GRACE = 5.0  # seconds an actor has to end after its learner; an unconnected one would wait forever
OUTPUT_GRACE = 2.0  # seconds for the output of ended processes; a grandchild may hold their pipe open
WATCH_PERIOD = 0.1  # seconds between looks at the processes
READ_BYTES = 1 << 16
PIECES = re.compile(r"([^\r\n]*)(\r\n|\r|\n|$)")  # of a read: text, and what ended it
RESTARTS, WINDOW_SECONDS = 5, 600.0  # of an actor within so long, before its crash ends all
BACK_OFF = 1.0  # seconds before the first of these; it doubles with each
WRONG_USAGE = 2  # exit status that a restart would only repeat

logger = logging.getLogger(__name__)


def core_sets(pin: bool, actors: int = 1) -> list[set[int] | None]:
    """Return the cores of the learner and of each actor, of which each has one of the last; None: no restriction."""
    cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_getaffinity") else []
    if len(cores) > actors:
        return [set(cores[:-actors]), *({core} for core in cores[-actors:])]
    if pin:
        logger.warning(f"--pin_cores has no effect: it needs Linux and {actors + 1} cores that this process may use")
    return [None] * (actors + 1)


def run_both(
    arguments: Sequence[str], *, pin: bool, ip: str, actors: Sequence[str] = (), program: Sequence[str] = PROGRAM
) -> int:
    """Start `serl-chunk ARGUMENTS` with --learner and with --actor, show their output, and end all when one fails.

    Args:
        pin: reserve a core for each actor.
        ip: the learner's address for the actors.
        actors: ids of several actors of simulators, each a process that is restarted where it crashes, up to RESTARTS
            times within WINDOW_SECONDS. Empty: one, which is not.

    Returns the exit status of the process that failed first, else 0; 130 where a signal ended one during its start.
    """
    exit_at_once_while(never)  # the children end first
    relay = Relay(current_screen())
    fleet = _Fleet(relay, restarts=RESTARTS if actors else 0)
    # as under nohup
    signals_taken = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, fleet.stop) for number in signals_taken}
    try:
        acting = [*program, *arguments, "--actor", "--ip", ip]
        commands = {LEARNER: [*program, *arguments, "--learner"]}
        commands |= {name: [*acting, "--actor_id", name] for name in actors} or {"actor": acting}
        for (name, command), cores in zip(commands.items(), core_sets(pin, len(commands) - 1), strict=True):
            fleet.start(name, command, cores)
        return fleet.watch()
    finally:
        fleet.kill()
        relay.close(OUTPUT_GRACE)
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass
class _Child:
    command: list[str]
    cores: set[int] | None
    process: subprocess.Popen[bytes]
    restarts: Sequence[float]  # times of those within WINDOW_SECONDS, monotonic, s
    restart_at: float | None = None  # monotonic, s; None: none is due

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def status(self) -> int:
        """Exit status of the ended process as in a shell; the launcher's SIGTERM during a start is an interruption."""
        code = self.process.returncode
        return INTERRUPTED if code == -signal.SIGTERM else 128 - code if code < 0 else code


class _Fleet:
    """A learner and its actors. `restarts`: how often in WINDOW_SECONDS an actor that crashes is started again."""

    def __init__(self, relay: Relay, restarts: int) -> None:
        self._relay, self._restarts = relay, restarts
        self._children: dict[str, _Child] = {}
        self._stopping = self._incomplete = False

    def start(self, name: str, command: list[str], cores: set[int] | None, restarts: Sequence[float] = ()) -> None:
        if self._stopping:
            self._incomplete = True
            return
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if self._relay.screen.live:
            environment[LIVE] = "1"
        # A terminal's Ctrl-C would reach the whole foreground group in addition to the parent's signal.
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._children[name] = _Child(command, cores, process, restarts)
        assert process.stdout is not None
        self._relay.follow(name, process.stdout)
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)
        if self._stopping:  # a signal came before the child was known to `stop`
            process.send_signal(signal.SIGTERM)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on as SIGTERM. It must not log, because it may interrupt the thread that logs."""
        self._stopping = True
        note_signal(number)
        for child in self._children.values():
            child.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        for child in self._children.values():
            if child.running:
                child.process.kill()
            child.process.wait()

    def watch(self) -> int:
        deadline = 0.0  # for actors whose learner is done
        while any(c.running for c in self._children.values()):
            time.sleep(WATCH_PERIOD)
            running = [name for name, child in self._children.items() if child.running]
            if self._stopping or not running:
                continue
            failed = [n for n, c in self._children.items() if not c.running and c.process.returncode]
            if LEARNER in running:
                failed = [name for name in failed if not self._restarts_soon(name)]
            else:
                failed = [name for name in failed if name == LEARNER]
            if failed:
                first = self._children[failed[0]]
                logger.error(f"{failed[0]} {_end(first.process.returncode)}: stopping the rest")
                self._end(running)
                return first.status
            if LEARNER not in running:  # connected actors are about to end; another would wait forever
                deadline = deadline or time.monotonic() + DONE_GRACE
                if time.monotonic() >= deadline:
                    logger.info(f"learner is done and {', '.join(running)} not: stopping the rest")
                    self._end(running)
                    return next((s for s in self._statuses() if s not in (0, INTERRUPTED)), 0)
        return next((s for s in self._statuses() if s), INTERRUPTED if self._incomplete else 0)

    def _statuses(self) -> list[int]:
        """Return the exit statuses of all but actors whose restart was due: a run that ends needs them no more."""
        return [child.status for child in self._children.values() if child.restart_at is None]

    def _restarts_soon(self, name: str) -> bool:
        """Restart an actor that crashed, after its back-off; returns whether that is to be."""
        child, now = self._children[name], time.monotonic()
        if child.restart_at is None:
            recent = [at for at in child.restarts if now - at < WINDOW_SECONDS]
            if child.status == WRONG_USAGE or len(recent) >= self._restarts:
                return False
            wait = BACK_OFF * 2 ** len(recent)
            child.restarts, child.restart_at = [*recent, now], now + wait
            again = f"restart {len(child.restarts)} of {self._restarts} in {wait:g} s"
            logger.warning(f"{name} {_end(child.process.returncode)}: {again}")
        elif now >= child.restart_at:
            self.start(name, child.command, child.cores, child.restarts)
        return True

    def _end(self, names: Sequence[str]) -> None:
        self._stopping = True
        for name in names:
            self._children[name].process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE
        for name in names:
            process = self._children[name].process
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning(f"{name} did not end within {STOP_GRACE:g} s: killing it")
                process.kill()
                process.wait()


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
