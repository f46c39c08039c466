"""Real ALOHAs: their specifications, the files and the experiment that are shipped, and a reset in them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from serl_chunk.config.loader import load_experiment
from serl_chunk.robots.registry import robot_spec
from serl_chunk.robots.served.robot import differing_fields
from serl_chunk.robots.served.task import Seen, make_expert
from serl_chunk_robot.robot_file.config import RobotFile, checked, load, load_driver

FILES = {"ros1": "aloha_ros1", "ros2": "aloha_ros2", "trossen": "trossen"}
FINGERS = np.isin(np.arange(14), (6, 13))


def file_of(arms: str) -> RobotFile:
    return load(Path(__file__).parents[2] / "experiments" / "robots" / f"{FILES[arms]}.toml")


@pytest.mark.parametrize("arms", FILES)
def test_the_specification_is_that_of_the_driver_and_the_file_is_the_experiments(arms):
    """Cameras, limits, and the poses that the file and the experiment lead to."""
    file, config = file_of(arms), load_experiment(f"aloha:{arms}")
    spec, driver = robot_spec(config.robot), load_driver(file).spec()
    assert differing_fields(spec, driver._asdict()) == []
    assert [name for name, _ in driver.state] == ["q"]
    for own, theirs, finger in ((spec.action_low, driver.low, 0.0), (spec.action_high, driver.high, 1.0)):
        np.testing.assert_array_equal(own, np.where(FINGERS, finger, theirs))
    assert (spec.control_hz, spec.action_dim, spec.state_dim, spec.dt) == (50.0, 14, 14, driver.tick)
    checked(file, driver)
    assert file.driver == FILES[arms]
    cameras = [(c.name, c.height, c.width) for c in spec.cameras]
    assert [(c.name, c.spec.height, c.spec.width) for c in file.cameras] == cameras
    assert config.agent.image_keys == tuple(c.name for c in spec.cameras)
    seen = Seen(file.reset[-1].joints, file.reset[-1].joints, {})
    expert = config.robot.expert(SimpleNamespace(robot_spec=spec, seen=lambda: seen))
    for name in ("first_day", "exploring", "evaluating"):
        limits = file.profiles[name].limits
        for pose in (file.park, file.reset[-1].joints, *expert._keyframes, spec.action_low, spec.action_high):
            assert (limits.low <= pose).all()
            assert (pose <= limits.high).all()


@pytest.mark.parametrize("arms", FILES)
def test_the_demonstrator_succeeds_from_the_start_of_an_episode(arms):
    """On a robot that is where its last target was, and faster than the demonstrator."""
    config = load_experiment(f"aloha:{arms}")
    q = file_of(arms).reset[-1].joints.copy()
    robot = SimpleNamespace(robot_spec=robot_spec(config.robot), seen=lambda: Seen(q, q, {}))
    expert = make_expert(config.robot, robot)
    expert.reset(3)
    speeds = [0.0]  # rad/s, of the fastest joint
    while not config.outcome.success({"state": q.astype(np.float32)}):
        action = expert.act().astype(np.float64)
        speeds.append(float(np.abs((action - q)[~FINGERS]).max()) / 0.02)
        assert len(speeds) < config.robot.max_episode_steps
        q = action
    assert 0.3 < max(speeds) < expert.SPEED + 1e-3
    assert np.abs(np.diff(speeds)).max() < 2 * expert.ACCELERATION * 0.02
    q[6] = 1.0
    assert not config.outcome.success({"state": q.astype(np.float32)})
