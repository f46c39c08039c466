"""Episodes under the lockstep clock: exact delays, interventions, ends, records."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from actor_helpers import (
    DT,
    SPEC,
    HumanOnTicks,
    LineEnv,
    ListSink,
    NoisyAgent,
    check_steps,
    chunk_starts,
    make_config,
    make_policy,
)
from errors import naming

from serl_chunk.actor.chunk_queue import TickAction
from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.handover import ACCELERATION, Handover, hold_warning
from serl_chunk.actor.policy import PolicyError
from serl_chunk.actor.recorder import EpisodeRecorder, NullSink
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.gripper import GripperConfig
from serl_chunk.config.experiment import ActorConfig, ChunkConfig, ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig, GymConfig
from serl_chunk.devices.teleoperation import TwistLimits
from serl_chunk.replay.episode import accelerations, human_segments
from serl_chunk.replay.windows import eligible_starts
from serl_chunk.robots.base import InterventionCommand
from serl_chunk.types import Begin, ConfigError, DataError, End, Outcome, RobotSpec, Source, Step


def run(env=None, *, horizon=8, execute=None, delay=0, agent=None, seed=5, config=None, **kwargs):
    agent = agent or NoisyAgent(horizon)
    config = config or make_config(horizon=horizon, execute=execute, actor=ActorConfig(delay_ticks=delay))
    sink = ListSink()
    runner = EpisodeRunner(env or LineEnv(), make_policy(agent), sink, config=config, **kwargs)
    summary = runner.run_episode(seed, explore=True)
    return summary, sink, agent


@pytest.mark.parametrize(("delay", "horizon", "execute"), [(0, 8, 8), (1, 5, 2), (3, 8, 6)])
def test_every_action_is_the_chunks_at_tick_minus_decision_tick(delay, horizon, execute):
    summary, sink, agent = run(delay=delay, horizon=horizon, execute=execute)
    steps = sink.steps
    check_steps(steps, execute)
    assert ([s.tick for s in steps if s.source != Source.POLICY], summary.hold_ticks) == (list(range(delay)), delay)
    assert summary.starved_ticks == 0
    starts = list(chunk_starts(steps))
    assert [s.decision_tick for s in starts] == [k * (execute - delay) for k in range(len(starts))]
    assert {s.tick - s.decision_tick for s in starts} == {delay}
    # The committed actions a decision was told are those that its first `delay` ticks executed.
    for s in starts:
        np.testing.assert_array_equal(
            agent.prefixes[s.decision_tick],
            np.reshape([steps[s.decision_tick + i].action for i in range(delay)], (-1, 2)),
        )


def test_who_steps_an_episode_closes_it_once_where_an_error_ends_it():
    policy, sink = make_policy(NoisyAgent(8)), ListSink()
    runner = EpisodeRunner(LineEnv(), policy, sink, config=make_config())
    episode = runner.begin(0)
    runner.accept(episode, policy.decide(runner.due(episode)))
    runner.tick(episode)
    for _ in range(2):
        runner.abort(episode)
    assert [type(r) for r in sink.records] == [Begin, Step, End]
    assert (sink.last_end.length, sink.last_end.truncated, sink.last_end.outcome_by) == (1, True, "crash")


def test_records_of_an_episode():
    summary, sink, _ = run(LineEnv(success_at=11))
    begin, *steps, end = sink.records
    assert isinstance(begin, Begin)
    assert isinstance(end, End)
    assert begin.episode_id == end.episode_id
    assert (end.length, end.terminated, end.truncated, end.outcome) == (12, True, False, Outcome.SUCCESS)
    assert [s.reward for s in steps] == [0.0] * 11 + [1.0]
    assert [s.observation["state"][2] for s in steps] == list(range(12))  # not the driver's reused buffer
    assert end.final_observation["state"][2] == 12
    np.testing.assert_allclose([s.stamp for s in steps], np.arange(12) * DT)
    assert ({s.policy_version for s in steps}, [s.tick for s in steps if s.decision is not None]) == ({3}, [0, 8])
    assert (steps[8].decision["q"], summary.success, summary.length, summary.total_reward) == (8, True, 12, 1.0)
    third = np.diff([s.action.astype(np.float64) for s in steps], n=3, axis=0)
    assert summary.jerk == pytest.approx(np.sqrt(np.mean(third**2)) / DT**3)


@pytest.mark.parametrize(("env", "terminated", "outcome", "last_reward"), [
    (LineEnv(success_at=4), True, Outcome.SUCCESS, 1.0), (LineEnv(failure_at=4), True, Outcome.FAILURE, 0.25),
    (LineEnv(terminated_at=4), True, Outcome.UNKNOWN, 0.0), (LineEnv(length=5), False, Outcome.UNKNOWN, 0.0),
    (LineEnv(failure_at=4, success_at=4), True, Outcome.SUCCESS, 1.0),
])  # fmt: skip
def test_ends(env, terminated, outcome, last_reward):
    _, sink, _ = run(env, config=make_config(failure_reward=0.25))
    end = sink.last_end
    assert (end.length, end.terminated, end.truncated) == (5, terminated, not terminated)
    assert (end.outcome, end.outcome_by, sink.steps[-1].reward) == (outcome, "environment", last_reward)


@pytest.mark.parametrize("tick", [0, 7])
def test_a_stop_truncates_before_the_next_command(tick):
    env = LineEnv()
    summary, sink, _ = run(env, stop=lambda: "operator" if env.tick >= tick else None)
    assert (summary.length, summary.ended_by, env.tick) == (tick, "operator", tick)
    if tick == 0:
        assert sink.records == []  # an episode without a step leaves no record
    else:
        end = sink.last_end
        assert (end.truncated, end.outcome, end.final_observation["state"][2]) == (True, Outcome.UNKNOWN, tick)


@pytest.mark.parametrize("delay", [0, 2])
def test_intervention_mid_chunk_and_release(delay):
    human = HumanOnTicks(ticks=frozenset(range(11, 16)) | {22}, idle=frozenset({14, 15}))
    summary, sink, _ = run(delay=delay, intervention=human)
    steps = sink.steps
    check_steps(steps, 8, human.ticks)
    assert [s.tick for s in steps if s.source == Source.HUMAN] == [11, 12, 13, 22]
    assert all(steps[t].source == Source.HOLD for t in (14, 15))
    np.testing.assert_array_equal(steps[12].action, np.array([0.9, -0.9], np.float32))
    assert (summary.human_ticks, summary.segments) == (6, 2)
    # Released: re-planned from the observation of that very tick, after holding for the delay.
    for release in (16, 23):
        assert [steps[release + i].source for i in range(delay)] == [Source.HOLD] * delay
        first = steps[release + delay]
        assert (first.source, first.decision_tick) == (Source.POLICY, release)
    assert summary.hold_ticks == 2 + 3 * delay
    # The learner's count of the same episode: waiting for a chunk after a release is no human tick.
    columns = np.array([(s.source, s.decision_tick) for s in steps], np.int32).T
    segments = human_segments(*columns)
    assert (int(np.diff(segments).sum()), len(segments)) == (summary.human_ticks, summary.segments)


@pytest.mark.parametrize("gate", [10.0, 0.3])
def test_the_environments_own_intervention_is_recorded_as_the_driver_executed_it(gate):
    override = np.array([0.5, 0.25], np.float32)
    summary, sink, _ = run(LineEnv(human={3: override, 4: override}, gate=gate))
    assert [s.tick for s in sink.steps if s.source == Source.HUMAN] == [3, 4]
    np.testing.assert_array_equal(sink.steps[3].action, np.minimum(override, np.float32(gate)))
    assert (sink.steps[5].decision_tick, summary.human_ticks, summary.segments) == (5, 2, 1)
    assert (summary.gated_share > 0) is (gate < 1)


@pytest.mark.parametrize(("command", "dims"), [
    ([0.5], None), ([np.nan, 0.0], None), ([0.5, 0.5], [False, False]), ([0.5, 0.5], [True]),
])  # fmt: skip
def test_a_humans_wrong_command_does_not_reach_the_robot(command, dims):
    human, env, sink = HumanOnTicks(frozenset({2})), LineEnv(), ListSink()
    wrong = InterventionCommand(np.array(command), dims=None if dims is None else np.array(dims))
    human.poll = lambda tick, *_: wrong if tick == 2 else None
    runner = EpisodeRunner(env, make_policy(NoisyAgent(8)), sink, config=make_config(), intervention=human)
    with pytest.raises(DataError, match=naming("actor.intervention", *(["line"] if dims is None else ["tick 2"]), 2)):
        runner.run_episode(0, explore=True)
    assert (env.tick, sink.last_end.outcome_by, sink.last_end.final_observation["state"][2]) == (2, "crash", 2)


@pytest.mark.parametrize("shown", [True, False])
def test_the_first_tick_of_an_environments_own_intervention_has_the_frames_that_the_human_saw(shown):
    """That a human acts is known after the step: the window that ends there needs what was seen before."""
    override = np.array([0.5, 0.25], np.float32)
    env = LineEnv(length=30, human={11: override, 12: override}, shown=shown)
    policy, sink = make_policy(NoisyAgent(8), image_keys=("wrist",)), ListSink()
    EpisodeRunner(env, policy, sink, config=make_config(), cameras=("wrist",)).run_episode(0, explore=True)
    frames = {s.tick: s.observation["images/wrist"] for s in sink.steps if "images/wrist" in s.observation}
    assert (11 in frames) == shown
    assert {12, 13} <= set(frames)
    assert all((frame == tick).all() for tick, frame in frames.items())
    assert all("images/front" not in s.observation for s in sink.steps)
    assert (11 + make_config().chunk.returned in frames) or not shown


@pytest.mark.parametrize(("delay", "returned"), [(0, 8), (3, 11)])
def test_every_look_of_an_image_agent_begins_a_window(delay, returned):
    """Decisions are not as far apart as windows are long where they come early, or their returns are longer."""
    config = dataclasses.replace(
        make_config(actor=ActorConfig(delay_ticks=delay)), chunk=ChunkConfig(8, return_steps=returned)
    )
    agent, sink, human = NoisyAgent(8), ListSink(), HumanOnTicks(ticks=frozenset({17, 18}))
    policy = make_policy(agent, image_keys=("wrist",))
    EpisodeRunner(LineEnv(length=60), policy, sink, config=config, intervention=human).run_episode(0, explore=True)
    shown = np.array(["images/wrist" in s.observation for s in sink.steps] + [True])
    starts, _ = eligible_starts(
        shown, first=0, last=len(sink.steps), terminated=False, returned=returned, keep_terminal=True
    )
    looks = {s.tick for s in sink.steps if s.decision is not None or s.source is Source.HUMAN}
    assert len(looks) >= 8
    assert {17, 18} < looks
    assert {t for t in looks if t + returned <= len(sink.steps)} <= set(starts.tolist())
    assert shown.mean() < 0.5


def test_a_policy_that_diverged_does_not_reach_the_robot_and_no_unknown_camera_is_recorded():
    env = LineEnv()
    with pytest.raises(PolicyError, match=naming("version", 3)):
        run(env, agent=NoisyAgent(8, spread=float("nan")))
    assert (env.tick, env.frames_read) == (0, [])
    with pytest.raises(ConfigError, match=naming("line", "rear", "front, wrist")):
        run(cameras=("rear",))


def test_what_is_not_recorded_reads_no_camera_on_every_tick():
    env = LineEnv(length=20)
    env.frames_with_observation = True  # with what `step` returns
    runner = EpisodeRunner(env, make_policy(NoisyAgent(8)), NullSink(), config=make_config(), cameras=("wrist",))
    runner.run_episode(5, explore=False)
    assert env.frames_read == [0, 8, 16, 20]


def test_a_human_who_has_one_arm_leaves_the_other_one_to_the_policy():
    ticks = frozenset(range(5, 12))
    _, alone, _ = run(delay=2)
    summary, sink, _ = run(delay=2, intervention=HumanOnTicks(ticks, dims=np.array([False, True])))
    assert summary.human_ticks == len(ticks)
    for step, without in zip(sink.steps, alone.steps, strict=True):
        if step.tick in ticks:
            assert (step.source, step.human_dims.tolist()) == (Source.HUMAN, [False, True])
            assert (step.action[1], step.decision_tick) == (np.float32(-0.9), -1)
        else:
            assert step.human_dims is None
        if step.tick <= max(ticks):
            assert step.action[0] == without.action[0], "the plan goes on"


@pytest.mark.parametrize(("value", "human", "random_steps"), [(None, True, 6), (0.5, False, 6), (None, False, 0)])
def test_a_fixed_gripper_keeps_the_opening_at_reset_or_what_a_human_left_it_at(value, human, random_steps):
    """An agent with a `fixed_value` says it in its chunks; random actions leave the gripper as it is."""
    gripper = GripperConfig(mode="fixed") if value is None else GripperConfig(mode="fixed", fixed_value=value)
    config, sink = dataclasses.replace(make_config(), agent=AcfqlConfig(gripper=gripper)), ListSink()
    hands = HumanOnTicks(frozenset(range(9, 13))) if human else None
    env = LineEnv(spec=dataclasses.replace(SPEC, grippers=(1,)))
    runner = EpisodeRunner(env, make_policy(NoisyAgent(8)), sink, config=config, intervention=hands)
    runner.run_episode(5, explore=True, random_steps=random_steps)
    steps, at_reset = sink.steps, sink.steps[0].observation["state"][1]
    assert [s.source for s in steps[:random_steps]] == [Source.RANDOM] * random_steps
    chosen = [s.decision_tick / 64 for s in steps] if value is not None else [at_reset] * len(steps)
    expected = [at_reset] * random_steps + chosen[random_steps:]
    if human:
        assert steps[9].source == Source.HUMAN
        expected[9:] = [np.float32(-0.9)] * (len(steps) - 9)
    assert [float(s.action[1]) for s in steps] == expected
    assert len({float(s.action[0]) for s in steps}) > 20 - 4 * human  # the other joint is the policy's


def picture(value, row=0):
    out = np.full((6, 4, 3), value, np.uint8)
    out[-1] = row
    return out


def recorded(pictures, numbers=None):
    """What the sink has of an episode whose camera gave `pictures`, by tick; the last one at the end."""
    sink, seen = ListSink(), {}
    recorder = EpisodeRecorder(sink, Begin("e"))
    for tick, image in enumerate(pictures):
        given = {} if numbers is None else {"top": numbers[tick]}
        observation = {"state": np.zeros(1, np.float32), "images/top": image}
        if tick < len(pictures) - 1:
            recorder.step(Step(tick, observation, np.zeros(1, np.float32), 0.0, Source.POLICY, 0, 0, 0.0), given)
        else:
            recorder.end(End("e", tick, observation, False, True, Outcome.UNKNOWN), given)
    observations = [s.observation for s in sink.steps] + [sink.last_end.final_observation]
    for tick, (record, observation) in enumerate(zip(sink.records[-len(pictures) :], observations, strict=True)):
        image = observation.get("images/top")
        assert "state" in observation
        assert (image is None) == (record.repeats is not None)
        seen[tick] = record.repeats if image is None else image
    return seen


A, B = picture(1), picture(2)
SAME_ROWS = picture(1, row=9)  # differs from A in its last row alone


@pytest.mark.parametrize(
    ("pictures", "numbers", "named"),
    [
        ([A, A, A, B, B], None, {1: 0, 2: 0, 4: 3}),  # the same array
        ([A, picture(1), SAME_ROWS, picture(1, row=9)], None, {1: 0, 3: 2}),  # the same bytes
        ([A, B, A, B], None, {}),  # only the newest is named
        ([A, picture(1), B, picture(2)], [5, 5, 6, 6], {1: 0, 3: 2}),
        ([A, picture(1), picture(1)], [5, 6, 6], {2: 1}),  # a new picture that looks the same
        ([A, B, SAME_ROWS], [5, 5, 5], {}),  # numbers that stand still
    ],
)
def test_a_frame_that_was_recorded_is_named_by_its_tick(pictures, numbers, named):
    seen = recorded(pictures, numbers)
    assert {tick: at["top"] for tick, at in seen.items() if isinstance(at, dict)} == named
    for tick, image in enumerate(pictures):
        np.testing.assert_array_equal(seen[named.get(tick, tick)], image)


NO_GAPS = np.zeros(0, np.int64)


class Policy:
    """Goes to a place, which moves with `speed` from the start on, rad/s."""

    def __init__(self, to: tuple[float, float], speed: float) -> None:
        self._to, self._speed, self._tick = np.array(to), speed, 0

    def reset(self, seed: int) -> None:
        self._tick = 0

    def act(self) -> np.ndarray:
        self._tick += 1
        return np.clip(self._to + self._speed * SPEC.dt * self._tick, -1, 1).astype(np.float32)


class Human:
    """Moves on some ticks at a speed; `dims`: what of the robot is the human's."""

    def __init__(self, ticks: range, speed: float, dims: tuple[bool, bool] | None) -> None:
        self._ticks, self._speed, self._dims = ticks, speed, dims

    def reset(self, seed: int) -> None: ...

    def poll(self, tick, observation, decision_tick, last):
        if tick not in self._ticks:
            return None
        dims = None if self._dims is None else np.array(self._dims)
        return InterventionCommand(last + np.float32(self._speed * SPEC.dt), dims=dims)

    def close(self) -> None: ...


def config_of(intervention: str = "spacemouse", server: str = "") -> ExperimentConfig:
    config = make_config(actor=ActorConfig(intervention=intervention))
    return dataclasses.replace(config, robot=dataclasses.replace(config.robot, server=server))


def executed(config: ExperimentConfig, policy: Policy, human: Human, length: int = 80) -> np.ndarray:
    sink = ListSink()
    EpisodeRunner(LineEnv(length=length), policy, sink, config=config, intervention=human).run_episode(0)
    return np.stack([step.action for step in sink.steps])


def seam(actions: np.ndarray, first: int, end: int) -> float:
    return accelerations(actions, np.array([[first, end]]), NO_GAPS, SPEC)[0]


@pytest.mark.parametrize(("to", "human_speed", "speed"), [
    ((0.5, -0.5), 0.6, 0.2), ((-0.2, 0.3), -1.0, 0.0),
])  # fmt: skip
def test_a_policy_takes_over_within_the_acceleration_of_the_human(to, human_speed, speed):
    policy, human = Policy(to, speed), Human(range(12), human_speed, None)
    actions = executed(config_of(), policy, human)
    after = np.abs(np.diff(actions[10:], n=2, axis=0)).max() / SPEC.dt**2
    assert after <= ACCELERATION * (1 + 1e-3)  # also beyond both ticks of the seam
    policy.reset(0)
    wanted = np.stack([policy.act() for _ in range(80 - 12)])
    np.testing.assert_array_equal(actions[-10:], wanted[-10:])
    assert seam(actions, 0, 12) <= ACCELERATION * (1 + 1e-3)
    plain = executed(config_of("none"), policy, human)  # of no device
    assert seam(plain, 0, 12) > 5 * ACCELERATION


def test_a_part_that_the_human_lets_go_of_is_blended_and_the_others_are_the_policys():
    policy, human = Policy((0.5, -0.5), 0.0), Human(range(12), 0.5, (True, False))
    actions = executed(config_of(), policy, human)
    np.testing.assert_array_equal(actions[:, 1], np.full(80, -0.5, np.float32))
    assert np.abs(np.diff(actions[10:, 0], n=2)).max() / SPEC.dt**2 <= ACCELERATION * (1 + 1e-3)
    assert actions[-1, 0] == np.float32(0.5)
    stands = executed(config_of(), policy, Human(range(12), 0.0, None))  # and does not overshoot
    assert (np.diff(stands[11:, 0]) >= -1e-6).all()
    assert stands[:, 0].max() <= 0.5 + 1e-6


def test_a_hold_after_a_human_is_at_once():
    handover = Handover(config_of(), SPEC)
    points = np.array([[0, 0], [0.02, 0], [0.04, 0]], np.float32)
    handover.bounded(points[1], TickAction(points[1], Source.HUMAN, by_human=True), points[0])
    hold = TickAction(points[1], Source.HOLD)
    assert (handover.bounded(points[1], hold, points[1]) == points[1]).all()
    assert TwistLimits().acceleration == ACCELERATION  # of the human's own motion


def spec_of(low, high, **changes) -> RobotSpec:
    fields = {"joint_of_action": (-1,) * len(low), "grippers": (), **changes}
    return RobotSpec("arm", 10.0, 3, tuple(low), tuple(high), cameras=(), max_episode_steps=10, **fields)


MOVES = ((-1.0, -1.0), (1.0, 1.0))
WITH_GRIPPER = ((-1.0, 0.0), (1.0, 2.0))  # gym-hil's: 0 opens, 1 leaves as it is, 2 closes


@pytest.mark.parametrize(
    ("limits", "named", "dimensions"),
    [
        (MOVES, {}, "0, 1"),  # not declared: each may be a gripper, or a position
        (WITH_GRIPPER, {}, "0, 1"),
        (WITH_GRIPPER, {"grippers": (0,)}, "1"),  # a hold of 0 is at the end of what it can do
        (MOVES, {"grippers": (1,)}, ""),
        (WITH_GRIPPER, {"joint_of_action": (0, 1)}, ""),
        (MOVES, {"joint_of_action": (-1, -1)}, ""),  # confirmed
    ],
)
def test_it_is_warned_where_nothing_measures_a_hold_and_nothing_is_named(limits, named, dimensions):
    warning = hold_warning(GymConfig(make=lambda fake_env: None, **named), spec_of(*limits, **named))
    assert (warning is None) == (dimensions == "")
    for part in ("'arm'", f"dimensions {dimensions} ", "robot.grippers", "robot.joint_of_action=(-1, -1)"):
        assert warning is None or part in warning
    assert hold_warning(FakeAlohaConfig(), spec_of(*limits, **named)) is None  # a robot of the package knows its holds


@pytest.mark.parametrize(
    ("actor", "warned"),
    [
        (ActorConfig(clock="lockstep"), 0),  # every tick has an action
        (ActorConfig(clock="lockstep", delay_ticks=2), 1),
        (ActorConfig(clock="realtime", inference="sync"), 1),
    ],
)
def test_an_actor_warns_where_it_may_have_to_hold(actor, warned, caplog):
    env = LineEnv(length=12, spec=dataclasses.replace(SPEC, joint_of_action=(-1, -1)))
    runner = EpisodeRunner(env, make_policy(NoisyAgent(8)), NullSink(), config=make_config(actor=actor))
    runner.close()
    assert sum("robot.joint_of_action" in line for line in caplog.messages) == warned
