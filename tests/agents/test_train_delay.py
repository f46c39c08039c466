"""Flows that are trained for decisions with committed actions (training-time RTC)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import fresh, marked_numbers, one_batch, output_bias, policy_gradient, same
from plain_networks import mlp

from serl_chunk.models.flow import integrate, linear_share

DELAYS = np.array([0, 1, 2, 0, 1, 2, 3, 0], np.int32)
GIVEN = (np.arange(3)[None] < DELAYS[:, None]).astype(np.float32)


def delayed(train_delay: str):
    agent, state = fresh("acfql", train_delay=train_delay)
    return agent, state, one_batch(agent, delay=DELAYS, bc_weight=np.ones((8, 3), np.float32))


def test_a_committed_action_is_seen_as_it_is_and_is_no_target():
    """Noise of the prefix enters the loss nowhere; its actions enter as inputs; free actions enter as targets."""
    agent, state, batch = delayed("recorded")
    draws = jax.tree.map(np.asarray, agent.policy_draws(jax.random.key(1), batch))
    mask, flat, t = np.repeat(GIVEN, 2, axis=1), batch.actions.reshape(8, 6), draws["t"][:, None]
    step = lambda b, d: policy_gradient(agent, state, b, d)  # noqa: E731
    grads, metrics = step(batch, draws)
    assert same(grads, step(batch, {**draws, "x0": draws["x0"] + 5 * mask})[0])
    moved = (flat + np.float32(0.2) * mask).reshape(8, 3, 2)
    assert not same(grads, step(batch._replace(actions=moved), draws)[0])
    # The loss itself, by hand: the target of a prefix's action is never compared with.
    x = mask * flat + (1 - mask) * ((1 - t) * draws["x0"] + t * flat)
    time = np.concatenate([t, np.cos(np.pi * t), np.sin(np.pi * t)], -1)
    velocity = mlp(state.policy["flow"]["Mlp_0"], batch.observations["state"], GIVEN, x, time)
    velocity = velocity + np.asarray(linear_share(t, 0.2)) * x
    error = ((velocity - (flat - draws["x0"])) ** 2 * (1 - mask)).sum() / (1 - mask).sum()
    assert float(metrics["value"]) == pytest.approx(error, rel=1e-4)


def test_outputs_for_committed_actions_are_not_trained():
    agent, state, batch = delayed("recorded")
    marked = batch._replace(delay=np.full(8, 2, np.int32), bc_dims=marked_numbers(agent.spec, 0))
    bias = output_bias(policy_gradient(agent, state, marked)[0], agent)
    assert (bias != 0).tolist() == [[False, False], [False, False], [True, False]]


def test_where_the_delay_comes_from():
    recorded, _, batch = delayed("recorded")
    plain, sampled = delayed("none")[0], delayed("sampled")[0]
    np.testing.assert_array_equal(recorded.net.given(batch, {}), GIVEN)
    np.testing.assert_array_equal(plain.net.given(batch, {}), np.zeros((8, 3)))
    keys = jax.random.split(jax.random.key(0), 100)
    draws, before = (jax.jit(jax.vmap(lambda k, a=a: a.net.draws(k, 8)))(keys) for a in (sampled, plain))
    assert same({k: draws[k] for k in before}, before)
    counts = np.bincount(np.ravel(draws["delay"]), minlength=4)
    assert counts[3] == 0  # of 3 executed ones
    np.testing.assert_allclose(counts[:3] / counts.sum(), np.full(3, 1 / 3), atol=0.06)
    one = jax.tree.map(lambda x: x[0], draws)
    np.testing.assert_array_equal(sampled.net.given(batch, one).sum(1), one["delay"])
    # Another network's shape tells both sides of a run apart.
    assert plain.network_shape() != sampled.network_shape() == recorded.network_shape()


def test_a_clean_prefix_is_seen_at_every_step_and_kept():
    seen = []
    prefix, mask = np.array([[0.7, 0.0]]), np.array([[1.0, 0.0]])
    velocity = lambda x, t: seen.append(np.asarray(x)) or jnp.ones_like(x)  # noqa: E731
    out = integrate(velocity, jnp.full((3, 2), -0.5), 4, (prefix, mask), clean=True)
    np.testing.assert_allclose([s[:, 0] for s in seen], np.full((4, 3), 0.7), atol=1e-6)
    np.testing.assert_allclose(out, np.broadcast_to([0.7, 0.5], (3, 2)), atol=1e-6)
