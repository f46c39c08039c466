"""What the gate lets through, whatever the goals and the arms: every limit holds in every pass; braking ends."""

from __future__ import annotations

import numpy as np
import pytest
from gate_passes import DT, GOALS, PROFILES, ends, goals, keeps, profile
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from robot_limits import GRIPPERS, HIGH, HOME, LOW, SPACE, J, limits, viperx

from serl_chunk_robot.safety.gate import REJECTIONS, Command, Gate
from serl_chunk_robot.safety.motion import Rates, SetPoint, Workspace, braked, peak_speed, stopping_distance


@settings(max_examples=examples(80))
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(sorted(PROFILES)),
    kind=st.sampled_from(GOALS),
    arm=st.sampled_from(["follows", "lags", "blocked"]),
    brakes=st.booleans(),
)
def test_no_goal_leads_beyond_a_limit(seed: int, name: str, kind: str, arm: str, brakes: bool):
    rng = np.random.default_rng(seed)
    of, dt = profile(name)
    gate, goal = Gate(of, dt), goals(kind, rng, dt)
    at = SetPoint.standing(rng.uniform(LOW, HIGH) if seed % 2 else HOME)
    measured, lag = at.position.copy(), rng.uniform(0.01, 0.15)
    rates = of.rates
    further = (
        stopping_distance(rates.velocity, np.zeros(J), rates, dt) + rates.velocity * rates.acceleration / rates.jerk
    )
    braking = 0
    for k in range(150):
        braking = max(braking - 1, 0) or (rng.integers(1, 40) if brakes and rng.random() < 0.05 else 0)
        at = keeps(gate, at, None if braking else goal(k), measured, LOW, HIGH).set_point
        if arm == "follows":
            measured = at.position
        elif arm == "lags":
            measured = measured + (at.position - measured) * min(1, dt / lag)
        else:
            free = np.arange(J) != seed % J
            measured = np.where(free, at.position, measured)
        assert (np.abs(at.position - measured) <= of.following + further).all(), "no wind-up"
    end = ends(at, gate).position
    assert (end >= LOW - 1e-8).all()
    assert (end <= HIGH + 1e-8).all()


@pytest.mark.parametrize("name", sorted(PROFILES))
@pytest.mark.parametrize("side", [-1, pytest.param(1, marks=pytest.mark.slow)])
def test_outside_a_limit_it_moves_inwards_only(name: str, side: int):
    """ALOHA's sleeping pose lies on a limit, and an arm may hang beyond one after its power was cut."""
    of, dt = profile(name)
    bound = LOW if side < 0 else HIGH
    for start in (bound, bound + 0.05 * side):
        gate, at = Gate(of, dt), SetPoint.standing(start)
        for _ in range(100):
            at = keeps(gate, at, start + side, at.position, np.minimum(LOW, start), np.maximum(HIGH, start)).set_point
            assert np.array_equal(at.position, start)
        for k in range(1200):
            low, high = np.minimum(LOW, at.position), np.maximum(HIGH, at.position)
            at = keeps(gate, at, HOME if k < 50 else start + side, at.position, low, high).set_point
        assert at.stands
        assert (side * at.position <= side * start + 1e-8).all()


@pytest.mark.parametrize("name", sorted(PROFILES))
@pytest.mark.parametrize("side", [-1, 1])
def test_a_goal_that_moves_on_through_a_limit_is_left_in_time(name: str, side: int):
    """The set point is on the goal, at speed, when the way to the limit becomes too short to brake."""
    of, dt = profile(name)
    gate, at = Gate(of, dt), SetPoint.standing(np.zeros(J))
    speed = 0.7 * of.rates.velocity[0]
    start, tracked = 3 * (speed / of.rates.acceleration[0] + of.rates.acceleration[0] / of.rates.jerk[0]), 0
    for k in range(int((start + 2.5 / speed) / dt)):
        t = k * dt
        way = speed * (t - start / np.pi * np.sin(np.pi * t / start)) / 2 if t < start else speed * (t - start / 2)
        goal = np.full(J, side * way)
        goal[[6, 13]] = 0
        passed = keeps(gate, at, goal, at.position, LOW, HIGH)
        at, tracked = passed.set_point, tracked + (passed.factor == 1 and t > start)
    assert tracked > 10
    assert gate.counts["limit"]
    end = ends(at, gate).position
    assert (end >= LOW - 1e-8).all()
    assert (end <= HIGH + 1e-8).all()


@pytest.mark.parametrize("lag", [pytest.param(0.0, marks=pytest.mark.slow), 0.02])
@pytest.mark.parametrize("workspace", [False, True])
def test_a_smooth_feasible_trajectory_passes_as_it_is(lag: float, workspace: bool):
    """Nothing within limits is touched, up to 0.99 of the limit that it needs most of."""
    of = limits(workspace=SPACE._replace(low=np.full(3, -2.0), high=np.full(3, 2.0)) if workspace else None)
    rng, times = np.random.default_rng(3), np.arange(-3, 600) * DT
    for _ in range(examples(6) if not workspace else 2):
        shape, rate = rng.uniform(-0.3, 0.3, J), rng.uniform(0.2, 1.5)
        shape[[6, 13]] = 0.1
        s = np.clip(times / 0.5, 0, 1)[:, None]
        way = s**3 * (10 - 15 * s + 6 * s * s) * shape * (1 - np.cos(2 * np.pi * rate * times))[:, None] / 2
        demands = [np.abs(np.diff(way, n, axis=0)) / DT**n / limit for n, limit in enumerate(of.rates, start=1)]
        way *= min(1.0, 0.99 / max(demand.max() for demand in demands))  # every demand is proportional to it
        gate, at = Gate(of, DT, viperx() if workspace else None), SetPoint.standing(HOME)
        measured = HOME
        for goal in HOME + way[3:]:
            passed = keeps(gate, at, goal, measured, LOW, HIGH)
            assert (passed.factor, passed.reason) == (1.0, "")
            assert np.array_equal(passed.set_point.position, goal)
            at = passed.set_point
            measured = measured + (at.position - measured) * (DT / lag if lag else 1)
        assert not gate.counts


def outside(pose: np.ndarray, space: Workspace) -> float:
    """How far a pose is outside, written apart from the gate."""
    left, right = viperx()(pose[None])[:, 0]
    points = np.concatenate([left, right])
    worst = max((space.low - points).max(), (points - space.high).max()) + space.radius
    gap = min(float(np.linalg.norm(a - b)) for a in left for b in right)
    return max(worst, space.between_arms + 2 * space.radius - gap, 0.0)


CRAMPED = Workspace(np.array([-0.6, 0.2, 0.03]), np.array([0.6, 0.8, 0.6]), between_arms=0.2, radius=0.02)


@pytest.mark.parametrize(
    "space", [pytest.param(SPACE, id="space", marks=pytest.mark.slow), pytest.param(CRAMPED, id="cramped")]
)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_no_goal_leads_further_outside_the_workspace(space: Workspace, data: st.DataObject):
    seed = data.draw(st.integers(0, 2**32 - 1))
    kind = data.draw(st.sampled_from(GOALS))
    rng = np.random.default_rng(seed)
    name = ("fake", "slow_loop")[seed % 2]
    of, dt = profile(name, space)
    gate, goal = Gate(of, dt, viperx()), goals(kind, rng, dt)
    at = SetPoint.standing(HOME + (rng.normal(0, 0.3, J) * (np.arange(J) % 7 != 6) if seed % 3 else 0))
    low, high = np.minimum(LOW, at.position), np.maximum(HIGH, at.position)
    most = outside(at.position, space)
    if data.draw(st.booleans()):  # reach for the table and for the other arm
        deep = HOME + np.tile([0, 0.9, -0.2, 0, 0, 0, 0], 2)

        def goal(k: int) -> np.ndarray:
            return deep

    for k in range(50):
        at = keeps(gate, at, None if k % 23 == 22 else goal(k), at.position, low, high).set_point
        assert outside(at.position, space) <= most + 1e-9
        if k % 10 == 9:
            way = at
            while not way.stands:
                way = braked(way, of.rates, dt)
                assert outside(way.position, space) <= most + 1e-9


def command(**fields: object) -> Command:
    return Command(**{"target": HOME.copy(), "number": 1, "generation": 3, "age": 0.0} | fields)  # type: ignore[arg-type]


def reject(gate: Gate, sent: Command, first: bool = False) -> str:
    return gate.rejects(sent, SetPoint.standing(HOME), generation=3, validity=0.08, first=first)


HOSTILE = {  # reason -> fields of a command
    "": [{}, {"age": 0.08}, *({"target": HOME.astype(kind)} for kind in (np.float32, ">f8"))],
    "shape": [
        {"target": x} for x in (HOME[:-1], HOME[None], *map(HOME.astype, (int, object, complex)), HOME.tolist(), None)
    ],
    "not_finite": [{"target": np.full(J, np.nan)}, {"target": np.where(np.arange(J) == 5, -np.inf, HOME)}],
    "generation": [{"generation": x} for x in (2, 4, None)],
    "order": [{"number": x} for x in (-1, "7", None, float("nan"))],
    "age": [{"age": x} for x in (0.081, -0.081, float("nan"))],
}


@pytest.mark.parametrize(("reason", "fields"), [(reason, each) for reason, rows in HOSTILE.items() for each in rows])
def test_a_command_is_rejected_for_a_reason(reason: str, fields: dict[str, object]):
    gate = Gate(limits(), DT)
    assert reject(gate, command(**fields)) == reason
    assert dict(gate.counts) == ({reason: 1} if reason else {})
    assert not reason or reason in REJECTIONS
    for offset, first in ((0.099, ""), (0.101, "first"), (-0.101, "first")):  # the first one is near the set point
        near = np.where(np.arange(J) == 9, HOME + offset, HOME)
        assert reject(Gate(limits(), DT), command(target=near), first=True) == first
        assert reject(Gate(limits(), DT), command(target=near)) == ""


@pytest.mark.parametrize("end", ["low", "high"])
def test_a_gripper_that_eases_to_the_end_of_its_range_slows_no_joint(end: str):
    """Smooth targets within every limit, the last of them the limit itself."""
    of, dt = limits(), 0.005
    gate, grips, n = Gate(of, dt), list(GRIPPERS), 60
    target = getattr(of, end)[grips]
    at = SetPoint.standing(HOME)
    for k in range(n + 10):
        s = min((k + 1) / n, 1.0)
        goal = HOME + 0.2 * s**3 * (10 - 15 * s + 6 * s**2) * np.where(HOME > 0, -1, 1)
        goal[grips] = HOME[grips] + (target - HOME[grips]) * s**3 * (10 - 15 * s + 6 * s**2)
        passed = gate.step(at, goal, at.position)
        assert (passed.factor, passed.reason) == (1.0, ""), k
        at = passed.set_point
    np.testing.assert_array_equal(at.position[grips], target)


N = 400  # joints, each with limits and a state of its own
CLOSE = 1 + 1e-6


def states(seed: int, dt: float) -> tuple[Rates, SetPoint]:
    """Limits from a stiff gripper's to a first day's, and states within them: many near rest, at a turn, at a limit."""
    rng = np.random.default_rng(seed)
    velocity = 10 ** rng.uniform(-1, 1.2, N)
    acceleration = velocity * 10 ** rng.uniform(0, 3.5, N)
    rates = Rates(velocity, acceleration, acceleration * 10 ** rng.uniform(0.5, 4, N))
    share = rng.choice([-1.0, 1.0], (2, N)) * np.where(
        rng.random((2, N)) < 0.4, 10 ** rng.uniform(-6, 0, (2, N)), rng.random((2, N))
    )
    share[:, rng.random(N) < 0.1] = 0
    share[1, rng.random(N) < 0.2] = 0
    share[0, rng.random(N) < 0.1] = 1
    return rates, SetPoint(np.zeros(N), share[0] * velocity, share[1] * acceleration)


@pytest.mark.parametrize("dt", [0.002, 0.005, 0.02])
@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**32 - 1))
def test_braking_stands_in_time_within_every_limit_and_its_distance(dt: float, seed: int):
    rates, at = states(seed, dt)
    start = at
    speed = np.abs(start.velocity)
    turn = np.abs(start.acceleration) / rates.jerk
    longest = speed / rates.acceleration + 2 * turn + rates.acceleration / rates.jerk + 8 * dt
    longest += 4 * np.sqrt((speed + turn * np.abs(start.acceleration)) / rates.jerk)
    up = stopping_distance(start.velocity, start.acceleration, rates, dt)
    down = stopping_distance(-start.velocity, -start.acceleration, rates, dt)
    peak = [peak_speed(s * start.velocity, s * start.acceleration, rates, dt) for s in (1, -1)]
    fastest = np.maximum(speed, np.maximum(*peak)) * CLOSE + 1e-9
    took = np.zeros(N)
    for _ in range(int(longest.max() / dt) + 1):
        after = braked(at, rates, dt)
        assert (np.abs(after.acceleration) <= np.maximum(rates.acceleration, np.abs(start.acceleration)) * CLOSE).all()
        rounding = 1e-15 * (1 + np.abs(after.position)) / dt**3
        assert (np.abs(after.acceleration - at.acceleration) / dt <= rates.jerk * CLOSE + rounding).all()
        assert (np.abs(after.velocity) <= fastest).all()
        assert (after.position <= up * CLOSE + 1e-12).all()
        assert (-after.position <= down * CLOSE + 1e-12).all()
        took += dt * ((after.velocity != 0) | (after.acceleration != 0))
        at = after
    assert at.stands
    assert (took <= longest).all()
    assert np.array_equal(braked(at, rates, dt).position, at.position), "what stands stays"


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**32 - 1), dt=st.sampled_from([0.002, 0.005, 0.02]))
def test_the_bound_is_of_use(seed: int, dt: float):
    """A joint at full speed is given no more than 3 passes and half as much again as it needs."""
    rates, _ = states(seed, dt)
    start = SetPoint(np.zeros(N), rates.velocity.copy(), np.zeros(N))
    at = start
    while not at.stands:
        at = braked(at, rates, dt)
    bound = stopping_distance(start.velocity, start.acceleration, rates, dt)
    assert (bound <= 1.5 * at.position + 3 * rates.velocity * dt).all()


def test_a_jerk_that_outweighs_the_acceleration_does_not_end_braking_beyond_it():
    """A gripper of 1e7 jerk at 50 Hz: what counts as rest is measured against the smaller of the two limits."""
    rates = Rates(np.array([3.0]), np.array([0.3]), np.array([1e7]))
    at = SetPoint(np.zeros(1), np.array([0.009]), np.zeros(1))
    while not at.stands:
        at = braked(at, rates, 0.02)
        assert abs(at.acceleration[0]) <= 0.3 * CLOSE


def test_a_set_point_keeps_its_differences_and_a_joint_that_turns_round_does_not_stand():
    at = SetPoint.standing(np.array([1.0, 2.0])).to(np.array([1.1, 2.0]), 0.1)
    assert at.velocity == pytest.approx([1.0, 0.0])
    assert at.acceleration == pytest.approx([10.0, 0.0])
    assert SetPoint.standing(np.zeros(2)).stands
    assert not SetPoint(np.zeros(2), np.zeros(2), np.array([0.0, -5.0])).stands
