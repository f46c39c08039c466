"""Flows that are trained for decisions with committed actions (training-time RTC)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import FLOW, build, config_of, make_batches, named, on_device, same

from serl_chunk.agents.state import Context
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.models.flow import integrate, linear_share

DELAYS = jnp.array([0, 1, 2, 0, 1, 2, 3, 0], jnp.int32)


def delayed(train_delay: str, variant: str = "acfql", **changes):
    flow = dataclasses.replace(FLOW, train_delay=train_delay)
    agent = build(config_of(variant, flow=flow, **changes))
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    return agent, agent.init(jax.random.key(0)), batch._replace(delay=DELAYS, bc_weight=jnp.ones((8, 3)))


def flow_loss(agent, policy, batch, draws):
    context, given = agent.policy_context(policy, {}, {}, batch.observations), agent.flow.given(batch, draws)
    return agent.flow.loss(policy["flow"], context, batch.actions, batch.bc_weight, given, draws).mean()


def gradient(agent, state, batch, draws):
    return jax.grad(lambda p: flow_loss(agent, p, batch, draws))(state.policy)


@pytest.mark.slow
def test_a_committed_action_is_seen_as_it_is_and_is_no_target():
    """Noise of the prefix enters the loss nowhere; its actions enter as inputs; free actions enter as targets."""
    agent, state, batch = delayed("recorded")
    draws = agent.flow.draws(jax.random.key(1), batch)
    given = np.arange(3)[None] < np.asarray(DELAYS)[:, None]
    noise = np.asarray(draws["x0"]).reshape(8, 3, 2)
    other = jnp.asarray(np.where(given[..., None], noise + 5, noise).reshape(8, 6))
    first = gradient(agent, state, batch, draws)
    assert same(first, gradient(agent, state, batch, {**draws, "x0": other}))
    moved = batch._replace(actions=jnp.where(given[..., None], batch.actions + 0.2, batch.actions))
    assert not same(first, gradient(agent, state, moved, draws))
    # The loss itself, by hand: the target of a prefix's action is never compared with.
    flat, t = batch.actions.reshape(8, 6), draws["t"][:, None]
    mask = jnp.repeat(jnp.asarray(given, jnp.float32), 2, axis=1)
    x = mask * flat + (1 - mask) * ((1 - t) * draws["x0"] + t * flat)
    inputs = jnp.concatenate([batch.observations["state"], jnp.asarray(given, jnp.float32)], axis=1)
    velocity = agent.flow.field.apply({"params": state.policy["flow"]}, inputs, x, draws["t"])
    velocity = velocity + linear_share(t, 0.2) * x
    error = ((velocity - (flat - draws["x0"])) ** 2 * (1 - mask)).sum() / (1 - mask).sum()
    assert float(flow_loss(agent, state.policy, batch, draws)) == pytest.approx(float(error), rel=1e-5)


def test_outputs_for_committed_actions_are_not_trained():
    agent, state, batch = delayed("recorded")
    batch = batch._replace(delay=jnp.full(8, 2, jnp.int32))
    draws = agent.flow.draws(jax.random.key(1), batch)
    last = sorted(k for k in state.policy["flow"]["Mlp_0"] if k.startswith("Dense"))[-1]
    bias = gradient(agent, state, batch, draws)["flow"]["Mlp_0"][last]["bias"].reshape(3, 2)
    np.testing.assert_array_equal(bias[:2], np.zeros((2, 2)))
    assert (np.abs(bias[2]) > 0).all()


def test_where_the_delay_comes_from():
    recorded, _, batch = delayed("recorded")
    wanted = (np.arange(3)[None] < np.asarray(DELAYS)[:, None]).astype(np.float32)
    np.testing.assert_array_equal(recorded.flow.given(batch, {}), wanted)
    plain, _, _ = delayed("none")
    np.testing.assert_array_equal(plain.flow.given(batch, {}), np.zeros((8, 3)))
    sampled, _, _ = delayed("sampled")
    counts = np.zeros(4, int)
    for seed in range(100):
        draws = sampled.flow.draws(jax.random.key(seed), batch)
        counts += np.bincount(draws["delay"], minlength=4)
        np.testing.assert_array_equal(sampled.flow.given(batch, draws).sum(1), draws["delay"])
        before = plain.flow.draws(jax.random.key(seed), batch)
        assert same({k: draws[k] for k in before}, before)
    assert counts[3] == 0
    np.testing.assert_allclose(counts[:3] / counts.sum(), np.full(3, 1 / 3), atol=0.06)


def test_a_clean_prefix_is_seen_at_every_step_and_kept():
    seen = []

    def velocity(x, t):
        seen.append(np.asarray(x))
        return jnp.ones_like(x)

    prefix, mask = jnp.array([[0.7, 0.0]]), jnp.array([[1.0, 0.0]])
    out = integrate(velocity, jnp.full((3, 2), -0.5), 4, (prefix, mask), clean=True)
    np.testing.assert_allclose([s[:, 0] for s in seen], np.full((4, 3), 0.7), atol=1e-6)
    np.testing.assert_allclose(out, np.broadcast_to([0.7, 0.5], (3, 2)), atol=1e-6)


@pytest.mark.parametrize("variant", [pytest.param("acfql", marks=pytest.mark.slow), "bc"])
def test_updates_and_decisions_compile_once(variant):
    for kind in ("recorded", "sampled"):
        agent, state, _ = delayed(kind, variant)
        for seed in range(2):
            state, metrics = agent.update(state, {}, named(agent, on_device(agent.spec, seed)))
        assert all(np.isfinite(v) for v in metrics.values())
        assert agent.update._cache_size() == 1
        observation = {"state": make_batches(agent.spec).observations["state"][0, 0]}
        params = agent.policy_params(state)
        prefix = (np.full((3, 2), 0.4, np.float32), np.array([1, 0, 0], np.float32))
        chunk, _ = agent.sample(params, observation, jax.random.key(0), explore=True, committed=prefix)
        np.testing.assert_allclose(chunk[0], prefix[0][0])
        free, _ = agent.sample(params, observation, jax.random.key(0), explore=True)
        assert free.shape == (3, 2)
        assert agent._sample._cache_size() == 1


def test_another_networks_shape_tells_both_sides_of_a_run_apart():
    assert delayed("none")[0].network_shape() != delayed("sampled")[0].network_shape()
    assert delayed("recorded")[0].network_shape() == delayed("sampled")[0].network_shape()


def two_modes(train_delay: str) -> tuple[float, float]:
    """A flow of chunks that stay at +0.6 or at -0.6 for all 4 steps, sampled with two of them given.

    The share of tails on the side of their prefix, and the mean jump from the prefix to the first free action.
    """
    flow = FlowConfig(hidden=(32, 32), steps=5, train_delay=train_delay)
    agent = build(config_of("bc", flow=flow, lr=3e-3), horizon=4, actions=1)
    state, rng = agent.init(jax.random.key(0)), np.random.default_rng(0)
    for seed in range(12):
        batch = make_batches(agent.spec, 50, 64, seed)
        side = rng.choice([-0.6, 0.6], (50, 64, 1, 1))
        actions = (side + rng.normal(0, 0.03, (50, 64, 4, 1))).astype(np.float32)
        here = {"state": np.zeros_like(batch.observations["state"])}  # nothing but the prefix tells the modes apart
        batch = batch._replace(observations=here, actions=actions, bc_weight=np.ones((50, 64, 4), np.float32))
        state, _ = agent.update_policy(state, {}, jax.device_put(batch))
    noise = jax.random.normal(jax.random.key(1), (200, 4))

    def sampled(*args):
        chunks = agent.net.sample(state.policy["flow"], Context(jnp.zeros(4)), *args)
        return np.asarray(agent.bounded(chunks))[..., 0]

    same_side, jump = [], []
    for side in (-0.6, 0.6):
        prefix = (jnp.full((4, 1), side), jnp.array([1.0, 1.0, 0.0, 0.0]))
        chunks = sampled(noise, prefix)
        same_side.append((np.sign(chunks[:, 2:]) == np.sign(side)).all(1).mean())
        jump.append(np.abs(chunks[:, 2] - side).mean())
    free = sampled(noise)
    assert 0.25 < (free > 0).mean() < 0.75  # without a prefix both modes are there
    return float(np.mean(same_side)), float(np.mean(jump))


@pytest.mark.slow
def test_a_flow_of_two_modes_keeps_the_one_its_prefix_is_in():
    trained, jump = two_modes("sampled")
    untrained, jump_untrained = two_modes("none")
    assert trained > 0.97
    assert jump < 0.12
    # The straight path alone decides too late: some tails leave their prefix's mode, and most start away from it.
    assert untrained < 0.93
    assert jump_untrained > 2 * jump
