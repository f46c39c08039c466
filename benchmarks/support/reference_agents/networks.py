"""Networks of the plain implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

_init = nn.initializers.xavier_uniform()


class Trunk(nn.Module):
    """Hidden layers; `norm_first` puts LayerNorm (where there is one) before the activation."""

    hidden: Sequence[int]
    activation: Callable[[jax.Array], jax.Array]
    norm: bool
    norm_first: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.hidden:
            x = nn.Dense(width, kernel_init=_init)(x)
            if self.norm and self.norm_first:
                x = nn.LayerNorm()(x)
            x = self.activation(x)
            if self.norm and not self.norm_first:
                x = nn.LayerNorm()(x)
        return x


class Field(nn.Module):
    """A chunk, or a velocity, from whatever is concatenated: float32[..., D]."""

    hidden: Sequence[int]
    out: int

    @nn.compact
    def __call__(self, *inputs: jax.Array) -> jax.Array:
        x = Trunk(self.hidden, nn.gelu, norm=False, name="trunk")(jnp.concatenate(inputs, axis=-1))
        return nn.Dense(self.out, kernel_init=_init, name="out")(x)


class Gaussian(nn.Module):
    """Means and log sigmas float32[..., D] of the tanh-squashed policy."""

    hidden: Sequence[int]
    out: int

    @nn.compact
    def __call__(self, observations: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = Trunk(self.hidden, nn.relu, norm=False, name="trunk")(observations)
        mean = nn.Dense(self.out, kernel_init=_init, name="mean")(x)
        log_std = nn.Dense(self.out, kernel_init=_init, name="log_std")(x)
        return mean, jnp.clip(log_std, -20.0, 2.0)


class _Head(nn.Module):
    hidden: Sequence[int]
    activation: Callable[[jax.Array], jax.Array]
    norm_first: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = Trunk(self.hidden, self.activation, norm=True, norm_first=self.norm_first, name="trunk")(x)
        return nn.Dense(1, kernel_init=_init, name="out")(x)[..., 0]


class Critic(nn.Module):
    """K heads, float32[K, ...]; relu after LayerNorm (RLPD's), or gelu before it (FQL's)."""

    hidden: Sequence[int]
    heads: int
    fql: bool

    @nn.compact
    def __call__(self, observations: jax.Array, chunk: jax.Array) -> jax.Array:
        ensemble = nn.vmap(
            _Head, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=self.heads
        )
        heads = ensemble(self.hidden, nn.gelu if self.fql else nn.relu, not self.fql, name="heads")
        return heads(jnp.concatenate([observations, chunk], axis=-1))


class Temperature(nn.Module):
    """exp of one trained number."""

    @nn.compact
    def __call__(self) -> jax.Array:
        return jnp.exp(self.param("log", nn.initializers.zeros, ()))


class Modules(nn.Module):
    """Several networks with one tree of parameters: `name` calls one, no name initialises all of them."""

    modules: dict[str, nn.Module]

    @nn.compact
    def __call__(self, *inputs: Any, name: str | None = None, **examples: tuple[Any, ...]) -> Any:
        if name is not None:
            return self.modules[name](*inputs)
        return {k: self.modules[k](*example) for k, example in examples.items()}
