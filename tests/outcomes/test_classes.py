"""Several classes: as stages of a task, and as a part of the state."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from actor_helpers import LineEnv, ListSink, NoisyAgent, make_config, make_policy
from classifier_sets import save_random
from errors import naming

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.cli.process import load
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.outcomes import classifier as module
from serl_chunk.outcomes.judge import CLASSIFIER
from serl_chunk.outcomes.robot import ObservedClasses, observing, spec_of_robot
from serl_chunk.types import IMAGE_PREFIX, STATE, CameraSpec, ConfigError, Outcome

WRIST = IMAGE_PREFIX + "wrist"
CLASSES = ("lost", "up", "down")
LENGTH = 12


@pytest.fixture
def seen(monkeypatch):
    """Makes the classifier see class `order[tick]`. Returns a callable that sets the order, and the ticks looked at."""
    order: list[str] = []
    looked: list[int] = []

    def probability(self, observation):
        tick = int(observation[WRIST][0, 0, 0])  # LineEnv's frames have their number
        looked.append(tick)
        return np.array([0.94 if name == order[tick] else 0.03 for name in CLASSES])

    monkeypatch.setattr(module.Classifier, "probability", probability)

    def show(text: str) -> None:
        order[:] = [{"l": "lost", "u": "up", "d": "down"}[letter] for letter in text]

    return show, looked


@pytest.fixture
def folder(tmp_path):
    return str(save_random(tmp_path / "c", LineEnv().robot_spec.camera("wrist"), classes=CLASSES))


def run(outcome: OutcomeConfig, env: LineEnv | None = None) -> ListSink:
    sink = ListSink()
    config = dataclasses.replace(make_config(), outcome=outcome)
    env = observing(env or LineEnv(length=LENGTH), config)
    policy = None if outcome.observed else make_policy(NoisyAgent(8))  # a normaliser has one length
    EpisodeRunner(env, policy, sink, config=config).run_episode(5)
    return sink


@pytest.mark.parametrize(
    ("order", "stages", "length"),
    [  # frame 0 is before the first tick; two frames in a row count
        ("uuuuuuddddddd", ("up>down", "down>up"), 7),  # flipped
        ("ddddduuuuuuuu", ("up>down", "down>up"), 6),
        ("uuuuudllluuuu", ("up>down", "down>up"), None),  # down on one frame alone
        ("uuuuudduuuuuu", ("up>down>up",), 8),
        ("ddddduuuuuuuu", ("up>down",), None),  # the wrong order
        ("uuuuulllldddd", (" up > down ",), 10),  # what lies between does not matter
        ("uuuuuuuuddddd", (), 9),  # the last class
    ],
)
def test_stages_are_to_be_seen_in_their_order(folder, seen, order, stages, length):
    show, _ = seen
    show(order)
    sink = run(OutcomeConfig(classifier=folder, stages=stages))
    end = sink.last_end
    if length is None:
        assert (end.outcome, end.length) == (Outcome.UNKNOWN, LENGTH)
    else:
        assert (end.outcome, end.outcome_by, end.length) == (Outcome.SUCCESS, CLASSIFIER, length)
        assert [s.reward for s in sink.steps] == [0.0] * (length - 1) + [1.0]


def test_stages_begin_anew_in_each_episode(folder, seen):
    show, _ = seen
    config = dataclasses.replace(make_config(), outcome=OutcomeConfig(classifier=folder, stages=("up>down",)))
    sink, env = ListSink(), LineEnv(length=LENGTH)
    runner = EpisodeRunner(env, make_policy(NoisyAgent(8)), sink, config=config)
    for order in ("u" * 13, "d" * 13):
        show(order)
        runner.run_episode(5)
        assert sink.last_end.outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("order", "stages", "rewards"),
    [
        ("uuuuuuddddddd", ("up>down",), {2: 0.25, 7: 1.0}),  # {frame that shows it: reward}
        ("uuuulludddldd", ("up>down>up",), {2: 0.25, 8: 0.25}),  # each once, and there is no success
        ("uuuuudduuuuuu", ("up>down>up",), {2: 0.25, 6: 0.25, 8: 1.0}),
        ("dddduuuullddd", ("up>down", "down>up"), {2: 0.25, 5: 1.0}),
        ("ddduullllllll", ("up>lost>down", "down>lost"), {2: 0.25, 6: 1.0}),  # up is no further than down
        ("ddddlllllllll", ("up>down",), {}),
    ],
)
def test_a_stage_that_is_first_reached_is_rewarded_once(folder, seen, order, stages, rewards):
    show, _ = seen
    show(order)
    sink = run(OutcomeConfig(classifier=folder, stages=stages, stage_reward=0.25))
    given = {tick + 1: s.reward for tick, s in enumerate(sink.steps) if s.reward}
    assert given == rewards


def test_what_the_environment_rewards_stays(folder, seen):
    show, _ = seen
    show("llluuuddddddd")
    env = LineEnv(length=LENGTH)
    step = env.receive
    env.receive = lambda: ((result := step())[0], 0.5, *result[2:])  # type: ignore[method-assign]
    sink = run(OutcomeConfig(classifier=folder, stages=("up>down",), stage_reward=0.25), env)
    assert [s.reward for s in sink.steps] == [0.5, 0.5, 0.5, 0.75, 0.5, 0.5, 1.5]


def test_a_critics_range_holds_the_stages_rewards(folder):
    stages = [("outcome.classifier", folder), ("outcome.stages", "up>down>up"), ("outcome.stage_reward", "0.25")]
    config = load("fake_aloha", stages)
    assert (config.outcome.longest, config.value_range) == (3, (0.0, 1.5))


def test_the_condition_is_of_the_last_stage(folder, seen):
    show, _ = seen
    show("uuuuuuddddddd")
    outcome = OutcomeConfig(classifier=folder, stages=("up>down",), condition=lambda o: bool(o[STATE][2] >= 9))
    assert run(outcome).last_end.length == 10  # frames 9 and 10


def test_the_class_is_a_part_of_the_state_at_one_look_a_tick(folder, seen):
    show, looked = seen
    show("luuudddddddddd")
    sink = run(OutcomeConfig(classifier=folder, stages=("down>up",), observed=("down", "up")))
    states = [s.observation[STATE] for s in sink.steps] + [sink.last_end.final_observation[STATE]]
    assert [s[2] for s in states] == list(range(LENGTH + 1))
    assert [tuple(s[3:]) for s in states] == [(0, 0)] + [(0, 1)] * 3 + [(1, 0)] * 9
    assert all(s.dtype == np.float32 for s in states)
    assert looked == list(range(LENGTH + 1))


def test_the_learner_knows_the_state_without_the_classifier(folder):
    config = dataclasses.replace(make_config(), outcome=OutcomeConfig(classifier=folder, observed=("up",)))
    env = observing(LineEnv(), config)
    assert isinstance(env, ObservedClasses)
    assert env.robot_spec.state_dim == LineEnv().robot_spec.state_dim + 1
    assert observing(env, config) is env
    assert env.length == 30  # of the robot inside
    learner = load("fake_aloha", [("outcome.observed", "up,down")])
    assert spec_of_robot(learner).state_dim == spec_of_robot(load("fake_aloha", [])).state_dim + 2


@pytest.mark.parametrize(
    ("outcome", "names"),
    [
        ({"observed": ("sideways",)}, ("outcome.observed", "sideways")),
        ({"stages": ("up>sideways",)}, ("outcome.stages", "sideways")),
        ({"observed": ("up",), "classifier": ""}, ("outcome.observed", "up")),
        ({"stages": ("up>",)}, ("outcome.stages", "up>")),
        ({"stages": ("up>down",), "stage_reward": 1.0}, ("outcome.stage_reward", "below 1")),
        ({"observed": ("up", "up")}, ("outcome.observed", "up")),
    ],
)
def test_classes_that_are_refused_before_anything_moves(folder, outcome, names):
    env = LineEnv()
    env.reset = env.send = lambda *a, **k: pytest.fail("the robot was touched")  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=naming(names[1])) as refused:
        run(OutcomeConfig(**{"classifier": folder} | outcome), env)
    assert refused.value.parameter == names[0]


def test_a_classifier_of_another_camera_closes_the_robot(tmp_path):
    other = str(save_random(tmp_path / "other", CameraSpec("belly", 8, 8), classes=CLASSES))
    env, closed = LineEnv(), []
    env.close = lambda: closed.append(True)  # type: ignore[method-assign]
    config = dataclasses.replace(make_config(), outcome=OutcomeConfig(classifier=other, observed=("up",)))
    with pytest.raises(ConfigError, match=naming("belly")):
        observing(env, config)
    assert closed
