"""What a demonstration by hand keeps of the episode that the control loop ran."""

from __future__ import annotations

import dataclasses

import gymnasium
import numpy as np
import pytest
from actor_helpers import HumanOnTicks, LineEnv, ListSink, make_config

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.config.robots import FakeSingleArmConfig, GymConfig
from serl_chunk.data.frames import with_repeated_frames
from serl_chunk.recording.recording import DemonstrationSink
from serl_chunk.robots.base import InterventionCommand
from serl_chunk.robots.fake.single_arm import FakeSingleArmEnv
from serl_chunk.robots.gym_adapter import GymAdapter
from serl_chunk.types import STATE, Begin, End, Episode, Outcome, Source, Step, StepBlock

CAMERAS = ("front", "wrist")


class Both:
    def __init__(self, *sinks) -> None:
        self._sinks = sinks

    def __getattr__(self, name):
        return lambda record: [getattr(sink, name)(record) for sink in self._sinks]


class SlowCameras(LineEnv):
    def __init__(self, every: dict[str, int], **options) -> None:
        super().__init__(**options)
        self._every = every

    def _frames(self, tick, cameras=None):
        whole = super()._frames(tick, cameras)
        return {k: v // self._every[k.rpartition("/")[2]] for k, v in whole.items()}


def run(moves: frozenset[int], *, idle: frozenset[int] = frozenset(), every: tuple[int, int] = (1, 1), **env):
    """Run an episode; returns its records as the loop made them, and those after the sink, with the sink."""
    whole, kept = ListSink(), ListSink()
    sink = DemonstrationSink(kept)
    robot = SlowCameras(dict(zip(CAMERAS, every, strict=True)), **{"length": 12, "success_at": 11, **env})
    runner = EpisodeRunner(
        robot, None, Both(whole, sink), config=make_config(), cameras=CAMERAS, intervention=HumanOnTicks(moves, idle)
    )
    runner.run_episode(7, episode_id="e")
    runner.close()
    return whole, kept, sink


def episode(sink: ListSink) -> Episode:
    begin, *steps, end = sink.records
    assert isinstance(begin, Begin)
    assert isinstance(end, End)
    return Episode(begin, *with_repeated_frames(StepBlock.from_steps(begin.episode_id, steps), end))


@pytest.mark.parametrize("first", [0, 1, 4, 11])
@pytest.mark.parametrize("every", [(1, 1), (3, 5), (100, 2)])
def test_an_episode_begins_at_the_first_motion_with_what_was_seen_then(first, every):
    whole, kept, sink = run(frozenset(range(first, 12)), every=every)
    before, after = episode(whole), episode(kept)
    assert after.begin == before.begin
    assert (after.steps.first_tick, after.steps.n, after.end.length) == (0, 12 - first, 12 - first)
    for name in ("action", "reward", "source", "stamp", "lost_ticks"):
        np.testing.assert_array_equal(getattr(after.steps, name), getattr(before.steps, name)[first:])
    np.testing.assert_array_equal(after.steps.observation[STATE], before.steps.observation[STATE][first:])
    for key in ("images/front", "images/wrist"):
        assert after.steps.sparse[key].index.tolist() == list(range(12 - first))
        np.testing.assert_array_equal(after.steps.sparse[key].values, before.steps.sparse[key].values[first:])
        np.testing.assert_array_equal(after.end.final_observation[key], before.end.final_observation[key])
    assert (after.end.outcome, after.end.terminated) == (Outcome.SUCCESS, True)
    assert sink.last == (12 - first, 12 - first, first, Outcome.SUCCESS, "environment")


def test_a_frame_of_before_the_first_motion_is_recorded_once():
    whole, kept, _ = run(frozenset(range(5, 12)), every=(100, 100))
    assert [len(s.observation) for s in kept.steps] == [3, *[1] * 6]
    assert {tuple(s.repeats.items()) for s in kept.steps[1:]} == {(("front", 0), ("wrist", 0))}
    assert kept.steps[0].repeats is None
    assert kept.last_end.repeats == {"front": 0, "wrist": 0}
    assert whole.steps[5].repeats == {"front": 0, "wrist": 0}


def test_an_environments_own_human_is_one():
    command = np.array([0.5, 0.5], np.float32)
    _, kept, sink = run(frozenset(), human=dict.fromkeys(range(3, 12), command))
    assert sink.last.idle_before == 3
    assert {s.source for s in kept.steps} == {Source.HUMAN}


def test_without_a_motion_nothing_is_handed_on():
    _, kept, sink = run(frozenset({3}), idle=frozenset({3}), success_at=None)
    assert kept.records == []
    assert sink.last == (0, 0, 12, Outcome.UNKNOWN, "environment")


def step(tick: int, source: Source, **more) -> Step:
    return Step(
        tick, {STATE: np.zeros(3, np.float32)}, np.zeros(2, np.float32), 0.25, source, -1, -1, 0.1 * tick
    )._replace(**more)


def test_ticks_of_decisions_and_gaps_are_those_of_the_shorter_episode():
    sink = DemonstrationSink(kept := ListSink())
    sink.begin(Begin("e", init_state="seed-4"))
    sink.step(step(0, Source.HOLD, lost_ticks=5))
    sink.step(step(1, Source.HOLD))
    sink.step(step(2, Source.HUMAN, lost_ticks=2, human_dims=np.array([True, False])))
    sink.step(step(3, Source.POLICY, decision_tick=0))
    sink.step(step(4, Source.POLICY, decision_tick=3))
    sink.end(End("e", 5, None, False, True, Outcome.UNKNOWN))
    assert kept.records[0].init_state == "seed-4"
    assert [(s.tick, s.decision_tick, s.lost_ticks) for s in kept.steps] == [(0, -1, 2), (1, -1, 0), (2, 1, 0)]
    assert [s.human_dims for s in kept.steps] == [None] * 3


class OwnLimit(gymnasium.Env):
    """Two numbers that follow an action, with a time limit of its own, as HIL-SERL's."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.curr_path_length = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.curr_path_length += 1
        return np.zeros(2, np.float32), 0.0, self.curr_path_length >= 12, False, {}


class Solved(FakeSingleArmEnv):
    """Solved from the start: an environment that does not decide goes on up to the time limit."""

    def _move(self, action):
        reward, info = super()._move(action)
        return reward, {**info, "success": True}


def limited_twice() -> GymAdapter:
    made = lambda fake_env: gymnasium.wrappers.TimeLimit(OwnLimit(), 11)  # noqa: E731
    return GymAdapter(GymConfig(make=made, max_episode_steps=10), fake_env=False)


ARM = FakeSingleArmConfig(max_episode_steps=10)


@pytest.mark.parametrize("make", [lambda: FakeSingleArmEnv(ARM), lambda: Solved(ARM), limited_twice])
@pytest.mark.parametrize(
    ("first", "idle", "moving"),  # motion from a tick on
    [(0, 0, 10), (7, 7, 10), (9, 9, 10), (10, 10, 0), (None, 10, 0)],
)
def test_the_time_limit_begins_with_the_first_motion_which_is_waited_for_as_long(make, first, idle, moving):
    robot, sink = make(), DemonstrationSink(kept := ListSink())

    class Human(HumanOnTicks):
        def poll(self, tick, observation, decision_tick, last):
            moves = first is not None and tick >= first
            return InterventionCommand(np.full(robot.robot_spec.action_dim, 0.5 * moves, np.float32))

    hidden = OutcomeConfig(success=lambda observation: False, environment=False)
    config = dataclasses.replace(make_config(), outcome=hidden) if isinstance(robot, Solved) else make_config()
    runner = EpisodeRunner(robot, None, sink, config=config, intervention=Human(frozenset()), from_motion=True)
    runner.run_episode(3, episode_id="e")
    runner.close()
    robot.close()
    assert sink.last == (moving, moving, idle, Outcome.UNKNOWN, "environment")
    ends = [record for record in kept.records if isinstance(record, End)]
    assert [(end.length, end.truncated) for end in ends] == [(10, True)] * bool(moving)
