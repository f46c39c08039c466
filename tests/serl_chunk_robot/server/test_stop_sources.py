"""Every row of the table that stops the robot or lets it brake, from random moments in motion, on an injected clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from robot_limits import GRIPPERS, HIGH, HOME, LOW, J, limits
from robot_model import RobotModel
from robot_world import DT, Way, World

from serl_chunk_robot.control.loop import Resistance
from serl_chunk_robot.safety.motion import Limits, stopping_distance
from serl_chunk_robot.safety.table import BRAKE, HELD, HOLD, MOVE, RUN, STOPPED, TABLE, Row

SEEDS = range(3)  # one for each profile
PROFILES = ((3.2, 40.0, 4000.0), (0.5, 4.0, 60.0), (2.0, 15.0, 300.0))  # velocity, acceleration, jerk
LONG = 8.0  # s, longer than any braking
Act = Callable[["Life"], object]


class Life:
    """A robot in motion, or that stands, in a state of the table; every pass of it is kept.

    Args:
        state: of the table.
        tick: seconds of a control tick.
    """

    def __init__(self, state: str, seed: int, *, of: Limits | None = None, tick: float = 0.02) -> None:
        self.rng = np.random.default_rng(seed)
        velocity, acceleration, jerk = PROFILES[seed % len(PROFILES)]
        self.world = World(limits(velocity, acceleration, jerk) if of is None else of, tick=tick)
        rates = self.world.limits.rates
        self.speed = self.rng.uniform(0.3, 0.8) * rates.velocity[0] * self.rng.choice([-1, 1], J)
        self.speed[list(GRIPPERS)] = 0.0
        self.way, self.rate, self.acceleration = HOME.copy(), 0.0, 0.6 * rates.acceleration[0]
        self.commanded = 0  # set points that were sent when the last command was taken
        self.motion: Motion | None = None
        self.world.run(2)
        if state != STOPPED:
            self.world.ask("clear", "operator")
        if state not in (STOPPED, HELD):
            self.world.ask("go", "operator")
        if state in (RUN, BRAKE):
            self.arm()
            self.drive(round(self.rng.uniform(0.15, 0.3) / tick) + 3)
        elif state == MOVE:
            self.motion = Motion(HOME + np.sign(self.speed) * 0.8)
            self.world.ask("reset", "controller", motion=self.motion)
        if state in (RUN, MOVE, BRAKE):
            self.world.run(int(self.rng.integers(1, 4)) if state != MOVE else int(self.rng.integers(20, 60)))
            assert self.moves, "in motion"
        else:
            self.world.run(3)
        if state == BRAKE:
            self.world.ask("release", "controller")
            self.world.run(1)
        assert self.world.state == state

    @property
    def moves(self) -> bool:
        sent = self.world.arms.sent
        return bool(np.abs(sent[-1] - sent[-2]).max() > 1e-3 * DT)

    def arm(self) -> None:
        self.world.ask("arm", "controller")

    def command(self) -> None:
        """Send the target of one tick."""
        self.rate = min(self.rate + self.acceleration * self.world.tick / np.abs(self.speed).max(), 1.0)
        self.way = self.way + self.speed * self.rate * self.world.tick
        assert self.world.send(self.way) == ""
        self.commanded = len(self.world.arms.sent)

    def drive(self, ticks: int) -> None:
        """Command so many ticks; the last one's passes are not run."""
        for k in range(ticks):
            self.command()
            if k < ticks - 1:
                self.world.run(round(self.world.tick / DT))

    def go_on(self, passes: int, state: str) -> None:
        """Run up to so many passes, with a command for each tick, until the robot leaves `state`."""
        for k in range(passes):
            if self.world.state != state:
                return
            if state == RUN and k % round(self.world.tick / DT) == 0:
                self.command()
            self.world.run()


class Motion(Way):
    """A motion to a place, which fails where it is given an error."""

    error: Exception | None = None

    def goal(self, at: object, reading: object, now: float) -> np.ndarray | None:
        if self.error is not None:
            raise self.error
        return super().goal(at, reading, now)  # type: ignore[arg-type]


def asked(event: str, role: str) -> Act:
    return lambda life: life.world.ask(event, role)


def injected(name: str, value: object) -> Act:
    return lambda life: setattr(life.world.arms, name, value)


def after(seconds: float) -> Act:
    def jump(life: Life) -> None:
        life.world.now += seconds

    return jump


def frozen(name: str) -> Act:
    """The driver repeats its newest sample; commands and motions go on until that is noticed."""

    def act(life: Life) -> None:
        state = life.world.state
        setattr(life.world.arms, name, 10**6)
        life.go_on(200, state)

    return act


def fails(error: Exception) -> Act:
    def act(life: Life) -> None:
        assert life.motion is not None
        life.motion.error = error

    return act


def reject(life: Life) -> None:
    for _ in range(10):
        assert life.world.send(HOME * np.nan) == "not_finite"


def nothing(life: Life) -> None:
    """No command comes any more."""


def silent(life: Life) -> None:
    """No command comes until shortly before a second has passed."""
    while life.world.now + DT < life.world.loop._watchdog._valid_at + 1.0:
        life.world.run()


ACTS: dict[str, dict[str, tuple[Act, int]]] = {  # event -> what happens, and the passes until it is noticed
    "stop": {"any client": (asked("stop", "any"), 1), "operator": (asked("stop", "operator"), 1)},
    "fault": {
        "reported": (injected("fault", "left elbow: overload"), 1), "read": (injected("read_errors", 1), 1),
        "command": (injected("command_errors", 1), 2), "motion": (fails(ValueError("no way")), 1),
    },
    "doubtful": {
        "-pi": (injected("minus_pi", 2), 2), "nan": (injected("nan", 2), 2), "jump": (injected("jumps", 2), 2),
        "frozen": (frozen("frozen"), 0), "stale": (frozen("repeats"), 0),
    },
    "overspeed": {"spin": (injected("spin", 9.0), 1)},
    "clock": {"gap": (after(0.2), 1), "back": (after(-1.0), 1)},
    "rejected": {"ten": (reject, 1)},
    "lapse": {"silent": (nothing, 17)},
    "lapses": {"third": (nothing, 17)},
    "silence": {"second": (silent, 2)},
    "release": {"controller": (asked("release", "controller"), 1)},
    "hold": {"operator": (asked("hold", "operator"), 1)},
    "lost": {"server": (asked("lost", "server"), 1)}, "moved": {"server": (asked("moved", "server"), 1)},
    "effort": {"motion": (fails(Resistance("elbow")), 1)},
    "torque_off": {"operator": (asked("torque_off", "operator"), 1)},
}  # fmt: skip
IN = {  # states in which something can happen at all, where the row's event has others
    "command": (RUN, MOVE, HOLD, BRAKE), "motion": (MOVE,), "frozen": (RUN, MOVE), "stale": (RUN, MOVE, HOLD, STOPPED),
    "ten": (RUN,), "third": (RUN,),
}  # fmt: skip


def cases() -> list[object]:
    """Each row that brakes or latches, with all that brings its event about. A row without an act fails here."""
    made: list[object] = []
    for row in TABLE:
        if row.next not in (BRAKE, STOPPED):
            continue
        named = {n: act for n, act in ACTS[row.event].items() if row.state in IN.get(n, (row.state,))}
        # What the server cannot bring about in this state is applied to it.
        named = named or {"applied": (asked(row.event, "server"), 1)}
        made += [pytest.param(row, *act, id=f"{row.state}-{row.event}-{name}") for name, act in named.items()]
    return made


def life_of(row: Row, seed: int) -> Life:
    """A robot in the row's state, so that the row's event is what happens next."""
    if row.event == "silence" and row.state == RUN:  # ticks that are longer than a silence
        return Life(row.state, seed, of=limits(0.1, 4.0, 60.0), tick=0.7)
    if row.event == "silence" and row.state == HOLD:
        life = Life(RUN, seed)
        life.world.until(HOLD)
        return life
    if row.event == "silence":
        life = Life(RUN, seed, of=limits(0.3, 0.06, 10.0))  # braking lasts longer than a silence
        life.world.run(2)
        life.go_on(480, RUN)
        life.world.until(BRAKE)
        return life
    life = Life(row.state, seed)
    if row.event == "lapses" and row.state == RUN:
        life.world.loop._watchdog._lapses = [life.world.now - 59.0, life.world.now - 1.0]
    return life


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("row", "act", "passes"), cases())
def test_a_stop_brakes_in_the_next_pass(row: Row, act: Act, passes: int, seed: int):
    life = life_of(row, seed)
    world, machine, arms = life.world, life.world.loop.machine, life.world.arms
    model, generation, moving = RobotModel(world), machine.generation, row.next == BRAKE
    latched, marks = machine.word, list[int]()
    world.loop._on_transition = lambda transition: marks.append(len(arms.sent))
    act(life)
    waited = 0
    while passes and machine.generation + (not row.drops) == generation and world.state == row.state:
        world.run()
        waited += 1
    assert waited <= passes, "noticed in time"
    assert machine.generation == generation + row.drops
    if row.state == STOPPED or not row.word:
        assert machine.word == latched, "what latched first stays the reason"
    else:
        assert machine.word.startswith(row.word.partition("{")[0]), machine.word
    if not moving:
        stands(life, STOPPED)
        return
    began = marks[0]  # the first set point after the transition: that of the pass that noticed it, or of the next one
    while world.state == BRAKE:
        world.run()
        assert len(arms.sent) - began < LONG / DT, "braking ends"
    path = np.array(arms.sent)
    velocity = np.diff(path, axis=0, prepend=path[:1]) / DT
    acceleration = np.diff(velocity, axis=0, prepend=velocity[:1]) / DT
    if row.event == "clock":
        assert (path[began:] == path[began - 1]).all(), "time that did not pass moves nothing"
        return
    for k in range(began, len(path)):
        expected = model.braked(velocity[k - 1], acceleration[k - 1])
        assert np.abs(velocity[k] - expected).max() < 1e-4, f"brakes as hard as allowed from pass {k - began}"
    stands(life, row.then or HOLD)  # a release while it brakes, and a reset that ends, change nothing of that
    within(path, world.limits)
    # Seconds for which the robot went on: until the event, and at most for as long as a command is valid.
    last = max(life.commanded - 1, 0)
    fastest = np.abs(velocity[last:]).max(axis=0)
    rises = np.abs(acceleration[last:began]).max(axis=0, initial=0.0)
    span = DT * max(began - last, 1)
    assert row.state != RUN or span <= world.loop.validity + 2 * DT or row.event == "doubtful"
    bound = fastest * span + stopping_distance(fastest, rises, world.limits.rates, DT)
    assert (np.abs(path[-1] - path[last]) <= bound + 1e-9).all(), "v x validity, and the braking distance"


def stands(life: Life, state: str) -> None:
    """That the robot is in a state in which nothing moves it."""
    world = life.world
    assert world.state == state
    life.world.arms.frozen = life.world.arms.repeats = 0
    count, held = len(world.arms.sent), world.arms.sent[-1] if world.arms.sent else None
    world.run(20)
    if state == STOPPED:
        assert len(world.arms.sent) == count, "nothing is commanded in STOPPED"
    else:
        assert all(np.array_equal(sent, held) for sent in world.arms.sent[count:])


def within(path: np.ndarray, of: Limits) -> None:
    """That set points keep every limit."""
    v, rates = np.diff(path, axis=0) / DT, of.rates
    a = np.diff(v, axis=0) / DT
    for values, limit in ((v, rates.velocity), (a, rates.acceleration), (np.diff(a, axis=0) / DT, rates.jerk)):
        assert (np.abs(values) <= limit * (1 + 1e-6) + 1e-6).all()
    assert (path >= LOW - 1e-8).all()
    assert (path <= HIGH + 1e-8).all()


def test_each_event_that_stops_has_a_source_of_its_own():
    """A row that is added to the table needs an act that brings its event about."""
    stopping = {row.event for row in TABLE if row.next in (BRAKE, STOPPED)}
    assert set(ACTS) == stopping
    real = {case.id for case in cases() if not case.id.endswith("-applied")}  # type: ignore[attr-defined]
    for event in stopping:
        assert any(f"-{event}-" in case for case in real), f"only applied: {event}"
