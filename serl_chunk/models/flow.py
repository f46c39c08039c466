"""Flow-matching policy: a velocity field from noise (t = 0) to chunks (t = 1), integrated in steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.models.mlp import Activation, KernelInit, Mlp, Norm

Velocity = Callable[[jax.Array, jax.Array], jax.Array]  # (x_t float32[..., D], t float32[...]) -> float32[..., D]
TimeFeatures = Literal["cosine", "raw", "fourier"]

_LONGEST_PERIOD = 10_000.0  # of the slowest Fourier feature, relative to the fastest's (Vaswani 2017)


def time_features(t: jax.Array, kind: TimeFeatures, dim: int) -> jax.Array:
    """A network's inputs for t float32[...]: float32[..., 3] (cosine), [..., 1] (raw) or [..., dim] (fourier).

    fourier: cosines, then sines, of dim / 2 frequencies that fall geometrically from 1 to 1 / 10,000.
    """
    if kind == "raw":
        return t[..., None]
    if kind == "cosine":
        return jnp.stack([t, jnp.cos(jnp.pi * t), jnp.sin(jnp.pi * t)], axis=-1)
    half = dim // 2
    frequencies = jnp.exp(jnp.arange(half, dtype=jnp.float32) * -(jnp.log(_LONGEST_PERIOD) / (half - 1)))
    angle = t[..., None] * jnp.broadcast_to(frequencies, (*t.shape, half))
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


class VelocityField(nn.Module):
    """v(features, x_t, t): float32[..., D]; see `time_features`.

    With `repeated` several passes, or several x where the features have axes of size 1, share the first layer's
    products of the features.
    """

    hidden: Sequence[int]
    out: int
    norm: Norm = "none"
    activation: Activation = "relu"
    kernel_init: KernelInit = "lecun_normal"
    time: TimeFeatures = "cosine"
    fourier_dim: int = 64

    @nn.compact
    def __call__(self, features: jax.Array, x: jax.Array, t: jax.Array, *, repeated: bool = False) -> jax.Array:
        time = time_features(t, self.time, self.fourier_dim)
        net = Mlp(self.hidden, self.out, self.norm, activation=self.activation, kernel_init=self.kernel_init)
        if repeated:
            return net(jnp.concatenate([x, time], axis=-1), shared=features)
        return net(jnp.concatenate([features, x, time], axis=-1))


def integrate(
    velocity: Velocity,
    noise: jax.Array,
    steps: int,
    committed: tuple[jax.Array, jax.Array] | None = None,
    *,
    clean: bool = False,
    spread: float | None = None,
) -> jax.Array:
    """Integrate `noise` float32[..., D] to a chunk, which may leave [-1, 1].

    Without `spread` by Euler's method. With it by `linear_steps`: `velocity` is then the field without k(t) x.

    `committed` is a prefix and a mask, float32[D] each. Dimensions where the mask is 1 follow the straight path from
    their noise to the prefix, and the free ones are generated with them. With `clean` they are the prefix from the
    first step on, for a velocity field that was trained so (training-time RTC, Black et al. 2025).
    """
    x = noise
    scales, gains = ([1.0] * steps, [1 / steps] * steps) if spread is None else linear_steps(steps, spread)
    prefix, mask = committed or (jnp.zeros(()), jnp.zeros(()))
    for i in range(steps):
        t = i / steps
        if committed is not None:
            x = mask * (prefix if clean else (1 - t) * noise + t * prefix) + (1 - mask) * x
        x = scales[i] * x + gains[i] * velocity(x, jnp.full(x.shape[:-1], t))
    return x if committed is None else mask * prefix + (1 - mask) * x


def interpolate(noise: jax.Array, t: jax.Array, chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Points x_t at t float32[B], on straight paths of float32[B, ...], and the paths' velocities (Lipman 2023)."""
    t = t.reshape(*t.shape, *(1 for _ in chunk.shape[t.ndim :]))
    return (1 - t) * noise + t * chunk, chunk - noise


def random_step(
    x: jax.Array, ahead: jax.Array, velocity: jax.Array, t: jax.Array, dt: float, sigma: float
) -> tuple[jax.Array, jax.Array]:
    """Mean and deviation of a random step of length `dt` from x float32[..., D] at t float32[..., 1] (Flow-SDE, piRL).

    With the ends a = x + (1 - t) v of the data and z = x - t v of the noise that v points to, g^2 = sigma^2 (1 - t') /
    t' and t' = max(t, dt), it is N(a (t + dt) + z (1 - t - dt - g^2 dt / (2 (1 - t))), g^2 dt). Without g the mean is
    Euler's step, in whose place stands `ahead`, the step that the ODE makes.
    """
    later = jnp.maximum(t, dt)
    variance = sigma * sigma * (1 - later) / later * dt
    return ahead - (x - t * velocity) * (variance / (2 * (1 - t))), jnp.sqrt(variance)


def linear_share(t: jax.Array, spread: float) -> jax.Array:
    """k(t) of t float32[...]: the regression of a - z on x_t where a has mean 0 and deviation `spread`.

    cov(a - z, x_t) / var(x_t) = (t s^2 - (1 - t)) / ((1 - t)^2 + t^2 s^2); -1 at 0, 1 at 1.
    """
    s2 = spread * spread
    return (t * s2 - (1 - t)) / ((1 - t) ** 2 + t**2 * s2)


def linear_steps(steps: int, spread: float) -> tuple[list[float], list[float]]:
    """Scales and gains of x <- scale x + gain net: a step of dx/dt = net + k(t) x, exact for a net that stays.

    sqrt(V(t)), V = (1 - t)^2 + t^2 s^2, solves dx/dt = k(t) x, and the gain of a step from t to u is the integral of
    sqrt(V(u) / V(w)) over w. Five steps of Euler's method leave 0.11 of s = 0.2 at noise 1, so that candidates are too
    alike, and as much of the net's part is lost.
    """
    t = np.linspace(0.0, 1.0, steps + 1)
    root, c = np.sqrt((1 - t) ** 2 + (t * spread) ** 2), 1 + spread**2
    integral = np.arcsinh((c * t - 1) / spread) / math.sqrt(c)  # of 1 / sqrt(V)
    return (root[1:] / root[:-1]).tolist(), (root[1:] * np.diff(integral)).tolist()
