"""Decoupled Q-chunking: what teaches what, what is executed and scored, and that a short policy learns from it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import (
    DISCOUNT,
    PREFIX,
    UNIT,
    build,
    config_of,
    critic,
    critic_gradient,
    fresh,
    make_batches,
    on_device,
    same,
)

from serl_chunk.agents.critic import ChunkCritic
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.flow import FlowConfig


def one_batch(agent, seed=0):
    return jax.tree.map(lambda x: x[0], on_device(agent.spec, seed))


def gradient(agent, state, batch, critic_params):
    draws = agent.critic_draws(jax.random.key(3), batch)
    return jax.jit(lambda s: critic_gradient(agent, s, batch, draws)[0])(state.replace(critic=critic_params))


def test_an_expectile_loss_ends_at_the_expectile():
    """Of targets 0 and 1, equally many, the tau-expectile is tau; of one target, that target."""
    target = jnp.asarray([[0.0, 1.0], [0.25, 0.25]])
    for bounds, tau in ((None, 0.8), (UNIT, 0.8), (UNIT, 0.5)):
        x = jnp.zeros((2, 1))
        config = AcfqlConfig(critic=CriticConfig(hidden=(8,)))
        value = ChunkCritic(config, AgentSpec(3, 2, 2, 2, (), 0.9, bounds), with_value=False)
        step = jax.jit(
            jax.grad(lambda x, c=value, t=tau: c.expectile_loss(jnp.repeat(x, 2, 1), target, t, jnp.ones(2)).mean())
        )
        for _ in range(300):
            x = x - 2.0 * step(x)
        found = jax.nn.sigmoid(x) if bounds else x
        np.testing.assert_allclose(found[:, 0], [tau, 0.25], atol=0.01)


def test_the_distilled_loss_is_its_equation():
    """By hand, head by head and length by length: the teacher is the online critic's head of the same number."""
    agent, state = fresh("decoupled-lengths")
    batch = one_batch(agent)._replace(weight=jnp.asarray([0.0, 2.0] * 4))
    draws = agent.critic_draws(jax.random.key(3), batch)
    metrics = jax.jit(lambda s: critic_gradient(agent, s, batch, draws)[1])(state)
    observation, wanted = batch.observations["state"], []
    apply = jax.jit(agent.critic.q.of_head)
    for k in range(2):
        head = lambda tree, x, k=k: apply(jax.tree.map(lambda p: p[k], tree["VmapMlp_0"]), x)  # noqa: E731
        five = jnp.concatenate([observation, batch.actions.reshape(8, -1)], 1)
        teacher = jax.nn.sigmoid(head(state.critic["q"], five))
        for m in (1, 2):
            shown = batch.actions[:, :2] * (jnp.arange(2) < m)[None, :, None]
            mask = jnp.tile((jnp.arange(2) < m).astype(jnp.float32)[None], (8, 1))
            output = head(state.critic["prefix"], jnp.concatenate([observation, shown.reshape(8, -1), mask], 1))
            entropy = jnp.logaddexp(0.0, output) - teacher * output
            weight = jnp.where(teacher < jax.nn.sigmoid(output), 0.2, 0.8) * batch.weight
            wanted.append(float((weight * entropy).mean()))
    assert float(metrics["critic/prefix_loss"]) == pytest.approx(np.mean(wanted), abs=1e-6)


def test_what_teaches_is_a_constant_and_what_is_taught_does_not_teach_it():
    agent, state = fresh("decoupled-lengths")
    batch = one_batch(agent)
    plain = gradient(agent, state, batch, state.critic)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(plain["prefix"]))
    shaken = {**state.critic, "prefix": jax.tree.map(lambda p: p + 0.1, state.critic["prefix"])}
    moved = gradient(agent, state, batch, shaken)
    assert same(plain["q"], moved["q"])  # the long critic's gradient does not go through the prefix critic
    assert not same(plain["prefix"], moved["prefix"])
    taught = {**state.critic, "q": jax.tree.map(lambda p: p + 0.1, state.critic["q"])}
    assert not same(plain["prefix"], gradient(agent, state, batch, taught)["prefix"])  # by the online heads


def test_the_long_critic_sees_all_its_actions_and_the_prefix_critic_the_executed_ones():
    agent, state = fresh("decoupled-lengths")
    batch = one_batch(agent)
    features = batch.observations["state"]
    values = lambda of, actions: of.values(state.critic, features, of.truncate_flatten(actions))  # noqa: E731
    long, short = (functools.partial(values, of) for of in (agent.critic, agent.short_critic))
    last, behind, executed = (batch.actions.at[:, i].add(0.3) for i in (4, 2, 1))
    assert not np.array_equal(long(batch.actions), long(last))
    assert np.array_equal(short(batch.actions), short(last))
    assert np.array_equal(short(batch.actions), short(behind))
    assert not np.array_equal(short(batch.actions), short(executed))


def test_only_the_prefix_critic_has_a_target_and_travels():
    agent, state = fresh("decoupled-lengths")
    assert set(state.target) == {"encoder", "prefix"}
    params = agent.policy_params(state)
    assert set(params["critic"]) == {"encoder", "prefix"}
    observation = {"state": np.ones(4, np.float32)}
    chunk, record = agent.sample(params, observation, jax.random.key(1), explore=True)
    assert chunk.shape == (3, 2)
    one = jnp.asarray(observation["state"])[None]
    flat = agent.short_critic.truncate_flatten(chunk[None])
    value = agent.short_critic.values(params["critic"], one, flat).mean()  # of its heads
    assert float(record["q"]) == pytest.approx(float(value), abs=1e-6)
    # Another long critic does not change what is chosen.
    other = state.replace(critic={**state.critic, "q": jax.tree.map(lambda p: p + 1, state.critic["q"])})
    assert same(agent.policy_params(other), params)


def test_v_follows_the_target_heads_of_the_prefix_critic_and_bootstraps_the_long_one():
    agent, state = fresh("decoupled-lengths")
    batch = one_batch(agent)
    plain = gradient(agent, state, batch, state.critic)
    other = state.replace(target={**state.target, "prefix": jax.tree.map(lambda p: p + 0.1, state.target["prefix"])})
    moved = gradient(agent, other, batch, state.critic)
    assert not same(plain["v"], moved["v"])
    assert same(plain["q"], moved["q"])
    assert same(plain["prefix"], moved["prefix"])
    value = jax.nn.sigmoid(agent.critic.value_output(state.critic, batch.next_observations["state"]))
    wanted = batch.rewards @ (DISCOUNT ** np.arange(5, dtype=np.float32)) + batch.discount_n * batch.mask * value
    metrics = critic_gradient(agent, state, batch, agent.critic_draws(jax.random.key(0), batch))[1]
    assert float(metrics["critic/target_qs"]) == pytest.approx(float(wanted.mean()), abs=1e-6)


def test_the_policy_is_taught_its_own_actions_alone():
    """What the batch holds behind the policy's horizon moves nothing in it."""
    agent, state = fresh("decoupled-lengths")
    batch = one_batch(agent)
    draws = agent.policy_draws(jax.random.key(1), batch)
    step = jax.jit(lambda b: agent._policy_gradient(state, {}, b, draws, False)[0])
    plain = step(batch)
    behind = batch._replace(
        actions=batch.actions.at[:, 3:].add(0.5),
        bc_weight=batch.bc_weight.at[:, 3:].set(0),
        valid=batch.valid.at[:, 3:].set(0),
    )
    assert same(plain, step(behind))
    assert not same(plain, step(batch._replace(actions=batch.actions.at[:, 2].add(0.5))))


def test_committed_actions_longer_than_a_chunk_are_cut():
    """A normaliser for windows of five makes a prefix of five; the chunk has three."""
    agent, state = fresh("decoupled-lengths")
    params, observation = agent.policy_params(state), {"state": np.ones(4, np.float32)}
    committed, mask = np.full((5, 2), 0.25, np.float32), np.array([1, 0, 0, 0, 0], np.float32)
    chunk, _ = agent.sample(params, observation, jax.random.key(0), explore=True, committed=(committed, mask))
    np.testing.assert_allclose(chunk[0], 0.25, atol=1e-6)
    assert not np.allclose(chunk[1:], 0.25)


@pytest.mark.slow
def test_the_prefix_critic_finds_the_chunk_whose_best_continuation_is_rewarded():
    """Reward only where the first action is right and the third, behind the executed ones, as well.

    The third is right in a third of the data: the executed actions are worth about the expectile of that, and the
    policy of two actions acts by it without ever outputting the third.
    """
    config = config_of(
        "decoupled",
        critic=critic(hidden=(32,)),
        candidates=24,
        prefix_expectile=0.9,
        flow=FlowConfig(hidden=(32,), steps=3),
    )
    agent = build(config, horizon=2, critic_steps=3, actions=1, prefix_steps=2)
    state = agent.init(jax.random.key(0))
    for i in range(15):
        rng = np.random.default_rng(i)
        actions = rng.uniform(-1, 1, (20, 64, 3, 1)).astype(np.float32)
        rewards = np.zeros((20, 64, 3), np.float32)
        rewards[..., 0] = np.exp(-2 * (actions[..., 0, 0] - 0.7) ** 2) * (actions[..., 2, 0] > 1 / 3)
        ones = np.ones((20, 64, 3), np.float32)
        batch = make_batches(
            agent.spec, 20, 64, i, actions=actions, rewards=rewards, mask=np.zeros((20, 64), np.float32),
            valid=ones, bc_weight=ones,
        )  # fmt: skip
        batch = jax.device_put(batch)
        state, _ = agent.update_policy(state, {}, batch)
        state, metrics = agent.update_critic(state, {}, batch)
    params = agent.policy_params(state)
    observations = np.random.default_rng(99).normal(size=(32, 4)).astype(np.float32)
    first = [
        agent.sample(params, {"state": o}, jax.random.key(i), explore=True)[0][0, 0] for i, o in enumerate(observations)
    ]
    assert abs(np.mean(first) - 0.7) < 0.2
    assert np.abs(np.array(first) - 0.7).mean() < 0.3  # uniform data: 0.77
    assert float(metrics["critic/prefix_values"]) > 1.5 * float(metrics["critic/target_qs"])  # optimistic


def test_a_decision_asks_to_be_followed_where_the_heads_disagree_about_the_rest():
    """By hand; and an offset of a whole head, its opinion of the state, changes nothing."""
    agent, state = fresh("decoupled-lengths")
    params, observation = agent.policy_params(state), {"state": np.ones(4, np.float32)}
    chunk = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (3, 2)), jnp.float32)
    values = []
    for m in (1, 2):
        shown = np.concatenate([np.where(np.arange(2)[:, None] < m, chunk[:2], 0).ravel(), np.arange(2) < m])
        x = jnp.asarray(np.concatenate([observation["state"], shown]), jnp.float32)
        values.append(jax.nn.sigmoid(agent.short_critic.q.outputs(params["critic"]["prefix"], x)))
    wanted = np.std(np.array(values[1]) - np.array(values[0]))
    assert wanted > 1e-4
    for threshold, steps in ((wanted * 0.9, 1), (wanted * 1.1, 2)):
        agent.short_critic.replan_spread = threshold
        try:
            record = agent.short_critic.plan(params["critic"], jnp.ones(4), chunk)
        finally:
            agent.short_critic.replan_spread = agent.config.replan_spread
        np.testing.assert_allclose(record["spread"], [0, wanted], atol=1e-6)
        assert (int(record["steps"]), record["steps"].dtype) == (steps, jnp.int32)


def test_steps_end_at_the_first_length_that_is_not_agreed_on():
    """A later length on which the heads agree again does not count."""
    config = config_of("decoupled", prefix_lengths=4, replan_spread=0.2)
    agent = build(config, horizon=4, critic_steps=5, prefix_steps=4)
    opinions = {"values": np.zeros((2, 4), np.float32)}
    agent.short_critic.values = lambda params, features, shown: jnp.asarray(opinions["values"])  # of the four lengths
    for second, steps in (
        ([0, 0, 0, 0], 4),
        ([0, 0, 1, 0], 2),
        ([0, 1, 0, 0], 1),
        ([0.9] * 4, 4),
        ([0, 0.3, 0.3, 1], 3),
    ):
        opinions["values"][1] = second
        record = agent.short_critic.plan({}, jnp.ones(4), jnp.zeros((4, 2)))
        assert int(record["steps"]) == steps
        unheard = agent.short_critic.plan({}, jnp.ones(4), jnp.zeros((4, 2)), alone=True)
        assert int(unheard["steps"]) == 4
        np.testing.assert_array_equal(unheard["spread"], record["spread"])


@pytest.mark.parametrize("candidates", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_no_actor_plans_anew_on_the_advice_of_a_critic_that_does_not_choose(candidates):
    config = config_of("decoupled", prefix_lengths=2, replan_spread=0.0, candidates=candidates)
    agent = build(config, **PREFIX)
    state, observation = agent.init(jax.random.key(0)), {"state": np.ones(4, np.float32)}
    for alone, steps in ((True, 2), (False, 1)):  # heads always differ by more than 0
        params = agent.policy_params(state)
        record = agent.sample(params, observation, jax.random.key(1), explore=True, alone=alone)[1]
        assert int(record["steps"]) == steps
