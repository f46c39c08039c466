"""Contact lets go: a motion that meets something goes back until nothing presses; a gripper that presses relaxes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from robot_limits import GRIPPERS, HOME, J, limits
from robot_world import DT, FaultyArms, World

from serl_chunk_robot.control.loop import Grip, GripLimits, Motion
from serl_chunk_robot.control.motions import PATIENCE, Oscillation, Reset, Step, jog, park
from serl_chunk_robot.drivers.base import Reading
from serl_chunk_robot.drivers.fake import viperx_arms
from serl_chunk_robot.robot_file.config import load
from serl_chunk_robot.safety.motion import Limits
from serl_chunk_robot.server.serve import Motions

LIMIT, ELASTIC = 3.0, 20.0  # effort, and effort per rad
JOINT, WALL = 3, 0.2  # rad, where the obstacle is
EFFORT = np.where(np.isin(np.arange(J), GRIPPERS), np.inf, LIMIT)
STAY, ZERO = np.full(J, np.nan), np.zeros(J)
THERE = HOME + 0.6 * (np.arange(J) == JOINT) + 0.3 * (np.arange(J) == 10)
Load = Callable[[np.ndarray], np.ndarray]  # joints -> effort that is no contact's


class Pressed(FaultyArms):
    """Arms in whose way an obstacle is that gives by a part of what presses on it, and what bears on them beside."""

    def __init__(self, wall: float = WALL, load: Load = lambda q: ZERO, gives: float = 0.1, sign: int = 1) -> None:
        super().__init__()
        self.wall, self.load, self.gives, self.sign = wall, load, gives, sign

    def advance(self) -> None:
        super().advance()
        self.q[JOINT] = min(self.q[JOINT], self.wall + self.gives * max(self.target[JOINT] - self.wall, 0.0))
        self.q[6] = max(self.q[6], 0.4)  # an object between the fingers

    def read(self):
        reading = super().read()
        held = (reading.q >= self.wall) & (np.arange(J) == JOINT)
        dq = np.where(held | (np.arange(J) == 6), 0.0, reading.dq)
        self.last = reading._replace(dq=dq, effort=self.sign * reading.effort + self.load(reading.q))
        return self.last


def reset(of: World, place: np.ndarray = THERE) -> Motion:
    steps = [Step(HOME + 0.1 * (np.arange(J) == 1), ZERO, ZERO), Step(place, ZERO, ZERO, gripper=0.2, grippers=(6,))]
    return Reset(
        HOME, steps, of.limits, episode=0, rng=np.random.default_rng(0), effort=EFFORT, stands=0.0, grippers=GRIPPERS
    )


MOTIONS: dict[str, Callable[[World], Motion]] = {
    "reset": reset,
    "park": lambda of: park(HOME, THERE, of.limits, effort=EFFORT, stands=0.0, grippers=GRIPPERS),
    "jog": lambda of: jog(HOME, JOINT, 0.6, of.limits, effort=EFFORT, grippers=GRIPPERS),
    "swing": lambda of: Oscillation(HOME, JOINT, 0.6, of.limits, effort=EFFORT, stands=0.0, grippers=GRIPPERS),
}


def meets(arms: Pressed, motion: str = "reset", speed: float = 3.2) -> tuple[World, int]:
    gripper = np.isin(np.arange(J), GRIPPERS)
    of = limits(speed, 12.5 * speed, 1250 * speed)
    world = World(of._replace(following=np.where(gripper, 1.0, of.following)), arms=arms).ready()
    world.run(5)
    world.ask("jog" if motion == "swing" else motion, "operator", motion=MOTIONS[motion](world))
    for _ in range(4000):
        world.run()
        if (np.abs(arms.last.effort) > EFFORT).any():  # type: ignore[union-attr]
            return world, len(arms.sent)
    raise AssertionError("nothing was met")


def effort(arms: FaultyArms) -> np.ndarray:
    assert arms.last is not None
    return np.abs(arms.last.effort)


@pytest.mark.parametrize(("motion", "speed", "gives", "sign"), [  # sign: of the effort
    ("reset", 3.2, 0.0, 1), ("reset", 3.2, 0.5, -1), ("jog", 3.2, 0.0, 1), ("jog", 3.2, 0.5, -1),
    ("park", 3.2, 0.0, 1), ("swing", 3.2, 0.5, -1), ("reset", 0.32, 0.5, -1), ("jog", 0.32, 0.0, 1),
])  # fmt: skip
def test_it_goes_back_along_its_way_until_it_is_relaxed(motion: str, gives: float, sign: int, speed: float):
    arms = Pressed(gives=gives, sign=sign)
    world, met = meets(arms, motion, speed)
    began, presses = world.now, f"joint {JOINT} presses: effort {3 * sign}."
    while world.state not in ("HOLD", "HELD"):
        world.run()
        if world.state == "MOVE":
            assert presses in world.loop.machine.word
            assert "going back" in world.loop.machine.word
    assert world.now - began < 1.0
    assert world.state == ("HOLD" if motion == "reset" else "HELD")
    assert presses in world.loop.machine.word
    assert ", limit 3; gone back until relaxed" in world.loop.machine.word
    for _ in range(400):
        world.run()
        assert effort(arms)[~np.isin(np.arange(J), GRIPPERS)].max() <= 0.5 * LIMIT
    assert arms.sent[-1][JOINT] > WALL, "no further than it has to"
    path = np.array(arms.sent)
    turned = met + int(np.argmax(path[met:, JOINT]))
    assert np.ptp(path[turned + 5 :, list(GRIPPERS)], axis=0).max() < 1e-6, "a gripper keeps its set point"
    joints = np.delete(np.arange(J), GRIPPERS)
    there, back = path[: turned + 1, joints], path[turned:, joints]
    assert max(np.abs(there - place).max(axis=1).min() for place in back) < 0.005 * speed, "along its way"
    v = np.diff(path, axis=0) / DT
    assert (np.abs(v) <= world.limits.rates.velocity * 1.001).all()
    assert (np.abs(np.diff(v, axis=0)) / DT <= world.limits.rates.acceleration * 1.001).all()


def test_a_gripper_that_presses_leads_nothing_back():
    world = World(arms=Pressed()).ready()
    close = Step(STAY, ZERO, ZERO, gripper="close", grippers=(6,))
    hard = np.where(np.arange(J) == 6, 2.0, np.inf)
    motion = Reset(
        HOME, [close], world.limits, episode=0, rng=np.random.default_rng(0), effort=hard, stands=0.0, grippers=GRIPPERS
    )
    world.ask("reset", "operator", motion=motion)
    world.until("HOLD")
    assert "joint 6 presses" in world.loop.machine.word
    held = world.arms.sent[-1]
    assert held[6] < 0.4
    assert np.array_equal(np.delete(held, 6), np.delete(HOME, 6))


def weighs(start: float, grows: float) -> Load:
    return lambda q: np.where(np.arange(J) == 1, start + grows * (q[10] - HOME[10]), 0.0)


@pytest.mark.parametrize("start", [1.4, 1.6, 2.0, 2.6])
def test_what_a_joint_bears_at_rest_is_no_reason_to_go_back(start: float):
    arms = Pressed(load=weighs(start, 0.0))
    world, _ = meets(arms, "park")
    world.until("HELD")
    assert world.arms.sent[-1][10] > HOME[10] + 0.05, "it is not led back to where it began"
    assert effort(arms)[JOINT] <= 0.5 * LIMIT
    heavy, _ = meets(Pressed(load=weighs(3.5, 0.0)))  # gravity above the limit moves nothing
    heavy.until("HOLD")
    heavy.run(200)
    assert all(np.array_equal(sent, HOME) for sent in heavy.arms.sent)
    assert "joint 1 presses: effort 3.50, limit 3" in heavy.loop.machine.word


def test_gravity_that_grows_along_the_way_leads_back_no_further_than_the_way():
    arms = Pressed(wall=9.0, load=weighs(1.0, 10.0))
    world, met = meets(arms)
    world.until("HOLD")
    assert HOME[10] - 1e-9 <= world.arms.sent[-1][10] < arms.sent[met - 1][10]
    assert effort(arms)[1] <= 0.5 * LIMIT
    held = world.arms.sent[-1]
    world.run(400)
    assert np.array_equal(world.arms.sent[-1], held), "nothing sinks"


def test_what_does_not_relax_ends_where_the_motion_began():
    stuck = [0.0]
    arms = Pressed(wall=9.0, load=lambda q: stuck[0] * (np.arange(J) == 1))
    world = World(arms=arms).ready()
    world.ask("reset", "operator", motion=reset(world))
    world.run(60)
    stuck[0] = 3.3
    world.until("HOLD", 3000)
    world.run(400)
    np.testing.assert_allclose(np.delete(world.arms.sent[-1], GRIPPERS), np.delete(HOME, GRIPPERS), atol=1e-9)
    assert "joint 1 presses: effort 3.30, limit 3; it still does where the motion began" in world.loop.machine.word


def test_what_is_met_on_the_way_back_ends_it():
    arms = Pressed()
    world, met = meets(arms)
    arms.load = lambda q: -4.0 * ((np.arange(J) == 10) & (q[10] < arms.sent[met - 1][10] - 0.01))
    world.until("HOLD")
    assert "; joint 10 on the way back: effort -4" in world.loop.machine.word
    assert world.arms.sent[-1][10] > HOME[10] + 0.01


@pytest.mark.parametrize(("event", "role", "state"), [("stop", "any", "STOPPED"), ("hold", "operator", "HELD")])
def test_a_person_ends_the_way_back(event: str, role: str, state: str):
    world, _ = meets(Pressed())
    world.run(25)
    assert "going back" in world.loop.machine.word
    before = world.arms.sent[-1]
    world.ask(event, role)
    world.until(state)
    assert np.abs(world.arms.sent[-1] - before).max() < 0.03


def test_limits_of_effort_are_the_drivers_where_no_file_sets_them(tmp_path):
    (path := tmp_path / "robot.toml").write_text('name = "cell"\ndriver = "fake"\n')
    file, known = load(path), np.array(viperx_arms().spec().effort)
    assert np.isinf(known[list(GRIPPERS)]).all()
    assert np.isfinite(np.delete(known, GRIPPERS)).all()
    arms = Pressed()
    world = World(arms=arms).ready()
    motion = Motions(file, viperx_arms())("jog", {"joint": JOINT, "angle": 0.6}, HOME, world.limits)
    world.ask("jog", "operator", motion=motion)
    world.until("HELD", 4000)
    assert f"joint {JOINT} presses: effort 4." in world.loop.machine.word
    world.run(100)
    assert effort(arms)[JOINT] <= 0.5 * known[JOINT]


LEFT = GRIPPERS[0]
GRIP_EFFORT = np.where(np.arange(J) == LEFT, 5.0, np.inf)
WIDTH = 0.4  # of the object between the left fingers
GIVE = 0.02  # of a gripper's range: written apart, as more would drop what it holds


def free_grippers(of: Limits) -> Limits:
    """Limits with grippers that may be commanded any distance, as the profiles of every robot have them."""
    gripper = np.isin(np.arange(J), GRIPPERS)
    return of._replace(first=np.where(gripper, 1.0, of.first), following=np.where(gripper, 1.0, of.following))


def holding(seconds: float = 0.5) -> World:
    world = World(free_grippers(limits())._replace(grip=GripLimits(GRIP_EFFORT, seconds)))
    advance, read = world.arms.advance, world.arms.read

    def stopped() -> None:
        advance()
        world.arms.q[LEFT] = max(world.arms.q[LEFT], WIDTH)

    def measured() -> Reading:
        reading = read()
        reading.dq[LEFT] = 0.0
        return reading

    world.arms.advance, world.arms.read = stopped, measured  # type: ignore[method-assign]
    return world.armed()


def grip(world: World, target: float, seconds: float) -> list[float]:
    began = len(world.arms.sent)
    for _ in range(round(seconds / world.tick)):
        assert world.send(np.where(np.arange(J) == LEFT, target, HOME)) == ""
        world.run(round(world.tick / DT))
    return [sent[LEFT] for sent in world.arms.sent[began:]]


def test_a_gripper_that_presses_for_long_relaxes_and_keeps_what_it_holds():
    world = holding()
    grip(world, 0.0, 0.4)
    assert world.arms.sent[-1][LEFT] == pytest.approx(0.0)
    assert world.arms.last is not None
    assert abs(world.arms.last.effort[LEFT]) > GRIP_EFFORT[LEFT]
    assert world.gate.counts["grip"] == 0
    grip(world, 0.0, 1.0)
    assert world.arms.sent[-1][LEFT] == pytest.approx(WIDTH - GIVE)
    assert 0 < -world.arms.last.effort[LEFT] < GRIP_EFFORT[LEFT], "it still presses"
    assert world.arms.q[LEFT] == WIDTH
    status = world.run()
    assert (status.reason, status.factor < 1) == ("grip", True), "the record is of the set point"
    assert world.gate.counts["grip"] > 50
    np.testing.assert_allclose(np.delete(world.arms.sent[-1], LEFT), np.delete(HOME, LEFT))
    opening = grip(world, 0.8, 0.4)
    assert opening[round(world.tick / DT)] > WIDTH - GIVE, "within a tick"
    assert opening[-1] == pytest.approx(0.8)
    assert grip(world, 0.1, 0.3)[-1] == pytest.approx(0.1), "it may close again"
    grip(world, 0.0, 1.0)
    world.ask("stop", "any")
    world.until("STOPPED")
    world.ready().ask("arm", "controller")
    assert grip(world, 0.1, 0.3)[-1] == pytest.approx(0.1), "until it has pressed for long again"
    world.ask("release", "controller")
    world.until("HOLD")
    counted = world.gate.counts["grip"]
    world.loop.limit(free_grippers(limits()))
    world.ask("arm", "controller")
    grip(world, 0.0, 2.0)
    assert world.arms.sent[-1][LEFT] == pytest.approx(0.0), "without limits it presses for ever"
    assert world.gate.counts["grip"] == counted


def test_a_robot_that_stands_moves_no_gripper_and_relaxes_it_once_it_moves():
    world = holding(2.0)
    grip(world, 0.0, 0.5)
    world.ask("release", "controller")
    world.until("HOLD")
    world.run(600)
    assert world.arms.sent[-1][LEFT] == pytest.approx(0.0)
    world.ask("arm", "controller")
    grip(world, 0.0, 0.2)
    assert world.arms.sent[-1][LEFT] == pytest.approx(WIDTH - GIVE)


def test_a_reset_that_closes_a_gripper_goes_on_once_it_relaxed():
    world = holding()
    world.ask("release", "controller")
    world.until("HOLD")
    still, zero = np.full(J, np.nan), np.zeros(J)
    steps = [
        Step(still, zero, zero, gripper="close", grippers=(LEFT,), wait=True),
        Step(still, 0.1 * (np.arange(J) == 0), zero),
    ]
    motion = Reset(HOME, steps, world.limits, episode=0, rng=np.random.default_rng(0), stands=0.0)
    world.ask("reset", "controller", motion=motion)
    world.run(round((PATIENCE + 3.0) / DT))
    assert (world.state, motion.waiting) == ("MOVE", True)
    assert world.arms.sent[-1][LEFT] == pytest.approx(WIDTH - GIVE)
    motion.proceed()
    world.until("HOLD")
    assert world.loop.machine.word == "the motion is done"
    assert world.arms.sent[-1][0] == pytest.approx(HOME[0] + 0.1)


SAMPLES = st.lists(
    st.tuples(*[st.floats(0.0, 1.0)] * 2, st.sampled_from([0.0, 4.9, -4.9, 5.1, -80.0])), min_size=1, max_size=60
)


PRESSES, RESTS = (0.5, 0.0, 5.1), (0.5, 0.0, 0.0)


@example([PRESSES] * 3 + [RESTS] + [PRESSES] * 2, 0.35)  # a short rest is no new beginning
@given(SAMPLES, st.floats(0.1, 2.0))
def test_it_gives_way_by_no_more_than_what_is_documented(samples, seconds):
    of = limits()
    grip, pressed, floor = Grip(of._replace(grip=GripLimits(GRIP_EFFORT, seconds))), 0.0, -np.inf
    for measured, wanted, effort in samples:
        q, hard = HOME.copy(), abs(effort) > GRIP_EFFORT[LEFT]
        q[LEFT] = measured
        grip.measured(q, np.where(np.arange(J) == LEFT, effort, 1e3), 0.1)
        pressed = max(pressed + (0.1 if hard else -0.1), 0.0)
        if floor == -np.inf and hard and pressed > seconds:
            floor = measured - GIVE * (of.high - of.low)[LEFT]
        goal = HOME + 0.1 * np.sin(np.arange(J))
        goal[LEFT] = wanted
        passed, relaxed = grip.goal(goal.copy())
        assert np.array_equal(np.delete(passed, LEFT), np.delete(goal, LEFT))
        if wanted >= floor:  # it opens, or presses no harder than relaxed: at once, and as commanded
            floor = -np.inf
            assert (passed[LEFT], relaxed) == (wanted, False)
        else:
            assert (passed[LEFT], relaxed) == (floor, True)
            assert wanted < passed[LEFT] < 1.0 - 0.5 * GIVE
