"""Windows of the replay whose chunks are the best of the policy's own candidates by the critic."""

from __future__ import annotations

from typing import Protocol

import jax
import numpy as np

from serl_chunk.agents.state import AgentState, Metrics, Params
from serl_chunk.replay.replay import BatchLoader, Replay, Request
from serl_chunk.types import PROMPT, PROMPT_MASK, ChunkBatch

SERVED = 8  # batches that a chunk is in on average, each with new draws: choosing one costs as much as many updates
HELD = 16  # batches of windows that are drawn from


class Relabels(Protocol):
    """What this asks of an agent."""

    def relabel(self, state: AgentState, base: Params, batch: ChunkBatch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """The best chunks float32[B, H, A] at a batch's observations."""

    def policy_part(self, batch: ChunkBatch) -> ChunkBatch: ...


class Relabelled:
    """Batches for the policy's imitation. For one thread; what is held is lost with the process, and made anew.

    Args:
        agent: chooses the chunks.
        size: windows of a batch.
        seed: a call's draws are a function of it and of the number of updates.
    """

    def __init__(self, replay: Replay, agent: Relabels, size: int, seed: int, *, prefetch: int) -> None:
        self._agent, self._size, self._seed = agent, size, seed
        self._replay, self._prefetch = replay, min(prefetch, 1)
        self._loader: BatchLoader | None = None
        self._held: list[ChunkBatch] = []  # on the host
        self._metrics: Metrics = {}
        self._calls = 0

    def next(self, state: AgentState, base: Params, updates: int) -> tuple[ChunkBatch, Metrics]:
        """Return a batch with arrays [1, size, ...], and what was found when chunks were last chosen."""
        if self._calls % SERVED == 0:
            if self._loader is None:  # a resumed run draws other windows than it did before
                rng = np.random.default_rng([self._seed, 1, updates])
                self._loader = BatchLoader(self._replay, rng, prefetch=self._prefetch)
            drawn = self._loader.next(Request("relabelled", 1, self._size, next_observations=False, frames=True))
            batch = self._agent.policy_part(jax.tree.map(lambda x: x[0], drawn["relabelled"]))
            key = jax.random.fold_in(jax.random.key(self._seed), updates)
            chunks, self._metrics = self._agent.relabel(state, base, batch, key)
            # The critic knows no action beyond an episode's end, where windows repeat the last one.
            batch = batch._replace(actions=np.asarray(chunks), bc_weight=batch.valid, bc_dims=None)
            self._held = [batch, *self._held[: HELD - 1]]
        self._calls += 1
        rng = np.random.default_rng([self._seed, 2, updates])
        of, row = rng.integers(len(self._held), size=self._size), rng.integers(self._size, size=self._size)
        slots = max(b.observations[PROMPT].shape[1] for b in self._held) if PROMPT in self._held[0].observations else 0
        held = [_with_slots(b, slots) for b in self._held]
        drawn = jax.tree.map(lambda *each: np.stack([each[o][r] for o, r in zip(of, row, strict=True)]), *held)
        return jax.tree.map(lambda x: x[None], drawn), self._metrics

    def close(self) -> None:
        """Drop what was prepared; `next` begins anew."""
        if self._loader is not None:
            self._loader.close()
        self._loader, self._held, self._calls = None, [], 0


def _with_slots(batch: ChunkBatch, slots: int) -> ChunkBatch:
    """`batch` with prompts of so many slots: each was filled up to the longest of its own."""
    filled = {
        name: np.pad(value, ((0, 0), (0, slots - value.shape[1])))
        for name, value in batch.observations.items()
        if name in (PROMPT, PROMPT_MASK)
    }
    return batch._replace(observations={**batch.observations, **filled})
