"""Random interleavings of what clients request, what goes wrong, and passes of a robot server's loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from robot_limits import GRIPPERS, HIGH, HOME, LOW, J
from robot_model import RobotModel
from robot_world import Way, World

from serl_chunk_robot.control.loop import Refused
from serl_chunk_robot.safety.gate import Command
from serl_chunk_robot.safety.motion import Limits

OLD = 7  # commands of older generations that are sent again


def does(method: str, *args: Any) -> Callable[[Any], object]:
    return lambda self: getattr(self, method)(*args)


class Interleaving:
    """One robot's life. `step` does one thing at random; the model checks every pass.

    Raises AssertionError where the product does what the model forbids.
    """

    WEIGHTS: ClassVar[dict[str, float]] = {
        "command": 40, "bad_command": 8, "arm": 8, "release": 4, "motion": 12, "clear": 12, "stop": 3, "hold": 4,
        "go": 6, "lost": 1.5, "lapse": 2, "silence": 0.4, "minus_pi": 2, "repeats": 1.5, "nan": 0.7, "jump": 0.5,
        "torque": 0.7, "torque_off": 0.3, "read_error": 0.7, "command_error": 1, "fault": 0.7, "spin": 0.4, "clock": 1,
        "hang": 1, "deaf": 0.5,
        "wrong_role": 8, "drive": 3, "rejected": 0.4, "reboot": 2,
    }  # fmt: skip
    NAMES, CHANCES = list(WEIGHTS), np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())

    def __init__(self, seed: int, of: Limits | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.world = World(of)
        self.model = RobotModel(self.world)
        self.counts: Counter[str] = Counter()
        self.states: Counter[str] = Counter()
        self.number, self.old = 0, [0]
        self.way = np.zeros(J)  # what the controller's target moves in a tick
        self.target: np.ndarray | None = None
        self.pinned: np.ndarray | None = None  # where the robot stands between a hold or clear and a go

    def step(self) -> None:
        """One event and some passes. A robot that is stopped is mostly cleared, one that stands mostly armed."""
        rng, state = self.rng, self.model.state
        name = self.NAMES[rng.choice(len(self.NAMES), p=self.CHANCES)]
        if rng.random() < 0.5:
            name = {"STOPPED": "clear", "HELD": "go", "HOLD": "arm", "RUN": "command"}.get(state, name)
        self.counts[name] += 1
        self.states[state] += 1
        getattr(self, "on_" + name)()
        self.run(int(rng.choice([0, 0, 1, 2, 3])) if name != "command" else int(rng.choice([4, 4, 2, 1, 0])))

    def run(self, passes: int) -> None:
        for _ in range(passes):
            self.world.now += self.world.dt
            self.model.run_pass()
            self.check_consent()

    def check_consent(self) -> None:
        """That no set point changes between a hold or clear and a go, once the braking has ended."""
        if self.pinned is not None and self.model.state in ("STOPPED", "HELD", "HOLD") and len(self.world.arms.sent):
            last = self.world.arms.sent[-1]
            self.pinned = last if not len(self.pinned) else self.pinned
            assert np.array_equal(last, self.pinned), "the robot moved without an operator's go"

    def consent(self, event: str, done: bool) -> None:
        """Note what an operator has done, apart from the model."""
        if done and event in ("hold", "clear"):
            self.pinned = np.zeros(0)  # the next set point of a robot that stands
        elif done and event in ("go", "park", "jog", "torque_off", "reboot"):  # these are an operator's own
            self.pinned = None

    def ask(self, event: str, role: str, motion: Way | None = None) -> None:
        """Request an event of the product and of the model."""
        wanted = self.model.request(event, role, motion)
        self.consent(event, wanted)
        try:
            self.world.loop.request(event, role, "K", self.world.now, motion=motion)
            done = True
        except Refused:
            done = False
        assert done == wanted, f"{event} of a {role} in {self.model.state}"

    def send(self, target: np.ndarray, number: int, generation: int, age: float = 0.0) -> str:
        """Send a command to the product and to the model."""
        wanted = self.model.command(target, number, generation, age)
        given = target.copy()
        reason = self.world.loop.command(Command(given, number, generation, age), self.world.now)
        given += 1.0  # the loop owns a copy
        assert reason == wanted, f"{reason or 'taken'}, not {wanted or 'taken'}"
        return reason

    def place(self) -> np.ndarray:
        return HOME if self.model.path is None else self.model.path[-1]

    def next_target(self) -> np.ndarray:
        """Smooth motion mostly; jumps and places beyond the limits now and then."""
        rng = self.rng
        kind = rng.random()
        if self.target is None or self.model.target is None:
            self.target, self.way = self.place().copy(), np.zeros(J)
            return self.target + rng.uniform(-0.02, 0.02, J)
        if kind < 0.03:
            self.target = rng.uniform(LOW - 1, HIGH + 1)
        elif kind < 0.3:
            self.way = rng.uniform(-0.07, 0.07, J)
            self.way[list(GRIPPERS)] *= 2
        self.target = self.target + self.way
        return self.target.copy()

    def inject(self, fault: str, *values: Any) -> None:
        setattr(self.world.arms, fault, values[self.rng.integers(len(values))])

    # What happens. Each of these may come at any moment.

    on_release, on_torque_off = does("ask", "release", "controller"), does("ask", "torque_off", "operator")
    on_hold, on_go = does("ask", "hold", "operator"), does("ask", "go", "operator")
    on_lapse, on_silence = does("run", 20), does("run", 210)
    on_minus_pi, on_nan = does("inject", "minus_pi", 1, 1, 2, 8), does("inject", "nan", 1, 2)
    on_jump, on_command_error = does("inject", "jumps", 1, 3), does("inject", "command_errors", 1, 2, 40)
    on_spin, on_fault = does("inject", "spin", -5.0), does("inject", "fault", "left elbow: overload")

    def on_stop(self) -> None:
        self.ask("stop", str(self.rng.choice(["any", "controller", "operator"])))

    def on_lost(self) -> None:
        self.ask(str(self.rng.choice(["lost", "moved"])), "server")

    def on_command(self) -> None:
        self.number += 1
        self.send(self.next_target(), self.number, self.model.generation)

    def on_bad_command(self) -> None:
        rng, place = self.rng, self.place().copy()
        self.number += 1
        generation = self.model.generation
        kind = rng.integers(6)
        if kind == 0:
            place[rng.integers(J)] = rng.choice([np.nan, np.inf, -np.inf])
            self.send(place, self.number, generation)
        elif kind == 1:
            self.send(place + 0.3, self.number, int(generation - rng.integers(1, OLD)))
        elif kind == 2:
            self.send(place + 0.3, self.number - 2, generation)
        elif kind == 3:
            self.send(place, self.number, generation, age=float(rng.choice([-1.0, 0.081, 60.0])))
        elif kind == 4:
            self.send(place[:-1], self.number, generation)
        else:  # far, which a first command must not be
            self.send(place + rng.choice([-0.15, 0.15]), self.number, generation)

    def on_rejected(self) -> None:
        for _ in range(12):
            self.number += 1
            self.send(self.place() * np.nan, self.number, self.model.generation)
            self.run(1)

    def on_drive(self) -> None:
        for _ in range(6):
            self.on_command()
            self.run(4)

    def on_arm(self) -> None:
        self.ask("arm", "controller")
        self.target = None

    def on_motion(self) -> None:
        rng = self.rng
        to = self.place() + rng.uniform(-1, 1, J) * rng.choice([0.0, 0.1, 2.0])
        way = Way(to, int(rng.choice([0, 20, 100, 400])))
        self.ask(*(("reset", "controller"), ("jog", "operator"), ("park", "operator"))[rng.integers(3)], way)
        self.run(int(rng.choice([0, 30, 100])))

    def on_clear(self) -> None:
        self.world.arms.answers = True
        self.world.arms.spin = 0.0
        self.ask("clear", "operator")
        for _ in range(3):
            if self.model.state == "STOPPED":
                self.run(2)
                self.ask("clear", "operator")

    def on_wrong_role(self) -> None:
        others = ["jog", "park", "hold", "go", "torque_off", "release"]
        event = "clear" if self.model.state == "STOPPED" else str(self.rng.choice(others))
        role = "any" if event == "release" else str(self.rng.choice(["any", "controller"]))
        self.ask(event, role, Way(HOME, 9))

    def on_reboot(self) -> None:
        """A motor is rebooted, mostly in STOPPED; often a clear comes before the next pass."""
        if self.rng.random() < 0.7:
            self.on_stop()
            self.run(60)
        role = str(self.rng.choice(["operator", "operator", "controller", "any"]))
        self.reboot(role, str(self.rng.choice(["left/gripper", "right/gripper"])))
        if self.rng.random() < 0.5:
            self.ask("clear", "operator")

    def reboot(self, role: str, motor: str) -> None:
        """Request a reboot of the product and of the model."""
        wanted, before = self.model.reboot(role, motor), len(self.world.arms.rebooted)
        try:
            self.world.loop.reboot(motor, role, "K", self.world.now)
            done = True
        except Refused:
            done = False
        self.check_reboot(done, wanted, before)

    def check_reboot(self, done: bool, wanted: bool, before: int) -> None:
        self.consent("reboot", done)
        assert done == wanted, f"reboot in {self.model.state}"
        assert len(self.world.arms.rebooted) == before + wanted

    def on_repeats(self) -> None:
        arms, n = self.world.arms, int(self.rng.choice([1, 8, 30]))
        if self.rng.random() < 0.5:
            arms.repeats = n
        else:
            arms.frozen = n
        if self.model.state == "RUN":
            self.on_drive()

    def on_torque(self) -> None:
        self.world.arms.lose_torque(int(self.rng.integers(2)))
        self.run(int(self.rng.choice([1, 40])))

    def on_read_error(self) -> None:
        arms = self.world.arms
        arms.error = (OSError("the bus is gone"), KeyError("q"), ZeroDivisionError())[self.rng.integers(3)]
        arms.read_errors = int(self.rng.choice([1, 3]))

    def on_clock(self) -> None:
        self.world.now += float(self.rng.choice([-3.0, 0.3, 5.0, 0.06, 0.0]))
        self.world.slept += float(self.rng.choice([0.0, 0.0, 0.02, 60.0]))

    def on_hang(self) -> None:
        """A call of the driver lasts, mostly of one that moves."""
        if self.model.state == "RUN":
            self.on_drive()
        arms, call = self.world.arms, str(self.rng.choice(["read", "command", "stop"]))
        method = getattr(arms, call)
        self.world.hang(call, float(self.rng.choice([0.06, 0.11, 5.0])))
        self.run(1)
        setattr(arms, call, method)

    def on_deaf(self) -> None:
        self.world.arms.answers = False
        if self.rng.random() < 0.7:
            self.on_stop()
            self.run(60)


def interleave(seed: int, steps: int) -> Interleaving:
    """Run `steps` steps. Raises AssertionError, with the step's number, where a check fails."""
    life = Interleaving(seed)
    for k in range(steps):
        try:
            life.step()
        except AssertionError as e:
            raise AssertionError(f"seed {seed}, step {k}, {life.model.state}: {e}") from e
    return life
