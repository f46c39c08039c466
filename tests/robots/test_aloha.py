"""Real ALOHAs: their specifications, the files and the experiment that are shipped, and a reset in them."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from driver_rigs import RIGS, WITHIN, Served

from serl_chunk.config.loader import load_experiment
from serl_chunk.config.robots import AlohaConfig
from serl_chunk.robots.registry import robot_spec
from serl_chunk.robots.served.robot import _compared
from serl_chunk.robots.served.task import Seen, make_expert
from serl_chunk_robot.robot_file.config import RobotFile, checked, load, load_driver
from serl_chunk_robot.server.serve import Motions

ROBOTS = Path(__file__).parents[2] / "experiments" / "robots"
FILES = {"ros1": "aloha_ros1", "ros2": "aloha_ros2", "trossen": "trossen"}
FINGERS = [6, 13]


def file_of(arms: str) -> RobotFile:
    return load(ROBOTS / f"{FILES[arms]}.toml")


@pytest.mark.parametrize("arms", FILES)
def test_the_specification_is_that_of_the_driver(arms):
    driver = load_driver(file_of(arms)).spec()
    spec = robot_spec(AlohaConfig(arms=arms, server="127.0.0.1"))
    assert _compared(spec, driver._asdict(), "127.0.0.1") == ["q"]
    joints = [i for i in range(14) if i not in FINGERS]
    assert [spec.action_low[i] for i in joints] == [driver.low[i] for i in joints]
    assert [spec.action_high[i] for i in joints] == [driver.high[i] for i in joints]
    assert {spec.action_low[i] for i in FINGERS} == {0.0}
    assert {spec.action_high[i] for i in FINGERS} == {1.0}
    assert (spec.control_hz, spec.action_dim, spec.state_dim) == (50.0, 14, 14)
    assert driver.tick == spec.dt


@pytest.mark.parametrize("arms", FILES)
def test_the_file_and_the_experiment_are_of_one_robot(arms):
    """Cameras, limits, and the poses that the file and the experiment lead to."""
    file, config = file_of(arms), load_experiment(f"aloha:{arms}")
    spec, driver = robot_spec(config.robot), load_driver(file).spec()
    checked(file, driver)
    assert file.driver == FILES[arms]
    assert [(c.name, c.spec.height, c.spec.width) for c in file.cameras] == [
        (c.name, c.height, c.width) for c in spec.cameras
    ]
    assert config.agent.image_keys == tuple(c.name for c in spec.cameras)
    poses = [file.park, file.reset[-1].joints]
    seen = Seen(file.reset[-1].joints, file.reset[-1].joints, {})
    expert = config.robot.expert(SimpleNamespace(robot_spec=spec, seen=lambda: seen))
    poses += expert._keyframes
    for name in ("first_day", "exploring", "evaluating"):
        limits = file.profiles[name].limits
        assert all((limits.low <= pose).all() and (pose <= limits.high).all() for pose in poses)
        assert (limits.low <= spec.action_low).all()
        assert (spec.action_high <= limits.high).all()


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
        speeds.append(float(np.abs(np.delete(action - q, FINGERS)).max()) / 0.02)
        assert len(speeds) < config.robot.max_episode_steps
        q = action
    assert 0.3 < max(speeds) < expert.SPEED + 1e-3
    assert np.abs(np.diff(speeds)).max() < 2 * expert.ACCELERATION * 0.02
    q[6] = 1.0
    assert not config.outcome.success({"state": q.astype(np.float32)})


@pytest.mark.slow
@pytest.mark.parametrize("arms", FILES)
def test_a_whole_reset_and_the_way_to_park(arms, monkeypatch):
    """From where the simulated arms begin, under the file's profile of evaluations."""
    monkeypatch.setattr("serl_chunk_robot.server.serve._beep", lambda: None)
    file = file_of(arms)
    with RIGS[FILES[arms]]() as rig:
        rig.connect()
        served = Served(rig)
        served.loop.limit(file.profiles["evaluating"].limits)
        served.hold()
        motions = Motions(file, rig.driver)
        for event, place in (("reset", file.reset[-1].joints), ("park", file.park)):
            motion = motions(event, {}, served.loop.set_point, file.profiles["evaluating"].limits)
            by = {"reset": "controller", "park": "operator"}[event]
            served.loop.request(event, by, "A", time.monotonic(), motion=motion)
            served.run(lambda: served.loop.machine.state == "HOLD", 3 * WITHIN)
            assert served.loop.machine.word == "the motion is done"
            served.passes(20)
            np.testing.assert_allclose(rig.read().q, place, atol=0.01)
        rig.driver.close()
