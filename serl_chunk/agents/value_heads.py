"""Values of a critic head's raw outputs, and their losses: squared, bounded, HL-Gauss.

The raw outputs of a head are one number a row, or `bins` of them.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.config.critics import SIGMAS, CriticConfig

Kind = Literal["squared", "bounded", "hl_gauss"]


class Support(NamedTuple):
    """The range of returns, and the bins over it (for hl_gauss).

    `bins` bins of equal width reach from SIGMAS deviations below `low` to as many above `high`, so that the Gaussian
    around a target in the range is not cut off, and its mean stays the target.
    """

    low: float = 0.0
    high: float = 1.0
    bins: int = 101
    sigma_bins: float = 0.75  # deviation of a target's Gaussian in widths of a bin

    @property
    def width(self) -> float:
        return (self.high - self.low) / (self.bins - 2 * SIGMAS * self.sigma_bins)

    @property
    def edges(self) -> np.ndarray:
        first = self.low - SIGMAS * self.sigma_bins * self.width
        return (first + self.width * np.arange(self.bins + 1)).astype(np.float32)

    @property
    def centres(self) -> np.ndarray:
        edges = self.edges.astype(np.float64)
        return ((edges[1:] + edges[:-1]) / 2).astype(np.float32)


UNIT = Support()


def support_of(config: CriticConfig) -> Support:
    """The range and bins that `config` describes."""
    return Support(config.value_low, config.value_high, config.bins, config.sigma_bins)


def outputs_per_head(config: CriticConfig) -> int:
    """How many numbers a head gives for a row."""
    return config.bins if config.loss == "hl_gauss" else 1


def initial_bias(config: CriticConfig) -> float | tuple[float, ...]:
    """The last bias with which a fresh critic's value is about low + (high - low) * sigmoid(`initial_logit`).

    Of the distributions over bins with that mean hl_gauss starts at the one of greatest entropy, whose logits are a
    straight line.
    """
    if config.loss == "squared":
        return 0.0
    if config.loss == "bounded":
        return config.initial_logit
    place = np.linspace(-1.0, 1.0, config.bins)  # of the centres
    share = 1 / (1 + math.exp(-config.initial_logit))
    support = support_of(config)
    wanted = float(np.interp(support.low + share * (support.high - support.low), support.centres, place))
    low, high = -50.0, 50.0
    for _ in range(60):  # the mean grows with the slope
        slope = (low + high) / 2
        weights = np.exp(slope * place - abs(slope))
        low, high = (slope, high) if weights @ place / weights.sum() < wanted else (low, slope)
    return tuple((slope * place).tolist())


def critic_values(outputs: jax.Array, kind: Kind, support: Support = UNIT) -> jax.Array:
    """Values float32[...] from raw outputs float32[...], for hl_gauss float32[..., bins].

    squared: the outputs. bounded: low + (high - low) * sigmoid(output). hl_gauss: the bins' mean under
    softmax(outputs) (Farebrother et al. 2024).
    """
    if kind == "squared":
        return outputs
    if kind == "bounded":
        return support.low + (support.high - support.low) * jax.nn.sigmoid(outputs)
    # Not a product of matrices: accelerators round its factors.
    centres = jnp.broadcast_to(jnp.asarray(support.centres), outputs.shape)
    return jnp.sum(jax.nn.softmax(outputs, axis=-1) * centres, axis=-1)


def target_bins(target: jax.Array, support: Support) -> jax.Array:
    """The share of each bin float32[..., bins] in a Gaussian around targets float32[...], clipped to the range.

    p_i = Phi((e_{i+1} - y) / sigma) - Phi((e_i - y) / sigma), divided by the sum (HL-Gauss: Imani and
    White 2018, Farebrother et al. 2024). With sigma >= half a bin the bins' mean is y to about a hundredth of a bin.
    """
    y = jnp.clip(target, support.low, support.high)[..., None]
    edges = jnp.asarray(support.edges).reshape((1,) * (y.ndim - 1) + (-1,))
    below = jax.scipy.special.ndtr((edges - y) / (support.sigma_bins * support.width))
    mass = below[..., 1:] - below[..., :-1]
    return mass / (below[..., -1:] - below[..., :1])


def regression_loss(
    outputs: jax.Array, target: jax.Array, kind: Kind, weight: jax.Array | float = 1.0, support: Support = UNIT
) -> jax.Array:
    """Mean loss of raw outputs float32[..., B], for hl_gauss [..., B, bins], against targets float32[B]: float32[].

    Each row counts times its `weight` float32[B]; the divisor counts every row, whatever its weight.
    squared: (Q - y)^2. bounded: cross-entropy of sigmoid(output) against the target's place in the range, in [0, 1];
    its minimum is y as well, and its gradient does not vanish at a confident mistake. hl_gauss: cross-entropy of
    softmax(outputs) against `target_bins`. Both cross-entropies clip targets to the range.
    """
    if kind == "hl_gauss":
        wanted = jnp.broadcast_to(target_bins(target, support), outputs.shape)
        error = -jnp.sum(wanted * jax.nn.log_softmax(outputs, axis=-1), axis=-1)
    elif kind == "squared":
        error = (outputs - jnp.broadcast_to(target, outputs.shape)) ** 2
    else:
        place = jnp.clip((jnp.broadcast_to(target, outputs.shape) - support.low) / (support.high - support.low), 0, 1)
        error = jax.nn.softplus(outputs) - place * outputs
    return jnp.mean(jnp.broadcast_to(weight, error.shape) * error)
