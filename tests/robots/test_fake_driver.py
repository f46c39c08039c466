"""The fake ALOHA task behind a robot's loop, with an injected clock, and as its scripted helpers see it."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_loop import FILES, LoopedTask

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.driver import FakeAlohaDriver
from serl_chunk.robots.fake.env import FakeAlohaEnv
from serl_chunk.robots.fake.expert import ScriptedExpert
from serl_chunk.robots.served.robot import differing_fields
from serl_chunk.types import STATE
from serl_chunk_robot.robot_file.config import load, load_driver

ARMS = np.array([i not in task.GRIPPER for i in range(task.ACTION_DIM)])


@pytest.fixture
def world():
    file = load(FILES / "fake_aloha.toml")
    driver = load_driver(file)
    spec = driver.spec()
    return LoopedTask(file, driver, np.array(driver.env.joints), spec.tick, fastest=np.array(spec.velocity))


def test_scripted_demonstrations_are_hardly_ever_gated(world):
    episodes = []
    for seed in range(12):
        world.reset(seed)
        episodes.append(world.demonstrated(ScriptedExpert(world.driver.env), seed, 120, 1))
    assert all(success for success, _, _ in episodes)
    assert sum(gated for _, _, gated in episodes) < 0.01 * sum(ticks for _, ticks, _ in episodes)


def test_a_reset_begins_where_the_environment_does(world):
    env = FakeAlohaEnv(FakeAlohaConfig())
    for seed in (0, 3):
        env.reset(seed=seed)
        (drawn,) = world.reset(seed).values()
        world.ask("arm")
        assert 0.5 * task.START_JOINT_NOISE < np.abs(drawn[ARMS]).max() <= task.START_JOINT_NOISE
        assert not drawn[~ARMS].any()
        reading = world.run().reading
        np.testing.assert_allclose(reading.q, np.array(task.HOME_JOINTS) + drawn, atol=1e-9)
        assert tuple(reading.extra["cube"]) == env.cube
        assert reading.extra["holder"] == -1
        world.tick(reading.q - 0.05 * ARMS)
        world.ask("release")
        world.run(20)


@pytest.mark.parametrize("observed", [True, False])
def test_the_served_state_is_the_environments_and_a_success_is_reported_once(observed):
    config = FakeAlohaConfig(observe_objects=observed, grasp_tolerance=0.02)
    driver, env = FakeAlohaDriver(observe_objects=observed, grasp_tolerance=0.02), FakeAlohaEnv(config)
    assert differing_fields(env.robot_spec, driver.spec()._asdict()) == []
    parts = [name for name, _ in driver.spec().state]
    observation, _ = env.reset(seed=5)
    driver.reset_scene(5)
    driver.env.place(env.joints, driver.env.cube)
    expert = ScriptedExpert(env)
    expert.reset(5)
    for _ in range(120):
        reading = driver.read()
        served = np.concatenate([reading.q if name == "q" else reading.extra[name] for name in parts])
        assert np.array_equal(served.astype(np.float32), observation[STATE])
        command = expert.act()
        observation, reward, ended, _, _ = env.step(command)
        driver.command(command.astype(np.float64), 0.02)
        if ended:
            break
    assert reward
    assert [tuple(e) for e in driver.read().events] == [(1.0, True, False)]
    assert driver.read().events == ()
