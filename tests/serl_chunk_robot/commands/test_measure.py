"""Delays of arms and cameras, and limits taught by hand, measured with simulated ones whose own are known."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from robot_limits import HOME, limits
from robot_simulated_time import simulated
from robot_world import World

from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.commands.measure import Recording, camera_latency, motion_lag, record, report
from serl_chunk_robot.commands.teach import extremes, taught, write_taught
from serl_chunk_robot.control.motions import LONGEST_SWING, Oscillation
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.config import load, load_driver

JOINT = 1


def swing(world: World, angle: float = 0.05, **more) -> Oscillation:
    return Oscillation(HOME, JOINT, angle, world.limits, stands=0.0, **more)


@functools.cache
def recorded(lag: float, latency: float, noise: float = 0.0, rate: float = 30.0) -> Recording:
    """A swing of simulated arms, and a camera whose stamps are late. `noise`: of its pictures, of 255."""
    world = World(lag=lag).ready()
    world.ask("jog", "operator", motion=swing(world))
    rows = []
    while world.state == "MOVE":
        status = world.run()
        rows.append((status.moment, status.set_point[JOINT], status.reading.stamp, status.reading.q[JOINT]))
    assert world.state == "HELD"
    moments, set_point, stamps, q = np.array(rows).T
    rng = np.random.default_rng(0)
    taken = np.arange(moments[0] + 0.1, moments[-1], 1 / rate) + rng.uniform(0, 0.003, 1)
    bars = 10 * (np.interp(taken - latency, stamps, q) - q[0])  # where an edge is, share of the width
    pictures = [(np.arange(160) / 160 < 0.5 + bar) * 200.0 + rng.normal(0, noise, (30, 160)) for bar in bars]
    changes = [float(np.abs(b - a).mean()) for a, b in itertools.pairwise(pictures)]
    seen = list(zip(taken, taken[1:], changes, strict=False))
    return Recording(moments, set_point, stamps, q, {"top": seen}, {"top": [0.01] * len(seen)})


@pytest.mark.parametrize(
    ("lag", "latency", "noise"), [(0.04, 0.08, 2.0), pytest.param(0.01, 0.2, 1.0, marks=pytest.mark.slow)]
)
def test_a_motion_lag_and_a_camera_latency_are_measured_to_10_ms(lag, latency, noise):
    recording = recorded(lag, latency, noise)
    motion, camera = motion_lag(recording), camera_latency(recording, "top")
    assert motion.seconds == pytest.approx(lag, abs=0.01)
    assert camera.seconds == pytest.approx(latency, abs=0.01)
    assert motion.uncertainty < 0.01
    assert camera.uncertainty < 0.02
    lines = report(recording)
    assert "`following`" in lines[0]
    assert f"{1e3 * camera.seconds:.1f} ms +- " in lines[1]
    assert f"`latency` in the [[camera]] table of its device: {camera.seconds:.3f}" in lines[1]


def test_a_camera_that_does_not_show_the_joint_is_named():
    recording = recorded(0.04, 0.08, 2.0)
    rng = np.random.default_rng(0)
    noise = [(a, b, float(x)) for (a, b, _), x in zip(recording.pictures["top"], rng.random(10**4), strict=False)]
    recording = recording._replace(pictures={"top": noise, "left": noise[:5]}, ages={"top": [0.0], "left": [0.0]})
    assert [camera_latency(recording, name) for name in ("top", "left")] == [None, None]
    assert "camera left  does not show the motion" in report(recording)[2]


@pytest.mark.parametrize(("joint", "angle", "parameter", "named"), [
    (14, 0.05, "joint", "0 to 13"), (1, np.nan, "angle", "finite"), (1, 3.0, "angle", "within the profile"),
    (1, 0.3, "angle", f"expected {LONGEST_SWING:g} s"),
])  # fmt: skip
def test_a_swing_that_cannot_be_is_refused_before_anything_moves(joint, angle, parameter, named):
    of = limits(0.01 if angle == 0.3 else 3.2)
    with pytest.raises(ConfigError, match=named) as raised:
        Oscillation(HOME, joint, angle, of)
    assert raised.value.parameter == parameter


def test_a_swing_of_a_served_robot_is_recorded_or_refused(tmp_path):
    path = tmp_path / "robot.toml"
    path.write_text('name = "cell"\nstart = "evaluating"\nrate = 100\n[driver]\nname = "fake"\nlag = 0.04\n')
    file = load(path)
    with simulated(file, load_driver(file)) as server:
        operator, machine = server.client("operator"), server.server.loop.machine
        operator.request("clear")
        recording = record(operator, JOINT, 0.05, [], machine.generation)
        assert motion_lag(recording).seconds == pytest.approx(0.04, abs=0.01)
        with pytest.raises(RobotError, match="angle"):
            record(operator, JOINT, 3.0, [], machine.generation)


FILE = 'name = "cell_3"\nrate = 50\n# a comment\n[driver]\nname = "fake"\narms = 1\n'


@pytest.fixture
def robot(tmp_path):
    path = tmp_path / "robot.toml"
    path.write_text(FILE + '[profile.evaluating]  # ours\nvelocity = 1.0\n[profile.careful]\nlike = "evaluating"\n')
    file = load(path)
    arms = load_driver(file)
    with simulated(file, arms) as server:
        yield file, arms, server


def without_torque(server, operator):
    operator.request("torque_off")
    server.each_pass = lambda state: None
    for _ in range(5):
        server.advance()


def lead(arms, low, high):
    passes = iter(range(100_000))

    def each(state):
        share = 0.5 - 0.5 * np.cos(next(passes) * 0.02)
        arms._rest = arms.q = low + (high - low) * share

    return each


def test_the_extremes_become_limits_of_every_profile(robot):
    file, arms, server = robot
    client = server.client("operator")
    client.request("clear")
    without_torque(server, client)
    start = arms.q.copy()
    high = start + np.array([0.5, 0.4, 0.3, 0.6, 0.5, 0.02, 0.4])
    server.each_pass = lead(arms, start, high)
    low, most = extremes(client, 20.0, lambda line: None)
    np.testing.assert_allclose(low, start, atol=0.01)
    np.testing.assert_allclose(most, high, atol=0.01)
    spec = arms.spec()
    low, most, still = taught(file, spec, low, most, 0.05)
    assert still == [5]  # which hardly moved
    assert low[5] == spec.low[5]
    np.testing.assert_allclose(low[:5], start[:5] + 0.05, atol=0.01)
    np.testing.assert_allclose(most[6], high[6], atol=0.01)  # no margin of a gripper
    out = file.path.with_name("taught.toml")
    names = write_taught(file, spec, np.round(low, 4), np.round(most, 4), out)
    assert sorted(names) == ["careful", "evaluating", "exploring", "first_day", "teleop"]
    made = load(out)
    assert made.profiles["careful"].limits.rates.velocity[0] == 1.0  # what the file had is kept
    assert "# a comment" in out.read_text()
    for of, to, named in (
        (file, out, "not overwritten"),
        (made, file.path.with_name("again.toml"), "has low or high already"),
        (file, file.path.parent.parent / "taught.toml", "another folder"),
    ):
        with pytest.raises(ConfigError, match=named):
            write_taught(of, spec, low, most, to)


def test_arms_with_torque_or_that_are_not_measured_are_not_taught(robot):
    file, arms, server = robot
    with pytest.raises(ConfigError, match="no joint was moved"):
        taught(file, arms.spec(), arms.q, arms.q + 0.1, 0.05)
    operator = server.client("operator")
    for prepare in (lambda: None, lambda: operator.request("clear")):
        prepare()
        with pytest.raises(RobotError, match="torque on"):
            extremes(operator, 1.0, lambda line: None)

    def jump():
        arms._rest = arms.q = arms.q + 1.0 * (np.arange(7) == 0)

    for happens, named in ((arms.clear_faults, "torque on"), (jump, "jumped")):
        without_torque(server, operator)
        passes = iter(range(1000))
        server.each_pass = lambda state, happens=happens, passes=passes: happens() if next(passes) == 20 else None
        with pytest.raises(RobotError, match=named):
            extremes(operator, 20.0, lambda line: None)
        if named == "torque on":
            operator.request("clear")
