"""RLPD on chunks: entropy, temperature, imitation, and that it learns the rewarded chunk."""

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
    named,
    on_device,
    policy_gradient,
    sac_critic,
    same,
)

from serl_chunk.agents.state import Context


def distribution(agent, state, observation):
    """The policy's, with an encoder of its own."""
    return agent.gaussian.distribution(state.policy["net"], agent.encode(state.policy["encoder"], {}, observation))


@pytest.mark.slow
def test_the_policy_climbs_the_critic_to_the_rewarded_chunk():
    config = config_of("acrlpd", lr=5e-3, bc_alpha=0.0, candidates=1, critic=sac_critic(hidden=(32,)))
    agent = build(config, horizon=2, actions=1)
    state = agent.init(jax.random.key(0))
    for i in range(250):
        batch, _ = bandit(agent.spec, 4, 32, i)
        state, _ = agent.update(state, {}, named(agent, jax.device_put(batch)))
    assert bandit_error(agent, state) < 0.12


def test_the_temperature_rises_while_the_entropy_is_too_low():
    temperatures = {}
    for wanted in (-5.0, 5.0):
        agent = build(config_of("acrlpd", target_entropy_per_dim=wanted), horizon=1)
        state = agent.init(jax.random.key(0))
        batch = on_device(agent.spec)
        before = float(jnp.exp(state.temperature["log_alpha"]))
        assert before == pytest.approx(0.01)

        @jax.jit
        def step(s, b, agent=agent):
            batch = jax.tree.map(lambda x: x[0], b)
            return agent.step(s, {}, batch, {"policy": agent.policy_draws(s.rng, batch)})

        state, metrics = step(state, batch)
        assert -2 < float(metrics["actor/entropy"]) < 2  # per dimension, whatever H * A
        temperatures[wanted] = float(jnp.exp(state.temperature["log_alpha"])) - before
    assert temperatures[-5.0] < 0 < temperatures[5.0]


@pytest.mark.parametrize(("steps", "compared"), [pytest.param({}, 3, marks=pytest.mark.slow), ({"critic_steps": 1}, 1)])
@pytest.mark.parametrize("log_prob", [pytest.param("mean", marks=pytest.mark.slow), "sum"])
def test_entropy_is_of_the_actions_that_a_critic_compares(steps, compared, log_prob):
    """Those behind them do not count: their entropy is free, and would be all there is."""
    agent = build(config_of("acrlpd", bc_alpha=0.0, log_prob=log_prob, init_temperature=1.0), **steps)
    state = agent.init(jax.random.key(0))
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    draws = agent.policy_draws(jax.random.key(1), batch)
    grads, metrics = policy_gradient(agent, state, agent.policy_part(batch), draws)
    (bias,) = [np.asarray(x) for x in jax.tree.leaves(grads["net"]) if x.shape == (12,)]
    moved = (np.abs(bias.reshape(2, 3, 2)) > 1e-6).all(axis=(0, 2))  # means and deviations of each step
    assert moved.tolist() == [i < compared for i in range(3)]
    of_each = np.arange(6, dtype=np.float32)
    part = of_each[: 2 * compared]
    assert float(agent.joint_log_prob(jnp.asarray(of_each))) == (part.sum() if log_prob == "sum" else part.mean())
    target = -0.5 * (2 * compared if log_prob == "sum" else 1)
    entropy = float(metrics["actor/entropy"])
    assert float(agent.temperature_loss({"log_alpha": 0.0}, entropy)) == pytest.approx(entropy - target, rel=1e-5)


@pytest.mark.parametrize("variant", ["acrlpd", "acrlpd-entropy"])
def test_the_target_is_the_least_of_its_heads_less_the_entropys_price_only_when_asked(variant):
    agent = build(config_of(variant, critic=sac_critic(target_subset=2)))
    state = agent.init(jax.random.key(0))
    state = state.replace(target=agent.init(jax.random.key(1)).target, temperature={"log_alpha": jnp.float32(1.0)})
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    draws = agent.critic_draws(jax.random.key(3), batch)
    metrics = jax.jit(lambda s, b, d: critic_gradient(agent, s, b, d)[1])(state, batch, draws)
    dist = distribution(agent, state, batch.next_observations)
    action, log_prob = dist.sample_and_log_prob(draws["next"])
    heads = agent.critic.outputs(state.target["q"], batch.next_observations["state"], action)
    value = heads.min(0) - (jnp.exp(1.0) * log_prob.mean(1) if "entropy" in variant else 0)
    returns = batch.rewards @ np.array([1, 0.9, 0.81], np.float32)
    wanted = float((returns + batch.discount_n * batch.mask * value).mean())
    assert float(metrics["critic/target_qs"]) == pytest.approx(wanted, abs=1e-5)


def test_heads_that_were_not_drawn_do_not_count_in_the_target():
    agent, state = fresh("acrlpd")
    features, chunk = jnp.ones((5, 4)), jnp.linspace(-1, 1, 30).reshape(5, 6)
    values = agent.critic.values(state.target, features, chunk)
    for head in range(2):
        drawn = agent.critic.target_values(state.target, {"heads": jnp.array([head])}, features, chunk)
        np.testing.assert_allclose(drawn, values[head], rtol=1e-5)


def test_the_policys_loss_by_hand():
    agent = build(config_of("acrlpd", bc_alpha=0.5))
    state = agent.init(jax.random.key(0)).replace(temperature={"log_alpha": jnp.float32(-1.0)})
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    draws = agent.policy_draws(jax.random.key(3), batch)
    _, metrics = policy_gradient(agent, state, batch, draws)
    dist = distribution(agent, state, batch.observations)
    action, log_prob = dist.sample_and_log_prob(draws["pi"])
    q = agent.critic.outputs(state.critic["q"], batch.observations["state"], action).mean()
    shown = np.asarray(dist.log_prob(batch.actions.reshape(8, 6)).reshape(8, 3, 2))[
        np.asarray(batch.bc_weight) > 0
    ].mean()
    wanted = float(jnp.exp(-1.0) * log_prob.mean() - q - 0.5 * shown)
    assert float(metrics["value"]) == pytest.approx(wanted, abs=1e-4)
    assert float(metrics["actor/entropy"]) == pytest.approx(-float(log_prob.mean()), abs=1e-5)


def test_a_decision_records_the_log_probability_of_what_was_chosen():
    agent, state = fresh("acrlpd-entropy")
    observation = {"state": np.full(4, 0.3, np.float32)}
    dist = distribution(agent, state, observation)
    for explore, count in ((True, False), (False, True)):
        params = agent.policy_params(state, pretrained=count)
        chunk, record = agent.sample(params, observation, jax.random.key(2), explore=explore)
        wanted = dist.log_prob(chunk.reshape(-1)).reshape(3, 2)
        assert float(record["log_prob"]) == pytest.approx(float(wanted.mean()), abs=1e-3)
    committed = (np.full((3, 2), 0.9, np.float32), np.array([1, 0, 0], np.float32))
    chunk, record = agent.sample(params, observation, jax.random.key(2), explore=True, committed=committed)
    wanted = dist.log_prob(chunk.reshape(-1)).reshape(3, 2)
    assert float(record["log_prob"]) == pytest.approx(float(wanted[1:].mean()), abs=1e-3)


def test_imitation_is_the_log_probability_of_the_marked_steps():
    agent, state = fresh("acrlpd-entropy")
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    bc = np.zeros((8, 3), np.float32)
    bc[2, 1] = 1
    _, metrics = policy_gradient(agent, state, batch._replace(bc_weight=jnp.asarray(bc)), {}, bc_only=True)
    log_prob = distribution(agent, state, batch.observations).log_prob(batch.actions.reshape(8, 6))
    assert float(metrics["value"]) == pytest.approx(-float(log_prob.reshape(8, 3, 2)[2, 1].mean()), abs=1e-4)


def test_the_mean_policy_is_the_first_candidate():
    agent, state = fresh("acrlpd-entropy")
    observation = {"state": np.full(4, 0.3, np.float32)}
    params = agent.policy_params(state)
    chunk, _ = agent.sample(params, observation, jax.random.key(9), explore=False, alone=True)
    mode = distribution(agent, state, observation).mode()
    np.testing.assert_allclose(chunk, mode.reshape(3, 2), atol=1e-6)
    shifted = state.replace(target=jax.tree.map(lambda x: x + 1, state.target))
    assert same(agent.policy_params(shifted)["critic"], state.critic)


def test_published_log_probabilities_are_sums_over_the_chunk():
    """`log_prob=sum`: entropy, its target and imitation are H*A times the means, for one policy and the same draws."""
    losses = {}
    for kind in ("mean", "sum"):
        agent = build(config_of("acrlpd", log_prob=kind, bc_alpha=0.0))
        state = agent.init(jax.random.key(0))
        batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
        draws = agent.policy_draws(jax.random.key(3), batch)
        losses[kind] = policy_gradient(agent, state, batch, draws)[1]
        entropy = losses[kind]["actor/entropy"]
        losses[kind]["temperature"] = agent.temperature_loss(state.temperature, entropy)
    for name in ("actor/entropy", "actor/bc_loss", "temperature"):
        assert float(losses["sum"][name]) == pytest.approx(6 * float(losses["mean"][name]), rel=1e-5)
    assert float(losses["sum"]["actor/q"]) == pytest.approx(float(losses["mean"]["actor/q"]), abs=1e-6)


def test_the_policys_deviation_has_the_configured_least_size():
    for least in (-10.0, -1.0):
        agent = build(config_of("acrlpd", log_std_min=least))
        policy = jax.tree.map(lambda x: x * 0, agent.init(jax.random.key(0)).policy)
        policy["net"]["Dense_1"]["bias"] = jnp.full(12, -99.0)
        shown = agent.gaussian.distribution(policy["net"], Context(jnp.zeros(4)))
        np.testing.assert_array_equal(shown.log_std, np.full(6, least))


def test_the_policys_activation_is_a_setting():
    """Equal parameters, other values: tanh of a large input is bounded, relu of it is not."""
    layers = {"hidden": (32,), "policy_layer_norm": False}
    agents = [build(config_of("acrlpd", policy_activation=name, **layers)) for name in ("relu", "tanh")]
    params = agents[0].init(jax.random.key(0)).policy
    context = Context(jnp.full(agents[0].spec.state_dim, 1e3))
    relu, tanh = (agent.gaussian.distribution(params["net"], context).mean for agent in agents)
    assert float(jnp.abs(tanh).max()) < 30 < float(jnp.abs(relu).max())
