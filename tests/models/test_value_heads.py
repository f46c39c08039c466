"""How heads say values and are taught them, and critics made of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import UNIT, build, config_of, make_batches

from serl_chunk.models.value_heads import critic_values, initial_bias, regression_loss

COSTS = (-100.0, 0.0)
AGENTS = Path(__file__).resolve().parents[2] / "serl_chunk" / "agents"


def regressed(*args) -> jax.Array:
    return regression_loss(*args).mean()


def test_a_bounded_value_and_its_loss_are_those_of_the_unit_range_scaled():
    outputs, places = jnp.linspace(-4, 4, 9), jnp.linspace(-0.2, 1.2, 9)
    values = critic_values(outputs, COSTS)
    np.testing.assert_allclose(values, -100 + 100 * critic_values(outputs, UNIT), rtol=1e-6)
    scaled = regressed(outputs, -100 + 100 * places, COSTS)
    assert float(scaled) == pytest.approx(float(regressed(outputs, places, UNIT)), rel=1e-5)


@pytest.mark.parametrize("bounds", [UNIT, COSTS])
def test_a_fresh_critic_is_at_an_eighth_of_the_range(bounds):
    low, high = bounds
    value = float(critic_values(jnp.asarray(initial_bias(bounds)), bounds))
    assert value == pytest.approx(low + (high - low) * 0.1192, abs=0.002 * (high - low))


def test_a_critic_of_a_range_learns_known_returns():
    agent = build(config_of("acfql"), value_range=(-2.0, 3.0))
    state = agent.init(jax.random.key(0))
    batch = make_batches(agent.spec, 2, 16, mask=np.zeros((2, 16), np.float32))
    batch = jax.device_put(batch._replace(rewards=5 * batch.rewards - 1))
    powers = 0.9 ** np.arange(3, dtype=np.float32)
    returns = np.clip(np.asarray(batch.rewards)[0] @ powers, -2, 3)
    for _ in range(60):
        state, _ = agent.update_critic(state, {}, batch)
    chunk = agent.critic.truncate_flatten(jax.tree.map(lambda x: x[0], batch).actions)
    values = np.asarray(agent.critic.values(state.critic, batch.observations["state"][0], chunk)).mean(0)
    assert np.abs(values - returns).mean() < 0.35 * np.abs(returns - returns.mean()).mean()


def one(agent, size=8, seed=0):
    return jax.tree.map(lambda x: jnp.asarray(x[0]), make_batches(agent.spec, 1, size, seed))


def test_candidates_are_ranked_by_the_targets_aggregate_at_acting_and_in_targets():
    config = config_of("published", actor_num_samples=6)
    bold = build(config)
    state = bold.init(jax.random.key(0))
    observation = {k: jnp.asarray(v[0, 0]) for k, v in make_batches(bold.spec).observations.items()}
    batch = one(bold)
    noise = bold.acting_noise(bold.policy_params(state), jax.random.key(3), observation, explore=True)
    chunks = bold.sampled(state.policy, state.critic, {}, observation, noise).reshape(6, 6)
    heads = np.asarray(bold.critic.values(state.critic, jnp.broadcast_to(observation["state"], (6, 4)), chunks))
    draws = bold.critic_draws(jax.random.key(1), batch)["next"]
    following = bold.sampled(state.policy, state.critic, {}, batch.next_observations, draws).reshape(8, 6, 6)
    features = jnp.broadcast_to(batch.next_observations["state"][:, None], (8, 6, 4))
    there = np.asarray(bold.critic.values(state.critic, features, following))
    chosen = set()
    for aggregate, over_heads in (("mean", np.mean), ("min", np.min)):
        agent = build(dataclasses.replace(config, q_agg=aggregate))
        _, record = agent.sample(agent.policy_params(state), observation, jax.random.key(3), explore=True)
        np.testing.assert_allclose(record["values"], over_heads(heads, axis=0), atol=2e-5)
        of_chosen = heads[:, int(np.argmax(record["values"]))].std()
        np.testing.assert_allclose(record["q_std"], of_chosen, atol=2e-5)
        best = over_heads(there, axis=0).argmax(1)
        chosen.add(tuple(best))
        wanted = np.take_along_axis(np.asarray(following), best[:, None, None], 1)[:, 0]
        np.testing.assert_allclose(agent.next_chunk(state, {}, batch.next_observations, draws), wanted, atol=1e-5)
    assert len(chosen) > 1  # the aggregate did change what was chosen


def test_only_the_critic_knows_what_raw_outputs_mean():
    """An agent that read outputs itself would know nothing of ranges."""
    for module in AGENTS.glob("*.py"):
        if module.name not in ("critic.py", "grasp_critic.py", "value_heads.py"):
            assert "value_heads" not in module.read_text(), f"{module.name}: use ChunkCritic.read and head_loss"
