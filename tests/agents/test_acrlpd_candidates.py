"""Best of N with a Gaussian policy: in decisions and in the critic's target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import bandit, build, config_of, critic, on_device

HEADS = {"target_subset": 2, "target_aggregate": "mean"}


def test_the_target_is_chosen_by_the_critic_and_valued_by_its_target():
    agent = build(config_of("acrlpd", critic=critic(**HEADS), target_candidates=6))
    state = agent.init(jax.random.key(0))
    state = state.replace(target=agent.init(jax.random.key(1)).target)  # a target of another opinion
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    draws = agent.critic_draws(jax.random.key(3), batch)
    assert draws["next"].shape == (8, 6, 6)
    observation = batch.next_observations["state"]
    dist = agent.gaussian.distribution(state.policy, {"state": observation})
    chunks = jnp.tanh(dist.mean[:, None] + jnp.exp(dist.log_std)[:, None] * draws["next"])
    values = np.zeros((2, 8, 6))
    for who, params in enumerate((state.critic, state.target)):
        for n in range(6):
            values[who, :, n] = agent.critic.values(params, observation, chunks[:, n]).mean(0)
    best = values[0].argmax(1)
    assert (best != values[1].argmax(1)).any()
    returns = batch.rewards @ np.array([1, 0.9, 0.81], np.float32)
    wanted = returns + batch.discount_n * batch.mask * values[1][np.arange(8), best]
    np.testing.assert_allclose(agent.critic_target(state, batch, draws), wanted, atol=1e-5)


def test_one_candidate_is_the_published_target():
    """The best of one is the one: both ways round give the same numbers."""
    agent = build(config_of("acrlpd", critic=critic(**HEADS)))
    state = agent.init(jax.random.key(0))
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    draws = agent.critic_draws(jax.random.key(3), batch)
    assert draws["next"].shape == (8, 6)
    chunk = agent.next_chunk(state, batch.next_observations, draws["next"][:, None])
    flat, _ = agent.gaussian.distribution(state.policy, batch.next_observations).sample_and_log_prob(draws["next"])
    np.testing.assert_allclose(chunk, flat, atol=1e-6)


def test_updates_with_several_candidates_compile_once():
    agent = build(config_of("acrlpd-tail", target_candidates=4))
    state = agent.init(jax.random.key(0))
    for seed in range(2):
        state, metrics = agent.update(state, {}, on_device(agent.spec, seed))
    assert all(np.isfinite(v) for v in metrics.values())
    assert agent.update._cache_size() == 1


@pytest.mark.parametrize("candidates", [8])
def test_acting_by_the_best_of_several_is_better_than_by_one(candidates):
    """A critic trained on the bandit, and a policy that was not: only the choice can find what is rewarded."""
    loss = critic(hidden=(32,), loss="bounded", **HEADS)
    many, one = (build(config_of("acrlpd", critic=loss, candidates=n), horizon=2, actions=1) for n in (candidates, 1))
    state = many.init(jax.random.key(0))
    for i in range(15):
        state, _ = many.update_critic(state, {}, jax.device_put(bandit(many.spec, 20, 64, i)[0]))
    batch, best = bandit(many.spec, 1, 64, 10_000)
    errors = []
    for agent in (many, one):
        chunks = [
            agent.sample(agent.policy_params(state), {"state": s}, jax.random.key(i), explore=True)[0]
            for i, s in enumerate(batch.observations["state"][0])
        ]
        errors.append(np.abs(np.array(chunks) - best[0]).mean())
    assert errors[0] < 0.7 * errors[1]
