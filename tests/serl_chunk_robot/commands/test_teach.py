"""`robot teach`: limits from arms that a person moves, here by changing where simulated arms without torque lie."""

from __future__ import annotations

import numpy as np
import pytest
from robot_simulated_time import simulated

from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.commands.teach import extremes, taught, write_taught
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.config import load, load_driver

FILE = 'name = "cell_3"\nrate = 50\n# a comment\n[driver]\nname = "fake"\narms = 1\n'


@pytest.fixture
def robot(tmp_path):
    path = tmp_path / "robot.toml"
    path.write_text(FILE + '[profile.evaluating]  # ours\nvelocity = 1.0\n[profile.careful]\nlike = "evaluating"\n')
    file = load(path)
    arms = load_driver(file)
    with simulated(file, arms) as server:
        for _ in range(5):
            server.advance()
        yield file, arms, server


def without_torque(server):
    operator = server.client("operator")
    operator.request("clear")
    operator.request("torque_off")
    for _ in range(5):
        server.advance()
    return operator


def lead(arms, low, high):
    """Move the arms between two poses, to and fro, as passes go by."""
    passes = iter(range(100_000))

    def each(state):
        share = 0.5 - 0.5 * np.cos(next(passes) * 0.02)
        arms._rest = arms.q = low + (high - low) * share

    return each


def test_the_extremes_become_limits_of_every_profile(robot):
    file, arms, server = robot
    client = without_torque(server)
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
    with pytest.raises(ConfigError, match="not overwritten"):
        write_taught(file, spec, low, most, out)
    with pytest.raises(ConfigError, match="has low or high already"):
        write_taught(made, spec, low, most, file.path.with_name("again.toml"))
    with pytest.raises(ConfigError, match="another folder"):
        write_taught(file, spec, low, most, file.path.parent.parent / "taught.toml")


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
        operator.request("torque_off")
        server.each_pass = lambda state: None
        for _ in range(5):
            server.advance()
        passes = iter(range(1000))
        server.each_pass = lambda state, happens=happens, passes=passes: happens() if next(passes) == 20 else None
        with pytest.raises(RobotError, match=named):
            extremes(operator, 20.0, lambda line: None)
        server.each_pass = lambda state: None
        if named == "torque on":
            operator.request("clear")
