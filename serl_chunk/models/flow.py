"""Flow-matching policy: a velocity field from noise (t = 0) to chunks (t = 1), integrated by Euler steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from serl_chunk.models.mlp import Mlp

Velocity = Callable[[jax.Array, jax.Array], jax.Array]  # (x_t float32[..., D], t float32[...]) -> float32[..., D]


class VelocityField(nn.Module):
    """v(features, x_t, t): float32[..., D]; time enters as (t, cos pi t, sin pi t)."""

    hidden: Sequence[int]
    out: int

    @nn.compact
    def __call__(self, features: jax.Array, x: jax.Array, t: jax.Array) -> jax.Array:
        time = jnp.stack([t, jnp.cos(jnp.pi * t), jnp.sin(jnp.pi * t)], axis=-1)
        return Mlp(self.hidden, self.out)(jnp.concatenate([features, x, time], axis=-1))


def integrate(velocity: Velocity, noise: jax.Array, steps: int, prefix: jax.Array, mask: jax.Array) -> jax.Array:
    """Euler-integrate `noise` float32[..., D] to a chunk, clipped to [-1, 1]; `prefix` and `mask` are float32[D].

    Dimensions where `mask` is 1 follow the straight path from their noise to `prefix` (the part of the chunk
    that is already committed), so that the free dimensions are generated beside it.
    """
    x = noise
    prefix, mask = jnp.broadcast_to(prefix, noise.shape), jnp.broadcast_to(mask, noise.shape)
    for i in range(steps):
        t = i / steps
        x = mask * ((1 - t) * noise + t * prefix) + (1 - mask) * x
        x = x + velocity(x, jnp.full(x.shape[:-1], t)) / steps
    return mask * prefix + (1 - mask) * jnp.clip(x, -1.0, 1.0)


def interpolate(key: jax.Array, chunk: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Training points of conditional flow matching for chunks float32[B, D] (Lipman 2023, straight paths).

    Returns x_t = (1 - t) z + t chunk, t ~ U(0, 1) float32[B], and the target velocity chunk - z.
    """
    key_noise, key_time = jax.random.split(key)
    noise = jax.random.normal(key_noise, chunk.shape)
    t = jax.random.uniform(key_time, chunk.shape[:-1])
    x = (1 - t[..., None]) * noise + t[..., None] * chunk
    return x, t, chunk - noise
