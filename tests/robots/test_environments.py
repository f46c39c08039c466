"""What holds for every simulated environment, its specification and its demonstrator."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from demonstrations import finish, started
from errors import naming
from gymnasium.utils.env_checker import check_env
from robosuite_stand_in import stand_in

from serl_chunk.config.robots import (
    AlohaSimConfig,
    FakeAlohaConfig,
    FakeSingleArmConfig,
    OgbenchConfig,
    RobomimicConfig,
    RobotConfig,
)
from serl_chunk.robots.registry import make_env, make_expert, robot_spec
from serl_chunk.types import ConfigError, DataError, RobotSpec

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
}


def needs(name: str) -> None:
    # Looked up, not imported: how MuJoCo renders is fixed by its first import.
    package = {"ogbench": "ogbench", "robomimic": ""}.get(name, "gym_aloha" if name in MUJOCO else "")
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
        if isinstance(case.config, RobomimicConfig):
            stand_in(patch)
        env = make_env(case.config)
        yield env
        env.close()


def test_the_specification_is_the_environments(case, env):
    spec = robot_spec(case.config)
    assert spec == env.robot_spec == RobotSpec.from_json(spec.to_json())
    assert (spec.action_dim, spec.state_dim, spec.control_hz) == case.numbers
    assert (spec.grippers, spec.max_episode_steps) == (case.grippers, LIMIT)
    assert [(c.name, c.height, c.width) for c in spec.cameras] == [(name, 16, 16) for name in case.cameras]


def test_a_seed_fixes_the_start(env):
    first, info = env.reset(seed=3)
    assert (list(first), info["success"]) == (["state"], False)
    assert env.observation_space.contains(first)
    others = [env.reset(**seed)[0]["state"] for seed in ({"seed": 4}, {}, {})]
    again = env.reset(seed=3)[0]
    np.testing.assert_array_equal(again["state"], first["state"])
    assert len({x.tobytes() for x in (first["state"], *others)}) == 4


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
    if isinstance(case.config, RobomimicConfig):
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


@pytest.mark.parametrize(
    ("config", "noise", "seeds", "least", "within"),
    [(FakeAlohaConfig(), None, range(100), 95, 110), (FakeSingleArmConfig(), None, range(100, 140), 39, 45),
     (AlohaSimConfig(max_episode_steps=300), 0.0, range(100, 104), 4, 200),
     (AlohaSimConfig(max_episode_steps=300), 0.005, range(104, 108), 4, 200),
     (AlohaSimConfig(env_name="insertion"), 0.0, range(300, 302), 2, 230),
     (AlohaSimConfig(env_name="insertion"), 0.003, range(302, 305), 3, 230)],
)  # fmt: skip
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


def test_specifications_helpers_and_drivers_import_no_simulator():
    """Of learners, actors behind a robot's server, and that server."""
    code = (
        "import sys, numpy as np\n"
        "from serl_chunk.config.robots import AlohaSimConfig, OgbenchConfig\n"
        "from serl_chunk.robots.registry import robot_spec\n"
        "from serl_chunk.robots.served import robot\n"
        "from serl_chunk.robots.served.task import Seen, make_expert\n"
        "robot_spec(OgbenchConfig()), robot_spec(AlohaSimConfig())\n"
        "config = AlohaSimConfig(server='here')\n"
        "seen = Seen(np.zeros(14), np.zeros(14), {'objects': np.array([.1, .5, .05, 1, 0, 0, 0])})\n"
        "robot = type('R', (), {'robot_spec': robot_spec(config), 'seen': lambda self: seen})()\n"
        "expert = make_expert(config, robot)\n"
        "expert.reset(0), expert.act()\n"
        "from serl_chunk.robots.aloha_sim.driver import AlohaSimDriver\n"
        "AlohaSimDriver().spec()\n"
        "unwanted = {'mujoco', 'gym_aloha', 'dm_control', 'ogbench', 'jax', 'serl_chunk.robots.fake.env'}\n"
        "assert not unwanted & set(sys.modules), unwanted & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
