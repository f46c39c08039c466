"""A robot server's loop with an injected clock, around simulated arms whose faults tests inject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from robot_limits import GRIPPERS, HIGH, HOME, LOW, J, limits

from serl_chunk_robot.control.loop import RobotLoop, Status
from serl_chunk_robot.control.pursuit import Pursuit
from serl_chunk_robot.drivers.base import DriverError, DriverSpec, Reading
from serl_chunk_robot.drivers.fake import FakeArms
from serl_chunk_robot.safety.gate import Command, Gate, Passed
from serl_chunk_robot.safety.measured import Measured
from serl_chunk_robot.safety.motion import Limits, SetPoint
from serl_chunk_robot.safety.table import Transition

DT, TICK = 0.005, 0.02
JOINTS = ~np.isin(np.arange(J), GRIPPERS)
MECHANISM = LOW - 0.3, HIGH + 0.3
REST = HOME + np.tile([0, 0.4, -0.3, 0, 0.2, 0, 0], 2)  # of arms without torque
SPEC = DriverSpec(
    "fake arms", tuple(MECHANISM[0]), tuple(MECHANISM[1]), tuple(limits().rates.velocity), GRIPPERS, ((0, 7), (7, 14))
)


class FaultyArms(FakeArms):
    """Arms with faults: counts are of the next reads or commands that have them."""

    def __init__(self, lag: float = 0.02) -> None:
        super().__init__(SPEC, HOME, lag=lag, rest=REST)
        self.minus_pi = self.nan = self.jumps = self.repeats = self.frozen = 0
        self.read_errors = self.command_errors = 0
        self.spin = 0.0  # measured velocity that is no motion
        self.error: Exception = OSError("the bus is gone")
        self.fault = ""
        self.answers = True
        self.sent: list[np.ndarray] = []
        self.attempts = 0
        self.stops: list[tuple[float, str, int]] = []
        self.clears = 0
        self.rebooted: list[str] = []
        self.last: Reading | None = None  # what the loop got last; None: an exception
        self._kept: Reading | None = None

    def read(self) -> Reading:
        now, self.last = super().read(), None
        if self.read_errors:
            self.read_errors -= 1
            raise self.error
        if self.fault:
            now = now._replace(faults=(self.fault,))
        if self.spin:
            now = now._replace(dq=np.where(np.arange(J) == 9, self.spin, now.dq))
        if self.minus_pi:
            self.minus_pi -= 1
            now = now._replace(q=np.full(J, -np.pi), dq=np.zeros(J))
        elif self.nan:
            self.nan -= 1
            now = now._replace(q=np.where(np.arange(J) == 3, np.nan, now.q))
        elif self.jumps:
            self.jumps -= 1
            now = now._replace(q=now.q + 0.2 * (np.arange(J) == 2))
        elif self._kept and (self.repeats or self.frozen):
            stamp = self._kept.stamp if self.repeats else now.stamp
            now = self._kept._replace(stamp=stamp, torque=now.torque, faults=now.faults)
            self.repeats, self.frozen = max(self.repeats - 1, 0), max(self.frozen - 1, 0)
        self.last = self._kept = now
        return now

    def command(self, target: np.ndarray, dt: float) -> None:
        self.attempts += 1
        if self.command_errors:
            self.command_errors -= 1
            raise self.error
        super().command(target, dt)
        self.sent.append(np.array(target))

    def stop(self, reason: str, level: int = 0) -> bool:
        self.stops.append((self._clock(), reason, level))
        return self.answers and super().stop(reason, level)

    def set(self, name: str, value: Any) -> None:
        if name == "reboot" and value == "right/gripper":
            raise DriverError("reboot: it answers no one")
        if name != "reboot":
            return super().set(name, value)
        self.rebooted.append(value)
        self.target[2] -= 0.01  # where the motor found itself
        return None

    def clear_faults(self) -> None:
        self.clears += 1
        self.fault = ""
        super().clear_faults()

    def lose_torque(self, arm: int) -> None:
        self.advance()
        self._on[slice(*SPEC.arms[arm])] = False


class SeenGate(Gate):
    """A gate that keeps what its last step was given and returned."""

    seen: tuple[SetPoint, np.ndarray | None, np.ndarray, Passed] | None = None

    def step(self, at: SetPoint, goal: np.ndarray | None, measured: np.ndarray) -> Passed:
        passed = super().step(at, goal, measured)
        self.seen = at, goal, measured, passed
        return passed


class SeenPursuit(Pursuit):
    """A pursuit that keeps the last goal that it was given."""

    seen: np.ndarray | None = None

    def place(self, at: SetPoint, goal: np.ndarray) -> tuple[np.ndarray, bool]:
        self.seen = goal.copy()
        return super().place(at, goal)


class World:
    """One robot, its loop and the time. All of it stands until `run`."""

    def __init__(
        self, of: Limits | None = None, *, dt: float = DT, tick: float = TICK, lag: float = 0.02,
        arms: FaultyArms | None = None,
    ) -> None:  # fmt: skip
        self.now, self.dt, self.tick = 100.0, dt, tick
        self.slept = 0.0  # s for which the machine was suspended
        self.hung = ""  # the method of the driver that lasted
        self.limits = limits() if of is None else of
        self.arms = arms or FaultyArms(lag)
        self.arms.connect(lambda: self.now)
        self.gate = SeenGate(self.limits, dt)
        self.heard: list[Transition] = []
        self.measured = Measured(*MECHANISM, np.array(SPEC.velocity))
        self.loop = RobotLoop(
            self.arms, self.gate, measured=self.measured, tick=tick, on_transition=self.heard.append,
            clock=lambda: self.now + self.slept,
        )  # fmt: skip
        self.loop._pursuit = self.pursuit = SeenPursuit(self.limits, dt)
        self.number = 0

    @property
    def state(self) -> str:
        return self.loop.machine.state

    def run(self, passes: int = 1) -> Status:
        for _ in range(passes):
            self.now += self.dt
            status = self.loop.run_pass(self.now)
        return status

    def until(self, state: str, passes: int = 1000) -> int:
        """Run passes until the robot is in `state`; returns how many."""
        for k in range(passes):
            if self.state == state:
                return k
            self.run()
        raise AssertionError(f"{self.state} for {passes} passes, not {state}")

    def ask(self, event: str, role: str, **more: Any) -> Transition:
        return self.loop.request(event, role, "K", self.now, **more)

    def hang(self, call: str, seconds: float) -> None:
        """Let the driver's next call of a method last."""
        method = getattr(self.arms, call)

        def slow(*args: object, **more: object) -> object:
            setattr(self.arms, call, method)
            self.now, self.hung = self.now + seconds, call
            return method(*args, **more)

        setattr(self.arms, call, slow)

    def ready(self) -> World:
        self.run(2)
        self.ask("clear", "operator")
        self.ask("go", "operator")
        return self

    def armed(self) -> World:
        self.ready().ask("arm", "controller")
        return self

    def send(self, target: np.ndarray, **more: Any) -> str:
        """Command a target for the end of a tick."""
        self.number += 1
        words = {"number": self.number, "generation": self.loop.machine.generation, **more}
        return self.loop.command(Command(np.asarray(target), **words), self.now)

    def drive(self, ticks: int, speed: float = 0.8, accelerates: float = 8.0) -> None:
        """Stream commands that move all joints but grippers, up to `speed`."""
        way, rate = self.arms.sent[-1].copy() if self.arms.sent else HOME.copy(), 0.0
        signs = np.tile([1, 1, -1, 1, 1, 1, 0], 2)
        for _ in range(ticks):
            rate = min(rate + accelerates * self.tick, speed)
            way = way + signs * rate * self.tick
            assert self.send(way) == ""
            self.run(round(self.tick / self.dt))


class Way:
    """A motion to a place, given up after some passes; it never ends where it is to last."""

    def __init__(self, to: np.ndarray, passes: int = 10**6, *, lasts: bool = False) -> None:
        self.to, self.left, self.lasts, self.done = to, passes, lasts, False
        self.last: np.ndarray | None = None
        self.draws = {"step 0": to}

    def goal(self, at: SetPoint, reading: object, now: float) -> np.ndarray | None:
        self.left -= 1
        there = not self.lasts and bool(np.abs(at.position - self.to).max() <= 1e-6)
        self.done = self.done or self.left < 0 or there
        self.last = None if self.done else self.to
        return self.last


def moving(
    state: str = "RUN",
    arms: FaultyArms | None = None,
    motion: Callable[[World], Any] = lambda world: Way(HOME + 0.4 * JOINTS),
) -> World:
    """A robot whose joints move at 0.4 rad/s and more: a controller commands it, a motion moves it, or it brakes."""
    world = World(arms=arms)
    if state == "MOVE":
        world.ready().ask("reset", "controller", motion=motion(world))
        world.run(30)
    else:
        world.armed().drive(12)
    if state == "BRAKE":
        world.ask("stop", "any")
        world.run(2)
    assert world.state == state
    assert np.abs(speed(world)[JOINTS]).min() > 0.4
    return world


def speed(world: World) -> np.ndarray:
    return (world.arms.sent[-1] - world.arms.sent[-2]) / world.dt
