"""Keeps processes of cameras, input devices and the front running, apart from the loop that moves the arms.

Four streams of cameras would starve the loop, and a vendor's library that crashes must take neither the server nor
another camera or device with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from serl_chunk_robot.output import background_output
from serl_chunk_robot.wire.sockets import Waker

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 10.0  # s; each doubles the one before it
RAN_WELL = 10.0  # s: a process that ran for so long is started anew after the first pause again
END_WITHIN = 3.0  # s for closing them, once the server ends
LOOK = 0.5  # s between two looks, at processes whose pipe did not end and of a process at these:
OPEN_WITHIN = 30.0  # s: a USB camera that is reset first takes several
HUNG = 5.0  # s without a picture or reading, in a library that does not return
CLOSE_WITHIN = 1.5  # s for closing the camera or device once the server ended
PRIORITY = 20  # of the loop in the real-time class, 1 to 99; the kernel's own threads have 50


class Child(NamedTuple):
    """What one process is for."""

    kind: str  # as log lines have it: camera, device, front
    name: str
    module: str  # that is run
    job: Dict[str, Any]  # plain values, as JSON has them
    descriptors: Tuple[int, ...] = ()  # that it gets under the same numbers
    on_end: Optional[Callable[[str], None]] = None  # called with the reason of each end, by the supervising thread
    pause: float = 1.0  # s before the next one is started, at first


class Processes:
    """Starts a process for each child, and starts one that ends anew. A context, which ends them.

    A camera or device that cannot be opened is logged and tried again; it never keeps the server from running.
    """

    def __init__(self, children: Sequence[Child]) -> None:
        self._processes = [_Process(child) for child in children]
        self._ending, self._waker = threading.Event(), Waker()
        self._thread = threading.Thread(target=self._supervise, name="processes", daemon=True)

    def __enter__(self) -> Processes:
        if self._processes:
            for each in self._processes:
                each.start()  # at once, before the loop runs
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        if self._processes:
            self._waker.wake()
            self._thread.join()
        for each in self._processes:
            each.let_end()
        ends = monotonic() + END_WITHIN
        for each in self._processes:
            each.end(max(0.0, ends - monotonic()))
        self._waker.close()

    def pids(self) -> List[int]:
        return [each.process.pid for each in self._processes if each.process is not None]

    def _supervise(self) -> None:
        while not self._ending.is_set():
            for each in self._processes:
                each.attend()
            pipes = [each.pipe for each in self._processes if each.process is not None]
            select.select([self._waker.fileno(), *pipes], [], [], LOOK)


class _Process:
    """The process of one child. It is `None` between two of them."""

    def __init__(self, child: Child) -> None:
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.pipe = -1  # ends with the process
        self._child = child
        self._began = self._due = 0.0
        self._pause = child.pause

    def start(self) -> None:
        self.pipe, theirs = os.pipe()
        try:
            os.set_blocking(self.pipe, False)
            # A session of its own: Ctrl-C at the server's terminal is for the server, which ends it.
            command, fds = [sys.executable, "-m", self._child.module, str(theirs)], (theirs, *self._child.descriptors)
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds, start_new_session=True)
        except OSError as e:
            os.close(self.pipe)
            self._retry(str(e))
            return
        finally:
            os.close(theirs)
        self._began = monotonic()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended already
            self.process.stdin.write(json.dumps(self._child.job).encode() + b"\n")
            self.process.stdin.flush()

    def attend(self) -> None:
        if self.process is None:
            if monotonic() >= self._due:
                self.start()
        elif self.process.poll() is not None:
            if monotonic() - self._began > RAN_WELL:
                self._pause = self._child.pause
            self._retry(self._reason(self.process.returncode))
            self._drop(self.process)

    def let_end(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def end(self, seconds: float) -> None:
        """Wait for the process's end, and kill it after `seconds`."""
        if self.process is None:
            return
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            logger.warning("%s killed: name=%s did not end", self._child.kind, self._child.name)
            self.process.kill()
            self.process.wait()
        self._drop(self.process)

    def _retry(self, reason: str) -> None:
        if self._child.on_end is not None:
            self._child.on_end(reason)
        logger.warning(
            "%s ended: name=%s reason=%s restarts_in=%gs", self._child.kind, self._child.name, reason, self._pause
        )
        self._due = monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _reason(self, status: int) -> str:
        try:
            reported = os.read(self.pipe, 4096).decode(errors="replace")
        except OSError:  # a child of the process keeps the pipe open
            reported = ""
        names = {each.value: each.name for each in signal.Signals}
        return reported or (f"exit status {status}" if status >= 0 else names.get(-status, f"signal {-status}"))

    def _drop(self, process: subprocess.Popen[bytes]) -> None:
        self.let_end()
        os.close(self.pipe)
        self.process, self.pipe = None, -1


class Watch:
    """Ends the process when its server did, or when the library of its camera or device does not return.

    `report`: writes the reason of the process's end.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.ended = threading.Event()
        self._report, self._parent = report, os.getppid()
        self._until, self._doing = monotonic() + OPEN_WITHIN, "open"
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def read(self) -> None:
        self._until, self._doing = monotonic() + HUNG, "read"

    def _look(self) -> None:
        # A child that a driver forked may keep the pipe open after the server's end: its parent is looked at too.
        while not select.select([0], [], [], LOOK)[0] and os.getppid() == self._parent:
            if monotonic() > self._until:
                self._report(f"{self._doing} does not return")
                os._exit(1)
        self.ended.set()
        threading.Event().wait(CLOSE_WITHIN)
        os._exit(0)


def run_child(
    work: Callable[[Dict[str, Any], Callable[[str], None]], None], reason: Callable[[Exception], str]
) -> None:
    """Run the process of a child. Its job is one line of JSON on its standard input, which ends with the server.

    Its argument is the descriptor of a pipe for the reason of its end.

    Args:
        work: called with the job and with what writes that reason.
        reason: of an error that `work` raises, which ends the process.
    """
    pipe = int(sys.argv[1])
    os.set_inheritable(pipe, False)

    def report(text: str) -> None:
        with contextlib.suppress(OSError):  # the server is gone
            os.write(pipe, text.encode()[:4000])

    with background_output():  # a pipe that takes nothing must not stop it
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        try:
            work(json.loads(sys.stdin.readline()), report)
        except Exception as e:
            report(reason(e))
            sys.exit(1)


def raise_priority(priority: int) -> str:
    """Let the calling thread, and no thread or process that it starts, run before all ordinary programs.

    So do the threads of libzmq that move messages: the newest command would wait for a busy computer there.
    Returns why the system does not permit that; empty where it does.
    """
    threads = [0]
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text().startswith("ZMQbg/"):  # as libzmq names them
                threads.append(int(task.name))
    try:
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    except (AttributeError, OSError) as e:  # not Linux, or not permitted
        return str(getattr(e, "strerror", None) or e)
    return ""
