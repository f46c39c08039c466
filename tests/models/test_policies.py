"""Euler integration and flow matching; TanhNormal against its own density, and at its edges."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models.distributions import TanhNormal
from serl_chunk.models.flow import VelocityField, integrate, interpolate, linear_share, linear_steps, time_features

FREE = (np.zeros((1, 4)), np.zeros((1, 4)))
NOISE = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def test_a_straight_path_arrives():
    steps = 5
    end = integrate(lambda x, t: jnp.full_like(x, 0.25), NOISE, steps, FREE)
    np.testing.assert_allclose(end, NOISE + 0.25, atol=1e-6)  # a path may leave [-1, 1]
    goal = np.array([[0.3, -0.9, 0.0, 1.0]], np.float32)
    end = integrate(lambda x, t: (goal - x) / (1 - t[..., None]), NOISE, steps)  # nothing committed is all free
    np.testing.assert_allclose(end, np.broadcast_to(goal, (6, 4)), atol=1e-5)


def test_committed_dimensions_are_kept_exactly_and_seen_on_their_path_at_every_time_once():
    prefix, mask = np.array([1.5, -0.2, 9.0, 9.0]), np.array([1.0, 1.0, 0.0, 0.0])
    seen: list = []
    velocity = lambda x, t: seen.append((np.unique(t), t.shape, x)) or jnp.ones_like(x)  # noqa: E731
    end = integrate(velocity, NOISE, 4, (prefix[None], mask[None]))
    np.testing.assert_array_equal(end[:, :2], np.broadcast_to(prefix[:2], (6, 2)).astype(np.float32))
    np.testing.assert_allclose(end[:, 2:], NOISE[:, 2:] + 1, atol=1e-6)
    assert [t.tolist() for t, _, _ in seen] == [[0.0], [0.25], [0.5], [0.75]]
    for (t,), shape, x in seen:
        assert shape == (6,)
        np.testing.assert_allclose(x[:, :2], (1 - t) * NOISE[:, :2] + t * prefix[:2], atol=1e-6)


def test_interpolated_points_lie_between_noise_and_chunk():
    chunk, noise = np.array([[1.0, -1.0], [0.5, 0.0]]), np.array([[0.0, 1.0], [-1.5, 2.0]])
    x, velocity = interpolate(noise, np.array([0.25, 0.5]), chunk)
    np.testing.assert_allclose(x, [[0.25, 0.5], [-0.5, 1.0]])
    np.testing.assert_allclose(velocity, [[1.0, -2.0], [2.0, -2.0]])


@pytest.mark.parametrize("time", ["cosine", "raw", "fourier"])
def test_a_velocity_field_reads_every_input_and_repeated_passes_are_the_same_function(time):
    field, rng = VelocityField((6, 5), 4, time=time, fourier_dim=6), np.random.default_rng(0)
    features, x, t = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 1, 2), (3, 7, 4), (3, 7)))
    every = np.broadcast_to(features, (3, 7, 2))
    shapes = jax.eval_shape(field.init, jax.random.key(0), every, x, t)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    out = field.apply(params, every, x, t)
    assert out.shape == (3, 7, 4)
    for changed in ((2 * every, x, t), (every, 2 * x, t), (every, x, t + 0.5)):
        assert not np.allclose(out, field.apply(params, *changed))
    np.testing.assert_allclose(field.apply(params, features, x, t, repeated=True), out, atol=1e-5)


def test_time_features_by_hand():
    t = np.array([[0.0, 0.5]], np.float32)
    np.testing.assert_array_equal(time_features(t, "raw", 64), [[[0.0], [0.5]]])
    np.testing.assert_allclose(time_features(t, "cosine", 64), [[[0, 1, 0], [0.5, 0, 1]]], atol=1e-6)
    angles = np.array([0.5, 0.5 / 100, 0.5 / 10_000])  # frequencies 1, 1/100, 1/10,000
    wanted = [[[1, 1, 1, 0, 0, 0], [*np.cos(angles), *np.sin(angles)]]]
    np.testing.assert_allclose(time_features(t, "fourier", 6), wanted, atol=1e-6)


def test_the_linear_share_is_the_regression_of_velocities_on_points():
    """k(t) = cov(a - z, x_t) / var(x_t), of samples without a chance correlation."""
    spread = 0.1
    angle = 2 * np.pi * np.arange(100) / 100
    z, a = np.cos(angle), spread * np.sin(angle)
    for t in (0.0, 0.25, 0.9, 1.0):
        covariance = np.cov(a - z, (1 - t) * z + t * a)
        slope = covariance[0, 1] / covariance[1, 1]
        assert float(linear_share(np.float32(t), spread)) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize(("steps", "spread"), [(5, 0.2), (1, 2.0)])
def test_steps_integrate_the_linear_part_exactly(steps, spread):
    """As Euler's method in many steps, for a net that is constant within each one."""
    nets, fine, x = np.linspace(-1.0, 2.0, steps), 4_000, 0.7
    net = lambda x, t: jnp.full(x.shape, jnp.asarray(nets)[jnp.round(t[0] * steps).astype(int)])  # noqa: E731
    for i in range(steps * fine):
        t = (i + 0.5) / (steps * fine)
        k = (t * spread**2 - (1 - t)) / ((1 - t) ** 2 + t**2 * spread**2)
        x += (nets[i // fine] + k * x) / (steps * fine)
    got = integrate(net, jnp.full((1, 1), 0.7), steps, spread=spread)
    assert float(got[0, 0]) == pytest.approx(x, rel=2e-3)
    scales, _ = linear_steps(steps, spread)
    assert math.prod(scales) == pytest.approx(spread)  # noise of deviation 1 ends with the chunks' deviation


def test_the_density_integrates_to_one_and_has_the_sampled_mean():
    dist = TanhNormal(jnp.float32(-1.2), jnp.float32(-0.3))
    # Points uniform before the squashing, so that the steep ends are resolved: a = tanh(u), da = (1 - a^2) du.
    u = np.linspace(-6, 6, 20_001)
    a, inside = np.tanh(u), np.abs(u) < 5  # beyond, float32 cannot tell the values apart
    weight = np.exp(np.asarray(dist.log_prob(jnp.asarray(a, jnp.float32)), np.float64)) * (1 - a**2) * inside
    assert np.trapezoid(weight, u) == pytest.approx(1, abs=2e-3)
    samples, _ = dist.sample_and_log_prob(jax.random.normal(jax.random.key(0), (40_000,)))
    assert float(samples.mean()) == pytest.approx(np.trapezoid(weight * a, u), abs=0.02)


def test_the_density_is_the_slope_of_the_distribution_function():
    values = np.array([-0.8, -0.1, 0.4, 0.9])
    cdf = lambda x: 0.5 * (1 + math.erf((math.atanh(x) - 0.3) / (math.exp(-0.5) * math.sqrt(2))))  # noqa: E731
    slope = [(cdf(v + 1e-5) - cdf(v - 1e-5)) / 2e-5 for v in values]
    density = np.exp(TanhNormal(jnp.float32(0.3), jnp.float32(-0.5)).log_prob(values.astype(np.float32)))
    np.testing.assert_allclose(density, slope, rtol=1e-3)


def test_a_sample_comes_with_its_own_log_probability():
    mean, log_std = np.array([[0.0, 0.5, -1.0]], np.float32), np.array([[0.0, -1.0, -2.0]], np.float32)
    dist = TanhNormal(mean, log_std)
    np.testing.assert_allclose(dist.mode(), np.tanh(mean), rtol=1e-6)
    for noise in (NOISE[:1, :3], np.zeros((1, 3), np.float32)):  # without noise it is the mode
        sample, log_prob = dist.sample_and_log_prob(noise)
        np.testing.assert_allclose(log_prob, dist.log_prob(sample), atol=1e-3)
    np.testing.assert_array_equal(sample, dist.mode())


@pytest.mark.parametrize("edge", [1e-6, 0.05])
def test_values_at_the_edge_count_as_those_just_inside(edge):
    dist = TanhNormal(jnp.float32(0.5), jnp.float32(0.0))
    at, inside, further = (float(dist.log_prob(jnp.float32(x), edge)) for x in (1.0, 1 - edge, 1 - 2 * edge))
    assert at == inside != further


def test_edges_and_extreme_parameters_are_finite_with_their_gradients():
    noise, value = np.array([0.3, -1.0, 2.0, 0.1], np.float32), np.array([1.0, -1.0, 1.0, 0.0], np.float32)

    def total(mean: jax.Array, log_std: jax.Array) -> jax.Array:
        dist = TanhNormal(mean, log_std)
        sample, own = dist.sample_and_log_prob(noise)
        return jnp.sum(dist.log_prob(value)) + jnp.sum(own) + jnp.sum(sample)

    mean, log_std = np.array([0.0, 30.0, -30.0, 0.0], np.float32), np.array([0.0, 2.0, 2.0, -5.0], np.float32)
    result, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(mean, log_std)
    assert np.isfinite(result)
    assert np.isfinite(grads).all()
    assert float(TanhNormal(mean[:1], log_std[:1]).log_prob(value[:1])[0]) < 0  # an edge is improbable
