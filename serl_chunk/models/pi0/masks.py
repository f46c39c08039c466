"""Which tokens of a pi0 are real, what each attends to, and where each stands."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.config.language import PROMPT_BLOCK
from serl_chunk.types import IMAGE_PREFIX, PROMPT, PROMPT_MASK

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


def without_unused(observation: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a batch without the cameras that no row has, and without the slots behind its longest prompt.

    What is computed from it is the same, in less time. The number of slots is a multiple of `PROMPT_BLOCK`.
    """
    lacking = {
        key.removeprefix(IMAGE_MASK_PREFIX)
        for key, mask in observation.items()
        if key.startswith(IMAGE_MASK_PREFIX) and not np.any(mask)
    }
    unused = {f"{prefix}{camera}" for camera in lacking for prefix in (IMAGE_PREFIX, IMAGE_MASK_PREFIX)}
    out = {key: value for key, value in observation.items() if key not in unused}
    if PROMPT in out:
        given = np.asarray(out[PROMPT_MASK])
        longest = int((np.arange(1, given.shape[-1] + 1) * given).max(initial=0))
        slots = -(-longest // PROMPT_BLOCK) * PROMPT_BLOCK
        out |= {key: out[key][..., :slots] for key in (PROMPT, PROMPT_MASK)}
    return out
