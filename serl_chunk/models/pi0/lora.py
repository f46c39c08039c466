"""Products with a matrix and its low-rank addition A B (LoRA, Hu et al. 2021), as openpi computes them.

Two of its conventions are kept, because an exported model would act differently without them:

- In the attention's product out of the heads, A and B are summed over the heads one after the other. All heads share
  the sum of B, and the addition is not one of a matrix for each head.
- The MLP's addition is not multiplied by alpha / rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from serl_chunk.models.pi0.tree import LORA_A, LORA_B


class Equations(NamedTuple):
    """Sums of a product with w, with A, and of the latter with B."""

    w: str
    a: str
    b: str


# Axes: t token, d width, n or k head, h number of a head, r rank, c query, key or value.
TO_HEADS = Equations("...td,ndh->...tnh", "...td,ndr->...tnr", "...tnr,nrh->...tnh")
TO_SEVERAL = Equations("...td,ckdh->c...tkh", "...td,ckdr->c...tkr", "c...tkr,ckrh->c...tkh")
FROM_HEADS = Equations("...tnh,nhd->...td", "...tnh,nhr->...tr", "...tr,nrd->...td")


def attention_product(
    equations: Equations, x: jax.Array, leaf: Mapping[str, jax.Array], rank: int, alpha: float
) -> jax.Array:
    """Return the product of x with `leaf["w"]`, plus alpha / rank times that with its A and B where rank is above 0."""
    out = jnp.einsum(equations.w, x, leaf["w"].astype(x.dtype))
    if rank == 0:
        return out
    small = jnp.einsum(equations.a, x, leaf[LORA_A].astype(x.dtype))
    return out + jnp.einsum(equations.b, small, leaf[LORA_B].astype(x.dtype)) * (alpha / rank)


def mlp_product(
    x: jax.Array, leaf: Mapping[str, jax.Array], name: str, rank: int, part: int | None = None
) -> jax.Array:
    """Return the product of x [..., D] with `leaf[name]` [D, F], plus that with its A and B where rank is above 0.

    Args:
        part: takes one of the matrices that are stacked in the leaf.
    """
    named = (name, *((f"{name}_{LORA_A}", f"{name}_{LORA_B}") if rank else ()))
    w, *added = ((leaf[n] if part is None else leaf[n][part]).astype(x.dtype) for n in named)
    out = jnp.dot(x, w)
    return out + jnp.dot(jnp.dot(x, added[0]), added[1]) if added else out
