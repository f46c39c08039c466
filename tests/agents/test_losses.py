"""Golden numbers of the shared losses, worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import UNIT

from serl_chunk.agents.critic import ChunkCritic
from serl_chunk.agents.losses import aggregate_heads, bootstrap_target, chunk_return, imitated_numbers, imitation_sum
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.models.value_heads import critic_values, regression_loss
from serl_chunk.types import ChunkBatch

SQUARED, BOUNDED = None, (0.0, 1.0)


def windows(rewards: list[list[float]], mask: list[float], discount_n: list[float]) -> ChunkBatch:
    """Windows of which only the return matters."""
    r, n = np.array(rewards, np.float32), np.zeros(len(rewards), np.float32)
    return ChunkBatch({}, n, r, r, np.array(mask, np.float32), np.array(discount_n, np.float32), {}, r, r, n, n + 1)


def imitation_mean(*args) -> jax.Array:
    return imitation_sum(*args).mean()


def regressed(*args) -> jax.Array:
    return regression_loss(*args).mean()


def test_the_target_bootstraps_after_n_steps_and_not_after_a_termination():
    assert chunk_return(np.array([[1.0, 2.0, 4.0], [0.0, 0.0, 1.0]]), 0.5).tolist() == [3.0, 0.25]
    rewards = [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    batch = windows(rewards, mask=[1, 0, 1, 0], discount_n=[0.125, 0.5, 0.25, 0.25])  # n = 3, 1, 2, 2 of H = 3
    target = lambda value: bootstrap_target(batch, 0.5, value)  # noqa: E731
    value = np.array([8.0, 100.0, 4.0, 100.0], np.float32)
    #                                  0.25 + 8/8        1 + 0       0.5 + 4/4       0
    assert target(value).tolist() == [1.25, 1.0, 1.5, 0.0]
    assert not jax.grad(lambda v: jnp.sum(target(v)))(value).any()


def test_imitation_is_a_mean_over_imitated_steps_and_numbers_only():
    error = np.array([[[1.0, 3.0], [100.0, 100.0]], [[5.0, 7.0], [2.0, 2.0]]])
    bc, dims = np.array([[1.0, 0.0], [1.0, 0.5]]), np.array([[[1.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [0.0, 1.0]]])
    assert float(imitation_mean(error, np.array([[1.0, 0.0], [1.0, 0.0]]))) == 4.0  # (1 + 3 + 5 + 7) / 4
    weight = imitated_numbers(bc, dims)
    assert weight.tolist() == [[[1, 0], [0, 0]], [[1, 1], [0, 0.5]]]
    assert float(imitation_mean(error, weight)) == (1 + 5 + 7 + 0.5 * 2) / 3.5
    for nothing in (0 * bc, imitated_numbers(bc, 0 * dims)):
        value, gradient = jax.value_and_grad(imitation_mean)(error, nothing)
        assert (float(value), gradient.any()) == (0.0, False)
    assert imitated_numbers(bc, None) is bc
    whole = imitation_mean(error, imitated_numbers(bc, np.ones_like(dims)))
    assert float(whole) == float(imitation_mean(error, bc))  # all numbers are what no marks are


def test_regression_losses_by_hand():
    outputs, target = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([0.0, 2.0])  # two heads, two windows
    assert float(regressed(outputs, target, SQUARED)) == (1 + 0 + 9 + 4) / 4
    assert float(regressed(outputs, target, SQUARED, np.array([1.0, 0.0]))) == (1 + 9) / 4
    assert float(regressed(np.zeros(1), np.array([0.3]), BOUNDED)) == pytest.approx(np.log(2))
    # beyond [0, 1] a target counts as its nearest possible return
    beyond, inside = (regressed(np.array([0.7]), np.array([y]), BOUNDED) for y in (1.5, 1.0))
    assert float(beyond) == float(inside)
    assert critic_values(np.array([3.0]), SQUARED).tolist() == [3.0]


@pytest.mark.parametrize(("bounds", "expectile"), [(SQUARED, 0.8), (UNIT, 0.5)])
def test_the_expectile_loss_rests_at_the_expectile(bounds, expectile):
    """m solves tau sum (x - m)+ = (1 - tau) sum (m - x)+; of one target it is that target."""
    config = AcfqlConfig(critic=CriticConfig(hidden=(8,)))
    critic = ChunkCritic(config, AgentSpec(3, 2, 2, 2, (), 0.9, bounds), with_value=False)
    samples = np.array([0.0, 0.2, 0.3, 0.9, 1.0], np.float32)
    found = np.linspace(0.01, 0.99, 981, dtype=np.float32)
    outputs = np.log(found / (1 - found)) if bounds else found
    slope = jax.vmap(jax.grad(lambda x: critic.expectile_loss(jnp.tile(x, 5), samples, expectile, np.ones(5)).mean()))
    m = found[np.argmin(np.abs(slope(outputs)))]
    above, below = np.maximum(samples - m, 0).sum(), np.maximum(m - samples, 0).sum()
    assert expectile * above == pytest.approx((1 - expectile) * below, abs=4e-3)
    assert expectile != 0.5 or m == pytest.approx(0.48, abs=2e-3)  # the mean


def test_heads_are_aggregated_over_the_ensemble():
    values = np.array([[1.0, 5.0], [3.0, 1.0]])
    assert aggregate_heads(values, "mean").tolist() == [2.0, 3.0]
    assert aggregate_heads(values, "min").tolist() == [1.0, 1.0]
