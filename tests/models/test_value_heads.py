"""How heads say values and are taught them: ranges, HL-Gauss's bins, and critics made of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import build, config_of, critic, critic_gradient, make_batches

from serl_chunk.agents.losses import expectile_weight
from serl_chunk.config.critics import SIGMA_BINS, CriticConfig
from serl_chunk.models.value_heads import (
    bin_centres,
    bin_edges,
    bin_width,
    critic_values,
    initial_bias,
    regression_loss,
    target_bins,
)


def ranged(loss="hl_gauss", low=0.0, high=1.0, bins=101):
    return CriticConfig(loss=loss, value_low=low, value_high=high, bins=bins)


COSTS, UNIT = ranged(low=-100.0, high=0.0, bins=41), ranged()
BOUNDED = ranged("bounded")
AGENTS = Path(__file__).resolve().parents[2] / "serl_chunk" / "agents"


def regressed(*args) -> jax.Array:
    return regression_loss(*args).mean()


def test_a_bounded_value_and_its_loss_are_those_of_the_unit_range_scaled():
    outputs, places = jnp.linspace(-4, 4, 9), jnp.linspace(-0.2, 1.2, 9)
    costs = ranged("bounded", -100.0, 0.0)
    values = critic_values(outputs, costs)
    np.testing.assert_allclose(values, -100 + 100 * critic_values(outputs, BOUNDED), rtol=1e-6)
    scaled = regressed(outputs, -100 + 100 * places, costs)
    assert float(scaled) == pytest.approx(float(regressed(outputs, places, BOUNDED)), rel=1e-5)


@pytest.mark.parametrize("config", [UNIT, COSTS, ranged(low=-3.0, high=7.0, bins=12)])
def test_the_bins_of_a_target_have_it_as_their_mean_and_the_published_deviation(config):
    y = np.linspace(config.value_low, config.value_high, 23).astype(np.float32)
    share = np.asarray(target_bins(jnp.asarray(y), config), np.float64)
    assert share.min() >= 0
    np.testing.assert_allclose(share.sum(-1), 1, atol=1e-5)
    centres, width = bin_centres(config), bin_width(config)
    mean = share @ centres
    np.testing.assert_allclose(mean, y, atol=0.012 * width)
    spread = np.sqrt((share * (centres - mean[:, None]) ** 2).sum(-1))
    within = np.sqrt(SIGMA_BINS**2 + 1 / 12) * width  # of a bin's own width, Sheppard's correction
    np.testing.assert_allclose(spread, within, rtol=0.03)


def test_bins_by_hand():
    config = ranged(low=0.0, high=7.0, bins=8)  # of eight bins, 2.25 beyond each end
    assert bin_width(config) == pytest.approx(2.0)
    np.testing.assert_allclose(bin_edges(config), -4.5 + 2 * np.arange(9), atol=1e-6)
    share = target_bins(jnp.array([4.5]), config)[0]  # the centre of bin 4, which reaches two thirds of a deviation
    np.testing.assert_allclose(share[4], 0.4950, atol=1e-3)
    np.testing.assert_allclose(share[3], 0.97725 - 0.74751, atol=1e-3)  # to two deviations


def test_targets_beyond_the_range_count_as_its_ends():
    bins = target_bins(jnp.array([-250.0, -100.0, 3.0, 0.0]), COSTS)
    np.testing.assert_array_equal(bins[0], bins[1])
    np.testing.assert_array_equal(bins[2], bins[3])


def test_the_loss_is_the_cross_entropy_of_the_bins_and_least_at_the_target():
    key = jax.random.key(0)
    outputs, target = 3 * jax.random.normal(key, (2, 5, 41)), jnp.array([-100.0, -60.0, -33.3, -1.0, 0.0])
    weight = jnp.array([1.0, 0.0, 2.0, 1.0, 0.5])
    logs = np.asarray(outputs, np.float64)
    logs = logs - np.log(np.exp(logs).sum(-1, keepdims=True))
    rows = -(np.asarray(target_bins(target, COSTS))[None] * logs).sum(-1)
    loss = regressed(outputs, target, COSTS, weight)
    assert float(loss) == pytest.approx((rows * np.asarray(weight)).mean(), rel=1e-5)
    learnt = jnp.log(target_bins(target, COSTS) + 1e-12)  # the loss is convex in the logits, and flat here
    gradient = jax.grad(lambda o: regressed(o, target, COSTS))
    np.testing.assert_allclose(gradient(learnt), 0, atol=1e-6)
    assert np.abs(gradient(outputs[0])).max() > 1e-3
    np.testing.assert_allclose(critic_values(learnt, COSTS), target, atol=0.012 * bin_width(COSTS))


def test_an_expectile_weight_lifts_the_value_of_bins_above_the_mean():
    samples = jnp.array([0.0, 0.2, 0.3, 0.9, 1.0])

    def settled(expectile: float) -> float:
        def step(_: int, x: jax.Array) -> jax.Array:
            def loss(o: jax.Array) -> jax.Array:
                outputs = jnp.broadcast_to(o, (5, 101))
                weight = expectile_weight(samples, critic_values(outputs, UNIT), expectile)
                return regressed(outputs, samples, UNIT, weight)

            return x - 3 * jax.grad(loss)(x)

        return float(critic_values(jax.lax.fori_loop(0, 600, step, jnp.zeros(101)), UNIT))

    mean, high = settled(0.5), settled(0.8)
    assert mean == pytest.approx(0.48, abs=0.01)
    # cross-entropy mixes the targets by their weights: the value is the weighted mean at its own fixed point
    weights = np.where(np.asarray(samples) < high, 0.2, 0.8)
    assert high == pytest.approx(weights @ np.asarray(samples) / weights.sum(), abs=0.02)
    assert high > mean + 0.1


@pytest.mark.parametrize("loss", ["bounded", "hl_gauss"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-100.0, 0.0)])
def test_a_fresh_critic_is_at_an_eighth_of_the_range(loss, low, high):
    config = CriticConfig(loss=loss, value_low=low, value_high=high)
    bias = jnp.asarray(initial_bias(config), jnp.float32)
    value = float(critic_values(bias, config))
    assert value == pytest.approx(low + (high - low) * 0.1192, abs=0.002 * (high - low))


def of_bins(variant, **changes):
    """A variant's agent with small HL-Gauss heads over [-2, 3]."""
    settings = {"loss": "hl_gauss", "value_low": -2.0, "value_high": 3.0, "bins": 21, **changes}
    return build(config_of(variant, critic=critic(**settings)))


def one(agent, size=8, seed=0):
    return jax.tree.map(lambda x: jnp.asarray(x[0]), make_batches(agent.spec, 1, size, seed))


@pytest.mark.slow
def test_heads_of_bins_one_by_one_and_side_by_side_are_the_same(monkeypatch):
    agent = of_bins("acfql")
    c, batch = agent.critic, one(agent, 160)
    params = agent.init(jax.random.key(0)).critic
    features, chunk = batch.observations["state"], agent.critic.truncate_flatten(batch.actions)
    target = jnp.linspace(-2.5, 3.5, 160)

    def everything(q, chunk):
        loss, outputs = c.regression({"q": q}, features, chunk, target, batch.weight)
        return loss.mean() + jnp.mean(c.mean_value({"q": jax.lax.stop_gradient(q)}, features, chunk)), outputs

    got = []
    for alone in (True, False):
        monkeypatch.setattr("serl_chunk.models.ensemble.one_by_one", lambda heads, alone=alone: alone)
        gradient = jax.jit(jax.value_and_grad(lambda *a: everything(*a), argnums=(0, 1), has_aux=True))
        (loss, outputs), grads = gradient(params["q"], chunk)
        assert outputs.shape == (2, 160, 21)
        assert c.expected_value(outputs).shape == (2, 160)
        got.append((loss, outputs, grads))
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(got[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(got[0][2][0]))


@pytest.mark.parametrize("variant", ["acfql", pytest.param("acrlpd", marks=pytest.mark.slow)])
def test_a_critic_of_bins_learns_known_returns_and_is_compiled_once(variant):
    agent = of_bins(variant)
    state = agent.init(jax.random.key(0))
    batch = make_batches(agent.spec, 2, 16, mask=np.zeros((2, 16), np.float32))
    batch = jax.device_put(batch._replace(rewards=5 * batch.rewards - 1))
    powers = 0.9 ** np.arange(3, dtype=np.float32)
    returns = np.clip(np.asarray(batch.rewards)[0] @ powers, -2, 3)
    for _ in range(60):
        state, metrics = agent.update_critic(state, {}, batch)
    chunk = agent.critic.truncate_flatten(jax.tree.map(lambda x: x[0], batch).actions)
    values = np.asarray(agent.critic.values(state.critic, batch.observations["state"][0], chunk)).mean(0)
    assert np.abs(values - returns).mean() < 0.35 * np.abs(returns - returns.mean()).mean()
    assert np.isfinite(float(metrics["critic/critic_loss"]))
    assert agent.update_critic._cache_size() == 1


def test_what_is_published_of_a_critic_of_bins_acts():
    agent = of_bins("acfql")
    params = agent.load_params(agent.flatten_params(agent.policy_params(agent.init(jax.random.key(0)))))
    observation = {k: v[0, 0] for k, v in make_batches(agent.spec).observations.items()}
    _, record = agent.sample(params, observation, jax.random.key(1), explore=True)
    assert record["values"].shape == (3,)
    assert -2.6 < float(record["q"]) < 3.6
    assert agent.network_shape() != build(config_of("acfql")).network_shape()


@pytest.mark.slow
def test_the_floor_lifts_targets_to_the_realised_return_and_nothing_else():
    values = {}
    for floor in ("none", "mc"):
        agent = build(config_of("acrlpd", critic=critic(loss="squared", target_floor=floor)))
        state, batch = agent.init(jax.random.key(0)), one(agent)
        realised = jnp.where(jnp.arange(8) % 2 == 0, 50.0, -jnp.inf).at[6].set(-50.0)
        batch = batch._replace(mc_return=realised)
        draws = agent.critic_draws(jax.random.key(1), batch)
        values[floor] = np.asarray(agent.critic_target(state, {}, batch, draws))
        _, metrics = critic_gradient(agent, state, batch, draws)
        assert ("critic/floored" in metrics) == (floor == "mc")
    np.testing.assert_array_equal(values["mc"][[0, 2, 4]], 50.0)
    np.testing.assert_array_equal(values["mc"][[1, 3, 5, 6, 7]], values["none"][[1, 3, 5, 6, 7]])
    assert float(metrics["critic/floored"]) == 2 / 8  # of rows 0, 2 and 4 the first two bootstrap nothing: 0, 1


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
    """An agent that read outputs itself would know nothing of ranges and bins."""
    for module in AGENTS.glob("*.py"):
        if module.name not in ("critic.py", "grasp_critic.py", "value_heads.py"):
            assert "value_heads" not in module.read_text(), f"{module.name}: use ChunkCritic.read and head_loss"
