"""hold: what a tick without an action commands, and the warning where that is a guess."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from actor_helpers import SPEC, LineEnv, NoisyAgent, make_config, make_policy

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.handover import HoldPolicy, hold_warning
from serl_chunk.actor.recorder import NullSink
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.config.robots import FakeAlohaConfig, GymConfig
from serl_chunk.types import RobotSpec


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
    (WITH_GRIPPER, {"grippers": (1,)}, ""),
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
