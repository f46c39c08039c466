"""The tanh-squashed Gaussian, in its numerically safe form."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_EDGE = 1.0 - 1e-6  # atanh of anything nearer to 1 is infinite in float32


class TanhNormal(NamedTuple):
    """tanh(u), u ~ N(mean, exp(log_std)^2), per dimension; log-probabilities are not summed."""

    mean: jax.Array
    log_std: jax.Array

    def mode(self) -> jax.Array:
        """tanh(mean): what the field calls the deterministic action."""
        return jnp.tanh(self.mean)

    def mode_log_prob(self) -> jax.Array:
        """The log-probability of `mode()` per dimension."""
        return self._log_prob_of_pre_tanh(self.mean)

    def sample_and_log_prob(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A sample and its log-probability per dimension, from the pre-tanh value (no atanh)."""
        u = self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape)
        return jnp.tanh(u), self._log_prob_of_pre_tanh(u)

    def log_prob(self, value: jax.Array) -> jax.Array:
        """Log-probability per dimension of values in [-1, 1]; the edges are moved inwards by 1e-6."""
        return self._log_prob_of_pre_tanh(jnp.arctanh(jnp.clip(value, -_EDGE, _EDGE)))

    def _log_prob_of_pre_tanh(self, u: jax.Array) -> jax.Array:
        gaussian = -0.5 * ((u - self.mean) / jnp.exp(self.log_std)) ** 2 - self.log_std - 0.5 * jnp.log(2 * jnp.pi)
        # log(1 - tanh(u)^2) without cancellation
        log_slope = 2.0 * (jnp.log(2.0) - u - jax.nn.softplus(-2.0 * u))
        return gaussian - log_slope
