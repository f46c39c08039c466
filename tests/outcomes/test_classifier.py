"""The classifier in the control loop: who is first, frames in a row, the condition, and what is refused before."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from actor_helpers import LineEnv, ListSink, NoisyAgent, make_config, make_policy
from classifier_sets import save_random
from errors import naming

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.classifier.files import DESCRIPTION
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.outcomes import classifier as module
from serl_chunk.outcomes.classifier import SETTING, Classifier
from serl_chunk.outcomes.judge import CLASSIFIER, CONDITION
from serl_chunk.types import IMAGE_PREFIX, STATE, CameraSpec, ConfigError, Outcome

WRIST = IMAGE_PREFIX + "wrist"


@pytest.fixture
def wrist() -> CameraSpec:
    return LineEnv().robot_spec.camera("wrist")


@pytest.fixture
def folder(tmp_path, wrist):
    return str(save_random(tmp_path, wrist))


@pytest.fixture
def seen(monkeypatch):
    """Makes probabilities of ticks: `give[tick]`, 0 elsewhere. Returns (give, the ticks that were looked at)."""
    give: dict[int, float] = {}
    looked: list[int] = []

    def probability(self, observation):
        tick = int(observation[WRIST][0, 0, 0]) - 1  # LineEnv's frames have the tick number after it
        looked.append(tick)
        return np.array([1 - give.get(tick, 0.0), give.get(tick, 0.0)])

    monkeypatch.setattr(module.Classifier, "probability", probability)
    return give, looked


def run(env: LineEnv, outcome: OutcomeConfig, episodes: int = 1):
    sink = ListSink()
    runner = EpisodeRunner(
        env, make_policy(NoisyAgent(8)), sink, config=dataclasses.replace(make_config(), outcome=outcome)
    )
    for i in range(episodes):
        runner.run_episode(5 + i)
    return sink


def test_frames_in_a_row_end_the_episode_with_reward_one(folder, seen):
    give, looked = seen
    give.update({2: 0.9, 4: 0.5, 5: 0.6})  # one alone, then two
    env = LineEnv()
    sink = run(env, OutcomeConfig(classifier=folder))
    end = sink.last_end
    assert (end.length, end.terminated, end.outcome, end.outcome_by) == (6, True, Outcome.SUCCESS, CLASSIFIER)
    assert [s.reward for s in sink.steps] == [0.0] * 5 + [1.0]
    assert looked == list(range(6))
    assert not any(WRIST in s.observation for s in sink.steps)  # looked at, and not recorded


def test_frames_of_an_episode_do_not_count_for_the_next(folder, seen):
    give, _ = seen
    env = LineEnv(length=4)
    give.update({3: 0.9, 0: 0.9, 1: 0.1})  # the last of one episode, and the first of the next
    sink = run(env, OutcomeConfig(classifier=folder), episodes=3)
    assert sink.last_end.outcome is Outcome.UNKNOWN
    assert sink.last_end.length == 4


@pytest.mark.parametrize(
    ("env", "outcome", "length"),
    [(LineEnv(success_at=5), Outcome.SUCCESS, 6), (LineEnv(failure_at=5), Outcome.FAILURE, 6)],
)
def test_the_environment_is_first(folder, seen, env, outcome, length):
    give, looked = seen
    give.update({4: 0.9, 5: 0.9})
    end = run(env, OutcomeConfig(classifier=folder)).last_end
    assert (end.outcome, end.outcome_by, end.length) == (outcome, "environment", length)
    assert looked == list(range(5))


def test_the_last_frames_of_its_camera_are_recorded_with_the_end(folder, seen):
    """A corrected episode is what the next classifier learns from."""
    give, _ = seen
    give.update({4: 0.9, 5: 0.9})
    for env, length in ((LineEnv(), 6), (LineEnv(success_at=3), 4), (LineEnv(length=3), 3)):
        final = run(env, OutcomeConfig(classifier=folder)).last_end.final_observation
        assert final[WRIST][0, 0, 0] == length


def test_the_condition_must_hold_on_each_frame(folder, seen):
    give, looked = seen
    give.update(dict.fromkeys(range(3, 20), 0.9))

    def condition(observation):
        assert set(observation) == {STATE}
        return int(observation[STATE][2]) - 1 not in (4, 6)

    end = run(LineEnv(), OutcomeConfig(classifier=folder, condition=condition)).last_end
    assert (end.length, end.outcome_by) == (9, CLASSIFIER)  # after ticks 7 and 8
    assert looked == [0, 1, 2, 3, 5, 7, 8]  # without the condition nothing is looked at


def test_a_condition_that_is_no_truth_value_is_refused(folder, seen):
    with pytest.raises(ConfigError) as refused:
        run(LineEnv(), OutcomeConfig(classifier=folder, condition=lambda observation: np.array([True, False])))
    assert refused.value.parameter == CONDITION


@pytest.mark.parametrize("other", [CameraSpec("belly", 8, 8), CameraSpec("wrist", 9, 7)])
def test_a_classifier_of_other_cameras_is_refused_before_anything_moves(tmp_path, other):
    env = LineEnv()
    env.reset = env.send = lambda *a, **k: pytest.fail("the robot was touched")  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=naming(other.name, f"{other.height}x{other.width}")) as refused:
        run(env, OutcomeConfig(classifier=str(save_random(tmp_path, other))))
    assert refused.value.parameter == SETTING


def test_a_folder_without_a_classifier_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=naming(str(tmp_path), DESCRIPTION)) as refused:
        run(LineEnv(), OutcomeConfig(classifier=str(tmp_path)))
    assert refused.value.parameter == SETTING


def test_the_network_is_applied_to_the_frame(folder, wrist):
    c = Classifier(folder)
    c.check(LineEnv().robot_spec)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (2, wrist.height, wrist.width, 3), np.uint8)
    first, second = (c.probability({STATE: np.zeros(3, np.float32), WRIST: f}) for f in frames)
    assert first.shape == (2,)
    assert first.sum() == pytest.approx(1)
    assert not np.array_equal(first, second)
    assert c.cameras == ("wrist",)


@pytest.mark.parametrize("frame", [None, np.zeros((3, 3, 3), np.uint8), np.zeros((8, 8, 3), np.float32)])
def test_frames_of_other_sizes_are_refused(folder, frame):
    observation = {} if frame is None else {WRIST: frame}
    with pytest.raises(ConfigError, match=naming("wrist")) as refused:
        Classifier(folder).probability(observation)
    assert refused.value.parameter == SETTING


def test_counting_begins_again_at_a_reset(folder, wrist):
    c = Classifier(folder)
    c.description = dataclasses.replace(c.description, threshold=1e-9)
    observation = {WRIST: np.zeros((wrist.height, wrist.width, 3), np.uint8)}

    def looks(holds: list[bool]) -> list[tuple[bool, bool]]:
        out = []
        for each in holds:
            c.count(c.probability(observation), each)
            out.append((c.seen(1), c.seen(1, holding=True)))
        return out

    assert looks([True, True, False, True]) == [(False, False), (True, True), (True, False), (True, False)]
    c.reset()
    assert looks([True, True]) == [(False, False), (True, True)]


@pytest.mark.parametrize("name", ["success", "condition"])
def test_a_text_is_no_function(name):
    with pytest.raises(ConfigError, match=naming("z > 0.04")) as refused:
        OutcomeConfig(**{name: "z > 0.04"})
    assert refused.value.parameter == f"outcome.{name}"
