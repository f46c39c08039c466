"""Who decides on a success, and what the episode records of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from actor_helpers import SPEC, LineEnv, ListSink, NoisyAgent, make_config, make_policy
from errors import naming

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.outcomes.judge import FUNCTION
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, Outcome

LAST = 11  # tick after which the function finds a success: the state has the tick number after it


def episode(env: LineEnv, outcome: OutcomeConfig, *, failure_reward: float = 0.0):
    sink = ListSink()
    config = dataclasses.replace(make_config(failure_reward=failure_reward), outcome=outcome)
    runner = EpisodeRunner(env, make_policy(NoisyAgent(8)), sink, config=config)
    return runner.run_episode(5), sink


def after_tick(observation):
    return observation[STATE][2] == LAST + 1


def test_a_success_of_the_function_ends_the_episode_on_its_tick():
    summary, sink = episode(LineEnv(), OutcomeConfig(after_tick))
    end = sink.last_end
    assert (end.length, end.terminated, end.truncated) == (LAST + 1, True, False)
    assert (end.outcome, end.outcome_by) == (Outcome.SUCCESS, FUNCTION)
    assert [s.reward for s in sink.steps] == [0.0] * LAST + [1.0]
    assert summary.outcome is Outcome.SUCCESS


@pytest.mark.parametrize(
    ("env", "outcome", "reward"),
    [
        (LineEnv(success_at=LAST), Outcome.SUCCESS, 1.0),  # not 2: the environment was first
        (LineEnv(failure_at=LAST), Outcome.FAILURE, 0.25),
        (LineEnv(terminated_at=LAST), Outcome.UNKNOWN, 0.0),
    ],
)
def test_the_environment_decides_first(env, outcome, reward):
    def success(observation):
        assert observation[STATE][2] <= LAST, "called after the end"
        return after_tick(observation)

    _, sink = episode(env, OutcomeConfig(success), failure_reward=0.25)
    assert (sink.last_end.outcome, sink.last_end.outcome_by) == (outcome, "environment")
    assert sink.last_end.terminated
    assert sink.steps[-1].reward == reward


def test_a_success_on_the_last_tick_of_the_time_limit_counts():
    _, sink = episode(LineEnv(length=LAST + 1), OutcomeConfig(after_tick))
    assert (sink.last_end.terminated, sink.last_end.truncated) == (True, False)
    assert sink.last_end.outcome is Outcome.SUCCESS


def test_the_function_gets_frames_of_its_cameras_on_every_tick_and_they_are_not_recorded():
    seen = []

    def success(observation):
        seen.append((int(observation[STATE][2]), int(observation[IMAGE_PREFIX + "wrist"][0, 0, 0])))
        assert set(observation) == {STATE, IMAGE_PREFIX + "wrist"}
        return False

    env = LineEnv()
    _, sink = episode(env, OutcomeConfig(success, ("wrist",)))
    assert seen == [(t, t) for t in range(1, env.length + 1)]
    assert not any(IMAGE_PREFIX + "wrist" in s.observation for s in sink.steps)


def test_a_camera_that_the_robot_lacks_is_refused():
    with pytest.raises(ConfigError, match=naming("belly", "front, wrist")):
        episode(LineEnv(), OutcomeConfig(after_tick, ("belly",)))


def test_what_is_no_truth_value_is_refused():
    with pytest.raises(ConfigError) as refused:
        episode(LineEnv(), OutcomeConfig(lambda observation: np.array([True, False])))
    assert refused.value.parameter == FUNCTION


def hidden(env: LineEnv, *, goes_on: bool = True):
    env.goes_on = goes_on
    _, sink = episode(env, OutcomeConfig(after_tick, environment=False), failure_reward=0.25)
    return sink, sink.last_end


@pytest.mark.parametrize(
    ("env", "judged"),
    [
        (LineEnv(success_at=3), Outcome.SUCCESS),
        (LineEnv(failure_at=3), Outcome.FAILURE),
        (LineEnv(success_at=9, failure_at=3), Outcome.FAILURE),  # the first one
        (LineEnv(), Outcome.UNKNOWN),
        (LineEnv(success_at=LAST), Outcome.SUCCESS),  # on the same tick
    ],
)
def test_a_hidden_environment_neither_ends_nor_rewards_and_is_recorded(env, judged):
    sink, end = hidden(env)
    assert (end.length, end.outcome, end.outcome_by) == (LAST + 1, Outcome.SUCCESS, FUNCTION)
    assert [s.reward for s in sink.steps] == [0.0] * LAST + [1.0]
    assert end.environment is judged


@pytest.mark.parametrize(
    ("env", "goes_on", "length"),
    [
        (LineEnv(success_at=3), False, 4),  # it cannot be stepped any further
        (LineEnv(length=6, success_at=5), True, 6),
        (LineEnv(spec=dataclasses.replace(SPEC, max_episode_steps=4), success_at=3), True, 4),  # gives no truncation
    ],
)
def test_a_hidden_success_that_ends_the_episode_all_the_same_truncates_it(env, goes_on, length):
    sink, end = hidden(env, goes_on=goes_on)
    assert (end.length, end.truncated, end.outcome) == (length, True, Outcome.UNKNOWN)
    assert end.environment is Outcome.SUCCESS
    assert not any(s.reward for s in sink.steps)


def test_an_environment_that_decides_has_no_second_judgement():
    _, sink = episode(LineEnv(success_at=3), OutcomeConfig(after_tick))
    assert sink.last_end.environment is None


def test_what_a_hidden_environment_judged_is_of_one_episode():
    config = dataclasses.replace(make_config(), outcome=OutcomeConfig(lambda observation: False, environment=False))
    sink, env = ListSink(), LineEnv(length=5, success_at=2)
    env.goes_on = True
    runner = EpisodeRunner(env, make_policy(NoisyAgent(8)), sink, config=config)
    found = []
    for success_at in (2, None):
        env.success_at = success_at
        runner.run_episode(5)
        found.append(sink.last_end.environment)
    assert found == [Outcome.SUCCESS, Outcome.UNKNOWN]


@pytest.mark.parametrize(
    ("values", "parameter", "names"),
    [
        ({"success": "z > 0.04"}, "outcome.success", "z > 0.04"),
        ({"success": after_tick, "classifier": "classifiers/c"}, "outcome.success", "classifiers/c"),
        ({"environment": False}, "outcome.environment", "outcome.classifier"),
    ],
)
def test_settings_that_are_refused(values, parameter, names):
    with pytest.raises(ConfigError, match=naming(names)) as refused:
        OutcomeConfig(**values)
    assert refused.value.parameter == parameter
