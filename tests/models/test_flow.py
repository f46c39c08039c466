"""Euler integration, committed dimensions, and the training points of flow matching."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models.flow import VelocityField, integrate, interpolate, linear_share, linear_steps, time_features

FREE = (jnp.zeros(4), jnp.zeros(4))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_constant_velocity_is_integrated_exactly(steps):
    noise = jnp.array([[0.5, -0.5, 0.0, 2.0], [0.1, 0.2, 0.3, -3.0]])
    end = integrate(lambda x, t: jnp.full_like(x, 0.25), noise, steps, FREE)
    np.testing.assert_allclose(end, noise + 0.25, atol=1e-6)  # a path may leave [-1, 1]


def test_the_velocity_sees_every_time_once_and_in_order():
    times: list[float] = []

    def velocity(x: jax.Array, t: jax.Array) -> jax.Array:
        assert t.shape == x.shape[:-1]
        times.append(float(t[0]))
        return jnp.zeros_like(x)

    integrate(velocity, jnp.zeros((3, 4)), 4, FREE)
    assert times == [0.0, 0.25, 0.5, 0.75]


def test_the_straight_path_to_a_point_arrives_there():
    goal = jnp.array([0.3, -0.9, 0.0, 1.0])
    noise = jax.random.normal(jax.random.key(0), (6, 4))
    end = integrate(lambda x, t: (goal - x) / (1 - t[..., None]), noise, 5, FREE)
    np.testing.assert_allclose(end, np.broadcast_to(goal, (6, 4)), atol=1e-5)


def test_committed_dimensions_are_kept_exactly_and_seen_on_their_path():
    prefix, mask = jnp.array([1.5, -0.2, 9.0, 9.0]), jnp.array([1.0, 1.0, 0.0, 0.0])
    noise = jax.random.normal(jax.random.key(1), (3, 4))
    seen = []

    def velocity(x: jax.Array, t: jax.Array) -> jax.Array:
        seen.append((float(t[0]), x))
        return jnp.ones_like(x)

    end = integrate(velocity, noise, 2, (prefix, mask))
    np.testing.assert_array_equal(end[:, :2], np.broadcast_to(prefix[:2], (3, 2)))
    np.testing.assert_allclose(end[:, 2:], noise[:, 2:] + 1, atol=1e-6)
    for t, x in seen:
        np.testing.assert_allclose(x[:, :2], (1 - t) * noise[:, :2] + t * prefix[:2], atol=1e-6)


def test_nothing_committed_is_all_free():
    noise = jax.random.normal(jax.random.key(0), (6, 4))
    velocity = lambda x, t: jnp.sin(3 * x) + t[..., None]  # noqa: E731
    np.testing.assert_array_equal(integrate(velocity, noise, 3), integrate(velocity, noise, 3, FREE))


def test_interpolated_points_lie_between_noise_and_chunk():
    chunk = jnp.array([[1.0, -1.0], [0.5, 0.0]])
    noise = jnp.array([[0.0, 1.0], [-1.5, 2.0]])
    x, velocity = interpolate(noise, jnp.array([0.25, 0.5]), chunk)
    np.testing.assert_allclose(x, [[0.25, 0.5], [-0.5, 1.0]])
    np.testing.assert_allclose(velocity, [[1.0, -2.0], [2.0, -2.0]])


@pytest.mark.parametrize("time", ["cosine", "raw", "fourier"])
def test_the_velocity_field_has_one_output_per_dimension_and_reads_every_input(time):
    field = VelocityField((8,), 4, time=time, fourier_dim=6)
    features, x, t = jnp.ones((2, 3)), jnp.ones((2, 4)), jnp.zeros(2)
    params = field.init(jax.random.key(0), features, x, t)
    out = field.apply(params, features, x, t)
    assert out.shape == (2, 4)
    for changed in ((2 * features, x, t), (features, 2 * x, t), (features, x, t + 0.5)):
        assert not np.allclose(out, field.apply(params, *changed))


def test_time_features_by_hand():
    t = jnp.array([[0.0, 0.5]])
    np.testing.assert_array_equal(time_features(t, "raw", 64), [[[0.0], [0.5]]])
    np.testing.assert_allclose(time_features(t, "cosine", 64), [[[0, 1, 0], [0.5, 0, 1]]], atol=1e-6)
    angles = np.array([0.5, 0.5 / 100, 0.5 / 10_000])  # frequencies 1, 1/100, 1/10,000
    wanted = [[[1, 1, 1, 0, 0, 0], [*np.cos(angles), *np.sin(angles)]]]
    np.testing.assert_allclose(time_features(t, "fourier", 6), wanted, atol=1e-6)


@pytest.mark.parametrize("time", ["cosine", "raw", "fourier"])
def test_repeated_passes_are_the_same_function(time):
    field = VelocityField((6, 5), 4, time=time)
    features, x = jax.random.normal(jax.random.key(0), (3, 1, 2)), jax.random.normal(jax.random.key(1), (3, 7, 4))
    every, t = jnp.broadcast_to(features, (3, 7, 2)), jnp.full((3, 7), 0.3)
    params = field.init(jax.random.key(2), every, x, t)
    np.testing.assert_allclose(
        field.apply(params, features, x, t, repeated=True), field.apply(params, every, x, t), atol=1e-6
    )


@pytest.mark.parametrize("spread", [0.1, 0.2, 1.0, 2.0])
@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_the_linear_share_is_the_regression_of_velocities_on_points(t, spread):
    """k(t) = cov(a - z, x_t) / var(x_t), of samples without a chance correlation."""
    z, a = np.cos(2 * np.pi * np.arange(100) / 100), spread * np.sin(2 * np.pi * np.arange(100) / 100)
    covariance = np.cov(a - z, (1 - t) * z + t * a)
    assert float(linear_share(jnp.float32(t), spread)) == pytest.approx(covariance[0, 1] / covariance[1, 1], rel=1e-5)


@pytest.mark.parametrize("spread", [0.05, 0.2, 2.0])
@pytest.mark.parametrize("steps", [1, 5])
def test_steps_integrate_the_linear_part_exactly(steps, spread):
    """As Euler's method in many steps, for a net that is constant within each one."""
    nets, fine = np.linspace(-1.0, 2.0, steps), 20_000

    def net(x, t):
        return jnp.full(x.shape, jnp.asarray(nets)[jnp.round(t[0] * steps).astype(int)])

    x = 0.7
    for i in range(steps * fine):
        t = (i + 0.5) / (steps * fine)
        k = (t * spread**2 - (1 - t)) / ((1 - t) ** 2 + t**2 * spread**2)
        x += (nets[i // fine] + k * x) / (steps * fine)
    got = integrate(net, jnp.full((1, 1), 0.7), steps, spread=spread)
    assert float(got[0, 0]) == pytest.approx(x, rel=2e-3)
    scales, _ = linear_steps(steps, spread)
    assert math.prod(scales) == pytest.approx(spread)  # noise of deviation 1 ends with the chunks' deviation
