"""Adam for one network, whose encoders may have a rate of their own."""

from __future__ import annotations

from typing import Any

import jax
import optax

from serl_chunk.agents.state import Params
from serl_chunk.config.optimisers import Optimiser

ENCODER = "encoder"  # the name of encoders in the parameters of networks


def adam(of: Optimiser) -> optax.GradientTransformation:
    """The optimiser of a network's parameters; those below a name "encoder" have `encoder_lr`.

    The state's tree is the same whatever is set, so that a resume may change it.
    """
    share = of.encoder_lr / of.lr

    def encoders_own(updates: Params, params: Params | None) -> Params:
        scaled = lambda path, u: share * u if _is_encoders(path) else u  # noqa: E731
        return jax.tree_util.tree_map_with_path(scaled, updates)

    return optax.chain(
        optax.clip_by_global_norm(of.grad_clip) if of.grad_clip else optax.identity(),
        optax.scale_by_adam(b2=of.b2),
        optax.add_decayed_weights(of.weight_decay) if of.weight_decay else optax.identity(),
        optax.scale_by_learning_rate(_rate(of)),
        optax.identity() if share == 1 else optax.stateless(encoders_own),
    )


def _rate(of: Optimiser) -> optax.Schedule:
    """The learning rate of a step by its number: linear, then half a cosine to a tenth (openpi's schedule)."""
    if of.lr_cosine and of.lr_warmup:
        first = of.lr / (of.lr_warmup + 1)
        return optax.warmup_cosine_decay_schedule(first, of.lr, of.lr_warmup, of.lr_cosine, of.lr / 10)
    if of.lr_cosine:
        return optax.cosine_decay_schedule(of.lr, of.lr_cosine, alpha=0.1)
    if of.lr_warmup:
        return optax.linear_schedule(of.lr / (of.lr_warmup + 1), of.lr, of.lr_warmup)
    return optax.constant_schedule(of.lr)


def _is_encoders(path: Any) -> bool:
    return any(getattr(entry, "key", None) == ENCODER for entry in path)
