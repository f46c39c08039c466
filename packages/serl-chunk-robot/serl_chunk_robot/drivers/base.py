"""What a driver is: the nine methods through which the loop reads and commands one robot, all its arms together.

A driver of a lab is one class in one file (`serve robot.toml --driver my_arm.py:MyArm`); `drivers/sample.py` is one to
copy. It runs in the loop's thread, so that no call may take longer than a part of a pass; what is slow, a camera above
all, belongs into a process of its own.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple, Protocol, Tuple

import numpy as np


class DriverSpec(NamedTuple):
    """A robot as its driver knows it, all arms together, in the order of the command.

    `state` is what an observation's state holds: "q", then names of `extra` with their lengths.

    With `targets="poses"` the numbers of each arm, measured and commanded, are those of its tip: x, y and z (m), three
    numbers of its orientation (rad), then grippers. All limits are of these numbers, as they are. The driver keeps the
    three continuous: it unwraps them, so that a motion makes no jump, and its `low` and `high` leave out where they are
    not unique. Of what a gate by joints ensures, it has to see to singular poses and to joints at their limits.
    """

    name: str
    low: Tuple[float, ...]  # what the mechanism can reach: rad, m, or a gripper's own unit
    high: Tuple[float, ...]
    velocity: Tuple[float, ...]  # the fastest it can move, per second
    grippers: Tuple[int, ...] = ()
    arms: Tuple[Tuple[int, int], ...] = ()  # slices (first, past-last) of the command that one arm owns
    state: Tuple[Tuple[str, int], ...] = ()
    rate: float = 200.0  # Hz, of the loop
    tick: float = 0.02  # s, of a control tick
    brakes: bool = False  # arms that stand without torque: only these may lose it by a stop
    acceleration: Tuple[float, ...] = ()  # of the profiles that every robot has; empty: `velocity` within 0.08 s
    jerk: Tuple[float, ...] = ()  # the same; empty: `acceleration` within 0.01 s
    fastest: Tuple[float, ...] = ()  # per second, that may be measured, as in a collision; empty: `velocity`
    home: Tuple[float, ...] = ()  # where a reset leads whose steps no file gives; empty: it moves nothing
    simulated: bool = False  # no one is in the cell: motions begin at once, without a beep
    targets: str = "joints"  # or "poses", as above
    effort: Tuple[float, ...] = ()  # limits for the server's motions; inf: none for a joint; empty: none is known
    # "module:function" that stops the robot without this process: called as function(options of the driver, reason) in
    # another one where the loop stands still and a stop is requested. Only where the robot takes it from two processes.
    stop_outside: str = ""


class Event(NamedTuple):
    """What a simulated task reports of a tick: its reward, and whether that ended it."""

    reward: float = 0.0
    success: bool = False
    failure: bool = False


class Reading(NamedTuple):
    """What a driver measured. Arrays are float64[J]; `stamp` is on the clock that the loop gave to `connect`, s."""

    q: np.ndarray
    dq: np.ndarray
    effort: np.ndarray
    stamp: float
    faults: Tuple[str, ...] = ()
    extra: Mapping[str, np.ndarray] = {}
    events: Tuple[Event, ...] = ()
    torque: bool = True  # False: the arms hold nothing


SUPPORTED = ": the arm is supported"  # after the name of a motor that the arm falls without, see `Driver.set`


class DriverError(Exception):
    """The robot does not do what it was asked for, in one sentence."""


def why(error: BaseException) -> str:
    """Return what an error says in one line, or its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def vendor(name: str, error: Callable[[str], Exception], remedy: str) -> Any:
    """Import a vendor's library. Raises `error` with the remedy."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as e:  # OSError: a part of it in C cannot be loaded
        raise error(f"{name} cannot be imported ({e}). {remedy}") from e


def linked(
    device: str, folder: str, pattern: str, kind: str, error: Callable[[str], Exception],
    same: Callable[[Path], object] = lambda link: link,
) -> Path:  # fmt: skip
    """Return the path of a device: `device`, or the link in a folder whose name has it. Raises `error`.

    Several links are one device where `same` returns the same of them.
    """
    links = sorted(Path(folder).glob(pattern))
    if "/" in device:
        found = [Path(device)] if Path(device).exists() else []
    else:
        found = [link for link in links if device and device in link.name]
    if (count := len({same(link) for link in found})) != 1:
        what = f"{count} {kind}s have this in their names" if found else f"no such {kind}. Is it plugged in?"
        raise error(f"{device!r}: {what} (in {folder}: {', '.join(link.name for link in links) or 'none'})")
    return found[0]


def equal_arms(count: int, size: int) -> Tuple[Tuple[int, ...], Tuple[Tuple[int, int], ...]]:
    """Return the fields `grippers` and `arms` of arms with `size` numbers each, the last one of a gripper."""
    firsts = range(0, size * count, size)
    return tuple(first + size - 1 for first in firsts), tuple((first, first + size) for first in firsts)


def sendable(target: np.ndarray, size: int) -> np.ndarray:
    """Return a set point as float64[size]. Raises DriverError for another shape, or a number that is not finite."""
    sent = np.array(target, np.float64)
    if sent.shape != (size,) or not np.isfinite(sent).all():
        raise DriverError(f"the set point is not {size} finite numbers. Nothing was sent")
    return sent


class Driver(Protocol):
    """One robot. Every method may raise, DriverError above all: the loop takes it for a fault and stops the robot.

    A simulated task has one method more, `reset_scene(seed: int) -> None`: it puts the objects where an episode with
    that seed begins, while the arms stand, and moves no arm. It is called at the end of each reset.
    """

    def spec(self) -> DriverSpec:
        """Describe the robot; opens nothing."""

    def connect(self, clock: Any) -> None:
        """Open the robot, and check modes, profiles, gains and current limits; change nothing that bears load."""

    def read(self) -> Reading:
        """Return the newest measurement; never waits for another one."""

    def command(self, target: np.ndarray, dt: float) -> None:
        """Send a set point, float64[J], that is to be reached after `dt` seconds; raises where it was not sent."""

    def hold(self) -> None:
        """Keep the arms where the last set point put them, with torque on."""
        return  # as for most: they do so by themselves

    def set(self, name: str, value: Any) -> None:
        """Set a named quantity: compliance, load, the scene's seed, and "torque" (False: all arms off).

        "reboot" is the name of one motor of a stopped robot. It switches no other motor, and until it is done the
        driver reports a fault. A motor that carries an arm is rebooted only if its name ends with SUPPORTED.

        Raises DriverError for an unknown name, and where the motor cannot be rebooted.
        """

    def clear_faults(self) -> None:
        """Clear what `faults` reported, and switch torque on with the arms where they are: nothing moves."""

    def stop(self, reason: str, level: int = 0) -> bool:
        """Report a stop; True once the robot answered it.

        Level 0: the loop brakes the set point, and the robot follows it to its end. Above: the robot did not answer for
        100 ms, and stops by its own means, harder with each level. It keeps torque unless `spec().brakes`.
        """

    def close(self) -> None:
        """Close the connection. Torque stays on."""
        return
