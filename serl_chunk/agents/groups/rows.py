"""Rows of an iteration: one decision of one episode each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from serl_chunk.agents.state import Context
from serl_chunk.types import Array


class GroupRows(NamedTuple):
    """Decisions, arrays with an axis of B rows first: B = `group.minibatch` of a step, or all of an iteration."""

    observations: Mapping[str, Array] | Context  # normalised, or as a constant part of the policy shows them, [B, ...]
    record: dict[str, Array]  # what `act` recorded, [B, ...]
    executed: Array  # float32[B, H]: 1 for the actions that were executed
    advantage: Array  # float32[B]
    weight: Array  # float32[B]; 0: padding
    old_log_prob: Array  # float32[B, R], of rules with a ratio; else zeros
    target: Array  # float32[B]: FlowIPO's w; else zeros


class Episodes(NamedTuple):
    """The episodes of an iteration, E of them; its rows are in their order, and in the order of their decisions."""

    reward: np.ndarray  # float32[E]: the sum of rewards, clipped to [0, 1]
    group: np.ndarray  # int[E]: number of the group
    decisions: np.ndarray  # int[E]: rows of each, 1 or more

    @property
    def of_rows(self) -> np.ndarray:
        """int[n]: each row's episode."""
        return np.repeat(np.arange(len(self.reward)), self.decisions)


def uncredited(observations: dict[str, Array], record: dict[str, Array], executed: Array) -> GroupRows:
    """Rows as they are collected, for `GroupAgent.credit`."""
    zeros = np.zeros(len(executed), np.float32)
    return GroupRows(observations, record, executed, zeros, zeros, zeros[:, None], zeros)


def taken(rows: GroupRows, chosen: np.ndarray, size: int) -> GroupRows:
    """The `chosen` rows, int[m], and copies of the first of them without a weight up to `size` rows."""
    index = np.concatenate([chosen, np.full(size - len(chosen), chosen[0])])
    out = jax.tree.map(lambda x: x[index], rows)
    return out._replace(weight=np.where(np.arange(size) < len(chosen), out.weight, np.float32(0)))


def blocks(rows: GroupRows, size: int) -> Iterator[GroupRows]:
    """All rows in their order, `size` at a time, the last ones filled up."""
    for at in range(0, len(rows.weight), size):
        yield taken(rows, np.arange(at, min(at + size, len(rows.weight))), size)


def minibatches(rng: np.random.Generator, rows: GroupRows, size: int) -> Iterator[GroupRows]:
    """One pass over all rows in random order, in as few equal parts of at most `size` as there can be, filled up."""
    order = rng.permutation(len(rows.weight))
    for part in np.array_split(order, -(-len(order) // size)):
        yield taken(rows, part, size)
