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


@pytest.mark.parametrize("random_steps", [0, 6])
@pytest.mark.parametrize(("value", "human"), [(None, False), (None, True), (0.5, False)])
def test_a_fixed_gripper_keeps_the_opening_at_reset_or_what_a_human_left_it_at(random_steps, value, human):
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
