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
SUCCESS, FAILURE, UNKNOWN = Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN


def after_tick(observation):
    assert observation[STATE][2] <= LAST + 1, "called after the end"
    return observation[STATE][2] == LAST + 1


def episode(env: LineEnv, success=after_tick, *cameras: str, **outcome) -> ListSink:
    sink = ListSink()
    config = dataclasses.replace(make_config(failure_reward=0.25), outcome=OutcomeConfig(success, cameras, **outcome))
    summary = EpisodeRunner(env, make_policy(NoisyAgent(8)), sink, config=config).run_episode(5)
    assert summary.outcome is sink.last_end.outcome
    return sink


@pytest.mark.parametrize(
    ("env", "outcome", "by", "reward"),
    [
        (LineEnv(), SUCCESS, FUNCTION, 1.0),
        (LineEnv(length=LAST + 1), SUCCESS, FUNCTION, 1.0),  # on the last tick of the time limit
        (LineEnv(success_at=LAST), SUCCESS, "environment", 1.0),  # not 2: the environment was first
        (LineEnv(failure_at=LAST), FAILURE, "environment", 0.25),
        (LineEnv(terminated_at=LAST), UNKNOWN, "environment", 0.0),
    ],
)
def test_a_success_of_the_function_ends_the_episode_unless_the_environment_did(env, outcome, by, reward):
    sink = episode(env)
    end = sink.last_end
    assert (end.length, end.terminated, end.truncated) == (LAST + 1, True, False)
    assert (end.outcome, end.outcome_by, end.environment) == (outcome, by, None)
    assert [s.reward for s in sink.steps] == [0.0] * LAST + [reward]


def test_the_function_gets_frames_of_its_cameras_on_every_tick_and_they_are_not_recorded():
    seen, env = [], LineEnv()

    def success(observation):
        seen.append((int(observation[STATE][2]), int(observation[IMAGE_PREFIX + "wrist"][0, 0, 0])))
        assert set(observation) == {STATE, IMAGE_PREFIX + "wrist"}
        return False

    sink = episode(env, success, "wrist")
    assert seen == [(t, t) for t in range(1, env.length + 1)]
    assert not any(IMAGE_PREFIX + "wrist" in s.observation for s in sink.steps)


@pytest.mark.parametrize(
    ("env", "judged"),
    [
        (LineEnv(success_at=9, failure_at=3), FAILURE),  # the first one
        (LineEnv(), UNKNOWN),
        (LineEnv(success_at=LAST), SUCCESS),  # on the same tick
    ],
)
def test_a_hidden_environment_neither_ends_nor_rewards_and_is_recorded(env, judged):
    env.goes_on = True
    sink = episode(env, environment=False)
    end = sink.last_end
    assert (end.length, end.outcome, end.outcome_by, end.environment) == (LAST + 1, SUCCESS, FUNCTION, judged)
    assert [s.reward for s in sink.steps] == [0.0] * LAST + [1.0]


@pytest.mark.parametrize(
    ("env", "goes_on", "length"),
    [
        (LineEnv(success_at=3), False, 4),  # it cannot be stepped any further
        (LineEnv(length=6, success_at=5), True, 6),
        (LineEnv(spec=dataclasses.replace(SPEC, max_episode_steps=4), success_at=3), True, 4),  # gives no truncation
    ],
)
def test_a_hidden_success_that_ends_the_episode_all_the_same_truncates_it(env, goes_on, length):
    env.goes_on = goes_on
    sink = episode(env, environment=False)
    end = sink.last_end
    assert (end.length, end.truncated, end.outcome, end.environment) == (length, True, UNKNOWN, SUCCESS)
    assert not any(s.reward for s in sink.steps)


def test_what_a_hidden_environment_judged_is_of_one_episode():
    config = dataclasses.replace(make_config(), outcome=OutcomeConfig(lambda observation: False, environment=False))
    sink, env, found = ListSink(), LineEnv(length=5, success_at=2), []
    env.goes_on = True
    runner = EpisodeRunner(env, make_policy(NoisyAgent(8)), sink, config=config)
    for env.success_at in (2, None):
        runner.run_episode(5)
        found.append(sink.last_end.environment)
    assert found == [SUCCESS, UNKNOWN]


@pytest.mark.parametrize(
    ("make", "parameter", "names"),
    [
        (lambda: episode(LineEnv(), lambda observation: np.array([True, False])), FUNCTION, FUNCTION),
        (lambda: episode(LineEnv(), after_tick, "belly"), "outcome.cameras", "front, wrist"),
        (lambda: OutcomeConfig(success="z > 0.04"), "outcome.success", "z > 0.04"),
        (lambda: OutcomeConfig(condition="z > 0.04"), "outcome.condition", "z > 0.04"),
        (lambda: OutcomeConfig(success=after_tick, classifier="classifiers/c"), "outcome.success", "classifiers/c"),
        (lambda: OutcomeConfig(environment=False), "outcome.environment", "outcome.classifier"),
    ],
)
def test_settings_that_are_refused(make, parameter, names):
    with pytest.raises(ConfigError, match=naming(names)) as refused:
        make()
    assert refused.value.parameter == parameter
