"""Values of a critic head's raw outputs, one number a row or `bins`, and their losses: squared, bounded, HL-Gauss."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.config.critics import INITIAL_LOGIT, SIGMA_BINS, SIGMAS, CriticConfig
from serl_chunk.models.sums import Sum, mean_of


def bin_width(config: CriticConfig) -> float:
    """Width of a bin, of equal ones from SIGMAS deviations below `value_low` to as many above `value_high`.

    So the Gaussian around a target in the range is not cut off, and its mean stays the target.
    """
    return (config.value_high - config.value_low) / (config.bins - 2 * SIGMAS * SIGMA_BINS)


def bin_edges(config: CriticConfig) -> np.ndarray:
    """float32[bins + 1]."""
    width = bin_width(config)
    first = config.value_low - SIGMAS * SIGMA_BINS * width
    return (first + width * np.arange(config.bins + 1)).astype(np.float32)


def bin_centres(config: CriticConfig) -> np.ndarray:
    """float32[bins]."""
    edges = bin_edges(config).astype(np.float64)
    return ((edges[1:] + edges[:-1]) / 2).astype(np.float32)


def initial_bias(config: CriticConfig) -> float | tuple[float, ...]:
    """The last bias with which a fresh critic's value is about low + (high - low) * sigmoid(INITIAL_LOGIT).

    Over bins it is the distribution of greatest entropy with that mean, whose logits are a straight line.
    """
    if config.loss == "squared":
        return 0.0
    if config.loss == "bounded":
        return INITIAL_LOGIT
    place = np.linspace(-1.0, 1.0, config.bins)  # of the centres
    share = 1 / (1 + math.exp(-INITIAL_LOGIT))
    mean = config.value_low + share * (config.value_high - config.value_low)
    wanted = float(np.interp(mean, bin_centres(config), place))
    low, high = -50.0, 50.0
    for _ in range(60):  # the mean grows with the slope
        slope = (low + high) / 2
        weights = np.exp(slope * place - abs(slope))
        low, high = (slope, high) if weights @ place / weights.sum() < wanted else (low, slope)
    return tuple((slope * place).tolist())


def critic_values(outputs: jax.Array, config: CriticConfig) -> jax.Array:
    """Values float32[...] from raw outputs float32[...], for hl_gauss float32[..., bins].

    squared: the outputs. bounded: low + (high - low) * sigmoid(output). hl_gauss: the bins' mean under
    softmax(outputs) (Farebrother et al. 2024).
    """
    if config.loss == "squared":
        return outputs
    if config.loss == "bounded":
        return config.value_low + (config.value_high - config.value_low) * jax.nn.sigmoid(outputs)
    # Not a product of matrices: accelerators round its factors.
    centres = jnp.broadcast_to(jnp.asarray(bin_centres(config)), outputs.shape)
    return jnp.sum(jax.nn.softmax(outputs, axis=-1) * centres, axis=-1)


def target_bins(target: jax.Array, config: CriticConfig) -> jax.Array:
    """The share of each bin float32[..., bins] in a Gaussian around targets float32[...], clipped to the range.

    p_i = Phi((e_{i+1} - y) / sigma) - Phi((e_i - y) / sigma), divided by the sum (HL-Gauss: Imani and
    White 2018, Farebrother et al. 2024). With sigma >= half a bin the bins' mean is y to about a hundredth of a bin.
    """
    y = jnp.clip(target, config.value_low, config.value_high)[..., None]
    edges = jnp.asarray(bin_edges(config)).reshape((1,) * (y.ndim - 1) + (-1,))
    below = jax.scipy.special.ndtr((edges - y) / (SIGMA_BINS * bin_width(config)))
    mass = below[..., 1:] - below[..., :-1]
    return mass / (below[..., -1:] - below[..., :1])


def regression_loss(
    outputs: jax.Array, target: jax.Array, config: CriticConfig, weight: jax.Array | float = 1.0
) -> Sum:
    """Loss of raw outputs float32[..., B], for hl_gauss [..., B, bins], against targets float32[B].

    Each row counts times its `weight` float32[B]; the divisor counts every row, whatever its weight.
    squared: (Q - y)^2. bounded: cross-entropy of sigmoid(output) against the target's place in the range, in [0, 1],
    whose gradient does not vanish at a confident mistake. hl_gauss: cross-entropy of softmax(outputs) against
    `target_bins`. Both cross-entropies clip targets to the range.
    """
    if config.loss == "hl_gauss":
        wanted = jnp.broadcast_to(target_bins(target, config), outputs.shape)
        error = -jnp.sum(wanted * jax.nn.log_softmax(outputs, axis=-1), axis=-1)
    elif config.loss == "squared":
        error = (outputs - jnp.broadcast_to(target, outputs.shape)) ** 2
    else:
        low, high = config.value_low, config.value_high
        place = jnp.clip((jnp.broadcast_to(target, outputs.shape) - low) / (high - low), 0, 1)
        error = jax.nn.softplus(outputs) - place * outputs
    return mean_of(jnp.broadcast_to(weight, error.shape) * error)
