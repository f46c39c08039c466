"""The leaves of a policy that are trained, and its base."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flax.traverse_util import flatten_dict, unflatten_dict

from serl_chunk.agents.state import Params


class Partition(NamedTuple):
    """Splits a tree of parameters into leaves that are trained and the base.

    `trains`: whether the leaf of a path, names that are joined by "/", is trained.
    """

    trains: Callable[[str], bool]

    def split(self, params: Params) -> tuple[Params, Params]:
        """Return the trees of trained leaves and of the others; nothing is copied."""
        leaves = flatten_dict(params, sep="/")
        return tuple(  # type: ignore[return-value]
            unflatten_dict({path: leaf for path, leaf in leaves.items() if self.trains(path) == trained}, sep="/")
            for trained in (True, False)
        )

    @staticmethod
    def merge(trained: Params, base: Params) -> Params:
        """Return the tree with the leaves of both; nothing is copied, and no leaf may be in both."""
        a, b = flatten_dict(trained, sep="/"), flatten_dict(base, sep="/")
        if twice := sorted(a.keys() & b.keys()):
            raise ValueError(f"{twice[0]} is in both trees, which must have no leaf in common")
        return unflatten_dict({**b, **a}, sep="/")
