"""The fake tasks: their scripted humans, the driver behind a robot's loop, drops, and the served camera."""

import contextlib
import math
import time

import numpy as np
import pytest
from demonstrations import begin_of, helped, joints_of, started
from robot_served import HERE, served, wait
from robot_world import FaultyArms
from simulated_loop import FILES, LoopedTask

from serl_chunk.config.robots import FakeAlohaConfig, FakeSingleArmConfig, ScriptedHumanConfig
from serl_chunk.devices.registry import make_intervention
from serl_chunk.robots.drawn_camera import FakeAlohaCamera
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.driver import FakeAlohaDriver
from serl_chunk.robots.fake.env import NO_ARM, FakeAlohaEnv
from serl_chunk.robots.fake.expert import ScriptedExpert
from serl_chunk.robots.fake.kinematics import BASE_X, LEFT, REACH, RIGHT, SHOULDER_Z, inverse
from serl_chunk.robots.fake.render import render
from serl_chunk.robots.fake.single_arm import STALL_TICKS, FakeSingleArmEnv
from serl_chunk.robots.served.robot import differing_fields
from serl_chunk.robots.served.task import Seen, make_expert
from serl_chunk.types import STATE
from serl_chunk_robot.robot_file.config import load, load_driver

USUAL = ScriptedHumanConfig()


def env_with(**human):
    return FakeAlohaEnv(FakeAlohaConfig(max_episode_steps=1000, scripted_human=ScriptedHumanConfig(**human)))


@pytest.fixture
def env():
    return env_with()


@pytest.mark.parametrize("still_for", [0, USUAL.stall_ticks + USUAL.reaction_ticks[0] - 2])
def test_it_leaves_a_policy_alone_that_makes_progress_or_recovers_within_the_delay(env, still_for):
    human, expert = env.make_scripted_human(), env.make_expert()
    for seed in range(1 if still_for else 10):
        started(env, human, seed)
        expert.reset(seed)
        done = False
        while not done:
            assert human.poll(env.tick, {}, True, None) is None
            done = env.step(joints_of(env)() if env.tick < still_for else expert.act())[2]


def test_the_expert_fetches_a_cube_dropped_anywhere_within_reach(env):
    expert, finished = env.make_expert(), 0
    for i, (x, y) in enumerate(np.random.default_rng(0).uniform((-0.3, -0.2), (0.3, 0.2), (20, 2)).tolist()):
        env.reset(seed=i)
        env.place(env.joints, (x, y, task.CUBE_REST_Z))
        expert.reset(i)
        finished += any(env.step(expert.act())[2] for _ in range(120))
    assert finished >= 19


class Published:
    """A served robot without a server, whose state is a tick older than the task."""

    def __init__(self):
        self.driver = FakeAlohaDriver()
        self.robot_spec = self.driver.env.robot_spec
        self.place(0)

    def place(self, seed):
        self.driver.env.reset(seed=seed)
        self.target, self.reading = np.array(self.driver.env.joints), self.driver.read()
        self.driver._events.clear()

    def seen(self):
        return Seen(self.reading.q, self.target, dict(self.reading.extra))

    def step(self, command):
        self.reading, self.target = self.driver.read(), command.astype(np.float64)
        self.driver.command(self.target, 0.02)
        return bool(self.driver._events)


def test_the_expert_is_as_fast_on_published_states_as_on_the_task():
    robot, took = Published(), []
    expert = make_expert(FakeAlohaConfig(), robot)
    for seed in range(10):
        robot.place(seed)
        expert.reset(seed)
        took.append(next((tick for tick in range(120) if robot.step(expert.act())), 1000))
    assert np.sort(took)[-2] < 120, took
    assert np.median(took) < 60, "43 ticks on the task itself"


@pytest.mark.parametrize(("fault_rate", "seeds", "solved"), [(0.0, 10, 10), (1.0, 5, 0)])
def test_corrections_solve_the_task_for_a_policy_that_does_nothing_unless_fumbled(fault_rate, seeds, solved):
    env = env_with(fault_rate=fault_rate)
    human, found = env.make_scripted_human(), 0
    for seed in range(seeds):
        started(env, human, seed)
        found += helped(env, human, joints_of(env), 300 if fault_rate else 600)[1]
    assert found == solved


OPEN, CLOSE = np.eye(7)[6], -np.eye(7)[6]


@pytest.fixture
def arm_env():
    return FakeSingleArmEnv(FakeSingleArmConfig())


def test_the_scripted_human_frees_a_policy_that_does_nothing(arm_env):
    human = make_intervention("scripted", arm_env)
    started(arm_env, human, 3)
    commands, solved = helped(arm_env, human, lambda: np.zeros(7), 300, every=4)
    assert solved
    assert begin_of(commands) >= STALL_TICKS - 1
    assert None in commands[STALL_TICKS:], "it hands back"
    human.close()


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


OPEN, CLOSED = 1.0, 0.0
CUBE = (0.15, 0.1, task.CUBE_REST_Z)


def place(env, cube, *, left=task.HOME_GRIP[LEFT], right=task.HOME_GRIP[RIGHT], openings=(OPEN, OPEN), holder=NO_ARM):
    """Start an episode with the grip points and the cube at given places, the cube centred in its holder's hand."""
    env.reset(seed=0)
    joints = (*inverse(LEFT, left), openings[LEFT], *inverse(RIGHT, right), openings[RIGHT])
    env.place(joints, cube, holder)


def drive(env, ticks, *, right=None, openings=(None, None)):
    """Send the right arm to a grip point (None: stay) and openings for some ticks; the last step's result."""
    for _ in range(ticks):
        command = list(env.joints)
        if right is not None:
            command[7:13] = inverse(RIGHT, right)
        for arm, opening in enumerate(openings):
            if opening is not None:
                command[task.GRIPPER[arm]] = opening
        result = env.step(np.array(command, np.float32))
    return result


def test_a_dropped_cube_falls_and_the_right_arm_places_none(env):
    """At full stretch it may come within the tolerance; it does not spare the hand-over."""
    start = (0.15, 0.0, 0.1)
    place(env, start, right=start, openings=(OPEN, 0.3), holder=RIGHT)
    drive(env, 1, openings=(None, OPEN))
    assert env.holder == NO_ARM
    np.testing.assert_allclose(env.cube, (0.15, 0.0, task.CUBE_REST_Z), atol=1e-6)
    assert math.dist((BASE_X[RIGHT], 0.0, SHOULDER_Z), task.PLACE) > REACH
    place(env, task.PLACE, openings=(OPEN, 0.3), holder=RIGHT)
    env.place(env.joints, env.cube, RIGHT, tuple(np.subtract(task.PLACE, env.grips[RIGHT])))
    _, reward, terminated, _, _ = drive(env, 1, openings=(None, OPEN))
    assert env.holder == NO_ARM
    assert math.dist(env.cube, task.PLACE) < task.PLACE_DISTANCE
    assert (reward, terminated) == (0.0, False)


class Aloha(FaultyArms):
    """Arms with a cube."""

    holder = -1.0

    def read(self):
        return super().read()._replace(extra={"cube": np.array(CUBE), "holder": np.array([self.holder])})


@contextlib.contextmanager
def opened(robot, **more):
    """A camera of a robot that was measured."""
    camera = FakeAlohaCamera("top", server=f"{HERE}:{robot.port}", **more)
    camera.open(time.monotonic)
    try:
        client = robot.client("a", "any")
        wait(lambda: client.next_state()["q"] is not None)
        yield camera
    finally:
        camera.close()


def test_a_served_camera_draws_the_measured_joints_and_the_cube():
    arms = Aloha()
    with served(arms=arms) as robot, opened(robot, size=32, rate=100.0) as camera:
        assert camera.spec() == (32, 32, False)
        frames = [camera.read() for _ in range(3)]
        q = arms.q.tolist()
        assert np.array_equal(frames[-1].image, render("top", 32, q, CUBE, False))
        assert [f.number for f in frames] == [1, 2, 3]
        assert frames[0].stamp < frames[1].stamp < frames[2].stamp < time.monotonic()
        arms.holder = 1.0
        wait(lambda: np.array_equal(camera.read().image, render("top", 32, q, CUBE, True)))
