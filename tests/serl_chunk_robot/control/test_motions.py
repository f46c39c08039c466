"""The server's own motions, and how the set point follows targets: where they lead, and what ends or refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from errors import naming
from gate_passes import PROFILES, Pursued, ends, goals, profile
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from robot_limits import GRIPPERS, HIGH, HOME, LOW, SPACE, J, limits, viperx
from robot_world import DT, TICK, Way, World

from serl_chunk_robot.control.loop import Refused, Resistance
from serl_chunk_robot.control.motions import Reset, Step, StepSequence, jog, park
from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.safety.motion import SetPoint, stopping_distance

STAY, ZERO = np.full(J, np.nan), np.zeros(J)
THERE = HOME + 0.3 * np.isin(np.arange(J), [0, 3, 7, 10])


def step(joints: np.ndarray = STAY, add: np.ndarray = ZERO, random: np.ndarray = ZERO, **more: Any) -> Step:
    return Step(joints, add, random, **more)


def reset(world: World, *steps: Step, episode: int = 0, seed: int = 0, **more: Any) -> Reset:
    rng = np.random.default_rng(seed)
    return Reset(HOME, steps, world.limits, episode=episode, rng=rng, **{"stands": 0.0, **more})


def tips(**more: Any) -> Reset:
    return reset(World(), step(tips=(0,), **more), arms=viperx())


def moved(motion: StepSequence, world: World | None = None, event: str = "reset", passes: int = 4000) -> World:
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
        world.run(600)
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
        (lambda of: tips(lift=1.5), "reset.step[0]", "arm 0 cannot go 1.5 m straight up"),
        (lambda of: tips(pose=np.array([3.0, 0, 0, 0, 0, 0])), "reset.step[0]", "arm 0 cannot reach [3.0"),
    ],
)
def test_a_goal_outside_the_limits_is_refused_before_anything_moves(make, parameter, named):
    with pytest.raises(ConfigError, match=naming(parameter, named)) as e:
        make(World().limits)
    assert e.value.parameter == parameter


JOINTS = [j for j in range(J) if j not in GRIPPERS]


# Motions.


class Failing:
    def __init__(self, error: object) -> None:
        self.error, self.calls = error, 0

    def goal(self, at: SetPoint, reading: object, now: float) -> np.ndarray | None:
        self.calls += 1
        if self.calls < 20:
            return HOME + 0.3 * np.isin(range(J), JOINTS)
        if isinstance(self.error, Exception):
            raise self.error
        return self.error  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "state", "word"),
    [
        (Resistance("4.1 N at joint 3"), "HOLD", "the motion met resistance: 4.1 N at joint 3"),
        (KeyError("pose"), "STOPPED", "a motion failed"),
        (np.full(J, np.nan), "STOPPED", "not 14 finite numbers"),
        (np.zeros(3), "STOPPED", "not 14 finite numbers"),
    ],
)
def test_a_motion_that_fails_brakes(error: object, state: str, word: str):
    world = World().ready()
    world.ask("reset", "controller", motion=Failing(error))
    world.run(20)
    assert world.state == "BRAKE"
    assert word in world.loop.machine.word
    world.until(state)


# Tracks.


def path_of(
    way: Callable[[float], np.ndarray],
    ticks: int,
    world: World,
    late: Callable[[int], int] = lambda k: 0,
    lag: float = 0.0,
):
    """Stream `way`; returns set points and factors. `late`: passes that command k comes late; `lag`: s, of passes."""
    per = round(world.tick / world.dt)
    due = sorted((k * per + late(k), k) for k in range(ticks))
    points, factors, began, rng = [], [], world.now, np.random.default_rng(5)
    for n in range(ticks * per):
        while due and due[0][0] == n:
            assert world.send(way((due.pop(0)[1] + 1) * world.tick)) == ""
        world.now = began + (n + 1) * world.dt + rng.uniform(0, lag)
        status = world.loop.run_pass(world.now)
        assert status.state == "RUN"
        points.append(status.set_point)
        factors.append(status.factor)
    return np.array(points), np.array(factors)


@pytest.mark.parametrize(("dt", "tick"), [(0.005, 0.02), (0.002, 0.1), (0.02, 0.02), (0.005, 0.065)])
def test_targets_on_a_parabola_are_followed_on_it(dt: float, tick: float):
    world = World(limits(3.2, 40.0, 1e5), dt=dt, tick=tick).armed()
    bend = np.where(np.isin(range(J), GRIPPERS), 0.0, 0.5)

    def way(t: float) -> np.ndarray:
        return HOME + bend * t * t

    points, factors = path_of(way, round(0.8 / tick), world)
    per = round(tick / dt)
    times = (np.arange(len(points)) + 1) * tick / per
    wanted = np.array([way(t) for t in times])
    assert (factors == 1).all()
    at_ends = slice(per - 1, None, per)
    assert np.abs(points[at_ends] - wanted[at_ends]).max() < 1e-12
    settled = 3 * per
    assert np.abs(points[settled:] - wanted[settled:]).max() < (2e-4 if per > 1 else 1e-12)


def aloha(seed: int) -> tuple[Callable[[float], np.ndarray], np.ndarray]:
    """Smooth motion with ALOHA's demands: up to 2.9 rad/s, 15 rad/s2 and 267 rad/s3."""
    rng = np.random.default_rng(seed)
    rates = rng.uniform(3.0, 9.0, J)
    size = np.minimum.reduce([2.9 / rates, 15 / rates**2, 267 / rates**3, 0.9 * np.minimum(HIGH - HOME, HOME - LOW)])
    size[list(GRIPPERS)] = 0.2

    def way(t: float) -> np.ndarray:
        fade = 0.5 - 0.5 * np.cos(np.pi * min(t / 1.5, 1.0))
        return HOME + fade * size * np.sin(rates * t)

    return way, size


@pytest.mark.parametrize(
    ("late", "lag", "seed"), [(0, 0.0, 0), (1, 0.0, 1), (0, 0.002, 0)], ids=["on time", "jitter", "late passes"]
)
def test_smooth_motion_at_the_demands_of_aloha_is_left_alone(seed: int, late: int, lag: float):
    world = World().armed()
    way, _ = aloha(seed)
    rng = np.random.default_rng(seed)
    points, factors = path_of(way, 500, world, lambda k: int(rng.integers(late + 1)), lag)
    moving_by = np.abs(np.diff(points, axis=0)).max() / DT
    assert moving_by > 1.5
    slowed = np.mean(factors < 1)
    assert slowed < 0.01, world.gate.counts


@pytest.mark.parametrize(
    ("rates", "seconds"), [((3.2, 40.0, 4000.0), 0.5), ((3.0, 16.0, 280.0), 1.0), ((1.0, 5.0, 50.0), 1.5)]
)
def test_targets_that_are_off_are_made_good(rates: tuple[float, float, float], seconds: float):
    """Three targets are off by 0.15 rad during a smooth motion of all joints: all are on their path again in time."""
    world = World(limits(*rates)).armed()
    rate = np.linspace(1.0, 3.0, J) * min(1.0, rates[1] / 20)
    off = 0.15 * np.where(np.arange(J) % 2, 1, -1) * ~np.isin(np.arange(J), GRIPPERS)
    blip = (201, 202, 203)

    def way(t: float) -> np.ndarray:
        s = min(t / 3, 1.0)
        fade = s**3 * (10 - 15 * s + 6 * s * s)
        return HOME + 0.2 * fade * np.sin(rate * t) + off * (round(t / TICK) in blip)

    points, factors = path_of(way, 350, world)
    times = (1 + np.arange(len(factors))) * DT
    missed = times[factors < 1]
    assert missed.min() + 1e-9 > 200 * TICK
    assert missed.max() < blip[-1] * TICK + seconds
    assert world.gate.counts["catching_up"]
    ends = slice(3, None, 4)
    settled = times[ends] > blip[-1] * TICK + seconds
    wanted = np.array([way(t) for t in times[ends]])
    assert np.abs(points[ends] - wanted)[settled].max() < 1e-12


def test_a_robot_whose_limits_are_changed_moves_within_them():
    world = World().ready()
    slow = limits(0.5, 5.0, 50.0)
    world.loop.limit(slow)
    goal = HOME + 0.3 * np.isin(range(J), JOINTS)
    first = len(world.arms.sent)
    world.ask("reset", "controller", motion=Way(goal))
    with pytest.raises(Refused, match="MOVE"):
        world.loop.limit(limits())
    world.until("HOLD", 2000)
    path = np.array(world.arms.sent[first:])[:, JOINTS]
    assert path[-1] == pytest.approx(goal[JOINTS], abs=1e-6)
    assert np.abs(np.diff(path, axis=0)).max() <= 0.5 * DT * (1 + 1e-6)
    assert np.abs(np.diff(path, n=2, axis=0)).max() <= 5.0 * DT**2 * (1 + 1e-6)
    assert world.gate.counts == {"catching_up": world.gate.counts["catching_up"]}, "planned within them, not gated"


@settings(max_examples=examples(30))
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(sorted(PROFILES)),
    size=st.floats(-5, 0.5),
    moving=st.booleans(),
)
def test_a_goal_that_is_held_is_reached_and_not_left(seed: int, name: str, size: float, moving: bool):
    rng = np.random.default_rng(seed)
    of, dt = profile(name)
    pursued, at = Pursued(Gate(of, dt)), SetPoint.standing(HOME)
    rates = of.rates
    if moving:  # from the middle of other motion
        goal = goals("jumps", rng, dt)
        for k in range(60):
            at = pursued.keeps(at, goal(k), at.position).set_point
    start = ends(at, pursued.gate).position
    target = np.clip(start + rng.uniform(-1, 1, J) * 10**size, LOW, HIGH)
    way = np.abs(target - at.position).max() + 0.1 * moving
    v, a, j = (x[0] for x in rates)
    longest = 1 + 3 * (way / v + v / a + a / j + 2 * np.sqrt(way / a) + 4 * np.cbrt(way / j)) + 200 * dt
    side = np.sign(target - start)
    beyond = np.zeros(J)
    for _ in range(int(longest / dt)):
        at = pursued.keeps(at, target, at.position).set_point
        beyond = np.maximum(beyond, side * (at.position - target))
        if at.stands and np.abs(at.position - target).max() <= 1e-8:
            break
    assert at.position == pytest.approx(target, abs=1e-8)
    assert at.stands
    if not moving:  # no further than a goal within the jerk of one pass takes it
        assert (beyond <= rates.jerk * dt**3 + 1e-8).all()
    for _ in range(20):
        passed = pursued.keeps(at, target, at.position)
        assert np.abs(passed.set_point.position - target).max() <= 1e-8
        assert pursued.follows
        at = passed.set_point


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_goal_that_moved_and_stops_abruptly_is_passed_once(name: str):
    of, dt = profile(name)
    pursued, at = Pursued(Gate(of, dt)), SetPoint.standing(np.zeros(J))
    speed = 0.8 * of.rates.velocity[0]
    offsets, k = [], 0
    passes = int(1.0 / speed / dt)
    while k < 40 * passes + 2000 and not (k > passes and at.stands):
        goal = np.full(J, min(k, passes) * speed * dt * 0.9)
        goal[[6, 13]] = 0
        at = pursued.keeps(at, goal, at.position).set_point
        k += 1
        offsets.append(at.position[0] - goal[0])
    assert at.stands
    assert abs(offsets[-1]) <= 1e-8
    signs = np.sign([x for x in offsets[passes:] if abs(x) > 1e-6])
    assert np.count_nonzero(np.diff(signs)) <= 1
    braking = stopping_distance(np.array([0.9 * speed]), np.zeros(1), type(of.rates)(*(x[:1] for x in of.rates)), dt)
    assert max(offsets[passes:]) <= 1.5 * braking[0] + 1e-3


def test_it_comes_to_rest_at_the_edge_of_the_workspace():
    of = limits(workspace=SPACE)
    pursued, at = Pursued(Gate(of, DT, viperx())), SetPoint.standing(HOME)
    goal = HOME + 1.5 * (np.arange(J) == 8)
    for _ in range(400):
        at = pursued.keeps(at, goal, at.position).set_point
    before = at.position
    for _ in range(100):
        at = pursued.keeps(at, goal, at.position).set_point
    assert np.abs(at.position - before).max() < 1e-3
    assert -0.005 < pursued.gate.outside(at.position[None])[0] <= 1e-9, "near the edge, not beyond"
    assert pursued.gate.counts["workspace"] > 100
    for _ in range(400):
        at = pursued.keeps(at, HOME, at.position).set_point
    assert at.position == pytest.approx(HOME, abs=1e-6)


def test_a_blocked_joint_stops_all_joints():
    pursued, at = Pursued(Gate(limits(), DT)), SetPoint.standing(HOME)
    goal = HOME + 0.6 * np.tile([1, 1, -1, 1, 1, 1, 0], 2)
    for _ in range(600):
        measured = at.position.copy()
        measured[3] = HOME[3]
        at = pursued.keeps(at, goal, measured).set_point
    assert at.stands
    assert 0.3 <= at.position[3] - HOME[3] < 0.5
    assert at.position[0] - HOME[0] == pytest.approx(at.position[3] - HOME[3], rel=0.05), "all by one factor"
    assert pursued.gate.counts["following"] > 100
    for _ in range(400):
        measured = at.position.copy()
        measured[3] = HOME[3]
        at = pursued.keeps(at, HOME, measured).set_point
    assert at.position == pytest.approx(HOME, abs=1e-6), "and it may go back"


def test_a_joint_that_is_held_away_and_need_not_move_stops_none():
    pursued, at = Pursued(Gate(limits(), DT)), SetPoint.standing(HOME)
    goal, measured = HOME.copy(), HOME.copy()
    goal[1] += 0.2
    measured[3] += 0.5
    for _ in range(400):
        measured[1] = at.position[1]
        at = pursued.keeps(at, goal, measured).set_point
    assert at.position == pytest.approx(goal, abs=1e-8)
