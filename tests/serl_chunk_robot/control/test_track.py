"""Motions of the server's own, and how the set point follows the targets of commands."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from robot_limits import GRIPPERS, HIGH, HOME, LOW, J, limits
from robot_world import DT, TICK, Way, World, speed

from serl_chunk_robot.control.loop import Refused, Resistance
from serl_chunk_robot.safety.motion import SetPoint

JOINTS = [j for j in range(J) if j not in GRIPPERS]


# Motions.


def test_a_motion_that_is_given_up_brakes_to_hold():
    world = World().ready()
    world.ask("reset", "controller", motion=Way(HOME + 0.3, passes=30))
    world.run(30)
    assert np.abs(speed(world)).max() > 0.5
    began = len(world.arms.sent)
    assert world.until("HOLD") < 60
    slowing = np.diff(world.arms.sent[began - 2 :], 2, axis=0) / DT**2
    assert (np.abs(slowing) <= world.limits.rates.acceleration * (1 + 1e-6)).all(), "it brakes before it stands"


class Failing:
    """A motion that fails after a while."""

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
    way: Callable[[float], np.ndarray], ticks: int, world: World, late: Callable[[int], int] = lambda k: 0,
    lag: float = 0.0,
):  # fmt: skip
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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("late", "lag"), [(0, 0.0), (1, 0.0), (0, 0.002)], ids=["on time", "jitter", "late passes"])
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
