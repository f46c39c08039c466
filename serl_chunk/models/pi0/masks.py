"""Which tokens of a pi0 are real, what each attends to, and where each stands."""

from __future__ import annotations

import jax
import jax.numpy as jnp

IMAGE_MASK_PREFIX = "image_masks/"  # before a camera's name, in observations: bool[...], absent where all are real


def attention_mask(real: jax.Array, opens: jax.Array) -> jax.Array:
    """Return which token attends to which, bool[..., S, S]: row i is what token i sees.

    Args:
        real: bool[..., S]; the others see nothing and are not seen.
        opens: bool[S], true for the first token of a group. A token sees its own group and those before it.
    """
    group = jnp.cumsum(opens)
    return (group[None, :] <= group[:, None]) & real[..., None, :] & real[..., :, None]


def positions(real: jax.Array) -> jax.Array:
    """Return the place of each token, int32[..., S]: the real ones before it count."""
    return jnp.cumsum(real, axis=-1, dtype=jnp.int32) - 1


def suffix_opens(horizon: int, *, state: bool) -> jax.Array:
    """Return the groups' first tokens of a state token, where there is one, and `horizon` action tokens."""
    return jnp.arange(horizon + state) <= int(state)
