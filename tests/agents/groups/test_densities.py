"""What a decision is sampled from is what is scored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from group_agents import HEAD, ODE, group_agent, iterating

from serl_chunk.agents.state import Context

FEATURES = np.linspace(-1, 1, 4, dtype=np.float32)
N = 2000


def drawn_records(sampling=None, **changes):
    """The policy, its parameters, and N records of one observation."""
    agent = group_agent(sampling, **changes)
    net, policy = agent.net, iterating(agent).policy
    params, context = net.network(policy, {}), Context(jnp.asarray(FEATURES))

    @jax.jit
    def draw(keys):
        noise = jax.vmap(net.record_noise)(keys)
        return noise, jax.vmap(lambda one: net.record(params, context, one))(noise)

    noise, record = jax.tree.map(np.asarray, draw(jax.random.split(jax.random.key(0), N)))
    repeated = Context(jnp.broadcast_to(FEATURES, (N, 4)))
    scored = np.asarray(jax.jit(net.log_prob)(params, repeated, record))
    return net, params, repeated, noise, record, scored


def same_distribution(values: np.ndarray, expected: str, *args: np.ndarray) -> bool:
    return scipy.stats.kstest(values.ravel(), expected, args=args).pvalue > 1e-4


def test_a_random_step_is_the_normal_that_is_scored():
    net, params, context, noise, record, scored = drawn_records({"noise": 0.7, "sigma": 0.6})
    x, following, step, dt = record["x"], record["next"], record["step"], 1 / net.steps
    assert same_distribution(noise["x0"] / 0.7, "norm")
    np.testing.assert_allclose(np.bincount(step) / N, np.full(net.steps, dt), atol=0.05)
    np.testing.assert_array_equal(x[step == 0], noise["x0"][step == 0])
    np.testing.assert_array_equal(following[step == net.steps - 1], record["sample"][step == net.steps - 1])
    t = (step * dt)[:, None].astype(np.float32)
    forward = jax.jit(
        lambda p: (net.velocity(p, context, x, t[:, 0], jnp.zeros((N, 3))), net.advance(p, context, x, step)[0])
    )
    v, ahead = map(np.asarray, forward(params))
    straight = x + dt * v
    late = np.maximum(t, dt)
    g2 = 0.6**2 * (1 - late) / late
    data, start = x + (1 - t) * v, x - t * v
    mean = data * (t + dt) + start * (1 - t - dt - g2 * dt / (2 * (1 - t))) + ahead - straight
    deviation = np.broadcast_to(np.sqrt(g2 * dt), mean.shape)
    assert same_distribution((following - mean) / deviation, "norm")
    expected = scipy.stats.norm.logpdf(following, mean, deviation).sum(1, keepdims=True)
    np.testing.assert_allclose(scored, expected, rtol=1e-3, atol=1e-3)


def test_without_sigma_the_random_step_is_the_odes():
    net, params, context, noise, record, _ = drawn_records({"noise": 1.0, "sigma": 1e-6})
    ode = group_agent(ODE).net
    expected, found, of_ode = jax.jit(
        lambda p: (
            net.sample(p, context, noise["x0"][:, None])[:, 0],
            net.recorded_chunk(record),
            ode.recorded_chunk(ode.record(p, context, noise)),
        )
    )(params)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(of_ode, expected, atol=1e-5)
    assert set(jax.eval_shape(ode.record_noise, jax.random.key(0))) == {"x0"}


def test_an_end_is_sampled_around_the_ode_whose_parameters_its_density_moves():
    net, params, context, _, record, scored = drawn_records({"density": "end", "noise": 0.5, "sigma": 0.2})
    mean = np.asarray(net.sample(params, context, record["x0"][:, None])[:, 0])
    residual = np.asarray(net.recorded_chunk(record)) - mean
    assert same_distribution(residual / 0.2, "norm")
    np.testing.assert_allclose(scored, scipy.stats.norm.logpdf(residual, 0, 0.2).sum(2), rtol=1e-4, atol=1e-3)
    one = jax.tree.map(lambda x: x[:1], (context, record))
    grads = jax.device_get(jax.jit(jax.grad(lambda p: net.log_prob(p, *one).sum()))(params))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("sigma", [0.0, 0.3])
@pytest.mark.parametrize(("policy", "of"), [("gaussian", scipy.stats.norm), ("laplace", scipy.stats.laplace)])
def test_a_head_is_scored_as_it_is_sampled_by_action_or_as_a_whole(policy, of, sigma):
    net, params, context, _, record, scored = drawn_records(HEAD | {"sigma": sigma}, policy=policy)
    whole = group_agent(HEAD | {"sigma": sigma, "density": "chunk"}, policy=policy).net
    (location, log_scale), of_whole, chunk = jax.jit(
        lambda p: (net._density(p, context), whole.log_prob(p, context, record)[:, 0], net.recorded_chunk(record))
    )(params)
    scale = np.exp(np.asarray(log_scale))
    if sigma:
        np.testing.assert_allclose(scale, sigma, rtol=1e-6)
    assert same_distribution((record["sample"] - np.asarray(location)) / scale, of.name)
    each = of.logpdf(record["sample"], np.asarray(location), scale).reshape(N, 3, 2).sum(2)
    np.testing.assert_allclose(scored, each, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(of_whole, scored.sum(1), rtol=1e-4, atol=1e-3)
    wanted = np.tanh(record["sample"]) if policy == "gaussian" else record["sample"]
    np.testing.assert_allclose(chunk.reshape(N, 6), wanted, atol=1e-6)


def test_the_scale_of_a_laplace_head_is_fitted_around_its_mean_and_stays_in_iterations():
    net, params, context, _, record, _ = drawn_records(HEAD, policy="laplace")
    grads = jax.device_get(jax.jit(jax.grad(lambda p: net.log_prob(p, context, record).sum()))(params))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads["scale"]))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(grads["mean"]))
    # Imitation: the mean's gradient is that of the absolute error alone.
    params["scale"] = jax.tree.map(lambda x: 0.1 * np.asarray(x), params["scale"])  # within its range
    chunks, weight = net.recorded_chunk(record), np.ones((N, 3), np.float32)

    def losses(p):
        own = net.loss(p, context, chunks, weight, weight, {}).mean()
        return jnp.stack([own, jnp.mean(jnp.abs(record["sample"] - net._mean(p, context)))])

    both = jax.jit(jax.jacrev(losses))(params)
    own, error = (jax.tree.map(lambda x, i=i: x[i], jax.tree.map(np.asarray, both)) for i in range(2))
    for a, b in zip(jax.tree.leaves(own["mean"]), jax.tree.leaves(error["mean"]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(own["scale"]))
