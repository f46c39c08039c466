"""`serl-chunk-robot serve`: one process that serves the robot of a file until a signal ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator

import numpy as np

from serl_chunk_robot.control.motions import Oscillation, Reset, Step, jog, park
from serl_chunk_robot.control.own_motion import Motion
from serl_chunk_robot.drivers.base import Driver
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.output import background_output
from serl_chunk_robot.robot_file.config import HAIR, RobotFile, load
from serl_chunk_robot.robot_file.opening import opened, state_folder
from serl_chunk_robot.robot_file.profiles import CAUTIOUS
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.safety.measured import Measured
from serl_chunk_robot.safety.motion import Limits
from serl_chunk_robot.server import front, streams
from serl_chunk_robot.server.admission import Address
from serl_chunk_robot.server.door import Door
from serl_chunk_robot.server.history import History
from serl_chunk_robot.server.leader_permissions import Drives
from serl_chunk_robot.server.processes import PRIORITY, Processes, raise_priority
from serl_chunk_robot.server.server import RobotServer
from serl_chunk_robot.wire.link import Link, make_pair

logger = logging.getLogger(__name__)

READY_WITHIN = 20.0  # s in which the front has to receive requests; a busy computer loads Python in seconds
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(path: Path, driver: str = "") -> None:
    """Serve the robot of a file until SIGINT, SIGTERM or SIGHUP: then brake and keep torque on.

    A second signal ends the process at once; the arms keep the last set point.

    Raises:
        ConfigError: the file, the driver's name, the address or the keys are wrong, or the robot is served already.
        DriverFailed: the robot cannot be opened.
    """
    file = load(path, driver=driver)
    with _logs_of_a_thread(), opened(file) as robot:
        spec = robot.spec()
        gate = Gate(file.profiles[file.start].limits, 1.0 / (file.rate or spec.rate), file.arms)
        low, high, fastest = (np.array(x, np.float64) for x in (spec.low, spec.high, spec.fastest or spec.velocity))
        measured = Measured(low - HAIR, high + HAIR, fastest)
        history = History(state_folder() / f"{file.name}.history.jsonl")
        drives = Drives([d.name for d in file.devices], file.profiles[CAUTIOUS].limits)
        own, theirs = make_pair()
        address, door = Address(file.host, file.port, file.keys), Door(Link(own))
        address.check()
        server = RobotServer(
            robot, gate, measured=measured, profiles=file.profiles, profile=file.start, motions=Motions(file, robot),
            door=door, cameras=[(c.name, c.spec.height, c.spec.width, c.port) for c in file.cameras],
            devices=[(d.name, d.port, d.arm) for d in file.devices], drives=drives, park=file.park, history=history,
            needs_go=file.needs_go, views={c.name: [*c.part, c.view.rotate, c.view.flip] for c in file.cameras},
        )  # fmt: skip
        where = file.host, file.keys, server.run_id
        children = [
            front.child(address, theirs, gate.dt, spec.stop_outside, file.options, door.front_ended),
            *streams.camera_children(file.cameras, *where),
            *streams.device_children(file.devices, *where, drives.descriptors()),
        ]
        with contextlib.ExitStack() as stack:
            for each in (theirs, drives, history):
                stack.enter_context(contextlib.closing(each))
            stack.enter_context(_ended_by_signals(server, own.fileno()))
            stack.enter_context(Processes(children))
            why = door.wait_for_front(READY_WITHIN)
            if why:
                raise ConfigError(why)
            logger.info("serving: robot=%s address=%s:%d profile=%s", file.name, file.host, file.port, file.start)
            prioritise()
            server.run()


class Motions:
    """Makes the motions of a robot's file."""

    def __init__(self, file: RobotFile, driver: Driver) -> None:
        self._file, self._driver, self._spec = file, driver, driver.spec()
        self._rng, self._episode = np.random.default_rng(), 0

    def __call__(self, event: str, arguments: Dict[str, Any], start: np.ndarray, limits: Limits) -> Motion:
        """Make a motion from the set point `start`, float64[J]. Raises ConfigError, TypeError or KeyError."""
        effort = np.full(len(start), np.inf) if self._file.effort is None else self._file.effort
        more: Dict[str, Any] = {"effort": effort, "grippers": self._spec.grippers}
        more.update({"stands": 0.0} if self._spec.simulated else {"beep": _beep})
        if event == "jog":
            joint, angle, swing = arguments.pop("joint"), arguments.pop("angle"), arguments.pop("swing", False)
            if type(joint) is not int or type(angle) not in (int, float):
                raise TypeError("joint is an integer, and angle a number (rad)")
            made: Motion = (Oscillation if swing else jog)(start, joint, float(angle), limits, **more)
        elif event == "park":
            if self._file.park is None:
                raise ConfigError(f"{self._file.path} has no pose to park in", parameter="park")
            made = park(start, self._file.park, limits, **more)
        else:
            episode = arguments.pop("episode", self._episode)
            if type(episode) is not int or episode < 0:
                raise TypeError("episode is an integer that is not negative")
            more["new_object"] = arguments.pop("new_object", False) is True
            made = self._reset(start, limits, episode, arguments.pop("seed", None), more)
            self._episode = episode + 1
        if arguments:
            raise ConfigError("no argument of {}: {}".format(event, ", ".join(sorted(arguments))))
        return made

    def _reset(self, start: np.ndarray, limits: Limits, episode: int, seed: Any, more: Dict[str, Any]) -> Motion:
        """Make a reset. `seed`: of what it draws, and of a simulated task's scene; None: another one each time."""
        if seed is None:
            seed = int(self._rng.integers(2**31))
        if type(seed) is not int or seed < 0:
            raise TypeError("seed is an integer that is not negative")
        steps = self._file.reset or ((Step.to(self._spec.home),) if self._spec.home else ())
        scene = getattr(self._driver, "reset_scene", None)
        return Reset(
            start, steps, limits, episode=episode, rng=np.random.default_rng(seed), set=self._driver.set,
            scene=None if scene is None else partial(scene, seed), arms=self._file.arms, **more,
        )  # fmt: skip


def prioritise() -> bool:
    """Raise the calling thread's priority; returns False, with a log line, where the system does not permit that.

    A busy computer then delays the control loop, which stops the robot after 100 ms.
    """
    refused = raise_priority(PRIORITY)
    if refused:
        line = f"{os.environ.get('USER', 'USER')} - rtprio {PRIORITY}"
        logger.warning(
            f"the control loop has no real-time priority ({refused}): other programs may delay it until the robot is "
            f"stopped. Add the line '{line}' to /etc/security/limits.d/robot.conf and log in anew."
        )
    return not refused


def _beep() -> None:
    logger.warning("motion: the robot moves now or in a second\a")


@contextlib.contextmanager
def _ended_by_signals(server: RobotServer, link: int) -> Iterator[None]:
    """Let signals end the server. The front learns of them by `link`, also where the loop's thread does not return."""

    def end(number: int, frame: object) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_DFL)  # the second one ends the process, whatever it waits for
        server.end(signal.Signals(number).name)

    heeded = [each for each in SIGNALS if signal.getsignal(each) != signal.SIG_IGN]  # not those of nohup
    before = {each: signal.signal(each, end) for each in heeded}
    own = os.dup(link)  # the server closes its own
    woken = signal.set_wakeup_fd(own, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        os.close(own)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _logs_of_a_thread() -> Iterator[None]:
    """Write log lines, and what a driver prints, by another thread: a stuck terminal must not stop the control loop."""
    package = logging.getLogger(__name__.partition(".")[0])
    before = package.level, package.propagate
    with background_output():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        package.propagate = False
        try:
            yield
        finally:
            package.removeHandler(handler)
            package.level, package.propagate = before
