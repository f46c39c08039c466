"""Who decides on a success: the environment, a function, or a classifier by frames, stages and a condition."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest
from actor_helpers import SPEC, LineEnv, ListSink, NoisyAgent, make_config, make_policy
from classifier_sets import save_random
from errors import naming

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.classifier.files import DESCRIPTION
from serl_chunk.cli.process import load
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.outcomes import classifier as module
from serl_chunk.outcomes.classifier import SETTING, Classifier
from serl_chunk.outcomes.judge import CLASSIFIER, CONDITION, FUNCTION
from serl_chunk.outcomes.robot import ObservedClasses, observing, spec_of
from serl_chunk.types import IMAGE_PREFIX, STATE, CameraSpec, ConfigError, Outcome

LAST = 11  # tick after which the function finds a success: the state has the tick number after it
SUCCESS, FAILURE, UNKNOWN = Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN


def after_tick(observation):
    return observation[STATE][2] == LAST + 1


def run(env: LineEnv, episodes: int = 1, before=lambda number: None, **outcome) -> ListSink:
    config = dataclasses.replace(make_config(failure_reward=0.25), outcome=OutcomeConfig(**outcome))
    sink, env = ListSink(), observing(env, config)
    policy = None if config.outcome.observed else make_policy(NoisyAgent(8))  # a normaliser has one length
    runner = EpisodeRunner(env, policy, sink, config=config)
    for number in range(episodes):
        before(number)
        assert runner.run_episode(5 + number).outcome is sink.last_end.outcome
    return sink


@pytest.mark.parametrize(
    ("env", "outcome", "by", "reward"),
    [
        (LineEnv(length=LAST + 1), SUCCESS, FUNCTION, 1.0),  # on the last tick of the time limit
        (LineEnv(success_at=LAST), SUCCESS, "environment", 1.0),  # not 2: the environment was first
        (LineEnv(failure_at=LAST), FAILURE, "environment", 0.25),
        (LineEnv(terminated_at=LAST), UNKNOWN, "environment", 0.0),
    ],
)
def test_a_success_of_the_function_ends_the_episode_unless_the_environment_did(env, outcome, by, reward):
    def success(observation):
        assert observation[STATE][2] <= LAST + (by == FUNCTION), "called after the end"
        return after_tick(observation)

    sink = run(env, success=success)
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

    sink = run(env, success=success, cameras=("wrist",))
    assert seen == [(t, t) for t in range(1, env.length + 1)]
    assert not any(IMAGE_PREFIX + "wrist" in s.observation for s in sink.steps)


@pytest.mark.parametrize(
    ("env", "judged"),
    [(LineEnv(success_at=9, failure_at=3), FAILURE), (LineEnv(), UNKNOWN), (LineEnv(success_at=LAST), SUCCESS)],
)
def test_a_hidden_environment_neither_ends_nor_rewards_and_is_recorded(env, judged):
    env.goes_on = True
    sink = run(env, success=after_tick, environment=False)
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
    sink = run(env, success=after_tick, environment=False)
    end = sink.last_end
    assert (end.length, end.truncated, end.outcome, end.environment) == (length, True, UNKNOWN, SUCCESS)
    assert not any(s.reward for s in sink.steps)


WRIST = IMAGE_PREFIX + "wrist"
CAMERA = LineEnv().robot_spec.camera("wrist")
CLASSES = {"l": "lost", "u": "up", "d": "down"}
LENGTH = 12


@pytest.fixture
def folder(tmp_path):
    return str(save_random(tmp_path / "one", CAMERA))


@pytest.fixture
def staged(tmp_path):
    """Of three classes."""
    return str(save_random(tmp_path / "three", CAMERA, classes=tuple(CLASSES.values())))


@pytest.fixture
def seen(monkeypatch):
    """Makes what the classifier sees on frames, LineEnv's of which have their number: returns a callable that sets it
    (probabilities of success by frame, or a letter of CLASSES for each), and the frames that were looked at."""
    given: dict[int, float] = {}
    order: list[str] = []
    looked: list[int] = []

    def probability(self, observation):
        frame = int(observation[WRIST][0, 0, 0])
        looked.append(frame)
        if order:
            return np.array([0.94 if name == order[frame] else 0.03 for name in CLASSES])
        return np.array([1 - given.get(frame, 0.0), given.get(frame, 0.0)])

    def show(what) -> None:
        order[:] = what if isinstance(what, str) else []
        given.clear()
        given.update({} if isinstance(what, str) else what)

    monkeypatch.setattr(module.Classifier, "probability", probability)
    return show, looked


def test_frames_in_a_row_end_the_episode_with_reward_one(folder, seen):
    show, looked = seen
    show({3: 0.9, 5: 0.5, 6: 0.6})  # one alone, then two
    sink = run(LineEnv(), classifier=folder)
    end = sink.last_end
    assert (end.length, end.terminated, end.outcome, end.outcome_by) == (6, True, Outcome.SUCCESS, CLASSIFIER)
    assert [s.reward for s in sink.steps] == [0.0] * 5 + [1.0]
    assert looked == list(range(1, 7))
    assert not any(WRIST in s.observation for s in sink.steps)  # looked at, and not recorded
    show({4: 0.9, 1: 0.9, 2: 0.1})  # the last of one episode, and the first of the next
    end = run(LineEnv(length=4), episodes=3, classifier=folder).last_end
    assert (end.outcome, end.length) == (Outcome.UNKNOWN, 4)


@pytest.mark.parametrize(
    ("env", "outcome", "length"),
    [
        (LineEnv(success_at=5), Outcome.SUCCESS, 6),
        (LineEnv(failure_at=5), Outcome.FAILURE, 6),
        (LineEnv(length=3), Outcome.UNKNOWN, 3),
    ],
)
def test_the_environment_is_first_and_the_last_frame_is_recorded_with_the_end(folder, seen, env, outcome, length):
    """A corrected episode is what the next classifier learns from."""
    show, looked = seen
    show({5: 0.9, 6: 0.9})
    end = run(env, classifier=folder).last_end
    assert (end.outcome, end.outcome_by, end.length) == (outcome, "environment", length)
    assert looked == list(range(1, length + outcome.value.startswith("u")))
    assert end.final_observation[WRIST][0, 0, 0] == length


def test_the_condition_must_hold_on_each_frame(folder, staged, seen):
    show, looked = seen
    show(dict.fromkeys(range(4, 21), 0.9))

    def condition(observation):
        assert set(observation) == {STATE}
        return int(observation[STATE][2]) not in (5, 7)

    end = run(LineEnv(), classifier=folder, condition=condition).last_end
    assert (end.length, end.outcome_by) == (9, CLASSIFIER)  # after frames 8 and 9
    assert end.final_observation[WRIST][0, 0, 0] == 9
    assert looked == [1, 2, 3, 4, 6, 8, 9]  # without the condition nothing is looked at
    show("uuuuuuddddddd")  # of stages it is of the last one
    sink = run(LineEnv(length=LENGTH), classifier=staged, stages=("up>down",), condition=lambda o: o[STATE][2] >= 9)
    assert sink.last_end.length == 10  # frames 9 and 10


def test_the_network_is_applied_to_the_frame_and_counting_begins_again_at_a_reset(folder):
    c = Classifier(folder)
    c.check(LineEnv().robot_spec)
    frames = np.random.default_rng(0).integers(0, 255, (2, CAMERA.height, CAMERA.width, 3), np.uint8)
    first, second = (c.probability({STATE: np.zeros(3, np.float32), WRIST: f}) for f in frames)
    assert (first.shape, c.cameras) == ((2,), ("wrist",))
    assert first.sum() == pytest.approx(1)
    assert not np.array_equal(first, second)
    c.description = dataclasses.replace(c.description, threshold=1e-9)

    def looks(holds: list[bool]) -> list[tuple[bool, bool]]:
        out = []
        for each in holds:
            c.count(first, each)
            out.append((c.seen(1), c.seen(1, holding=True)))
        return out

    assert looks([True, True, False, True]) == [(False, False), (True, True), (True, False), (True, False)]
    c.reset()
    assert looks([True, True]) == [(False, False), (True, True)]


@pytest.mark.parametrize(
    ("order", "stages", "length", "rewards"),
    [  # frame 0 is before the first tick; two frames in a row count; {frame that shows a stage first: reward}
        ("uuuuuuddddddd", ("up>down", "down>up"), 7, {2: 0.25, 7: 1.0}),  # flipped
        ("uuuuudllluuuu", ("up>down", "down>up"), None, {2: 0.25}),  # down on one frame alone
        ("uuuuudduuuuuu", ("up>down>up",), 8, {2: 0.25, 6: 0.25, 8: 1.0}),
        ("uuuulludddldd", ("up>down>up",), None, {2: 0.25, 8: 0.25}),  # each once
        ("ddddduuuuuuuu", ("up>down",), None, {6: 0.25}),  # the wrong order
        ("uuuuulllldddd", (" up > down ",), 10, {2: 0.25, 10: 1.0}),  # what lies between does not matter
        ("ddduullllllll", ("up>lost>down", "down>lost"), 6, {2: 0.25, 6: 1.0}),  # up is no further than down
        ("uuuuuuuuddddd", (), 9, {9: 1.0}),  # the last class
    ],
)
def test_stages_are_to_be_seen_in_their_order_and_each_is_rewarded_once(staged, seen, order, stages, length, rewards):
    show, _ = seen
    show(order)
    how = {"stage_reward": 0.25} if stages else {}
    sink = run(LineEnv(length=LENGTH), classifier=staged, stages=stages, **how)
    end = sink.last_end
    if length is None:
        assert (end.outcome, end.length) == (Outcome.UNKNOWN, LENGTH)
    else:
        assert (end.outcome, end.outcome_by, end.length) == (Outcome.SUCCESS, CLASSIFIER, length)
    assert {tick + 1: s.reward for tick, s in enumerate(sink.steps) if s.reward} == rewards


def test_stages_begin_anew_in_each_episode_and_what_the_environment_rewards_stays(staged, seen):
    show, _ = seen
    env, orders = LineEnv(length=LENGTH), ("d" * 13, "u" * 13, "d" * 13)
    sink = run(env, 3, lambda number: show(orders[number]), classifier=staged, stages=("up>down",))
    assert [sink.last_end.outcome, sink.last_end.length] == [Outcome.UNKNOWN, LENGTH]
    show("llluuuddddddd")
    receive = env.receive
    env.receive = lambda: ((result := receive())[0], 0.5, *result[2:])  # type: ignore[method-assign]
    sink = run(env, classifier=staged, stages=("up>down",), stage_reward=0.25)
    assert [s.reward for s in sink.steps] == [0.5, 0.5, 0.5, 0.75, 0.5, 0.5, 1.5]
    stages = [("outcome.classifier", staged), ("outcome.stages", "up>down>up"), ("outcome.stage_reward", "0.25")]
    config = load("fake_aloha", stages)  # a critic's range holds them
    assert (config.outcome.longest, config.value_range) == (3, (0.0, 1.5))


def test_the_class_is_a_part_of_the_state_at_one_look_a_tick(staged, seen):
    show, looked = seen
    show("luuudddddddddd")
    sink = run(LineEnv(length=LENGTH), classifier=staged, stages=("down>up",), observed=("down", "up"))
    states = [s.observation[STATE] for s in sink.steps] + [sink.last_end.final_observation[STATE]]
    assert [s[2] for s in states] == looked == list(range(LENGTH + 1))
    assert [tuple(s[3:]) for s in states] == [(0, 0)] + [(0, 1)] * 3 + [(1, 0)] * 9
    assert {s.dtype for s in states} == {np.dtype(np.float32)}


def test_the_learner_knows_the_state_without_the_classifier(tmp_path, staged):
    config = dataclasses.replace(make_config(), outcome=OutcomeConfig(classifier=staged, observed=("up",)))
    env = observing(LineEnv(), config)
    assert isinstance(env, ObservedClasses)
    assert env.robot_spec.state_dim == LineEnv().robot_spec.state_dim + 1
    assert observing(env, config) is env
    env.env.init_states = ("left",)
    env.check_init_state("left")
    with mock.patch.object(LineEnv, "states_of", return_value=("right",)):
        assert env.states_of("push") == ("right",)
    assert env.length == 30  # of the robot inside
    with mock.patch.object(LineEnv, "restart_limit") as restarted:
        env.restart_limit()
    assert restarted.called
    learner = load("fake_aloha", [("outcome.observed", "up,down")])
    assert spec_of(learner).state_dim == spec_of(load("fake_aloha", [])).state_dim + 2
    other = str(save_random(tmp_path / "other", CameraSpec("belly", 8, 8), classes=tuple(CLASSES.values())))
    env, closed = LineEnv(), []
    env.close = lambda: closed.append(True)  # type: ignore[method-assign]
    config = dataclasses.replace(make_config(), outcome=OutcomeConfig(classifier=other, observed=("up",)))
    with pytest.raises(ConfigError, match=naming("belly")):  # of another camera: the robot is closed
        observing(env, config)
    assert closed


@pytest.mark.parametrize(
    ("outcome", "parameter", "names"),
    [
        ({"observed": ("sideways",)}, "outcome.observed", ("sideways",)),
        ({"stages": ("up>sideways",)}, "outcome.stages", ("sideways",)),
        ({"observed": ("up",), "classifier": ""}, "outcome.observed", ("up",)),
        ({"stages": ("up>",)}, "outcome.stages", ("up>",)),
        ({"stages": ("up>down",), "stage_reward": 1.0}, "outcome.stage_reward", ("below 1",)),
        ({"observed": ("up", "up")}, "outcome.observed", ("up",)),
        ({"classifier": CameraSpec("belly", 8, 8)}, SETTING, ("belly", "8x8")),
        ({"classifier": CameraSpec("wrist", 9, 7)}, SETTING, ("wrist", "9x7")),
        ({"classifier": "absent"}, SETTING, ("absent", DESCRIPTION)),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_moves(tmp_path, staged, outcome, parameter, names):
    env, other = LineEnv(), outcome.get("classifier")
    env.reset = env.send = lambda *a, **k: pytest.fail("the robot was touched")  # type: ignore[method-assign]
    if isinstance(other, CameraSpec):
        outcome = {"classifier": str(save_random(tmp_path / "other", other))}
    with pytest.raises(ConfigError, match=naming(*names)) as refused:
        run(env, **{"classifier": staged} | outcome)
    assert refused.value.parameter == parameter


NO_TRUTH_VALUE = lambda observation: np.array([True, False])  # noqa: E731


@pytest.mark.parametrize(
    ("call", "parameter", "named"),
    [
        (lambda folder: run(LineEnv(), success=NO_TRUTH_VALUE), FUNCTION, "True or False"),
        (lambda folder: run(LineEnv(), classifier=folder, condition=NO_TRUTH_VALUE), CONDITION, "True or False"),
        (lambda folder: run(LineEnv(), success=after_tick, cameras=("belly",)), None, "front, wrist"),
        (lambda folder: OutcomeConfig(success="z > 0.04"), "outcome.success", "z > 0.04"),
        (lambda folder: OutcomeConfig(condition="z > 0.04"), "outcome.condition", "z > 0.04"),
        (lambda folder: OutcomeConfig(success=after_tick, classifier="c/c"), "outcome.success", "c/c"),
        (lambda folder: OutcomeConfig(environment=False), "outcome.environment", "outcome.classifier"),
        (lambda folder: Classifier(folder).probability({}), SETTING, "wrist"),
        (lambda folder: Classifier(folder).probability({WRIST: np.zeros((8, 8, 3), np.float32)}), SETTING, "wrist"),
    ],
)
def test_settings_and_frames_that_are_refused(folder, call, parameter, named):
    with pytest.raises(ConfigError, match=naming(named)) as refused:
        call(folder)
    assert parameter is None or refused.value.parameter == parameter
