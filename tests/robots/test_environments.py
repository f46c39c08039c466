"""What holds for every simulated environment, its specification and its demonstrator."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium
import libero_stand_in
import numpy as np
import pytest
import robosuite_stand_in
from actor_helpers import LineEnv
from demonstrations import finish, started
from errors import naming
from gymnasium.utils.env_checker import check_env

from serl_chunk.config.loader import load_experiment
from serl_chunk.config.robots import (
    AlohaConfig,
    AlohaSimConfig,
    FakeAlohaConfig,
    FakeSingleArmConfig,
    GymConfig,
    LiberoConfig,
    OgbenchConfig,
    RobomimicConfig,
    RobotConfig,
)
from serl_chunk.robots.arms import aloha_arms, fake_aloha_arms, kinematics_of
from serl_chunk.robots.fake import kinematics as fake
from serl_chunk.robots.registry import make_env, make_expert, robot_spec
from serl_chunk.robots.served import task as served_task
from serl_chunk.robots.served.robot import differing_fields
from serl_chunk.robots.served.task import Seen
from serl_chunk.types import ConfigError, DataError, RobotSpec
from serl_chunk_robot.robot_file.config import RobotFile, checked, load, load_driver

MUJOCO = ("aloha_sim", "aloha_sim insertion", "ogbench")
LIMIT = 3


class Case(NamedTuple):
    config: RobotConfig
    numbers: tuple[int, int, float]  # of an action, of a state, Hz
    grippers: tuple[int, ...]
    cameras: tuple[str, ...]


FEW: dict[str, Any] = {"max_episode_steps": LIMIT, "image_size": 16}
CASES = {
    "fake_aloha": Case(FakeAlohaConfig(**FEW), (14, 23, 50.0), (6, 13), ("top", "left_wrist", "right_wrist")),
    "fake_single_arm": Case(FakeSingleArmConfig(**FEW), (7, 15, 10.0), (6,), ("side", "wrist")),
    "aloha_sim": Case(AlohaSimConfig(cameras=("top", "angle"), **FEW), (14, 21, 50.0), (6, 13), ("top", "angle")),
    "aloha_sim insertion": Case(
        AlohaSimConfig(env_name="insertion", cameras=("top",), **FEW), (14, 28, 50.0), (6, 13), ("top",)
    ),
    "ogbench": Case(OgbenchConfig(**FEW), (5, 28, 20.0), (4,), ("front",)),
    "robomimic": Case(RobomimicConfig(**FEW), (7, 19, 20.0), (6,), ("agentview",)),
    "libero": Case(LiberoConfig(**FEW), (7, 8, 20.0), (6,), ("agentview", "robot0_eye_in_hand")),
}
STAND_INS = {"robomimic": robosuite_stand_in, "libero": libero_stand_in}


def needs(name: str) -> None:
    # Looked up, not imported: how MuJoCo renders is fixed by its first import.
    package = {"ogbench": "ogbench"}.get(name, "gym_aloha" if name in MUJOCO else "")
    if package and not (importlib.util.find_spec("mujoco") and importlib.util.find_spec(package)):
        pytest.skip(f"{package} is not installed")


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=pytest.mark.system if n == "ogbench" else ()) for n in CASES]
)
def case(request):
    needs(request.param)
    return CASES[request.param]


@pytest.fixture(scope="module")
def env(case):
    with pytest.MonkeyPatch.context() as patch:
        if case.config.kind in STAND_INS:
            STAND_INS[case.config.kind].stand_in(patch)
        env = make_env(case.config)
        yield env
        env.close()


def test_the_specification_is_the_environments(case, env):
    spec = robot_spec(case.config)
    assert spec == env.robot_spec == RobotSpec.from_json(spec.to_json())
    assert (spec.action_dim, spec.state_dim, spec.control_hz) == case.numbers
    assert (spec.grippers, spec.max_episode_steps) == (case.grippers, LIMIT)
    assert [(c.name, c.height, c.width) for c in spec.cameras] == [(name, 16, 16) for name in case.cameras]


def test_an_episode_truncates_at_its_limit_and_can_be_begun_again(case, env):
    for _ in range(2):
        env.reset(seed=0)
        steps = [env.step(np.zeros(case.numbers[0], np.float32)) for _ in range(LIMIT)]
        assert [s[2:4] for s in steps] == [(False, False)] * (LIMIT - 1) + [(False, True)]
        assert [(s[1], s[4]["success"]) for s in steps] == [(0.0, False)] * LIMIT
        assert env.observation_space.contains(steps[-1][0])


def test_commands_are_clipped_or_refused_and_what_was_executed_is_reported(case, env):
    env.reset(seed=0)
    executed = env.step(np.full(case.numbers[0], 9.0))[4]["executed_action"]
    assert env.action_space.contains(executed)
    if not isinstance(case.config, FakeAlohaConfig):  # whose joints go 0.06 rad in a tick
        np.testing.assert_array_equal(executed, np.float32(env.robot_spec.action_high))
    for bad in (np.zeros(case.numbers[0] - 1), np.full(case.numbers[0], np.nan), np.full(case.numbers[0], np.inf)):
        with pytest.raises(DataError, match=naming("action", env.robot_spec.name, case.numbers[0])):
            env.step(bad)


@pytest.mark.parametrize("config", [FakeAlohaConfig(image_size=16), FakeSingleArmConfig(image_size=16)])
def test_gymnasium_accepts_an_environment_with_images(config):
    env = make_env(config, images="always")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.zeros(env.robot_spec.action_dim))
    check_env(env, skip_render_check=True)


def test_frames_are_of_the_moment_and_come_on_request_or_always(case, env):
    if case.config.kind in STAND_INS:
        pytest.skip("the stand-in draws nothing")
    env.reset(seed=0)
    try:
        frames = env.read_images()
    except ConfigError as error:
        if "OpenGL" not in str(error):
            raise
        pytest.skip(f"no rendering here: {error}")
    spec = env.robot_spec
    assert {k: (v.shape, v.dtype) for k, v in frames.items()} == {
        f"images/{name}": ((16, 16, 3), np.uint8) for name in case.cameras
    }
    first = case.cameras[0]
    for _ in range(6):
        env.step(np.where(np.arange(spec.action_dim) % 7 == 2, -1.0, np.array(spec.action_high)))
    later = env.read_images([first])
    assert list(later) == [f"images/{first}"]
    assert not np.array_equal(later[f"images/{first}"], frames[f"images/{first}"])
    with pytest.raises(ConfigError, match=naming(spec.name, "back", *case.cameras)):
        env.read_images(["back"])
    if isinstance(case.config, OgbenchConfig):  # seconds to build
        return
    always = make_env(case.config, images="always")
    observation, _ = always.reset(seed=0)
    assert always.observation_space.contains(observation)
    assert always.observation_space.contains(always.step(np.zeros(spec.action_dim))[0])
    np.testing.assert_array_equal(observation[f"images/{first}"], frames[f"images/{first}"])
    always.close()


@pytest.mark.parametrize(("config", "noise", "seeds", "least", "within"), [
    (FakeAlohaConfig(), None, range(100), 95, 110), (FakeSingleArmConfig(), None, range(100, 140), 39, 45),
    (AlohaSimConfig(max_episode_steps=300), 0.0, range(100, 102), 2, 200),
    (AlohaSimConfig(max_episode_steps=300), 0.005, range(104, 106), 2, 200),
    (AlohaSimConfig(env_name="insertion"), 0.0, range(300, 302), 2, 230),
    (AlohaSimConfig(env_name="insertion"), 0.003, range(302, 304), 2, 230),
])  # fmt: skip
def test_the_demonstrator_succeeds_with_time_to_spare(config, noise, seeds, least, within):
    needs(config.kind)
    env = make_env(config)
    expert, took = make_expert(env), []
    if noise is not None:
        expert.noise = noise
    for seed in seeds:
        started(env, expert, seed)
        took.append(finish(env, expert) or 1000)
    assert sum(t < within for t in took) >= least, took
    if config.kind == "fake_aloha":
        assert 41 <= np.mean([t for t in took if t < within]) <= 50
    env.close()


SIDES = (fake.LEFT, fake.RIGHT)


@pytest.mark.parametrize(("config", "arms"), [
    (FakeAlohaConfig(), fake_aloha_arms), (AlohaSimConfig(), aloha_arms),
    (AlohaConfig(server="pc", arms="ros2"), aloha_arms), (AlohaConfig(server="pc", arms="trossen"), lambda: None),
    (FakeSingleArmConfig(), lambda: None), (GymConfig(make=lambda fake_env: LineEnv()), lambda: None),
])  # fmt: skip
def test_kinematics_are_those_of_the_robots_arms(config, arms):
    assert kinematics_of(config) is arms()


def poses(count: int) -> np.ndarray:
    low, high = np.array([*fake.JOINT_LOW, 0.0] * 2), np.array([*fake.JOINT_HIGH, 1.0] * 2)
    return np.random.default_rng(0).uniform(low, high, (count, 14))


def test_alohas_arms_are_those_of_the_simulated_model():
    mujoco = pytest.importorskip("mujoco", reason="the [aloha-sim] extra is not installed")
    pytest.importorskip("gym_aloha", reason="the [aloha-sim] extra is not installed")
    env = make_env(AlohaSimConfig())
    data = mujoco.MjData(env.model)
    for pose in poses(5):
        for side in SIDES:
            data.qpos[8 * side : 8 * side + 6] = pose[7 * side : 7 * side + 6]
        mujoco.mj_kinematics(env.model, data)
        for arm, name in enumerate(("left", "right")):
            body = env.model.body(f"vx300s_{name}/gripper_link").id
            frame, _ = aloha_arms().tip(arm, pose)
            np.testing.assert_allclose(frame[:3, 3] - 0.15 * frame[:3, 0], data.xpos[body], atol=2e-3)
            np.testing.assert_allclose(frame[:3, :3], data.xmat[body].reshape(3, 3), atol=2e-3)
    env.close()


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
    expert = served_task.make_expert(config.robot, robot)
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
