"""TanhNormal against numerical integration, its own density, and its edges."""

from __future__ import annotations

from math import atanh, erf, exp, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models.distributions import TanhNormal


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.2, -0.3)])
def test_the_density_integrates_to_one_and_has_the_sampled_mean(mean, log_std):
    dist = TanhNormal(jnp.float32(mean), jnp.float32(log_std))
    # Points uniform before the squashing, so that the steep ends are resolved: a = tanh(u), da = (1 - a^2) du.
    u = np.linspace(-6, 6, 20_001)
    a = np.tanh(u)
    weight = np.exp(np.asarray(dist.log_prob(jnp.asarray(a, jnp.float32)), np.float64)) * (1 - a**2)
    inside = np.abs(u) < 5  # beyond, float32 cannot tell the values apart
    assert np.trapezoid(np.where(inside, weight, 0), u) == pytest.approx(1, abs=2e-3)
    many = TanhNormal(jnp.full(40_000, mean), jnp.full(40_000, log_std))
    samples, _ = many.sample_and_log_prob(jax.random.normal(jax.random.key(0), (40_000,)))
    assert float(samples.mean()) == pytest.approx(np.trapezoid(np.where(inside, weight, 0) * a, u), abs=0.02)


def test_the_density_is_the_slope_of_the_distribution_function():
    dist = TanhNormal(jnp.float32(0.3), jnp.float32(-0.5))
    for value in (-0.8, -0.1, 0.4, 0.9):

        def cdf(x: float) -> float:
            return 0.5 * (1 + erf((atanh(x) - 0.3) / (exp(-0.5) * sqrt(2))))

        slope = (cdf(value + 1e-5) - cdf(value - 1e-5)) / 2e-5
        assert float(jnp.exp(dist.log_prob(jnp.float32(value)))) == pytest.approx(slope, rel=1e-3)


def test_a_sample_comes_with_its_own_log_probability():
    mean, log_std = jnp.array([[0.0, 0.5, -1.0]]), jnp.array([[0.0, -1.0, -2.0]])
    dist = TanhNormal(mean, log_std)
    sample, log_prob = dist.sample_and_log_prob(jax.random.normal(jax.random.key(3), (1, 3)))
    assert sample.shape == log_prob.shape == (1, 3)
    np.testing.assert_allclose(log_prob, dist.log_prob(sample), atol=1e-3)
    np.testing.assert_allclose(dist.mode(), np.tanh(mean), rtol=1e-6)
    mode, its_log_prob = dist.sample_and_log_prob(jnp.zeros((1, 3)))  # no noise
    np.testing.assert_array_equal(mode, dist.mode())
    np.testing.assert_allclose(its_log_prob, dist.log_prob(dist.mode()), atol=1e-3)


@pytest.mark.parametrize("edge", [1e-6, 1e-5, 0.05])
def test_values_at_the_edge_count_as_those_just_inside(edge):
    dist = TanhNormal(jnp.float32(0.5), jnp.float32(0.0))
    at, inside = (float(dist.log_prob(jnp.float32(x), edge)) for x in (1.0, 1 - edge))
    assert at == inside
    assert float(dist.log_prob(jnp.float32(1 - 2 * edge), edge)) != at


def test_edges_and_extreme_parameters_are_finite_with_their_gradients():
    def total(mean: jax.Array, log_std: jax.Array, value: jax.Array) -> jax.Array:
        dist = TanhNormal(mean, log_std)
        sample, own = dist.sample_and_log_prob(jax.random.normal(jax.random.key(0), mean.shape))
        return jnp.sum(dist.log_prob(value)) + jnp.sum(own) + jnp.sum(sample)

    mean = jnp.array([0.0, 30.0, -30.0, 0.0])
    log_std = jnp.array([0.0, 2.0, 2.0, -5.0])
    value = jnp.array([1.0, -1.0, 1.0, 0.0])
    result, grads = jax.value_and_grad(total, argnums=(0, 1))(mean, log_std, value)
    assert np.isfinite(result)
    assert all(np.isfinite(g).all() for g in grads)
    assert float(TanhNormal(mean[:1], log_std[:1]).log_prob(jnp.array([1.0]))[0]) < 0  # an edge is improbable
