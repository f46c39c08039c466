"""Weighted means before their division, so that those of micro-batches add up exactly, and losses of them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Metrics = dict[str, jax.Array]  # means, by name

_LEAST = 1e-6  # weight of a sum without a weight


class Sum(NamedTuple):
    """A weighted mean that is not divided yet, so that those of micro-batches add up exactly."""

    total: jax.Array  # float32[]
    weight: jax.Array  # float32[], without a gradient

    def mean(self) -> jax.Array:
        """0 where nothing had a weight."""
        return self.total / jnp.maximum(self.weight, _LEAST)

    def times(self, factor: float | jax.Array) -> Sum:
        return Sum(factor * self.total, self.weight)


class Loss(NamedTuple):
    """What is minimised: the sum of the terms' means."""

    terms: tuple[Sum, ...]
    metrics: dict[str, Sum]


def mean_of(values: jax.Array) -> Sum:
    """The mean of all numbers."""
    return Sum(jnp.sum(values), jnp.float32(values.size))
