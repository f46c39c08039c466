"""`--learner --actor`, `fleet --engine local`: processes on this machine, each in its own operating system session."""

from __future__ import annotations

import codecs
import collections
import dataclasses
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from serl_chunk.fleet import engines
from serl_chunk.fleet.engines import DRAINED, LAST_LINES, LEARNER, PROGRAM, Job, JobFiles, JobStatus
from serl_chunk.logs import LIVE, Screen, current_screen
from serl_chunk.signals import DRAIN, INTERRUPTED, SIGNALS, exit_at_once_while, keeping_drain, never, note_signal

DONE_GRACE = 5.0  # seconds an actor has to end after its learner; an unconnected one would wait forever
OUTPUT_GRACE = 2.0  # seconds for the output of ended processes; a grandchild may hold their pipe open
WATCH_PERIOD = 0.1  # seconds between looks at the processes
READ_BYTES = 1 << 16
PIECES = re.compile(r"([^\r\n]*)(\r\n|\r|\n|$)")  # of a read: text, and what ended it
STATES_PERIOD = 1.0  # seconds between looks at the requests of `fleet stop`

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
    acting = (*arguments, "--actor", "--ip", ip)
    jobs = [Job(LEARNER, (*arguments, "--learner"), restarts=0)]
    jobs += [Job(name, (*acting, "--actor_id", name)) for name in actors] or [Job("actor", acting, restarts=0)]
    return run_jobs(jobs, pin=pin, program=program)


class LocalEngine:
    """All jobs on this machine, under this process, which shows their lines. `folder`: the fleet's."""

    def __init__(self, folder: Path) -> None:
        self._files = JobFiles(folder)

    def start(self, jobs: Sequence[Job]) -> int:
        self._files.begin([job.name for job in jobs])
        return run_jobs(jobs, files=self._files)

    def status(self) -> list[JobStatus]:
        return self._files.status()

    def stop(self, names: Collection[str], *, drain: bool) -> None:
        self._files.request(names, drain=drain)

    def close(self) -> None:
        return


def run_jobs(
    jobs: Sequence[Job], *, pin: bool = False, files: JobFiles | None = None, program: Sequence[str] = PROGRAM
) -> int:
    """Run jobs until all have ended, the learner has, or one fails; returns as `run_both`."""
    exit_at_once_while(never)  # the children end first
    relay = Relay(current_screen())
    fleet = _Fleet(relay, {job.name: job for job in jobs}, files)
    # as under nohup
    signals_taken = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, fleet.stop) for number in signals_taken}
    try:
        for job, cores in zip(jobs, core_sets(pin, len(jobs) - 1), strict=True):
            fleet.start(job.name, [*(job.program or program), *job.arguments], cores)
        return fleet.watch()
    finally:
        fleet.kill()
        fleet.write_states(over=True)
        relay.close(OUTPUT_GRACE)
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass
class _Child:
    command: list[str]
    cores: set[int] | None
    process: subprocess.Popen[bytes]
    restarts: Sequence[float]  # times of those within WINDOW_SECONDS, monotonic, s
    restarted: int = 0  # times in all
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
    """A learner and its actors, or actors of a learner elsewhere. `files`: of a fleet that others may stop."""

    def __init__(self, relay: Relay, jobs: dict[str, Job], files: JobFiles | None) -> None:
        self._relay, self._jobs, self._files = relay, jobs, files
        self._children: dict[str, _Child] = {}
        self._stopping = self._incomplete = False
        self._states_at = 0.0  # when states are written next
        self._requested: dict[str, str] = {}

    def start(
        self, name: str, command: list[str], cores: set[int] | None, restarts: Sequence[float] = (), restarted: int = 0
    ) -> None:
        if self._stopping:
            self._incomplete = True
            return
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if self._relay.screen.live:
            environment[LIVE] = "1"
        # A terminal's Ctrl-C would reach the whole foreground group in addition to the parent's signal.
        with keeping_drain():
            process = subprocess.Popen(
                engines.tied(command, signal.SIGTERM), env=environment, start_new_session=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._children[name] = _Child(command, cores, process, restarts, restarted)
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
        led = LEARNER in self._jobs
        while any(c.running for c in self._children.values()) or not (led or self._stopping or self._done()):
            time.sleep(WATCH_PERIOD)
            self._take_requests()
            running = [name for name, child in self._children.items() if child.running]
            if self._stopping or not (running or not led):
                continue
            failed = [n for n, c in self._children.items() if not c.running and c.process.returncode]
            if LEARNER in running or not led:
                failed = [name for name in failed if not self._restarts_soon(name)]
            else:
                failed = [name for name in failed if name == LEARNER]
            if failed:
                first = self._children[failed[0]]
                logger.error(f"{failed[0]} {_end(first.process.returncode)}: stopping the rest")
                self._end(running)
                return first.status
            if led and LEARNER not in running:  # connected actors are about to end; another would wait forever
                deadline = deadline or time.monotonic() + DONE_GRACE
                if time.monotonic() >= deadline:
                    logger.info(f"learner is done and {', '.join(running)} not: stopping the rest")
                    self._end(running)
                    return next((s for s in self._statuses() if s not in (0, INTERRUPTED)), 0)
        return next((s for s in self._statuses() if s), INTERRUPTED if self._incomplete else 0)

    def _done(self) -> bool:
        return all(child.process.poll() == 0 for child in self._children.values())

    def _take_requests(self) -> None:
        if self._files is None or not self._states_due():
            return
        newest = {name: what for name in self._children if (what := self._files.requested(name))}
        changed = [name for name, what in newest.items() if what != self._requested.get(name)]
        self._requested, self._stopping = self._requested | newest, self._stopping or bool(newest)
        self.write_states()
        drained = [name for name in changed if newest[name] == DRAINED]
        for name in drained:
            self._children[name].process.send_signal(DRAIN)
        self._end([name for name in changed if name not in drained])

    def _states_due(self) -> bool:
        if time.monotonic() < self._states_at:
            return False
        self._states_at = time.monotonic() + STATES_PERIOD
        return True

    def write_states(self, *, over: bool = False) -> None:
        """Write what other processes see of the jobs. `over`: no other child is started."""
        if self._files is None:
            return
        for name in self._jobs.keys() - self._children.keys() if over else ():
            self._files.write(JobStatus(name, "stopped", "it was not begun"))
        for name, child in self._children.items():
            statuses, lines = () if child.running else (child.status,), tuple(self._relay.newest[name])
            state, detail = "running", f"process {child.process.pid}"
            if not child.running:
                ended = "stopped" if self._stopping else "done"
                state = "failed" if child.status not in (0, INTERRUPTED) else ended
                state, detail = "restarting" if child.restart_at is not None and not self._stopping else state, ""
            elif name in self._requested:
                state = "stopping"
            self._files.write(JobStatus(name, state, detail, child.restarted, statuses, lines))

    def _statuses(self) -> list[int]:
        """Return the exit statuses of all but actors whose restart was due: a run that ends needs them no more."""
        return [child.status for child in self._children.values() if child.restart_at is None]

    def _restarts_soon(self, name: str) -> bool:
        """Restart an actor that crashed, after its back-off; returns whether that is to be."""
        child, now = self._children[name], time.monotonic()
        if child.restart_at is None:
            limit = self._jobs[name].restarts
            wait, child.restarts = engines.back_off(child.restarts, child.status, limit, now)
            if wait is None:
                return False
            child.restart_at = now + wait
            again = f"restart {len(child.restarts)} of {limit} in {wait:g} s"
            logger.warning(f"{name} {_end(child.process.returncode)}: {again}")
        elif now >= child.restart_at:
            self.start(name, child.command, child.cores, child.restarts, child.restarted + 1)
        return True

    def _end(self, names: Sequence[str]) -> None:
        if not names:
            return
        self._stopping = True
        for name in names:
            self._children[name].process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + engines.STOP_GRACE
        while (left := [n for n in names if self._children[n].running]) and time.monotonic() < deadline:
            time.sleep(WATCH_PERIOD)
            if self._states_due():
                self.write_states()
        for name in left:
            logger.warning(f"{name} did not end within {engines.STOP_GRACE:g} s: killing it")
            self._children[name].process.kill()
            self._children[name].process.wait()


class Relay:
    """Copies the output of several processes to a screen, line by line, as `NAME | LINE`.

    What ends in a carriage return is a state, kept at the screen's bottom; a line feed right after makes it stay.
    """

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self._lock = threading.Lock()
        self._states: dict[str, str] = {}  # name -> its state; the last one is shown
        self._threads: list[threading.Thread] = []
        self.newest: dict[str, collections.deque[str]] = {}  # name -> its last lines

    def follow(self, name: str, pipe: IO[bytes]) -> None:
        """Copy `pipe`, in a thread, until it ends; closes it."""
        self.newest.setdefault(name, collections.deque(maxlen=LAST_LINES))
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
        self.newest[name].append(text)
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
