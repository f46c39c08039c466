"""Q-chunking: what its losses are made of, the critic that acts, and that it learns to choose."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from agent_tools import (
    bandit,
    bandit_error,
    build,
    config_of,
    critic,
    critic_gradient,
    fresh,
    make_batches,
    on_device,
    same,
)

from serl_chunk.config.agents.flow import FlowConfig


@pytest.mark.slow
def test_choosing_by_value_finds_the_rewarded_chunk():
    config = config_of("acfql", critic=critic(hidden=(32,)), candidates=24)
    config = dataclasses.replace(config, flow=FlowConfig(hidden=(32,), steps=3))
    agent = build(config, horizon=2, actions=1)
    state = agent.init(jax.random.key(0))
    for i in range(15):
        batch = jax.device_put(bandit(agent.spec, 20, 64, i)[0])
        state, _ = agent.update_policy(state, {}, batch)
        state, _ = agent.update_critic(state, {}, batch)
    first = bandit_error(agent, state, pretrained=True, explore=True)
    chosen = bandit_error(agent, state, explore=True)
    assert first > 0.35  # the data are uniform: imitating them is no better than chance
    assert chosen < 0.2


def test_the_value_loss_trains_the_value_head_alone():
    agent, state = fresh("acfql")
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))

    @jax.jit
    def gradient(b):
        return critic_gradient(agent, state, b, {})[0]

    grads = gradient(batch)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads["v"]["Dense_1"]))
    # V enters Q's target as a number: another successor changes Q's gradient and leaves V's as it was.
    other = batch._replace(next_observations=jax.tree.map(lambda x: x + 1, batch.next_observations))
    moved = gradient(other)
    assert same(grads["v"], moved["v"])
    assert not same(grads["q"], moved["q"])


@pytest.mark.slow
def test_the_heads_of_an_expectile_target_rank_as_they_should():
    """With Q fixed by frozen target heads, V climbs from the mean towards the maximum as the expectile grows."""
    values = []
    for expectile in (0.5, 0.95):
        agent = build(config_of("acfql", expectile=expectile))
        state = agent.init(jax.random.key(0))
        batch = make_batches(agent.spec, 4, 16)
        one_state = np.broadcast_to(batch.observations["state"][:1, :1], batch.observations["state"].shape)
        batch = jax.device_put(batch._replace(observations={"state": one_state}))

        @jax.jit
        def step(critic_params, b, agent=agent, frozen=state):
            draws = agent.critic_draws(jax.random.key(0), b)
            grads, metrics = critic_gradient(agent, frozen.replace(critic=critic_params), b, draws)
            return jax.tree.map(lambda p, g: p - 0.5 * g, critic_params, grads), metrics["critic/values"]

        params = state.critic
        for u in range(200):
            params, value = step(params, jax.tree.map(lambda x, u=u: x[u % 4], batch))
        values.append(float(value))
    assert values[1] > values[0] + 0.01


def critic_target(agent, state, batch, draws) -> float:
    """The mean target that the critic is regressed to."""
    metrics = jax.jit(lambda s, b, d: critic_gradient(agent, s, b, d)[1])(state, batch, draws)
    return float(metrics["critic/target_qs"])


def test_an_expectile_target_is_the_return_and_the_discounted_value_of_the_successor():
    agent, state = fresh("acfql")
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    value = jax.nn.sigmoid(agent.critic.v.apply({"params": state.critic["v"]}, batch.next_observations["state"])[:, 0])
    returns = batch.rewards @ np.array([1, 0.9, 0.81], np.float32)
    wanted = float((returns + batch.discount_n * batch.mask * value).mean())
    draws = agent.critic_draws(jax.random.key(3), batch)
    assert critic_target(agent, state, batch, draws) == pytest.approx(wanted, abs=1e-6)


def test_the_averaged_critic_acts():
    agent, state = fresh("acfql")
    state = state.replace(target=jax.tree.map(lambda x: x + 1, state.target))
    travelling = agent.policy_params(state)["critic"]  # "v" does not: acting needs none
    assert same(travelling, {name: state.target[name] for name in ("encoder", "q")})
