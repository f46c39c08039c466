"""RLPD on chunks: losses by hand, entropy, temperature, imitation, and that it learns the rewarded chunk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import (
    bandit,
    bandit_error,
    build,
    config_of,
    critic_gradient,
    fresh,
    made,
    named,
    one_batch,
    policy_gradient,
    sac_critic,
    same,
    seen_by,
    shaken,
)
from plain_networks import heads, log_density, tanh_normal

from serl_chunk.agents.state import Context

POWERS = np.array([1, 0.9, 0.81])


@pytest.mark.slow
def test_the_policy_climbs_the_critic_to_the_rewarded_chunk():
    config = config_of("acrlpd", lr=5e-3, bc_alpha=0.0, candidates=1, critic=sac_critic(hidden=(32,)))
    agent = build(config, horizon=2, actions=1)
    state = agent.init(jax.random.key(0))
    for i in range(250):
        state, _ = agent.update(state, {}, named(agent, jax.device_put(bandit(agent.spec, 4, 32, i)[0])))
    assert bandit_error(agent, state) < 0.12


def test_acting_by_the_best_of_several_is_better_than_by_one():
    """A critic trained on the bandit, and a policy that was not: only the choice can find what is rewarded."""
    heads = sac_critic(hidden=(32,), target_subset=2, target_aggregate="mean")
    many, one = (build(config_of("acrlpd", critic=heads, candidates=n), horizon=2, actions=1) for n in (8, 1))
    state = many.init(jax.random.key(0))
    for i in range(15):
        state, _ = many.update_critic(state, {}, bandit(many.spec, 20, 64, i)[0])
    assert bandit_error(many, state, explore=True) < 0.7 * bandit_error(one, state, explore=True)


@pytest.mark.parametrize("wanted", [-5.0, 5.0])
def test_the_temperature_rises_while_the_entropy_is_too_low(wanted):
    agent, state = fresh("acrlpd", target_entropy_per_dim=wanted)
    batch = one_batch(agent)
    step = jax.jit(lambda s, b: agent.step(s, {}, b, {"policy": agent.policy_draws(s.rng, b)}))
    after, metrics = step(state, batch)
    assert -2 < float(metrics["actor/entropy"]) < 2  # per dimension, whatever H * A
    assert (after.temperature["log_alpha"] > state.temperature["log_alpha"]) == (wanted > 0)
    assert agent.initial_temperature == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("steps", "log_prob"),
    [(1, "sum"), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((3, "mean"), (3, "sum"), (1, "mean")))],
)
def test_entropy_is_of_the_actions_that_a_critic_compares(steps, log_prob):
    """Those behind them do not count: their entropy is free, and would be all there is."""
    agent, state = fresh("acrlpd", sizes={"critic_steps": steps}, bc_alpha=0.0, log_prob=log_prob)
    grads, metrics = policy_gradient(agent, state, one_batch(agent))
    (bias,) = [np.asarray(x) for x in jax.tree.leaves(grads["net"]) if x.shape == (12,)]
    moved = (np.abs(bias.reshape(2, 3, 2)) > 1e-6).all(axis=(0, 2))  # means and deviations of each step
    assert moved.tolist() == [i < steps for i in range(3)]
    of_each, summed = np.arange(6, dtype=np.float32), log_prob == "sum"
    part = of_each[: 2 * steps]
    assert float(agent.joint_log_prob(of_each)) == (part.sum() if summed else part.mean())
    entropy, target = float(metrics["actor/entropy"]), -0.5 * (2 * steps if summed else 1)
    assert float(agent.temperature_loss({"log_alpha": 0.0}, entropy)) == pytest.approx(entropy - target, rel=1e-5)


@pytest.mark.parametrize("variant", ["acrlpd", "acrlpd-entropy"])
def test_the_target_is_the_least_of_its_heads_less_the_entropys_price_only_when_asked(variant):
    agent, state = fresh(variant, critic=sac_critic(target_subset=2))
    batch = one_batch(agent)
    draws = agent.critic_draws(jax.random.key(3), batch)
    later = batch.next_observations["state"]
    mean, std = tanh_normal(state.policy["net"], later)
    u = mean + std * np.asarray(draws["next"])
    value = heads(state.target["q"], later, np.tanh(u)).min(0)
    value -= np.exp(-2) * log_density(mean, std, u).mean(1) if "entropy" in variant else 0
    wanted = (batch.rewards @ POWERS + batch.discount_n * batch.mask * value).mean()
    metrics = critic_gradient(agent, state, batch, draws)[1]
    assert float(metrics["critic/target_qs"]) == pytest.approx(wanted, abs=1e-5)


def test_heads_that_were_not_drawn_do_not_count_in_the_target():
    agent, state = fresh("acrlpd")
    features, chunk = np.ones((5, 4), np.float32), np.linspace(-1, 1, 30, dtype=np.float32).reshape(5, 6)
    values = heads(state.target["q"], features, chunk)
    for head in range(2):
        drawn = agent.critic.target_values(state.target, {"heads": np.array([head])}, features, chunk)
        np.testing.assert_allclose(drawn, values[head], rtol=1e-4, atol=1e-6)


def test_the_policys_loss_by_hand_of_means_and_of_sums_over_the_chunk():
    """`log_prob=sum`: entropy, its target and imitation are H*A times the means."""
    for kind, factor in (("mean", 1), ("sum", 6)):
        agent, state = fresh("acrlpd", bc_alpha=0.5, log_prob=kind)
        batch = one_batch(agent)
        draws, seen = agent.policy_draws(jax.random.key(3), batch), batch.observations["state"]
        mean, std = tanh_normal(state.policy["net"], seen)
        u = mean + std * np.asarray(draws["pi"])
        entropy = -factor * log_density(mean, std, u).mean()
        q = heads(state.critic["q"], seen, np.tanh(u)).mean()
        shown = log_density(mean, std, np.arctanh(batch.actions.reshape(8, 6))).reshape(8, 3, 2)
        wanted = -np.exp(-2) * entropy - q - 0.5 * factor * shown[batch.bc_weight > 0].mean()
        metrics = policy_gradient(agent, state, batch, draws)[1]
        assert float(metrics["value"]) == pytest.approx(wanted, abs=1e-4)
        assert float(metrics["actor/entropy"]) == pytest.approx(entropy, abs=1e-4)
        loss = agent.temperature_loss(state.temperature, metrics["actor/entropy"])
        assert float(loss) == pytest.approx(np.exp(-2) * (entropy + 0.5 * factor), abs=1e-4)
        alone = np.zeros((8, 3), np.float32)
        alone[2, 1] = 1
        metrics = policy_gradient(agent, state, batch._replace(bc_weight=alone), bc_only=True)[1]
        assert float(metrics["value"]) == pytest.approx(-factor * shown[2, 1].mean(), abs=1e-4)


def test_a_decision_records_the_log_probability_of_what_was_chosen():
    agent, state = fresh("acrlpd-entropy")
    observation = seen_by(agent)
    mean, std = tanh_normal(state.policy["net"], observation["state"])
    committed = np.full((3, 2), 0.9, np.float32), np.array([1, 0, 0], np.float32)
    for explore, free, given in ((True, 0, None), (False, 0, None), (True, 1, committed)):
        chunk, record = agent.sample(
            agent.policy_params(state), observation, jax.random.key(2), explore=explore, committed=given
        )
        wanted = log_density(mean, std, np.arctanh(np.asarray(chunk, np.float64)).reshape(-1)).reshape(3, 2)
        assert float(record["log_prob"]) == pytest.approx(wanted[free:].mean(), abs=1e-3)
    chunk, _ = agent.sample(agent.policy_params(state), observation, jax.random.key(9), explore=False, alone=True)
    np.testing.assert_allclose(chunk.reshape(-1), np.tanh(mean), atol=1e-6)  # the first candidate
    shifted = state.replace(target=shaken(state.target))
    assert same(agent.policy_params(shifted)["critic"], state.critic)


@pytest.mark.parametrize("least", [-10.0, -1.0])
def test_the_policys_deviation_has_the_configured_least_size(least):
    agent, state = fresh("acrlpd", log_std_min=least)
    policy = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state.policy)
    policy["net"]["Dense_1"]["bias"] = np.full(12, -99.0, np.float32)
    shown = agent.gaussian.distribution(policy["net"], Context(jnp.zeros(4)))
    np.testing.assert_array_equal(shown.log_std, np.full(6, least))


def test_the_policys_activation_is_a_setting():
    """Equal parameters, other values: tanh of a large input is bounded, relu of it is not."""
    (relu, state), tanh = (
        fresh("acrlpd", policy_layer_norm=False), made("acrlpd", policy_layer_norm=False, policy_activation="tanh"),
    )  # fmt: skip
    context = Context(jnp.full(4, 1e3))
    large, small = (np.abs(a.gaussian.distribution(state.policy["net"], context).mean).max() for a in (relu, tanh))
    assert small < 30 < large
