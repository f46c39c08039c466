"""Where a human lets go of a robot without a server: how its joints accelerate, by the metric of seams."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from actor_helpers import SPEC, LineEnv, ListSink, NoisyAgent, make_config, make_policy

from serl_chunk.actor.chunk_queue import TickAction
from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.handover import ACCELERATION, Handover, HoldPolicy, hold_warning
from serl_chunk.actor.recorder import NullSink
from serl_chunk.config.experiment import ActorConfig, ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig, GymConfig
from serl_chunk.devices.teleoperation import TwistLimits
from serl_chunk.replay.episode import accelerations
from serl_chunk.robots.base import InterventionCommand
from serl_chunk.types import RobotSpec, Source

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


@pytest.mark.parametrize(("config", "spec"), [
    (config_of("scripted"), SPEC), (config_of(server="host"), SPEC),
    (config_of(), dataclasses.replace(SPEC, joint_of_action=(-1, -1))),
    (config_of(), dataclasses.replace(SPEC, grippers=(0, 1))),
])  # fmt: skip
def test_a_server_a_script_velocities_and_grippers_stay_as_they_are(config: ExperimentConfig, spec: RobotSpec):
    handover, last = Handover(config, spec), np.zeros(2, np.float32)
    handover.bounded(last, TickAction(last, Source.HUMAN, by_human=True), last)
    there = np.ones(2, np.float32)
    assert handover.bounded(there, TickAction(there, Source.POLICY), last) is there


def test_a_hold_after_a_human_is_at_once():
    handover = Handover(config_of(), SPEC)
    points = np.array([[0, 0], [0.02, 0], [0.04, 0]], np.float32)
    handover.bounded(points[1], TickAction(points[1], Source.HUMAN, by_human=True), points[0])
    hold = TickAction(points[1], Source.HOLD)
    assert (handover.bounded(points[1], hold, points[1]) == points[1]).all()
    far = np.ones(2, np.float32)
    moved = handover.bounded(far, TickAction(far, Source.POLICY), points[1]) - points[1]
    assert TwistLimits().acceleration == ACCELERATION  # of the human's own motion
    np.testing.assert_allclose(moved, ACCELERATION * SPEC.dt**2, rtol=1e-4)


# -- hold: what a tick without an action commands, and the warning where that is a guess ----------------------------


def spec_of(low, high, **changes) -> RobotSpec:
    fields = {"joint_of_action": (-1,) * len(low), "grippers": (), **changes}
    return RobotSpec("arm", 10.0, 3, tuple(low), tuple(high), cameras=(), max_episode_steps=10, **fields)


MOVES = ((-1.0, -1.0), (1.0, 1.0))
WITH_GRIPPER = ((-1.0, 0.0), (1.0, 2.0))  # gym-hil's: 0 opens, 1 leaves as it is, 2 closes


def test_a_hold_of_an_unnamed_gripper_opens_it():
    """What the warning is about."""
    np.testing.assert_array_equal(HoldPolicy(spec_of(*WITH_GRIPPER)).next(np.float32([0.5, 2.0])), [0.0, 0.0])
    named = HoldPolicy(spec_of(*WITH_GRIPPER, grippers=(1,)))
    np.testing.assert_array_equal(named.next(np.float32([0.5, 2.0])), [0.0, 2.0])


@pytest.mark.parametrize(("limits", "named", "dimensions"), [
    (MOVES, {}, "0, 1"),  # not declared: each may be a gripper, or a position
    (WITH_GRIPPER, {}, "0, 1"),
    (WITH_GRIPPER, {"grippers": (0,)}, "1"),  # a hold of 0 is at the end of what it can do
    (MOVES, {"grippers": (1,)}, ""),
    (WITH_GRIPPER, {"joint_of_action": (0, 1)}, ""),
    (MOVES, {"joint_of_action": (-1, -1)}, ""),  # confirmed
])  # fmt: skip
def test_it_is_warned_where_nothing_measures_a_hold_and_nothing_is_named(limits, named, dimensions):
    warning = hold_warning(GymConfig(make=lambda fake_env: None, **named), spec_of(*limits, **named))
    assert (warning is None) == (dimensions == "")
    for part in ("'arm'", f"dimensions {dimensions} ", "robot.grippers", "robot.joint_of_action=(-1, -1)"):
        assert warning is None or part in warning
    assert hold_warning(FakeAlohaConfig(), spec_of(*limits, **named)) is None  # a robot of the package knows its holds


@pytest.mark.parametrize(("actor", "warned"), [
    (ActorConfig(clock="lockstep"), 0),  # every tick has an action
    (ActorConfig(clock="lockstep", delay_ticks=2), 1),
    (ActorConfig(clock="realtime", inference="sync"), 1),
])  # fmt: skip
def test_an_actor_warns_where_it_may_have_to_hold(actor, warned, caplog):
    env = LineEnv(length=12, spec=dataclasses.replace(SPEC, joint_of_action=(-1, -1)))
    runner = EpisodeRunner(env, make_policy(NoisyAgent(8)), NullSink(), config=make_config(actor=actor))
    runner.close()
    assert sum("robot.joint_of_action" in line for line in caplog.messages) == warned
