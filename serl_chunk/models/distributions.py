"""The tanh-squashed Gaussian, in its numerically safe form."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

EDGE = 1e-6  # atanh of anything nearer to 1 is infinite in float32


def normal_log_prob(value: jax.Array, mean: jax.Array, deviation: jax.Array | float) -> jax.Array:
    """log N(value; mean, deviation^2) of each number."""
    return -0.5 * ((value - mean) / deviation) ** 2 - jnp.log(deviation) - 0.5 * jnp.log(2 * jnp.pi)


class TanhNormal(NamedTuple):
    """tanh(u), u ~ N(mean, exp(log_std)^2), per dimension; log-probabilities are not summed."""

    mean: jax.Array
    log_std: jax.Array

    def mode(self) -> jax.Array:
        return jnp.tanh(self.mean)

    def sample_and_log_prob(self, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sample of standard normal `noise` (0: the mode) and its log-probability per dimension, with no atanh."""
        u = self.mean + jnp.exp(self.log_std) * noise
        return jnp.tanh(u), self._log_prob_of_pre_tanh(u)

    def log_prob(self, value: jax.Array, edge: float = EDGE) -> jax.Array:
        """Log-probability per dimension of values in [-1, 1], which are moved to within 1 - `edge` of 0."""
        return self._log_prob_of_pre_tanh(jnp.arctanh(jnp.clip(value, -1.0 + edge, 1.0 - edge)))

    def _log_prob_of_pre_tanh(self, u: jax.Array) -> jax.Array:
        gaussian = -0.5 * ((u - self.mean) / jnp.exp(self.log_std)) ** 2 - self.log_std - 0.5 * jnp.log(2 * jnp.pi)
        # log(1 - tanh(u)^2) without cancellation
        log_slope = 2.0 * (jnp.log(2.0) - u - jax.nn.softplus(-2.0 * u))
        return gaussian - log_slope
