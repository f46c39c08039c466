"""Adam for one network whose encoder may have rates, decay and clipping of its own.

The state's tree is that of `optax.chain(clip, optax.adam(...))` whatever is set, so that a resume may change it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from serl_chunk.agents.state import Params
from serl_chunk.config.agents import AgentConfig
from serl_chunk.config.optimisers import Optimiser

ENCODER = "encoder"  # the name of encoders in the parameters of networks


def network_optimiser(
    config: AgentConfig, network: Literal["policy", "critic"], *, lr: float | None = None
) -> optax.GradientTransformation:
    """That of a network's parameters; those below a name "encoder" have `encoder_optimiser`'s.

    `lr` replaces the network's rate. An encoder without a `grad_clip` of its own is clipped together with its network.
    """
    own = config.optimiser(network)
    of_network, of_encoder = own if lr is None else own._replace(lr=lr), config.optimiser("encoder", network)
    apart = config.encoder_optimiser.grad_clip is not None
    return _adam(of_network, of_encoder, clip_apart=apart, b2=config.adam_b2)


def plain_optimiser(optimiser: Optimiser) -> optax.GradientTransformation:
    """That of parameters without an encoder, and without weight decay."""
    return _adam(optimiser._replace(weight_decay=0.0), None, clip_apart=False)


def _adam(
    net: Optimiser, encoder: Optimiser | None, *, clip_apart: bool, b2: float = 0.999
) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(b2=b2)
    rates = {False: _rate(net), True: _rate(encoder or net)}
    decays = {False: net.weight_decay, True: (encoder or net).weight_decay}

    def init(params: Params) -> Any:
        return optax.EmptyState(), (adam.init(params), optax.EmptyState())

    def update(grads: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        assert params is not None
        _, (moments, _) = state
        if encoder is not None and clip_apart:
            grads = _clipped(grads, net.grad_clip, of_encoder=False)
            grads = _clipped(grads, encoder.grad_clip, of_encoder=True)
        else:
            grads = _clipped(grads, net.grad_clip, of_encoder=None)
        directions, after = adam.update(grads, moments)
        # The first step has count 0.
        now = {of_encoder: rate(moments.count) for of_encoder, rate in rates.items()}

        def step(path: Any, direction: jax.Array, param: jax.Array) -> jax.Array:
            of_encoder = _is_encoders(path)
            decay = decays[of_encoder]
            return -now[of_encoder] * (direction + decay * param if decay else direction)

        updates = jax.tree_util.tree_map_with_path(step, directions, params)
        return updates, (optax.EmptyState(), (after, optax.EmptyState()))

    return optax.GradientTransformation(init, update)


def _rate(optimiser: Optimiser) -> Callable[[jax.Array], float | jax.Array]:
    """The learning rate of a step by its number: linear, then half a cosine to a tenth (openpi's schedule)."""
    lr, warmup, cosine = optimiser.lr, optimiser.lr_warmup, optimiser.lr_cosine
    if cosine and warmup:
        return optax.warmup_cosine_decay_schedule(lr / (warmup + 1), lr, warmup, cosine, lr / 10)
    if cosine:
        return optax.cosine_decay_schedule(lr, cosine, alpha=0.1)
    return optax.linear_schedule(lr / (warmup + 1), lr, warmup) if warmup else lambda _: lr


def _clipped(grads: Params, most: float, *, of_encoder: bool | None) -> Params:
    """Gradients with a norm of at most `most` (0: any), over encoders alone, all but encoders, or all (None)."""
    if not most:
        return grads

    def chosen(path: Any) -> bool:
        return of_encoder is None or _is_encoders(path) == of_encoder

    leaves = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(grads) if chosen(path)]
    norm = optax.tree.norm(leaves)
    factor = jnp.where(norm < most, 1.0, most / jnp.maximum(norm, 1e-30))
    return jax.tree_util.tree_map_with_path(lambda path, g: g * factor if chosen(path) else g, grads)


def _is_encoders(path: Any) -> bool:
    return any(getattr(entry, "key", None) == ENCODER for entry in path)
