"""A gripper that is no part of what is learned keeps what it has, until a human changes it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from actor_helpers import SPEC, HumanOnTicks, LineEnv, ListSink, NoisyAgent, make_config, make_policy

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.gripper import GripperConfig
from serl_chunk.types import Source

GRIPPED = dataclasses.replace(SPEC, grippers=(1,))


def steps(gripper: GripperConfig, human: HumanOnTicks | None = None, random_steps: int = 0):
    sink = ListSink()
    config = dataclasses.replace(make_config(), agent=AcfqlConfig(gripper=gripper))
    env = LineEnv(spec=GRIPPED)
    runner = EpisodeRunner(env, make_policy(NoisyAgent(8)), sink, config=config, intervention=human)
    runner.run_episode(5, explore=True, random_steps=random_steps)
    return sink.steps


@pytest.mark.parametrize("random_steps", [0, 6])
def test_it_keeps_the_opening_at_reset(random_steps):
    found = steps(GripperConfig(mode="fixed"), random_steps=random_steps)
    at_reset = found[0].observation["state"][1]
    assert {float(s.action[1]) for s in found} == {float(at_reset)}
    assert len({float(s.action[0]) for s in found}) > 20  # the other joint is the policy's


def test_what_a_human_left_it_at_stays():
    human = HumanOnTicks(frozenset(range(9, 13)))
    found = steps(GripperConfig(mode="fixed"), human)
    assert found[9].source == Source.HUMAN
    at_reset = found[0].observation["state"][1]
    assert [float(s.action[1]) for s in found] == [at_reset] * 9 + [np.float32(-0.9)] * (len(found) - 9)


def test_random_actions_leave_a_fixed_one_as_it_is():
    found = steps(GripperConfig(mode="fixed", fixed_value=0.5), random_steps=6)
    at_reset = found[0].observation["state"][1]
    assert [s.source for s in found[:6]] == [Source.RANDOM] * 6
    assert {float(s.action[1]) for s in found[:6]} == {float(at_reset)}
    assert found[-1].action[1] == found[-1].decision_tick / 64  # afterwards the agent says `fixed_value`
