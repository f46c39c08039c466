"""The front's process: `python -m serl_chunk_robot.server.front_process`, which `serve` starts. See `processes`."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import socket
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Callable, Dict, NamedTuple, Optional

from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.server.admission import Address
from serl_chunk_robot.server.front import PATIENCE, Front
from serl_chunk_robot.server.priority import PRIORITY, raise_priority
from serl_chunk_robot.server.processes import Child, run_child
from serl_chunk_robot.wire.link import Link

PASSES = 3.0  # of a slow loop that it may miss
DESCRIPTORS = 4096  # two of each connection
PAUSE = 0.1  # s before the next front is started: no request is received meanwhile
BIND_AGAIN, BIND_WITHIN = 0.1, 2.0  # s: the front before it may not have ended in full


class Job(NamedTuple):
    """What the process gets, as plain values."""

    host: str
    port: int
    keys: Optional[str]
    link: int  # descriptor
    dt: float  # s between two passes of the loop
    stop_outside: str  # "module:function", as in `DriverSpec`
    options: Dict[str, Any]  # of the driver, for it


def child(
    address: Address, link: socket.socket, dt: float, stop_outside: str, options: Dict[str, Any],
    on_end: Callable[[str], None],
) -> Child:  # fmt: skip
    """Return the front of a robot. `link`: the front's end; `on_end`: gets the reason of each end of the process."""
    keys = None if address.keys is None else str(address.keys)
    job = Job(address.host, address.port, keys, link.fileno(), dt, stop_outside, options if stop_outside else {})
    return Child("front", "front", __name__, job._asdict(), (link.fileno(),), on_end, PAUSE)


def made(job: Job) -> Front:
    """Make the front of a job. Raises ConfigError."""
    link = Link(socket.socket(fileno=job.link))
    address = Address(job.host, job.port, None if job.keys is None else Path(job.keys))
    patience, server, ends = max(PATIENCE, PASSES * job.dt), os.getppid(), monotonic() + BIND_WITHIN
    while True:
        try:
            end_loop = partial(_kill, server)
            return Front(link, address, patience=patience, stop_outside=_stop_of(job), end_loop=end_loop)
        except ConfigError:
            if monotonic() > ends:
                raise
            select.select([0], [], [], BIND_AGAIN)


def _stop_of(job: Job) -> Optional[Callable[[str], None]]:
    if not job.stop_outside:
        return None
    module, _, name = job.stop_outside.partition(":")
    try:
        return partial(getattr(importlib.import_module(module), name), job.options)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"stop_outside {job.stop_outside!r} of the driver cannot be loaded: {e}") from e


def _kill(process: int) -> None:
    if os.getppid() == process:  # else its number may be another one's by now
        os.kill(process, signal.SIGKILL)


def _allow_descriptors() -> None:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(DESCRIPTORS, most)
    if resource.RLIM_INFINITY != now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def main() -> None:
    """Run the process."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # it ends with the server, which a signal to both would end
    server = os.getppid()
    _allow_descriptors()

    def work(job: Dict[str, Any], report: Callable[[str], None]) -> None:
        with contextlib.closing(made(Job(**job))) as front:
            raise_priority(PRIORITY - 1)  # after the loop: on a machine of one core it must not keep it waiting
            while os.getppid() == server and not front.ended and not select.select([0], [], [], 0)[0]:
                front.step()

    run_child(work, str)


if __name__ == "__main__":
    main()
