"""What the gate lets through: whatever the goals and the arms, every limit holds in every pass."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from robot_limits import HIGH, HOME, LOW, SPACE, J, limits, viperx

from serl_chunk_robot.safety.gate import REJECTIONS, SLOWED, Command, Gate, Passed
from serl_chunk_robot.safety.limits import Limits, Workspace
from serl_chunk_robot.safety.motion import SetPoint, braked, stopping_distance

DT = 0.005
CLOSE = 1 + 1e-6
PROFILES = {  # velocity, acceleration, jerk, seconds of a pass
    "fake": (3.2, 40.0, 4000.0, 0.005),
    "first_day": (0.5, 4.0, 60.0, 0.005),
    "stiff": (6.0, 400.0, 1e5, 0.002),
    "slow_loop": (2.0, 15.0, 300.0, 0.02),
}
GOALS = ("jumps", "extremes", "beyond", "smooth", "noise", "held", "huge")


def profile(name: str, workspace: Workspace | None = None) -> tuple[Limits, float]:
    v, a, j, dt = PROFILES[name]
    return limits(v, a, j, workspace), dt


def goals(kind: str, rng: np.random.Generator, dt: float) -> Callable[[int], np.ndarray]:
    """The goal of each pass."""
    held = rng.uniform(LOW, HIGH)
    phase, size = rng.uniform(0, 6.28, J), rng.uniform(0.1, 2)

    def goal(k: int) -> np.ndarray:
        nonlocal held
        if kind == "jumps" and k % 20 == 0:
            held = rng.uniform(LOW, HIGH)
        elif kind == "extremes":
            held = (LOW, HIGH)[k // rng.integers(1, 9) % 2]
        elif kind == "beyond" and k % 30 == 0:
            held = rng.uniform(LOW - 2, HIGH + 2)
        elif kind == "smooth":
            held = HOME + size * np.sin(2 * k * dt + phase)
        elif kind == "noise" and k % 4 == 0:
            held = held + rng.normal(0, 0.05, J)
        elif kind == "huge":
            held = rng.choice([-1e300, -3.0, 0.0, 3.0, 1e300], J)
        return held

    return goal


def keeps(gate: Gate, at: SetPoint, goal: np.ndarray | None, measured: np.ndarray, low: np.ndarray, high: np.ndarray):
    """One pass, and what must hold of it."""
    rates, dt = gate.limits.rates, gate.dt
    passed = gate.step(at, goal, measured)
    now = passed.set_point
    rounding = 2e-15 * (1 + np.abs(now.position)) / dt**3
    assert np.isfinite(now.position).all()
    assert (np.abs(now.velocity) <= rates.velocity * CLOSE).all()
    assert (np.abs(now.acceleration) <= rates.acceleration * CLOSE).all()
    assert (np.abs(now.acceleration - at.acceleration) / dt <= rates.jerk * CLOSE + rounding).all()
    assert (now.position >= low - 1e-8).all()
    assert (now.position <= high + 1e-8).all()
    assert np.array_equal((now.position - at.position) / dt, now.velocity)
    brake = braked(at, rates, dt).position
    if goal is None:
        assert np.array_equal(now.position, brake)
        return passed
    assert 0 <= passed.factor <= 1
    clipped = np.clip(goal, np.minimum(gate.limits.low, at.position), np.maximum(gate.limits.high, at.position))
    assert now.position == pytest.approx(brake + passed.factor * (clipped - brake), abs=1e-12)
    assert (passed.reason != "") == (passed.factor < 1 or not np.array_equal(clipped, goal))
    assert passed.reason in ("", *SLOWED)
    return passed


def ends(at: SetPoint, gate: Gate) -> SetPoint:
    """Where braking from `at` ends."""
    while not at.stands:
        at = braked(at, gate.limits.rates, gate.dt)
    return at


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
@pytest.mark.parametrize("side", [-1, 1])
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
    gate, at = Gate(of, dt), SetPoint.standing(HOME)
    rates = of.rates
    if moving:  # from the middle of other motion
        goal = goals("jumps", rng, dt)
        for k in range(60):
            at = gate.step(at, goal(k), at.position).set_point
    start = ends(at, gate).position
    target = np.clip(start + rng.uniform(-1, 1, J) * 10**size, LOW, HIGH)
    way = np.abs(target - at.position).max() + 0.1 * moving
    v, a, j = (x[0] for x in rates)
    longest = 1 + 3 * (way / v + v / a + a / j + 2 * np.sqrt(way / a) + 4 * np.cbrt(way / j)) + 200 * dt
    side = np.sign(target - start)
    beyond = np.zeros(J)
    for _ in range(int(longest / dt)):
        at = keeps(gate, at, target, at.position, LOW, HIGH).set_point
        beyond = np.maximum(beyond, side * (at.position - target))
        if at.stands and np.abs(at.position - target).max() <= 1e-8:
            break
    assert at.position == pytest.approx(target, abs=1e-8)
    assert at.stands
    if not moving:  # no further than a goal within the jerk of one pass takes it
        assert (beyond <= rates.jerk * dt**3 + 1e-8).all()
    for _ in range(20):
        passed = keeps(gate, at, target, at.position, LOW, HIGH)
        assert np.abs(passed.set_point.position - target).max() <= 1e-8
        assert passed.factor == 1
        at = passed.set_point


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_goal_that_moved_and_stops_abruptly_is_passed_once(name: str):
    of, dt = profile(name)
    gate, at = Gate(of, dt), SetPoint.standing(np.zeros(J))
    speed = 0.8 * of.rates.velocity[0]
    offsets, k = [], 0
    passes = int(1.0 / speed / dt)
    while k < 40 * passes + 2000 and not (k > passes and at.stands):
        goal = np.full(J, min(k, passes) * speed * dt * 0.9)
        goal[[6, 13]] = 0
        at = keeps(gate, at, goal, at.position, LOW, HIGH).set_point
        k += 1
        offsets.append(at.position[0] - goal[0])
    assert at.stands
    assert abs(offsets[-1]) <= 1e-8
    signs = np.sign([x for x in offsets[passes:] if abs(x) > 1e-6])
    assert np.count_nonzero(np.diff(signs)) <= 1
    braking = stopping_distance(np.array([0.9 * speed]), np.zeros(1), type(of.rates)(*(x[:1] for x in of.rates)), dt)
    assert max(offsets[passes:]) <= 1.5 * braking[0] + 1e-3


def commands_of(way: Callable[[float], np.ndarray], seconds: float, hermite: bool) -> np.ndarray:
    """A goal per pass, from commands at 50 Hz."""
    times = np.arange(0, seconds, DT)
    tick = 0.02
    k = np.floor(times / tick + 1e-9)
    s = (times - k * tick)[:, None] / tick
    at = [np.stack([way((i + n) * tick) for i in k]) for n in (-1, 0, 1, 2)]
    if not hermite:
        return at[1] + s * (at[2] - at[1])
    before, after = (at[2] - at[0]) / 2, (at[3] - at[1]) / 2
    return (
        (1 + 2 * s) * (1 - s) ** 2 * at[1]
        + s * (1 - s) ** 2 * before
        + s**2 * (3 - 2 * s) * at[2]
        + s**2 * (s - 1) * after
    )


@pytest.mark.parametrize("hermite", [False, True])
@pytest.mark.parametrize("lag", [0.0, 0.02])
@pytest.mark.parametrize("workspace", [False, True])
def test_a_smooth_feasible_trajectory_passes_as_it_is(hermite: bool, lag: float, workspace: bool):
    """What the interpolation leaves within limits is not touched, up to 0.99 of the limit that it needs most of."""
    of = limits(workspace=SPACE._replace(low=np.full(3, -2.0), high=np.full(3, 2.0)) if workspace else None)
    rng = np.random.default_rng(3)
    rates = of.rates
    for _ in range(examples(6) if not workspace else 2):
        shape, rate = rng.uniform(-0.3, 0.3, J), rng.uniform(0.2, 1.5)
        shape[[6, 13]] = 0.1

        def way(t: float, size: float = 1.0, shape: np.ndarray = shape, rate: float = rate) -> np.ndarray:
            return HOME + size * shape * (1 - np.cos(2 * np.pi * rate * max(t, 0.0))) / 2

        def demand(size: float) -> float:
            path = np.concatenate([[HOME] * 3, commands_of(lambda t: way(t, size), 3.0, hermite)])
            return max(
                (np.abs(np.diff(path, n, axis=0)) / DT**n / limit).max() for n, limit in enumerate(rates, start=1)
            )

        size = min(1.0, 0.99 / demand(1.0))  # every demand is proportional to it
        gate, at = Gate(of, DT, viperx() if workspace else None), SetPoint.standing(HOME)
        measured = HOME
        for goal in commands_of(functools.partial(way, size=size), 3.0, hermite):
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


@pytest.mark.parametrize("space", [SPACE, CRAMPED], ids=["space", "cramped"])
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


@pytest.mark.parametrize("joint", [1, 8])
def test_it_comes_to_rest_at_the_edge_of_the_workspace(joint: int):
    of = limits(workspace=SPACE)
    gate, at = Gate(of, DT, viperx()), SetPoint.standing(HOME)
    goal = HOME.copy()
    goal[joint] += 1.5
    for _ in range(600):
        at = keeps(gate, at, goal, at.position, LOW, HIGH).set_point
    before = at.position
    for _ in range(100):
        at = keeps(gate, at, goal, at.position, LOW, HIGH).set_point
    assert np.abs(at.position - before).max() < 1e-3
    assert -0.005 < gate._outside(at.position[None])[0] <= 1e-9, "near the edge, not beyond"
    assert gate.counts["workspace"] > 100
    for _ in range(600):
        at = keeps(gate, at, HOME, at.position, LOW, HIGH).set_point
    assert at.position == pytest.approx(HOME, abs=1e-6)


def test_arms_that_meet_keep_their_distance():
    space = Workspace(np.full(3, -2.0), np.full(3, 2.0), between_arms=0.1, radius=0.05)
    gate, at = Gate(limits(workspace=space), DT, viperx()), SetPoint.standing(HOME)
    reach = HOME + np.tile([0, 1.1, -0.9, 0, 0, 0, 0], 2)
    gaps = []
    for _ in range(600):
        at = keeps(gate, at, reach, at.position, LOW, HIGH).set_point
        left, right = viperx()(at.position[None])[:, 0]
        gaps.append(np.linalg.norm(left[:, None] - right, axis=-1).min())
    assert min(gaps) >= 0.2 - 1e-9
    assert gaps[-1] < 0.21


def test_a_blocked_joint_stops_all_joints():
    gate, at = Gate(limits(), DT), SetPoint.standing(HOME)
    goal = HOME + 0.6 * np.tile([1, 1, -1, 1, 1, 1, 0], 2)
    for _ in range(600):
        measured = at.position.copy()
        measured[3] = HOME[3]
        at = keeps(gate, at, goal, measured, LOW, HIGH).set_point
    assert at.stands
    assert 0.3 <= at.position[3] - HOME[3] < 0.5
    assert at.position[0] - HOME[0] == pytest.approx(at.position[3] - HOME[3], rel=0.05), "all by one factor"
    assert gate.counts["following"] > 100
    for _ in range(400):
        measured = at.position.copy()
        measured[3] = HOME[3]
        at = keeps(gate, at, HOME, measured, LOW, HIGH).set_point
    assert at.position == pytest.approx(HOME, abs=1e-6), "and it may go back"


def test_a_joint_that_is_held_away_and_need_not_move_stops_none():
    gate, at = Gate(limits(), DT), SetPoint.standing(HOME)
    goal, measured = HOME.copy(), HOME.copy()
    goal[1] += 0.2
    measured[3] += 0.5
    for _ in range(400):
        measured[1] = at.position[1]
        at = keeps(gate, at, goal, measured, LOW, HIGH).set_point
    assert at.position == pytest.approx(goal, abs=1e-8)


def command(**fields: object) -> Command:
    return Command(**{"target": HOME.copy(), "number": 1, "generation": 3, "age": 0.0} | fields)  # type: ignore[arg-type]


def reject(gate: Gate, sent: Command, first: bool = False) -> str:
    return gate.rejects(sent, SetPoint.standing(HOME), generation=3, validity=0.08, first=first)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        ({"target": HOME.astype(np.float32)}, ""),
        ({"target": HOME.astype(">f8")}, ""),
        ({"target": HOME[:-1]}, "shape"),
        ({"target": HOME[None]}, "shape"),
        ({"target": HOME.astype(int)}, "shape"),
        ({"target": HOME.astype(object)}, "shape"),
        ({"target": HOME.astype(complex)}, "shape"),
        ({"target": HOME.tolist()}, "shape"),
        ({"target": None}, "shape"),
        ({"target": np.full(J, np.nan)}, "not_finite"),
        ({"target": np.where(np.arange(J) == 5, -np.inf, HOME)}, "not_finite"),
        ({"generation": 2}, "generation"),
        ({"generation": 4}, "generation"),
        ({"generation": None}, "generation"),
        ({"number": -1}, "order"),
        ({"number": "7"}, "order"),
        ({"number": None}, "order"),
        ({"number": float("nan")}, "order"),
        ({"age": 0.081}, "age"),
        ({"age": -0.081}, "age"),
        ({"age": float("nan")}, "age"),
        ({"age": 0.08}, ""),
    ],
)
def test_a_command_is_rejected_for_a_reason(fields: dict[str, object], reason: str):
    gate = Gate(limits(), DT)
    assert reject(gate, command(**fields)) == reason
    assert dict(gate.counts) == ({reason: 1} if reason else {})
    assert not reason or reason in REJECTIONS


@pytest.mark.parametrize(("offset", "reason"), [(0.099, ""), (0.101, "first"), (-0.101, "first")])
def test_the_first_command_is_near_the_set_point(offset: float, reason: str):
    target = HOME.copy()
    target[9] += offset
    gate = Gate(limits(), DT)
    assert reject(gate, command(target=target), first=True) == reason
    assert reject(gate, command(target=target, number=2)) == ""


def test_numbers_rise_and_begin_anew_with_each_controller():
    gate = Gate(limits(), DT)
    assert [reject(gate, command(number=n)) for n in (5, 5, 4, 9)] == ["", "order", "order", ""]
    assert reject(gate, command(number=10, generation=0)) == "generation"
    assert reject(gate, command(number=10)) == "", "a rejected command takes no number"
    gate.begin()
    assert reject(gate, command(number=0)) == ""
    assert dict(gate.counts) == {"order": 2, "generation": 1}


def test_slowed_passes_are_counted_by_reason():
    gate, at = Gate(limits(), DT), SetPoint.standing(HOME)
    passes: list[Passed] = []
    for _ in range(300):
        passes.append(gate.step(at, HOME + 2.0, at.position))
        at = passes[-1].set_point
    for reason in ("jerk", "acceleration", "velocity", "limit"):
        assert gate.counts[reason] == sum(p.reason == reason for p in passes) > 0


def test_a_goal_that_the_caller_changes_in_place_is_another_goal():
    gate, same = Gate(limits(), DT), Gate(limits(), DT)
    goal, a, b = HOME.copy(), SetPoint.standing(HOME), SetPoint.standing(HOME)
    for _ in range(100):
        goal += 0.004
        a, b = gate.step(a, goal, a.position).set_point, same.step(b, goal.copy(), b.position).set_point
        assert np.array_equal(a.position, b.position)


def test_a_workspace_without_arms_is_refused():
    with pytest.raises(ValueError, match="kinematics"):
        Gate(limits(workspace=SPACE), DT)
