"""Exploration noise of a chunk: independent from step to step, or smooth through a few knots.

Independent noise on 50 actions a second shakes a robot and averages out before it leads anywhere. Noise drawn at knots
and interpolated keeps its direction for a part of the chunk, as coloured noise does (Eberhard et al. 2023).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def knot_weights(horizon: int, knots: int) -> np.ndarray:
    """W float32[H, K]: standard normal values z at K >= 1 knots become standard normal noise W z at each of H steps.

    The knots lie evenly from the first step to the last, with a Catmull-Rom cubic between them and the outermost values
    repeated beyond the ends. Each row has length 1, which makes the variance 1 at every step.
    """
    if knots == 1:
        return np.ones((horizon, 1), np.float32)
    at = np.linspace(0.0, knots - 1.0, horizon)
    left = np.minimum(at.astype(int), knots - 2)
    t = at - left
    cubic = 0.5 * np.stack(
        [-(t**3) + 2 * t**2 - t, 3 * t**3 - 5 * t**2 + 2, -3 * t**3 + 4 * t**2 + t, t**3 - t**2], axis=-1
    )
    weights = sum(cubic[:, i, None] * np.eye(knots)[np.clip(left - 1 + i, 0, knots - 1)] for i in range(4))
    return (weights / np.linalg.norm(weights, axis=1, keepdims=True)).astype(np.float32)


def chunk_noise(key: jax.Array, count: int, horizon: int, action_dim: int, knots: int) -> jax.Array:
    """Standard normal noise of `count` chunks, float32[count, H*A]: independent, or smooth in time through `knots`."""
    if knots == 0:
        return jax.random.normal(key, (count, horizon * action_dim))
    at_knots = jax.random.normal(key, (count, knots, action_dim))
    noise = jnp.einsum("hk,nka->nha", jnp.asarray(knot_weights(horizon, knots)), at_knots)
    return noise.reshape(count, horizon * action_dim)
