"""What the engines of a fleet share: jobs and their states, the worker that runs a job, and a job's files."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from serl_chunk.io import atomic_write
from serl_chunk.signals import DRAIN, keeping_drain

LEARNER = "learner"
PROGRAM = (sys.executable, "-m", "serl_chunk")
STOP_GRACE = 60.0  # seconds a child has for its last checkpoint or its last records
RESTARTS, WINDOW_SECONDS = 5, 600.0  # of a job within so long, before its crash is final
BACK_OFF = 1.0  # seconds before the first of these; it doubles with each
WRONG_USAGE = 2  # exit status that a restart would only repeat
LAST_LINES = 20  # of a job's output
STALE_S = 30.0  # seconds without a sign of life after which a job of files is lost
POLL_S = 0.2
STOP, DRAINED = "stop", "drain"  # requests
_TIED = (
    "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,int(sys.argv[1]));os.getppid()==int(sys.argv[2]) or sys.exit(1);"
    "os.execvp(sys.argv[3],sys.argv[3:])"
)


class Job(NamedTuple):
    """An ordinary command of a fleet, by the name of its actor, or LEARNER."""

    name: str
    arguments: tuple[str, ...]
    folder: str = ""  # where it runs, if that is there
    restarts: int = RESTARTS  # within WINDOW_SECONDS
    program: tuple[str, ...] = ()  # another than PROGRAM of the machine where it runs


class JobStatus(NamedTuple):
    """The state of a job: `waiting`, `running`, `restarting`, `stopping`, `stopped`, `done`, `failed` or `lost`."""

    name: str
    state: str
    detail: str = ""
    restarts: int = 0
    statuses: tuple[int, ...] = ()  # exit statuses, the newest last
    lines: tuple[str, ...] = ()  # the last ones of its output

    @property
    def ended(self) -> bool:
        """Whether no process of it is left. One that is lost may run on."""
        return self.state in ("stopped", "done", "failed")


class Engine(Protocol):
    """Starts jobs, and later finds them by the fleet's name. It sees no record."""

    def start(self, jobs: Sequence[Job]) -> int:
        """Start the jobs; returns the exit status of what already ended, else 0. Raises ConfigError."""

    def status(self) -> list[JobStatus]:
        """Return the state of each job."""

    def stop(self, names: Collection[str], *, drain: bool) -> None:
        """Request the end of jobs as SIGTERM does; with `drain` only after the learner has what they recorded."""

    def close(self) -> None:
        """Forget jobs that ended."""


def back_off(crashes: Sequence[float], status: int, limit: int, now: float) -> tuple[float | None, list[float]]:
    """Return the seconds before the restart of a job that crashed `now`, None for no restart, and recent crashes.

    Args:
        crashes: times of earlier ones.
        status: its exit status.
        limit: restarts within WINDOW_SECONDS.
    """
    recent = [at for at in crashes if now - at < WINDOW_SECONDS]
    if status == WRONG_USAGE or len(recent) >= limit:
        return None, recent
    return BACK_OFF * 2 ** len(recent), [*recent, now]


def tied(command: Sequence[str], number: int) -> list[str]:
    """Return the command of a child that Linux ends by a signal with the thread that starts it: it leaves no orphan."""
    own = [sys.executable, "-SEc", _TIED, str(number), str(os.getpid())] if sys.platform == "linux" else []
    return [*own, *command]


class Worker:
    """Runs a job's command as a child that dies with this process, and restarts it where it crashes.

    Any thread may call its methods. Engines for whole clusters put one of these on a node.

    Args:
        over: returns the state in which the job ended in another process, or is to end; empty: none.
        note_end: receives the state in which it ends here.
    """

    def __init__(self, job: Job, over: Callable[[], str] = str, note_end: Callable[[str], object] = str) -> None:
        self._job, self._lines = job, collections.deque[str](maxlen=LAST_LINES)
        self._over, self._note_end = over, note_end
        self._status = JobStatus(job.name, "running")
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping, self._kill_at = threading.Event(), float("inf")
        self._lock = threading.Lock()
        # The child is tied to the thread that made it.
        self._thread = threading.Thread(target=self._run, name=f"worker-{job.name}", daemon=True)
        self._thread.start()

    def status(self) -> JobStatus:
        return self._status._replace(lines=tuple(self._lines))

    def stop(self, drain: bool = False) -> None:
        """End the child as SIGTERM does, or as DRAIN does, which waits for the learner; it is not started again."""
        with self._lock:
            self._stopping.set()
            self._kill_at = float("inf") if drain else time.monotonic() + STOP_GRACE
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(DRAIN if drain else signal.SIGTERM)
                self._set("stopping", "until the learner has its records" if drain else "")

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the job's end; False where it has not ended by then."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _set(self, state: str, detail: str = "") -> None:
        self._status = self._status._replace(state=state, detail=detail)
        if self._status.ended:
            self._note_end(state)

    def _run(self) -> None:
        crashes: list[float] = []
        while (status := self._run_once()) is not None:
            self._status = self._status._replace(statuses=(*self._status.statuses[-9:], status))
            if self._stopping.is_set() or status == 0:
                self._set("done" if status == 0 and not self._stopping.is_set() else "stopped")
                return
            wait, crashes = back_off(crashes, status, self._job.restarts, time.monotonic())
            if wait is None:
                self._set("failed", f"status {status} after {self._status.restarts} restarts")
                return
            self._set("restarting", f"in {wait:g} s after status {status}")
            if self._stopping.wait(wait):
                break
            self._status = self._status._replace(restarts=self._status.restarts + 1)
        self._set(self._over() or "stopped")

    def _run_once(self) -> int | None:
        """Run the child to its end; returns its exit status, None where it was to be stopped before."""
        with self._lock:
            if self._stopping.is_set() or self._over():
                return None
            command = tied([*(self._job.program or PROGRAM), *self._job.arguments], signal.SIGKILL)
            folder = self._job.folder if os.path.isdir(self._job.folder) else None
            with keeping_drain():
                process = self._process = subprocess.Popen(
                    command, cwd=folder, env=os.environ | {"PYTHONUNBUFFERED": "1"}, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
            self._set("running", f"process {process.pid}")
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
                break
            if time.monotonic() > self._kill_at:
                process.kill()
        reader.join(POLL_S)  # a grandchild may hold the pipe open
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._lines.append(line.decode(errors="replace").rstrip())


@dataclasses.dataclass(frozen=True)
class JobFiles:
    """State and requests of the jobs of a fleet as files in its folder, for engines that cannot call a job."""

    folder: Path

    def begin(self, names: Collection[str]) -> None:
        """Forget the jobs of an earlier fleet; these are waiting. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in [*self.folder.glob("*.state"), *self.folder.glob("*.request")]:
            file.unlink(missing_ok=True)
        for name in names:
            self.write(JobStatus(name, "waiting"))

    def write(self, status: JobStatus) -> None:
        with contextlib.suppress(OSError):  # a full disk ends no job
            atomic_write(self.folder / f"{status.name}.state", json.dumps([*status, socket.gethostname()]))

    def status(self) -> list[JobStatus]:
        """Return the states, `lost` where a job that runs gave no sign of life. A waiting one gives none."""
        found = []
        # Not what `atomic_write` has under way, whose names begin with a dot.
        for file in sorted(self.folder.glob("[!.]*.state"), key=lambda f: (len(f.name), f.name)):
            with contextlib.suppress(OSError, ValueError, TypeError):
                name, state, detail, restarts, statuses, lines, host = json.loads(file.read_text())
                status = JobStatus(name, state, detail, restarts, tuple(statuses), tuple(lines))
                silent = time.time() - file.stat().st_mtime
                if silent > STALE_S and not status.ended and state != "waiting":
                    detail = f"no sign of life for {STALE_S:g} s: check {host} ({detail}); if it ended remove {file}"
                    status = status._replace(state="lost", detail=detail)
                found.append(status)
        return found

    def request(self, names: Collection[str], *, drain: bool) -> None:
        """Raises OSError."""
        for name in names:
            atomic_write(self.folder / f"{name}.request", DRAINED if drain else STOP)

    def requested(self, name: str) -> str:
        """Return STOP, DRAINED or nothing."""
        with contextlib.suppress(OSError):
            return (self.folder / f"{name}.request").read_text()
        return ""

    def follow(self, name: str, worker: Worker) -> JobStatus:
        """Keep the state of a worker, and pass requests to it, until its end; returns its last state."""
        requested = ""
        while not worker.wait(POLL_S):
            if (newest := self.requested(name)) and newest != requested:
                requested = newest
                worker.stop(drain=requested == DRAINED)
            self.write(worker.status())
        self.write(worker.status())
        return worker.status()
