"""Adam for one network, whose encoders may have a rate of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from serl_chunk.agents.state import Params
from serl_chunk.config.agents.base import Optimiser
from serl_chunk.models.sums import Loss, Metrics, Sum


def adam(of: Optimiser) -> optax.GradientTransformation:
    """The optimiser of a network's parameters; those below a name "encoder" have `encoder_lr`.

    The state's tree is the same whatever is set, so that a resume may change it.
    """
    share = of.encoder_lr / of.lr

    def encoders_own(updates: Params, params: Params | None) -> Params:
        def scaled(path: Any, update: Any) -> Any:
            return share * update if any(getattr(entry, "key", None) == "encoder" for entry in path) else update

        return jax.tree_util.tree_map_with_path(scaled, updates)

    chain = optax.chain(
        optax.clip_by_global_norm(of.grad_clip) if of.grad_clip else optax.identity(),
        optax.scale_by_adam(b2=of.b2),
        optax.add_decayed_weights(of.weight_decay) if of.weight_decay else optax.identity(),
        optax.scale_by_learning_rate(_rate(of)),
        optax.identity() if share == 1 else optax.stateless(encoders_own),
    )

    def update(grads: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of an integer count
            return chain.update(grads, state, params)

    return optax.GradientTransformation(chain.init, update)


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


def descend(optimiser: optax.GradientTransformation, grads: Params, opt: Any, params: Params) -> tuple[Params, Any]:
    """The parameters after one step of `optimiser`, and its state."""
    updates, opt = optimiser.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt


def gradient(
    loss: Callable[[Params, Any], Loss], params: Params, rows: Any, parts: int = 1, shares: int = 1
) -> tuple[Params, Metrics, jax.Array]:
    """The gradient of `loss(params, rows)`, its metrics and its value, of the whole batch or over `parts` equal ones.

    Every array of `rows` has the batch's axis first. The sums' weights must not depend on `params`; those of the whole
    batch are summed first, so that the parts' gradients add up to the whole one's. Each part has as many rows of each
    of `shares`, blocks of the batch that lie on devices of their own, so that none moves.
    """

    def value(params: Params, rows: Any, weights: tuple[jax.Array, ...] | None) -> tuple[jax.Array, dict[str, Sum]]:
        terms, metrics = loss(params, rows)
        weights = tuple(jax.lax.stop_gradient(term.weight) for term in terms) if weights is None else weights
        means = [term._replace(weight=weight).mean() for term, weight in zip(terms, weights, strict=True)]
        return sum(means[1:], means[0]), metrics

    differentiated = jax.value_and_grad(value, has_aux=True)
    if parts == 1:
        (total, metrics), grads = differentiated(params, rows, None)
    else:

        def divided(x: jax.Array) -> jax.Array:
            x = x.reshape(shares, parts, -1, *x.shape[1:])
            return jnp.moveaxis(x, 1, 0).reshape(parts, -1, *x.shape[3:])

        cut = jax.tree.map(divided, rows)
        # The compiler drops the networks, which most weights do not depend on.
        each = jax.lax.scan(lambda _, part: (None, tuple(t.weight for t in loss(params, part).terms)), None, cut)[1]
        weights = jax.tree.map(lambda x: jnp.sum(x, axis=0), each)

        def step(sums: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, differentiated(params, part, weights)), None

        shapes = jax.eval_shape(differentiated, params, jax.tree.map(lambda x: x[0], cut), weights)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        ((total, metrics), grads), _ = jax.lax.scan(step, zeros, cut)
    return grads, {name: each.mean() for name, each in metrics.items()}, total
