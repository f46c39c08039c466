"""Golden numbers of the shared losses, worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.agents.losses.imitation import imitated_numbers, imitation_sum
from serl_chunk.agents.losses.values import aggregate_heads, bootstrap_target, chunk_return, expectile_weight
from serl_chunk.agents.optimiser import soft_update
from serl_chunk.models.value_heads import critic_values, regression_loss
from serl_chunk.types import ChunkBatch

SQUARED, BOUNDED = None, (0.0, 1.0)


def windows(rewards: list[list[float]], mask: list[float], discount_n: list[float]) -> ChunkBatch:
    """Windows of which only the return matters."""
    r = np.array(rewards, np.float32)
    nothing = np.zeros(len(r), np.float32)
    return ChunkBatch(
        {}, nothing, r, r, np.array(mask, np.float32), np.array(discount_n, np.float32), {}, r, r, nothing, nothing + 1,
    )  # fmt: skip


def imitation_mean(*args) -> jax.Array:
    return imitation_sum(*args).mean()


def regressed(*args) -> jax.Array:
    return regression_loss(*args).mean()


def test_the_return_is_discounted_per_step():
    assert chunk_return(jnp.array([[1.0, 2.0, 4.0], [0.0, 0.0, 1.0]]), 0.5).tolist() == [3.0, 0.25]


def test_the_target_bootstraps_after_n_steps_and_not_after_a_termination():
    batch = windows(
        rewards=[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]],
        mask=[1, 0, 1, 0],
        discount_n=[0.125, 0.5, 0.25, 0.25],  # n = 3, 1, 2, 2 of H = 3
    )
    target = bootstrap_target(batch, 0.5, jnp.array([8.0, 100.0, 4.0, 100.0]))
    #                         0.25 + 8/8        1 + 0       0.5 + 4/4       0
    assert target.tolist() == [1.25, 1.0, 1.5, 0.0]


def test_no_gradient_flows_into_the_target():
    batch = windows([[0.0, 1.0]], [1.0], [0.81])
    gradient = jax.grad(lambda v: jnp.sum(bootstrap_target(batch, 0.9, v)))(jnp.array([2.0]))
    assert gradient.tolist() == [0.0]


def test_imitation_is_a_mean_over_imitated_steps_only():
    error = jnp.array([[[1.0, 3.0], [100.0, 100.0]], [[5.0, 7.0], [2.0, 2.0]]])
    bc = jnp.array([[1.0, 0.0], [1.0, 0.0]])
    assert float(imitation_mean(error, bc)) == 4.0  # (1 + 3 + 5 + 7) / 4
    assert float(imitation_mean(error, jnp.array([[0.0, 0.0], [0.0, 1.0]]))) == 2.0
    value, gradient = jax.value_and_grad(imitation_mean)(error, jnp.zeros((2, 2)))
    assert float(value) == 0.0
    assert not np.asarray(gradient).any()


def test_imitation_of_some_numbers_is_a_mean_over_these_only():
    error = jnp.array([[[1.0, 3.0], [100.0, 100.0]], [[5.0, 7.0], [2.0, 2.0]]])
    bc, dims = jnp.array([[1.0, 0.0], [1.0, 0.5]]), jnp.array([[[1.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [0.0, 1.0]]])
    weight = imitated_numbers(bc, dims)
    assert weight.tolist() == [[[1, 0], [0, 0]], [[1, 1], [0, 0.5]]]
    assert float(imitation_mean(error, weight)) == (1 + 5 + 7 + 0.5 * 2) / 3.5
    value, gradient = jax.value_and_grad(imitation_mean)(error, imitated_numbers(bc, jnp.zeros_like(dims)))
    assert float(value) == 0.0
    assert not np.asarray(gradient).any()
    assert imitated_numbers(bc, None) is bc
    whole = imitation_mean(error, imitated_numbers(bc, jnp.ones_like(dims)))
    assert float(whole) == float(imitation_mean(error, bc))  # all numbers are what no marks are


@pytest.mark.parametrize("y", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_bounded_loss_is_least_where_the_value_is_the_target(y):
    logits = jnp.linspace(-12, 12, 2401)
    losses = jax.vmap(lambda x: regressed(x[None], jnp.array([y]), BOUNDED))(logits)
    assert float(critic_values(logits[jnp.argmin(losses)], BOUNDED)) == pytest.approx(y, abs=3e-3)
    gradient = jax.vmap(jax.grad(lambda x: regressed(x[None], jnp.array([y]), BOUNDED)))(logits)
    np.testing.assert_allclose(gradient, jax.nn.sigmoid(logits) - y, atol=1e-5)  # constant at a confident mistake


def test_regression_losses_by_hand():
    outputs = jnp.array([[1.0, 2.0], [3.0, 4.0]])  # two heads, two windows
    target = jnp.array([0.0, 2.0])
    assert float(regressed(outputs, target, SQUARED)) == (1 + 0 + 9 + 4) / 4
    assert float(regressed(outputs, target, SQUARED, jnp.array([1.0, 0.0]))) == (1 + 9) / 4
    assert float(regressed(jnp.zeros(1), jnp.array([0.3]), BOUNDED)) == pytest.approx(np.log(2))
    # beyond [0, 1] a target counts as its nearest possible return
    beyond, inside = (regressed(jnp.array([0.7]), jnp.array([y]), BOUNDED) for y in (1.5, 1.0))
    assert float(beyond) == float(inside)
    assert critic_values(jnp.array([3.0]), SQUARED).tolist() == [3.0]


@pytest.mark.parametrize("expectile", [0.5, 0.8, 0.95])
def test_the_expectile_regression_settles_at_the_expectile(expectile):
    samples = jnp.array([0.0, 0.2, 0.3, 0.9, 1.0])

    def step(_: int, value: jax.Array) -> jax.Array:
        def loss(v: jax.Array) -> jax.Array:
            outputs = jnp.broadcast_to(v, samples.shape)
            return regressed(outputs, samples, SQUARED, expectile_weight(samples, outputs, expectile))

        return value - 0.3 * jax.grad(loss)(value)

    value = float(jax.lax.fori_loop(0, 300, step, jnp.float32(0.0)))
    # the expectile m solves  tau * sum (x - m)+ = (1 - tau) * sum (m - x)+
    above = np.maximum(np.asarray(samples) - value, 0).sum()
    below = np.maximum(value - np.asarray(samples), 0).sum()
    assert expectile * above == pytest.approx((1 - expectile) * below, abs=1e-4)
    if expectile == 0.5:
        assert value == pytest.approx(0.48, abs=1e-4)  # the mean


def test_heads_are_aggregated_over_the_ensemble():
    values = jnp.array([[1.0, 5.0], [3.0, 1.0]])
    assert aggregate_heads(values, "mean").tolist() == [2.0, 3.0]
    assert aggregate_heads(values, "min").tolist() == [1.0, 1.0]


def test_the_target_follows_slowly():
    new = soft_update({"a": jnp.array([1.0])}, {"a": jnp.array([0.0])}, 0.25)
    assert new["a"].tolist() == [0.25]
