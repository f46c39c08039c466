"""The critic's step before the policy's, or as published both at once; what the target follows; weights of rows."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import build, config_of, critic_gradient, fresh, make_batches, named, on_device, same

TOGETHER = ["published-distill", "published-gaussian"]


def first(batches):
    return jax.tree.map(lambda x: jnp.asarray(x[0]), batches)


def close(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(x, y, atol=1e-6) for x, y in pairs)


@pytest.mark.parametrize("variant", TOGETHER)
def test_together_each_gradient_is_taken_at_the_parameters_before_the_step(variant):
    agent = build(config_of(variant, lr=0.1))
    state, batch = agent.init(jax.random.key(0)), first(make_batches(agent.spec))
    draws = agent.critic_draws(jax.random.key(1), batch), agent.policy_draws(jax.random.key(2), batch)

    step = jax.jit(lambda s, **d: agent.step(s, {}, batch, d)[0])
    joint = step(state, critic=draws[0], policy=draws[1])
    critic_alone, policy_alone = step(state, critic=draws[0]), step(state, policy=draws[1])
    in_turn = step(critic_alone, policy=draws[1])
    for name in ("critic", "critic_opt", "target", "critic_updates"):
        assert close(getattr(joint, name), getattr(critic_alone, name)), name
    for name in ("policy", "policy_opt", "policy_average", "temperature", "policy_updates"):
        assert close(getattr(joint, name), getattr(policy_alone, name)), name
    assert not close(joint.policy, in_turn.policy)  # against the new critic it would be another step


@pytest.mark.parametrize("variant", TOGETHER)
def test_together_every_batch_of_an_update_trains_both_and_compiles_once(variant):
    agent, state = fresh(variant)
    for seed in range(2):
        state, metrics = agent.update(state, {}, named(agent, on_device(agent.spec, seed)))
    assert (int(state.critic_updates), int(state.policy_updates)) == (4, 4)
    assert {"critic/critic_loss", "actor/actor_loss"} <= metrics.keys()
    assert all(np.isfinite(v) for v in metrics.values())
    assert agent.update._cache_size() == 1


@pytest.mark.parametrize("variant", [pytest.param("acfql", marks=pytest.mark.slow), "published"])
def test_the_target_moves_towards_the_critic_after_the_step_and_as_published_before_it(variant):
    agent = build(config_of(variant))
    state, batch = agent.init(jax.random.key(0)), first(make_batches(agent.spec))
    state = state.replace(target=jax.tree.map(lambda x: x + 1.0, state.target))
    after, _ = agent.step(state, {}, batch, {"critic": agent.critic_draws(jax.random.key(1), batch)})
    followed = (state if variant == "published" else after).critic
    wanted = jax.tree.map(lambda c, t: 0.1 * c + 0.9 * t, followed["q"], state.target["q"])
    assert close(after.target["q"], wanted)
    assert not same(after.critic["q"], state.critic["q"])


@pytest.mark.parametrize("variant", ["acfql", "acrlpd", "published-gaussian"])
def test_a_row_of_no_weight_teaches_the_critic_nothing_and_counts_in_the_divisor(variant):
    agent = build(config_of(variant))
    state, batch = agent.init(jax.random.key(0)), first(make_batches(agent.spec))
    draws = agent.critic_draws(jax.random.key(1), batch)
    half = batch._replace(weight=jnp.array([1.0] * 4 + [0.0] * 4))
    spoiled = half._replace(rewards=half.rewards.at[4:].add(9.0), mask=half.mask.at[4:].set(0.0))
    gradient = jax.jit(lambda b, d: critic_gradient(agent, state, b, d)[0])
    assert close(gradient(half, draws), gradient(spoiled, draws))
    twice = lambda x: jnp.concatenate([x[:4], x[:4]])  # noqa: E731
    same_draws = {k: v if k == "heads" else twice(v) for k, v in draws.items()}
    alone = gradient(jax.tree.map(twice, batch), same_draws)
    assert close(gradient(half, draws), jax.tree.map(lambda g: g / 2, alone))


@pytest.mark.parametrize("variant", ["acfql", "acrlpd", "published-distill"])
def test_returns_of_more_steps_than_the_chunk(variant):
    """n-step returns: the batch brings R rewards and the discount of after them."""
    agent = build(config_of(variant), horizon=1)
    batch = first(make_batches(agent.spec))._replace(
        rewards=jnp.arange(32, dtype=jnp.float32).reshape(8, 4) / 32, discount_n=jnp.full(8, 0.9**4), mask=jnp.zeros(8)
    )
    state = agent.init(jax.random.key(0))
    _, metrics = critic_gradient(agent, state, batch, agent.critic_draws(jax.random.key(1), batch))
    wanted = np.asarray(batch.rewards) @ 0.9 ** np.arange(4)
    assert float(metrics["critic/target_qs"]) == pytest.approx(wanted.mean(), abs=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the compiler of other devices places copies otherwise")
@pytest.mark.parametrize("variant", ["published-distill", "published"])
@pytest.mark.slow
def test_no_network_is_copied_between_updates(variant):
    """By default the compiler copies each parameter that one update both reads and replaces."""
    agent = build(config_of(variant, value_hidden_dims=(44, 44), actor_hidden_dims=(44, 44)))
    state, batches = agent.init(jax.random.key(0)), on_device(agent.spec)
    parts = agent.update.lower(state, {}, {"critic": batches}).compile().as_text().split("\n\n")
    updates = [part for part in parts if not part.startswith("ENTRY") and "44,44" in part]
    assert updates
    assert not [line for part in updates for line in part.splitlines() if re.search(r"\[(2,)?44,44\]\S* copy\(", line)]
