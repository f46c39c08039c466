"""Opens the robot of a file: one process at a time, compared with the file, and held with torque on at the end."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from pathlib import Path
from time import monotonic
from typing import ContextManager, Iterator, Union

import numpy as np

from serl_chunk_robot.control.border import text_of
from serl_chunk_robot.drivers.base import Driver
from serl_chunk_robot.errors import ConfigError, SerlChunkError
from serl_chunk_robot.robot_file.config import RobotFile, checked, load, load_driver

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class DriverFailed(SerlChunkError):
    """The driver could not open the robot, in one sentence."""


def open_robot(path: Union[str, Path]) -> ContextManager[Driver]:
    """Open the robot of a file for a block of a script, as `serve` does: its driver, connected.

    Read it, or try your own driver. What the block commands goes to the arms as it is: limits, gate and operator are
    those of a server alone. At the end the arms hold their last set point, with torque on.

    Raises:
        ConfigError: the file is wrong or the robot is not as it says, or another process has the robot.
        DriverFailed: the robot cannot be opened.
    """
    return opened(load(path))


@contextlib.contextmanager
def opened(file: RobotFile) -> Iterator[Driver]:
    """Open the robot of a file that was read; see `open_robot`."""
    with claimed(file.name, state_folder()):
        robot = load_driver(file)
        spec = robot.spec()
        checked(file, spec)
        try:
            robot.connect(monotonic)
            q = robot.read().q
        except Exception as e:  # of a lab's code
            with contextlib.suppress(Exception):
                robot.close()
            raise DriverFailed(f"{file.driver}: the robot cannot be opened: {type(e).__name__} {e}") from e
        try:
            checked(file, spec, np.asarray(q, np.float64))
            yield robot
        finally:
            _leave(robot)


def state_folder() -> Path:
    """Return `$XDG_STATE_HOME/serl-chunk-robot`, or `~/.local/state/serl-chunk-robot`."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.local/state").expanduser()) / "serl-chunk-robot"


@contextlib.contextmanager
def claimed(name: str, folder: Path) -> Iterator[None]:
    """Let one process of this user serve the robot `name`. Raises ConfigError with the other one's process."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: use 1..64 letters, digits, '-', '_' or '.' for a robot's name", parameter="name")
    path = folder / f"{name}.lock"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(str(path), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as e:
        raise ConfigError(f"{path} cannot be used: {e.strerror}") from e
    open_here = [lock]

    def close() -> None:
        if open_here:
            os.close(open_here.pop())

    # A driver's process that outlives this one must not hold the lock: the robot could not be served again.
    os.register_at_fork(after_in_child=close)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(f"{name} is served already, by process {other}. End that one first.") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        close()  # the file stays: another process may have opened it by now


def _leave(robot: Driver) -> None:
    """Hold and disconnect. Torque stays on, whatever the driver answers."""
    for call in (robot.hold, robot.close):
        try:
            call()
        except BaseException as e:
            logger.error("%s failed: %s %s", call.__name__, type(e).__name__, text_of(e))
    logger.warning("the robot is left. Torque stays on: the arms hold their last set point.")
