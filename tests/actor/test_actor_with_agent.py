"""The loop with a real agent on the real fake robot, its scripted human included."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from actor_helpers import ListSink, chunk_starts

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.agents.registry import make_agent
from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.experiment import ActorConfig, ChunkConfig, ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.data.preprocess import fit_preprocess
from serl_chunk.devices.registry import make_intervention
from serl_chunk.robots.fake.spec import GRIPPER, GRIPPER_RATE, JOINT_RATE
from serl_chunk.robots.registry import make_env
from serl_chunk.types import Snapshot, Source

pytestmark = pytest.mark.compiles

RATES = np.array([GRIPPER_RATE if i in GRIPPER else JOINT_RATE for i in range(14)])
SMALL = {"critic": CriticConfig(hidden=(16,), ensemble=2), "flow": FlowConfig(hidden=(16,), steps=2), "candidates": 4}
CONFIG = ExperimentConfig(name="fake", robot=FakeAlohaConfig(max_episode_steps=90), agent=AcfqlConfig(**SMALL))


@pytest.fixture(scope="module")
def agent():
    return make_agent(CONFIG, make_env(CONFIG.robot).robot_spec)


def run(agent, delay, seed=11, config=CONFIG):
    config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, delay_ticks=delay))
    env = make_env(config.robot)
    spec = env.robot_spec
    policy = ChunkPolicy(agent, fit_preprocess(config, spec, []), spec, seed=3)
    params = jax.jit(lambda key: agent.policy_params(agent.init(key)))(jax.random.key(0))
    policy.swap(Snapshot(1, agent.flatten_params(params)))
    sink = ListSink()
    runner = EpisodeRunner(env, policy, sink, config=config, intervention=make_intervention("scripted", env))
    return runner.run_episode(seed, explore=True), sink, policy


@pytest.mark.parametrize("delay", [0, 2])
def test_an_episode_with_a_scripted_human(agent, delay):
    # An untrained policy stalls, but not in every episode so early that the human hands back before the time limit.
    runs = (run(agent, delay, seed) for seed in range(11, 31))
    summary, sink, policy = next(r for r in runs if r[0].segments and r[1].steps[-1].source != Source.HUMAN)
    steps = sink.steps
    # The scripted human rests its hands before it hands back: ticks that are human, but recorded as holds.
    assert summary.human_ticks > sum(s.source == Source.HUMAN for s in steps) > 0
    spec = make_env(CONFIG.robot).robot_spec
    starts = list(chunk_starts(steps))
    assert {s.tick - s.decision_tick for s in starts} == {delay}
    for s in starts:
        # What was sampled, decoded from the decision's own observation, is what was commanded; the driver then
        # moved as far towards it as its rate limit permits.
        observed = steps[s.decision_tick]
        decoded = policy.preprocess.decode(observed.observation["state"], observed.decision["chunk"])
        within = np.clip(decoded[delay], spec.action_low, spec.action_high)
        joints = s.observation["state"][:14]
        expected = joints + np.clip(within - joints, -RATES, RATES)
        np.testing.assert_allclose(s.action, expected, atol=1e-5)
    assert {"chunk", "q"} <= set(steps[0].decision)


@pytest.mark.parametrize(("adaptive", "apart"), [(True, 1), (False, 3)])
def test_an_episode_of_a_critic_that_scores_more_than_the_policy_outputs(adaptive, apart):
    """Its normaliser is for more actions than a chunk; untrained heads disagree more than 0, so steps is the least."""
    config = dataclasses.replace(
        CONFIG,
        agent=DecoupledConfig(**SMALL, prefix_lengths=5, replan_spread=0.0),
        chunk=ChunkConfig(5, critic_horizon=8),
        actor=ActorConfig(adaptive_execution=adaptive),
    )
    _, sink, policy = run(make_agent(config, make_env(config.robot).robot_spec), 2, config=config)
    assert policy.preprocess.horizon == 8
    decided = {s.tick: s.decision for s in sink.steps if s.decision is not None}
    assert {(d["chunk"].shape, d["spread"].shape, int(d["steps"])) for d in decided.values()} == {((5, 14), (5,), 1)}
    starts = [s.decision_tick for s in chunk_starts(sink.steps[:20])]
    assert np.diff(starts).tolist() == [apart] * (len(starts) - 1)


def test_two_runs_are_identical(agent):
    (a, sink_a, _), (b, sink_b, _) = run(agent, 2), run(agent, 2)
    assert dataclasses.replace(a, wall_seconds=0) == dataclasses.replace(b, wall_seconds=0)
    for x, y in zip(sink_a.records, sink_b.records, strict=True):
        np.testing.assert_equal(x._asdict(), y._asdict())
