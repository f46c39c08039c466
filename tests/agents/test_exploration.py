"""Smooth exploration noise: as large as independent noise at every step, and smoother over a chunk."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from agent_tools import build, config_of, make_batches

from serl_chunk.agents.policies import chunk_noise, knot_weights

HORIZON, ACTIONS, COUNT = 12, 2, 4000


def noise(knots: int, seed: int = 0) -> np.ndarray:
    flat = chunk_noise(jax.random.key(seed), COUNT, HORIZON, ACTIONS, knots)
    return np.asarray(flat).reshape(COUNT, HORIZON, ACTIONS)


@pytest.mark.parametrize("knots", [0, 1, 2, 3, 5, 12])
def test_every_step_has_unit_variance_and_no_mean(knots):
    drawn = noise(knots)
    np.testing.assert_allclose(drawn.var(0), np.ones((HORIZON, ACTIONS)), atol=0.12)
    np.testing.assert_allclose(drawn.mean(0), np.zeros((HORIZON, ACTIONS)), atol=0.08)
    if knots:
        np.testing.assert_allclose((knot_weights(HORIZON, knots) ** 2).sum(1), np.ones(HORIZON), atol=1e-6)


def test_fewer_knots_are_smoother():
    """Mean squares of first and second differences: 2 and 6 where steps are independent."""
    first = {k: float((np.diff(noise(k), axis=1) ** 2).mean()) for k in (0, 2, 3, 5, 12)}
    second = {k: float((np.diff(noise(k), 2, axis=1) ** 2).mean()) for k in (0, 3, 5)}
    assert first[0] == pytest.approx(2, abs=0.1)
    assert first[12] == pytest.approx(2, abs=0.1)  # as many knots as steps: independent
    assert first[2] < first[3] < first[5] < first[0]
    assert first[3] < 0.2
    assert second[3] < 0.05 < second[5] < 2 < second[0]


def test_one_knot_holds_one_value_over_the_chunk():
    drawn = noise(1)
    np.testing.assert_array_equal(drawn, np.broadcast_to(drawn[:, :1], drawn.shape))


def test_dimensions_and_chunks_are_independent():
    drawn = noise(3)
    assert abs(np.corrcoef(drawn[:, 4, 0], drawn[:, 4, 1])[0, 1]) < 0.06
    assert abs(np.corrcoef(drawn[:-1, 4, 0], drawn[1:, 4, 0])[0, 1]) < 0.06


def test_a_knot_is_met_and_between_two_the_curve_is_between_or_near_them():
    weights = knot_weights(9, 3)  # knots at steps 0, 4, 8
    np.testing.assert_allclose(weights[[0, 4, 8]], np.eye(3), atol=1e-6)
    assert weights[2, 0] > 0.5 < weights[2, 1]
    assert weights[2, 2] < 0  # a cubic bends with what comes after


def test_a_chunk_of_one_step():
    assert chunk_noise(jax.random.key(0), 3, 1, 2, 1).shape == (3, 2)
    np.testing.assert_allclose(knot_weights(1, 4), [[1, 0, 0, 0]])


@pytest.mark.parametrize("variant", ["acfql", "acfql-policy-distill", "acrlpd", "bc", "bc-gaussian"])
def test_agents_start_from_smooth_noise_only_when_they_explore(variant):
    rough, smooth = (build(config_of(variant, exploration_knots=k), horizon=8) for k in (0, 2))
    observation = {"state": make_batches(rough.spec).observations["state"][0, 0]}

    def roughness(agent, explore):
        drawn = [agent.acting_noise(jax.random.key(i), observation, explore=explore) for i in range(12)]
        return float((np.diff(np.stack(drawn).reshape(12, -1, 8, 2)[:, -1], axis=1) ** 2).mean())

    assert roughness(smooth, True) < 0.3 * roughness(rough, True)
    a, b = (np.asarray(x.acting_noise(jax.random.key(0), observation, explore=False)) for x in (rough, smooth))
    np.testing.assert_array_equal(a, b)
    params = smooth.policy_params(smooth.init(jax.random.key(0)))
    chunk, _ = smooth.sample(params, observation, jax.random.key(0), explore=True)
    assert chunk.shape == (8, 2)


@pytest.mark.slow
def test_smooth_noise_makes_the_gaussians_chunk_smooth():
    """tanh(mean + deviation * noise) with a mean of 0."""
    rough, smooth = (build(config_of("acrlpd", exploration_knots=k, candidates=1), horizon=8) for k in (0, 2))
    state = rough.init(jax.random.key(0))
    params = rough.policy_params(state.replace(policy=jax.tree.map(lambda x: 0 * x, state.policy)))
    observation = {"state": np.zeros(4, np.float32)}
    jumps = []
    for agent in (rough, smooth):
        chunks = [agent.sample(params, observation, jax.random.key(i), explore=True)[0] for i in range(12)]
        jumps.append(float((np.diff(np.stack(chunks), axis=1) ** 2).mean()))
    assert jumps[1] < 0.3 * jumps[0]
