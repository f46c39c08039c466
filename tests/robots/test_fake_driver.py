"""The fake ALOHA task behind a robot's loop, with an injected clock, and as its scripted helpers see it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from demonstrations import helped
from simulated_loop import FILES, LoopedTask

from serl_chunk.config.robots import FakeAlohaConfig, ScriptedHumanConfig
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.driver import FakeAlohaDriver
from serl_chunk.robots.fake.env import FakeAlohaEnv
from serl_chunk.robots.fake.expert import ScriptedExpert
from serl_chunk.robots.fake.scripted_human import ScriptedHuman
from serl_chunk.robots.served.robot import differing_fields
from serl_chunk.robots.served.task import Seen, make_expert, make_scripted_human
from serl_chunk.types import STATE
from serl_chunk_robot.drivers.base import DriverError
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


def test_a_target_out_of_the_tasks_rate_is_reached_about_when_the_task_does(world):
    world.reset(1)
    world.ask("arm")
    q = world.run().reading.q
    for way in (0.3, 0.6):
        env = FakeAlohaEnv(FakeAlohaConfig())
        env.place(q, world.driver.env.cube)
        target = q + way * ARMS * np.where(q > 0, -1, 1)
        alone = served = 0
        while np.abs(env.joints - target).max() > 1e-6:
            env._move(target)
            alone += 1
        for _ in range(3):  # from rest by a step that is no jump, as the first command has to be
            world.tick(q)
        while np.abs(world.driver.env.joints - target).max() > 1e-6 and served < 100:
            world.tick(target)
            served += 1
        assert alone <= served <= alone + 3 + 0.2 * alone
        q = np.array(world.driver.env.joints)


def test_targets_that_turn_round_are_followed_at_once_and_a_held_set_point_changes_nothing(world):
    """The task knows rates alone: no acceleration and no jerk limits."""
    world.reset(2)
    world.ask("arm")
    q = world.run().reading.q
    assert Counter(world.tick(q + 0.05 * ARMS * (-1) ** k).reason for k in range(40)) == {"": 40}
    world.ask("hold", "operator")
    world.run(20)
    before = world.run().reading
    after = world.run(50).reading
    assert np.array_equal(before.q, after.q)
    assert after.stamp == world.now
    assert not after.dq.any()
    assert world.loop.machine.state == "HOLD"


def test_torque_and_unknown_settings():
    driver = FakeAlohaDriver()
    driver.set("torque", False)
    assert not driver.read().torque
    driver.clear_faults()
    assert driver.read().torque
    with pytest.raises(DriverError, match="compliance: unknown"):
        driver.set("compliance", 1.0)


class Stale:
    """A served robot without a server: its state is a tick older than the task."""

    def __init__(self) -> None:
        self.driver = FakeAlohaDriver()
        self.env = self.driver.env
        self.robot_spec, self.action_space = self.env.robot_spec, self.env.action_space
        self.place(0)

    def place(self, seed: int) -> None:
        self.env.reset(seed=seed)
        self.driver._events.clear()
        self.target = np.array(self.env.joints)
        self.reading = self.driver.read()

    def seen(self) -> Seen:
        return Seen(self.reading.q, self.target, dict(self.reading.extra))

    def step(self, command: np.ndarray) -> tuple[None, float, bool]:
        self.reading = self.driver.read()
        self.target = command.astype(np.float64)
        self.driver.command(self.target, 0.02)
        return None, 0.0, bool(self.driver._events)


def test_helpers_do_about_as_well_on_published_states():
    """A demonstrator, and the help for a policy that stands still; a state that is a tick old costs some grasps."""
    config, robot = FakeAlohaConfig(scripted_human=ScriptedHumanConfig(correction_ticks=(60, 80))), Stale()
    expert, took = make_expert(config, robot), []
    for seed in range(20):
        robot.place(seed)
        expert.reset(seed)
        took.append(next((t for t in range(120) if robot.step(expert.act())[2]), 1000))
    assert np.sort(took)[-2] < 120, took
    assert np.median(took) < 60, "43 ticks on the task itself"
    solved = [0, 0]
    for k, human in enumerate((make_scripted_human(config, robot), ScriptedHuman(robot.env, config.scripted_human))):
        for seed in range(20):
            robot.place(seed)
            human.reset(seed)
            solved[k] += helped(robot, human, lambda: robot.target.astype(np.float32), 200)[1]
    assert solved[1] >= 10
    assert solved[0] >= 0.6 * solved[1], solved
