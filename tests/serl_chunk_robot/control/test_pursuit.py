"""The set point gets back onto its goal, whether that stands or moves, and stays there."""

from __future__ import annotations

import numpy as np
import pytest
from gate_passes import DT, PROFILES, Pursued, ends, goals, profile
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from robot_limits import GRIPPERS, HIGH, HOME, LOW, SPACE, J, limits, viperx

from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.safety.motion import SetPoint, stopping_distance


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
    for _ in range(600):
        at = pursued.keeps(at, goal, at.position).set_point
    before = at.position
    for _ in range(100):
        at = pursued.keeps(at, goal, at.position).set_point
    assert np.abs(at.position - before).max() < 1e-3
    assert -0.005 < pursued.gate.outside(at.position[None])[0] <= 1e-9, "near the edge, not beyond"
    assert pursued.gate.counts["workspace"] > 100
    for _ in range(600):
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


def test_a_far_goal_is_reached_straight_and_without_overshoot():
    of, way = limits(), np.where(np.isin(np.arange(J), GRIPPERS), 0.2, np.linspace(-0.4, 0.4, J))
    pursued, at = Pursued(Gate(of, DT)), SetPoint.standing(HOME)
    shares = []
    while not pursued.follows or len(shares) < 2:
        at = pursued.keeps(at, HOME + way, at.position).set_point
        shares.append((at.position - HOME) / way)
    assert len(shares) * DT < 0.4
    assert np.ptp(shares, axis=1).max() < 1e-9
    assert np.max(shares) <= 1 + 1e-9
    assert not pursued.gate.counts
    for _ in range(3):
        at = pursued.keeps(at, HOME + way, at.position).set_point
        assert np.array_equal(at.position, HOME + way)
    assert at.stands
