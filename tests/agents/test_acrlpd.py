"""RLPD on chunks: losses by hand, entropy, temperature, imitation, and that it learns the rewarded chunk."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from agent_tools import fresh, one_batch, policy_gradient, sac_critic, same, seen_by, shaken
from plain_networks import heads, log_density, tanh_normal

POWERS = np.array([1, 0.9, 0.81])


def test_entropy_is_of_the_actions_that_a_critic_compares():
    """Those behind them do not count: their entropy is free, and would be all there is."""
    agent, state = fresh("acrlpd", sizes={"critic_steps": 1}, bc_alpha=0.0, log_prob="sum")
    grads, metrics = policy_gradient(agent, state, one_batch(agent))
    (bias,) = [np.asarray(x) for x in jax.tree.leaves(grads["net"]) if x.shape == (12,)]
    moved = (np.abs(bias.reshape(2, 3, 2)) > 1e-6).all(axis=(0, 2))  # means and deviations of each step
    assert moved.tolist() == [True, False, False]
    assert float(agent.joint_log_prob(np.arange(6, dtype=np.float32))) == 1
    entropy = float(metrics["actor/entropy"])
    assert float(agent.temperature_loss({"log_alpha": 0.0}, entropy)) == pytest.approx(entropy + 1, rel=1e-5)


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
    target = jax.jit(lambda b: agent.critic_target(state, {}, b, draws))
    assert float(np.mean(target(batch))) == pytest.approx(wanted, abs=1e-5)


def test_heads_that_were_not_drawn_do_not_count_in_the_target():
    agent, state = fresh("acrlpd")
    features, chunk = np.ones((5, 4), np.float32), np.linspace(-1, 1, 30, dtype=np.float32).reshape(5, 6)
    values = heads(state.target["q"], features, chunk)
    target = jax.jit(lambda head: agent.critic.target_values(state.target, {"heads": head}, features, chunk))
    for head in range(2):
        drawn = target(np.array([head]))
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
