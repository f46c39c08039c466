"""The server's own motions in the loop: where they lead, what ends them, and what is refused before anything moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from errors import naming
from robot_limits import GRIPPERS, HIGH, HOME, LOW, J, viperx
from robot_world import DT, World

from serl_chunk_robot.control.motions import Reset, Step, StepSequence, jog, park
from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.errors import ConfigError

STAY, ZERO = np.full(J, np.nan), np.zeros(J)
THERE = HOME + 0.3 * np.isin(np.arange(J), [0, 3, 7, 10])


def step(joints: np.ndarray = STAY, add: np.ndarray = ZERO, random: np.ndarray = ZERO, **more: Any) -> Step:
    return Step(joints, add, random, **more)


def reset(world: World, *steps: Step, episode: int = 0, seed: int = 0, **more: Any) -> Reset:
    rng = np.random.default_rng(seed)
    return Reset(HOME, steps, world.limits, episode=episode, rng=rng, **{"stands": 0.0, **more})


def moved(motion: StepSequence, world: World | None = None, event: str = "reset", passes: int = 4000) -> World:
    """Run a motion of a robot that stands, up to its end."""
    world = world or World().ready()
    world.ask(event, "operator", motion=motion)
    for _ in range(passes):
        if world.state != "MOVE":
            break
        world.run()
    return world


def test_a_reset_takes_its_steps_one_after_the_other_a_second_after_the_beep_and_then_puts_its_scene_in_place():
    world, beeps, scenes = World().ready(), [], []
    first = np.arange(J) == 0
    motion = reset(
        world, step(THERE), step(add=-0.2 * (np.arange(J) == 1)), step(STAY, speed=0.1),
        step(least=np.where(first, THERE[0] + 0.1, -np.inf)), step(least=np.where(first, THERE[0] - 0.1, -np.inf)),
        beep=lambda: beeps.append(world.now), stands=1.0, scene=lambda: scenes.append(world.arms.sent[-1].copy()),
    )  # fmt: skip
    world.ask("reset", "controller", motion=motion)
    began = world.now
    world.run(round(0.99 / DT))
    np.testing.assert_array_equal(world.arms.sent[-1], HOME)
    assert (world.state, scenes) == ("MOVE", [])
    world.until("HOLD", 4000)
    assert beeps == [pytest.approx(began + DT)]
    end = THERE - 0.2 * (np.arange(J) == 1) + 0.1 * first  # a step to a height leads up, and never down
    np.testing.assert_allclose(world.arms.sent[-1], end, atol=1e-6)
    np.testing.assert_allclose(scenes, [end], atol=1e-6)
    assert motion.goal(world.loop._at, world.arms.last, world.now) is None
    assert len(scenes) == 1
    assert min(np.abs(sent - THERE).max() for sent in world.arms.sent) < 1e-6
    assert not world.gate.counts, "a motion is within the profile by itself"
    for episode in range(7):
        due = reset(world, step(THERE, every=3), step(HOME + 0.01), episode=episode)._todo
        assert len(due) == (2 if episode % 3 == 0 else 1)


def test_what_is_drawn_is_recorded_and_repeats():
    world = World().ready()
    random = np.where(np.isin(np.arange(J), GRIPPERS), 0, 0.1)
    first, again, other = (reset(world, step(THERE, random=random), seed=seed) for seed in (1, 1, 2))
    moved(first, world)
    drawn = first.draws["reset.step[0]"]
    np.testing.assert_allclose(world.arms.sent[-1], THERE + drawn, atol=1e-6)
    assert (np.abs(drawn) <= random).all()
    assert np.abs(drawn).max() > 0.03
    np.testing.assert_array_equal(again.draws["reset.step[0]"], drawn)
    assert (other.draws["reset.step[0]"] != drawn).any()
    assert not reset(world, step(THERE)).draws


def test_a_lift_leads_both_tips_straight_up_within_the_profile():
    world, arms = World().ready(), viperx()
    motion = reset(world, step(tips=(0, 1), lift=0.1, gripper=0.8, grippers=GRIPPERS), arms=arms)
    moved(motion, world)
    assert world.state == "HOLD"
    assert not world.gate.counts, "a motion is within the profile by itself"
    way = np.array(world.arms.sent)
    tips = arms(way)[:, :, -1]
    up = tips - tips[:, :1]
    np.testing.assert_allclose(up[:, -1], [[0, 0, 0.1]] * 2, atol=1e-4)
    assert np.abs(up[:, :, :2]).max() < 0.01
    turned = [arms.tip(arm, way[-1])[0][:3, :3] @ arms.tip(arm, HOME)[0][:3, :3].T for arm in (0, 1)]
    np.testing.assert_allclose(turned, [np.eye(3)] * 2, atol=1e-3)
    np.testing.assert_allclose(way[-1][list(GRIPPERS)], 0.8, atol=1e-6)
    for n, (rate, slack) in enumerate(zip(world.limits.rates, (1.001, 1.001, 1.05), strict=True), 1):
        assert (np.abs(np.diff(way, n, axis=0)) / DT**n <= 0.3 * rate * slack + 1e-3).all(), "of the step's speed"


def test_a_pose_is_reached_by_its_arm_alone():
    world, arms = World().ready(), viperx()
    there = arms.tip(1, HOME + 0.2 * (np.arange(J) > 6))[0]
    r = there[:3, :3]
    angles = [np.arctan2(r[2, 1], r[2, 2]), -np.arcsin(r[2, 0]), np.arctan2(r[1, 0], r[0, 0])]
    pose = np.array([*there[:3, 3], *angles])
    moved(reset(world, step(add=-0.1 * (np.arange(J) == 0)), step(tips=(1,), pose=pose), arms=arms), world)
    assert world.state == "HOLD"
    np.testing.assert_allclose(arms.tip(1, world.arms.sent[-1])[0], there, atol=2e-4)
    np.testing.assert_allclose(world.arms.sent[-1][:7], HOME[:7] - 0.1 * (np.arange(7) == 0), atol=1e-6)


def test_a_tip_that_cannot_get_there_is_refused_before_anything_moves():
    far = np.array([3.0, 0, 0, 0, 0, 0])
    for more, named in (({"lift": 1.5}, "1.5 m straight up"), ({"pose": far}, "reach [3.0")):
        with pytest.raises(ConfigError, match=naming("reset.step[0]", "arm 0", named, "within the profile's limits")):
            reset(World(), step(tips=(0,), **more), arms=viperx())


def test_grippers_open_close_keep_and_take_a_value():
    place = {"open": HIGH[6], "close": LOW[6], "keep": HOME[6], 0.25: 0.25}
    for gripper, value in place.items():
        world = moved(reset(World(), step(HOME - 0.1, gripper=gripper, grippers=GRIPPERS)))
        np.testing.assert_allclose(world.arms.sent[-1][list(GRIPPERS)], value, atol=1e-6)
    world = moved(reset(World(), step(gripper="open", grippers=(13,))))
    np.testing.assert_allclose(world.arms.sent[-1][[6, 13]], [HOME[6], HIGH[13]], atol=1e-6)


def test_compliance_is_set_where_its_step_begins():
    world = World().ready()
    steps = step(set={"compliance": 0.7}), step(THERE, set={"compliance": 0.1, "load": 0.3})
    seen = []

    def set_it(name: str, value: object) -> None:
        seen.append((name, value, float(np.abs(world.arms.target - HOME).max())))
        world.arms.set(name, value)

    moved(reset(world, *steps, set=set_it), world)
    assert seen == [("compliance", 0.7, 0.0), ("compliance", 0.1, 0.0), ("load", 0.3, 0.0)]
    assert world.arms.settings == {"compliance": 0.1, "load": 0.3}


def fails(*_: object) -> None:
    raise DriverError("it is refused")


@pytest.mark.parametrize(("steps", "more", "place"), [
    ((step(THERE, set={"stiffness": 1}),), {"set": fails}, HOME), ((step(THERE),), {"scene": fails}, THERE),
])  # fmt: skip
def test_a_setting_or_a_scene_that_fails_stops_the_robot(steps, more, place):
    world = moved(reset(World(), *steps, **more))
    world.until("STOPPED")
    assert "it is refused" in world.loop.machine.word
    np.testing.assert_allclose(world.arms.sent[-1], place, atol=1e-6)


def test_it_waits_at_the_end_of_a_step_for_the_operator_or_for_its_seconds():
    world = World().ready()
    motion = reset(world, step(THERE, wait=True), step(HOME, wait=True), step(THERE, stands=2.0), step(HOME))
    assert not motion.proceed()
    world.ask("reset", "controller", motion=motion)
    for place in (THERE, HOME):
        world.run(2000)
        assert (world.state, motion.waiting) == ("MOVE", True)
        np.testing.assert_allclose(world.arms.sent[-1], place, atol=1e-6)
        assert motion.proceed()
        world.run()
        assert not motion.waiting
    while np.abs(world.arms.sent[-1] - THERE).max() > 1e-6:
        world.run()
    there = world.now
    while np.abs(world.arms.sent[-1] - THERE).max() <= 1e-6:
        world.run()
    assert 2.0 - DT <= world.now - there < 2.1  # the next way begins slowly
    world.until("HOLD")
    assert not motion.proceed()


def test_a_step_that_relieves_leads_the_set_point_to_where_the_robot_is_before_the_next_one_acts():
    world = World().ready()
    pressed = HOME + 0.01 * (np.arange(J) == 3) + 0.02 * (np.arange(J) == GRIPPERS[0])
    read, seen = world.arms.read, []
    world.arms.read = lambda: read()._replace(q=pressed)  # something holds it there
    steps = step(relieve=True, grippers=GRIPPERS), step(set={"params": "stiff"})
    motion = reset(world, *steps, set=lambda name, value: seen.append((name, world.arms.sent[-1].copy())))
    moved(motion, world)
    assert world.state == "HOLD", world.heard[-3:]
    [(name, then)] = seen
    assert name == "params"
    np.testing.assert_allclose(then, np.where(np.arange(J) == GRIPPERS[0], HOME, pressed), atol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_effort_above_the_limit_ends_the_motion(sign):
    world = World(lag=0.05).ready()
    effort = np.full(J, np.inf)
    effort[3] = 0.3
    goal = HOME + 0.5 * sign * (np.arange(J) == 3)
    moved(reset(world, step(goal, speed=1.0), effort=effort), world)
    world.until("HOLD")
    assert "joint 3" in world.heard[-2].word
    assert "0.3" in world.heard[-2].word
    assert np.abs(world.arms.sent[-1] - goal).max() > 0.05
    world = moved(reset(World(lag=0.05), step(goal, speed=1.0), effort=np.full(J, 9.0)))
    np.testing.assert_allclose(world.arms.sent[-1], goal, atol=1e-6)


def test_a_goal_that_the_gate_keeps_it_from_is_given_up():
    world = World().ready()
    motion = reset(world, step(THERE))
    world.limits.high[0] = HOME[0] + 0.1  # the gate's: the motion was checked before
    try:
        moved(motion, world)
        world.until("HOLD")
    finally:
        world.limits.high[0] = 3.14
    assert "joint 0 is kept" in world.heard[-2].word


def test_it_parks_and_jogs_one_joint_at_once():
    world = moved(park(HOME, THERE, World().limits), event="park")
    np.testing.assert_allclose(world.arms.sent[-1], THERE, atol=1e-6)
    assert world.state == "HELD"
    world = World().ready()
    moved(jog(HOME, 9, -0.2, world.limits), world, "jog", passes=2)
    assert world.arms.sent[-1][9] < HOME[9]
    world.until("HELD")
    np.testing.assert_allclose(world.arms.sent[-1], HOME - 0.2 * (np.arange(J) == 9), atol=1e-6)
    asleep = np.where(np.arange(J) == 1, LOW - 0.02, HOME)
    jog(asleep, 3, 0.1, world.limits)  # a joint that stays may be outside its limits
    jog(asleep, 1, 0.1, world.limits)
    with pytest.raises(ConfigError, match=naming("angle")):
        jog(asleep, 1, 0.01, world.limits)


@pytest.mark.parametrize("reaches", [9.0, 0.2])  # rad, which joint 0 does not get beyond
def test_torque_goes_off_where_the_arms_are_measured_in_the_pose_alone(reaches):
    world, most = World(), np.where(np.arange(J) == 0, HOME[0] + reaches, np.inf)
    read = world.arms.read
    world.arms.read = lambda: (reading := read())._replace(q=np.minimum(reading.q, most))
    world.ready().ask("end", "operator", motion=park(HOME, THERE, world.limits), ends=THERE)
    world.until("STOPPED" if reaches > 1 else "HELD", 4000)
    assert world.arms.read().torque == (reaches < 1)
    assert ("joint 0 is measured 0.100 away" in world.loop.machine.word) == (reaches < 1)


@pytest.mark.parametrize(("event", "role"), [("hold", "operator"), ("lost", "server"), ("stop", "any")])
def test_a_motion_that_was_ended_is_not_done_and_ends_no_day(event, role):
    world = World().ready()
    world.ask("end", "operator", motion=park(HOME, THERE, world.limits, stands=0.0), ends=THERE)
    world.run(30)
    world.ask(event, role)
    world.until("STOPPED" if event == "stop" else "HELD")
    assert (world.loop.motion.number, world.loop.motion.done) == (1, 0)
    if event == "stop":
        world.ask("clear", "operator")
    moved(park(world.arms.sent[-1], THERE, world.limits, stands=0.0), world, "park")
    assert (world.state, world.loop.motion.number, world.loop.motion.done) == ("HELD", 2, 2)
    assert world.arms.read().torque


def test_a_doubtful_sample_is_neither_published_nor_given_to_a_motion():
    world, seen = World().ready(), []
    motion = reset(world, step(THERE))
    goal = motion.goal
    motion.goal = lambda at, reading, now: seen.append(reading) or goal(at, reading, now)
    world.ask("reset", "controller", motion=motion)
    good = world.run(30).reading
    world.arms.jumps = 1
    status = world.run()
    assert status.state == "MOVE"
    assert status.reading is seen[-1] is good


@pytest.mark.parametrize(
    ("make", "parameter", "named"),
    [
        (lambda of: jog(HOME, 14, 0.1, of), "joint", "14"),
        (lambda of: jog(HOME, -1, 0.1, of), "joint", "-1"),
        (lambda of: jog(HOME, 3, np.nan, of), "angle", "nan"),
        (lambda of: jog(HOME, 9, 1.5, of), "angle", "2.66"),
        (lambda of: park(HOME, HOME - 3 * (np.arange(J) == 7), World().limits._replace(low=LOW + 0.2)), "park", "-3"),
        (lambda of: reset(World(), step(HOME), step(HOME + 5)), "reset.step[1]", "5"),
        (lambda of: reset(World(), step(add=ZERO - 3)), "reset.step[0]", "-3.96"),
        (lambda of: reset(World(), step(HIGH - 0.05, random=ZERO + 0.1)), "reset.step[0]", "3.09"),
        (lambda of: reset(World(), step(LOW + 0.05, random=ZERO + 0.1)), "reset.step[0]", "-3.09"),
        (lambda of: reset(World(), step(gripper=1.2, grippers=GRIPPERS)), "reset.step[0]", "1.2"),
    ],
)
def test_a_goal_outside_the_limits_is_refused(make, parameter, named):
    with pytest.raises(ConfigError, match=naming(parameter, named)) as e:
        make(World().limits)
    assert e.value.parameter == parameter
