"""The published agents: their losses by hand, and what acts. Recorded numbers of that code: test_parity_qc.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import build, config_of, fresh, make_batches, on_device, policy_gradient, same

from serl_chunk.agents.base import Agent
from serl_chunk.agents.published_qc import EDGE, PublishedAcfql, PublishedAcrlpd
from serl_chunk.agents.state import AgentState
from serl_chunk.models.flow import integrate

VARIANTS = ("published", "published-distill", "published-gaussian")
FREE = (np.zeros((3, 2), np.float32), np.zeros(3, np.float32))


def started(variant: str, **changes: Any) -> tuple[Agent, AgentState, Any]:
    """An agent, its state with another target than its critic, and one batch."""
    agent = build(config_of(variant, **changes))
    state = agent.init(jax.random.key(0))
    state = state.replace(target=jax.tree.map(lambda x: 1.5 * x, state.target))
    return agent, state, jax.tree.map(lambda x: x[0], on_device(agent.spec))


def q_values(agent: Any, q: Any, observation: jax.Array, flat: jax.Array) -> jax.Array:
    return agent.critic.q.outputs(q, jnp.concatenate([observation, flat], -1))


def velocity(agent: Any, state: AgentState, observation: jax.Array, x: jax.Array, t: jax.Array) -> jax.Array:
    return agent.flow.field.apply({"params": state.policy["flow"]}, observation, x, t)


def one_step(agent: Any, state: AgentState, observation: jax.Array, noise: jax.Array) -> jax.Array:
    inputs = jnp.concatenate([observation, noise], -1)
    return agent.one_step.net.apply({"params": state.policy["onestep"]["net"]}, inputs)


def test_the_name_chooses_the_agent():
    assert isinstance(build(config_of("published")), PublishedAcfql)
    assert isinstance(build(config_of("published-gaussian")), PublishedAcrlpd)


@pytest.mark.parametrize("aggregate", ["mean", "min"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_target_and_the_critics_loss_by_hand(variant, aggregate):
    agent, state, batch = started(variant, q_agg=aggregate)
    batch = batch._replace(weight=jnp.array([1.0] * 6 + [0.0] * 2))
    fold = jnp.min if aggregate == "min" else jnp.mean
    draws = agent.critic_draws(jax.random.key(1), batch)
    following, noise = batch.next_observations["state"], draws["next"]
    assert noise.shape == (8, 3 if variant == "published" else 1, 6)
    if variant == "published":
        each = jnp.repeat(following[:, None], 3, axis=1)
        samples = integrate(lambda x, t: velocity(agent, state, each, x, t), noise, 2).clip(-1, 1)
        best = jnp.argmax(fold(q_values(agent, state.critic["q"], each, samples), axis=0), axis=1)
        chosen = samples[jnp.arange(8), best]
    elif variant == "published-distill":
        chosen = one_step(agent, state, following, noise[:, 0]).clip(-1, 1)
    else:
        context = agent.policy_context(state.policy, state.critic, {}, batch.next_observations)
        pi = agent.gaussian.distribution(state.policy["net"], context)
        chosen = jnp.tanh(pi.mean + jnp.exp(pi.log_std) * noise[:, 0])
    value = fold(q_values(agent, state.target["q"], following, chosen), axis=0)
    y = batch.rewards @ np.array([1, 0.9, 0.81], np.float32) + batch.discount_n * batch.mask * value
    np.testing.assert_allclose(agent.critic_target(state, {}, batch, draws), y, atol=1e-5)
    q = q_values(agent, state.critic["q"], batch.observations["state"], batch.actions.reshape(8, 6))
    loss = agent.critic_loss(state.critic, state, {}, batch, draws)
    assert float(loss.terms[0].mean()) == pytest.approx(float((batch.weight * (q - y) ** 2).mean()), rel=1e-5)


@pytest.mark.parametrize("variant", ["published", "published-distill"])
def test_the_flows_loss_by_hand(variant):
    """Steps beyond an episode's end count in the divisor alone."""
    agent, state, batch = started(variant)
    draws = agent.policy_draws(jax.random.key(1), batch)
    observation, flat = batch.observations["state"], batch.actions.reshape(8, 6)
    t = draws["t"][:, None]
    error = velocity(agent, state, observation, (1 - t) * draws["x0"] + t * flat, draws["t"]) - (flat - draws["x0"])
    expected = float((error.reshape(8, 3, 2) ** 2 * batch.valid[..., None]).mean())
    _, metrics = policy_gradient(agent, state, batch, draws)
    assert float(metrics["actor/bc_loss"]) == pytest.approx(expected, rel=1e-5)
    if variant == "published-distill":
        noise = draws["distill"]
        taught = integrate(lambda x, t: velocity(agent, state, observation, x, t), noise, 2).clip(-1, 1)
        student = one_step(agent, state, observation, noise)
        q = q_values(agent, state.critic["q"], observation, student.clip(-1, 1)).mean()
        expected += float(3.0 * ((student - taught) ** 2).mean() - q)
    assert float(metrics["value"]) == pytest.approx(expected, rel=1e-4)


def test_the_gaussians_loss_by_hand():
    """Every row is imitated; densities are of whole chunks; the critics' mean is climbed whatever `q_agg` is."""
    agent, state, batch = started("published-gaussian", q_agg="min", init_temp=0.3)
    draws = agent.policy_draws(jax.random.key(1), batch)
    observation = batch.observations["state"]
    pi = agent.gaussian.distribution(
        state.policy["net"], agent.policy_context(state.policy, {}, {}, {"state": observation})
    )
    action, log_prob = pi.sample_and_log_prob(draws["pi"])
    log_prob = log_prob.sum(-1)
    taught = pi.log_prob(batch.actions.reshape(8, 6).clip(EDGE - 1, 1 - EDGE)).sum(-1)
    q = q_values(agent, state.critic["q"], observation, action).mean()
    _, metrics = policy_gradient(agent, state, batch, draws)
    expected = 0.3 * log_prob.mean() - q - 0.5 * taught.mean()
    assert float(metrics["value"]) == pytest.approx(float(expected), rel=1e-4)
    alpha_loss = agent.temperature_loss(state.temperature, metrics["actor/entropy"])
    assert float(alpha_loss) == pytest.approx(float(0.3 * (-log_prob.mean() + 0.5 * 6)), rel=1e-4)


def test_imitated_actions_at_the_limits_have_a_finite_density():
    agent, state, batch = started("published-gaussian")
    batch = batch._replace(actions=jnp.sign(batch.actions))
    grads, metrics = policy_gradient(agent, state, batch, {}, bc_only=True)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((grads, metrics)))


def test_imitation_alone_needs_no_critic():
    for variant in VARIANTS:
        agent, state, batch = started(variant)
        draws = agent.policy_draws(jax.random.key(1), batch)
        gradients = [
            policy_gradient(agent, s, batch, draws, bc_only=True)[0]
            for s in (state, state.replace(critic=jax.tree.map(lambda x: x * 2, state.critic)))
        ]
        assert same(*gradients)
        assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(gradients[0]))


def test_of_the_samples_that_act_the_critics_choose():
    agent, state = fresh("published")
    observation = {k: v[0, 0] for k, v in make_batches(agent.spec).observations.items()}
    noise = agent.acting_noise(agent.policy_params(state), jax.random.key(3), observation, explore=True)
    assert noise.shape == (3, 6)
    each = jnp.repeat(jnp.asarray(observation["state"])[None], 3, axis=0)
    samples = integrate(lambda x, t: velocity(agent, state, each, x, t), noise, 2).clip(-1, 1)
    q = q_values(agent, state.critic["q"], each, samples).mean(0)
    for pretrained in (False, True):  # as published, from the first step on
        params = agent.policy_params(state, pretrained=pretrained)
        chunk, record = jax.jit(agent.act)(params, {}, observation, noise, FREE)
        np.testing.assert_allclose(record["values"], q, atol=1e-5)
        np.testing.assert_allclose(chunk.reshape(-1), samples[int(jnp.argmax(q))], atol=1e-5)


@pytest.mark.parametrize("variant", ["published-distill", "published-gaussian"])
def test_other_policies_act_with_one_sample(variant):
    agent, state = fresh(variant)
    observation = {k: v[0, 0] for k, v in make_batches(agent.spec).observations.items()}
    params = agent.policy_params(state)
    assert set(params["policy"]) == ({"onestep"} if variant == "published-distill" else {"encoder", "net"})
    chunk, record = agent.sample(params, observation, jax.random.key(3), explore=True)
    assert record["values"].shape == (1,)
    noise = agent.acting_noise(params, jax.random.key(3), observation, explore=True)
    if variant == "published-distill":
        expected = one_step(agent, state, observation["state"], noise[0]).clip(-1, 1)
    else:
        context = agent.policy_context(state.policy, {}, {}, observation)
        expected = agent.gaussian.distribution(state.policy["net"], context).sample_and_log_prob(noise[0])[0]
    np.testing.assert_allclose(chunk.reshape(-1), expected, atol=1e-6)


@pytest.mark.parametrize(("fourier", "inputs"), [(False, 1), (True, 8)])
def test_t_enters_the_flow_alone_or_as_fourier_features(fourier, inputs):
    agent = build(config_of("published", use_fourier_features=fourier, fourier_feature_dim=8))
    kernel = agent.init(jax.random.key(0)).policy["flow"]["Mlp_0"]["Dense_0"]["kernel"]
    assert kernel.shape == (4 + 6 + inputs, 16)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_norm_is_an_option_of_critics_and_of_flows(variant):
    def norms(tree: Any) -> bool:
        return "LayerNorm" in str(jax.tree.structure(tree))

    plain = build(config_of(variant, layer_norm=False, actor_layer_norm=False)).init(jax.random.key(0))
    normed = build(config_of(variant, layer_norm=True, actor_layer_norm=True)).init(jax.random.key(0))
    assert (norms(plain.critic), norms(normed.critic)) == (False, True)
    assert (norms(plain.policy), norms(normed.policy)) == (False, variant != "published-gaussian")
