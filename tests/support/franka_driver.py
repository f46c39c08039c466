"""The driver of Franka arms against its server's stand-in, in a time that tests set."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import numpy as np
from franka_http import FrankaServer

from serl_chunk_robot.control.loop import Refused, RobotLoop, Status
from serl_chunk_robot.drivers.base import Reading
from serl_chunk_robot.drivers.franka_http import FrankaHttp
from serl_chunk_robot.robot_file.profiles import built_in
from serl_chunk_robot.safety.gate import Command, Gate
from serl_chunk_robot.safety.measured import Measured

DT = 0.02


class Clock:
    """A clock that tests set."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


def by(*numbers: float) -> np.ndarray:
    """An addition to the first of an arm's seven numbers."""
    return np.array(numbers + (0.0,) * (7 - len(numbers)))


def wait(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.001)


def newest(driver: FrankaHttp, server: FrankaServer) -> Reading:
    """What is read once two more states were asked for: what was commanded before has been sent then."""
    wanted = server.states + 3
    wait(lambda: server.states >= wanted)
    return driver.read()


class Loop:
    """The driver under the loop, in the clock's time."""

    def __init__(self, driver: FrankaHttp, server: FrankaServer, clock: Clock) -> None:
        self.driver, self.server, self.clock = driver, server, clock
        spec = driver.spec()
        limits = built_in(spec)["evaluating"]
        first = np.where(np.isin(np.arange(7), spec.grippers), 1.0, 0.3)
        measured = Measured(*(np.array(x) for x in (spec.low, spec.high, spec.velocity)))
        gate = Gate(limits._replace(first=first), DT)
        self.loop = RobotLoop(driver, gate, measured=measured, tick=spec.tick, clock=clock, needs_go=False)
        self.slowest, self.number = 0.0, 0

    def run(self, passes: int, fresh: bool = True) -> Status:
        """Passes with a newer state before each; without `fresh`, after a time in which one would have come."""
        for _ in range(passes):
            self.clock.now += DT
            if fresh:
                newest(self.driver, self.server)
            else:
                time.sleep(0.03)
            began = time.monotonic()
            status = self.loop.run_pass(self.clock.now)
            self.slowest = max(self.slowest, time.monotonic() - began)
        return status

    def armed(self) -> np.ndarray:
        """Arm the robot; returns its set point."""
        self.run(3)
        self.loop.request("clear", "operator", "K", self.clock.now)
        self.loop.request("arm", "controller", "A", self.clock.now)
        self.number = 0
        return self.run(1).set_point

    def cleared(self) -> Status:
        """Clear the robot, which may take some attempts; returns the status after it."""
        for _ in range(4):
            self.run(5)
            with contextlib.suppress(Refused):
                self.loop.request("clear", "operator", "K", self.clock.now)
                break
        return self.run(1)

    def tick(self, target: np.ndarray, fresh: bool = True) -> Status:
        """A control tick of 0.1 s."""
        self.number += 1
        command = Command(target, self.number, self.loop.machine.generation)
        assert self.loop.command(command, self.clock.now) == ""
        return self.run(5, fresh)
