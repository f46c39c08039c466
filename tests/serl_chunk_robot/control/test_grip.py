"""Grippers that press for long: they relax, hold what they have, and open at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from robot_limits import GRIPPERS, HOME, J, limits
from robot_world import DT, World

from serl_chunk_robot.control.loop import Grip, GripLimits
from serl_chunk_robot.control.motions import PATIENCE, Reset, Step
from serl_chunk_robot.drivers.base import Reading
from serl_chunk_robot.safety.motion import Limits

LEFT = GRIPPERS[0]
EFFORT = np.where(np.arange(J) == LEFT, 5.0, np.inf)
WIDTH = 0.4  # of the object between the left fingers
GIVE = 0.02  # of a gripper's range: written apart, as more would drop what it holds


def free_grippers(of: Limits) -> Limits:
    """Limits with grippers that may be commanded any distance, as the profiles of every robot have them."""
    gripper = np.isin(np.arange(J), GRIPPERS)
    return of._replace(first=np.where(gripper, 1.0, of.first), following=np.where(gripper, 1.0, of.following))


def holding(seconds: float = 0.5) -> World:
    """A world whose left gripper holds an object that does not give way, under the limits of a grip."""
    world = World(free_grippers(limits())._replace(grip=GripLimits(EFFORT, seconds)))
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
    """Command the left gripper for a while; returns its set points."""
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
    assert abs(world.arms.last.effort[LEFT]) > EFFORT[LEFT]
    assert world.gate.counts["grip"] == 0
    grip(world, 0.0, 1.0)
    assert world.arms.sent[-1][LEFT] == pytest.approx(WIDTH - GIVE)
    assert 0 < -world.arms.last.effort[LEFT] < EFFORT[LEFT], "it still presses"
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
    grip, pressed, floor = Grip(of._replace(grip=GripLimits(EFFORT, seconds))), 0.0, -np.inf
    for measured, wanted, effort in samples:
        q, hard = HOME.copy(), abs(effort) > EFFORT[LEFT]
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
