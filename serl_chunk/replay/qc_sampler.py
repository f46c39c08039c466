"""Q-chunking's published sampler: windows of neighbouring rows, whatever episode they are of; for comparisons.

The code of Li, Zhou and Levine (2025) draws a row uniformly and takes the H rows from there on, as they lie in its
buffer. Where an episode ends among them, the critic's loss leaves the window out unless the end comes with its last
row, and imitation stops there. A published trajectory goes on after a success, where our data cut it: a demonstration
that begins in the very state in which a terminated one ended goes on with it here, and a window across the two keeps
its weight; its mask is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.replay.episode import Partition
from serl_chunk.replay.step_storage import StepStorage
from serl_chunk.types import STATE, ChunkBatch


class Rows(NamedTuple):
    """N steps in the order in which they neighbour each other, those of one episode in theirs."""

    state: np.ndarray  # float32[N, S]
    next_state: np.ndarray  # float32[N, S], after the step
    action: np.ndarray  # float32[N, A]
    reward: np.ndarray  # float32[N], as trained on
    mask: np.ndarray  # float32[N], 0 where the task terminated with the step: nothing is bootstrapped
    terminal: np.ndarray  # [N], not 0 on the last step of an episode, however it ended


def gather_adjacent(rows: Rows, starts: np.ndarray, *, horizon: int, returned: int, discount: float) -> ChunkBatch:
    """Gather the windows of `max(horizon, returned)` rows that start at `starts` int64[B], in the units of `rows`.

    `valid[b, i]` is 1 until the first end, its own step included; `weight` is that of the return's last step. Rewards
    are those of all R = `returned` rows, also after an end; `mask` is 0 where any of them terminated; `discount_n` is
    gamma^R, and the next observation that of row R - 1. Valid steps count as imitated.
    """
    length = max(horizon, returned)
    at = starts[:, None] + np.arange(length)
    ended = np.maximum.accumulate(rows.terminal[at] > 0, axis=1)
    reached = np.ones(at.shape, np.float32)
    reached[:, 1:] = ~ended[:, :-1]
    valid = reached[:, :horizon]
    return ChunkBatch(
        observations={STATE: rows.state[starts]},
        actions=rows.action[at[:, :horizon]],
        valid=valid.copy(),
        rewards=rows.reward[at[:, :returned]],
        mask=rows.mask[at[:, :returned]].min(1),
        discount_n=np.full(len(starts), discount**returned, np.float32),
        next_observations={STATE: rows.next_state[at[:, returned - 1]]},
        bc_weight=valid.copy(),
        delay=np.zeros(len(starts), np.int32),
        weight=reached[:, returned - 1].copy(),
    )


def gather_qc_windows(
    storage: StepStorage, preprocess: Preprocess, config: ExperimentConfig, rows: np.ndarray, *, bc_all: bool
) -> ChunkBatch:
    """Gather windows of storage rows `rows` int64[B, L], L = max(horizon, returned), in model space; arrays are fresh.

    As `gather_adjacent`, with the storage's own marks of imitated steps unless `bc_all`. An end lies
    where a row's successor is not the window's next, unless a demonstrated trajectory goes on there.
    """
    (b, length), horizon, returned = rows.shape, config.chunk.carried, config.chunk.returned
    held, links = storage.steps, storage.links
    at, after = rows.ravel(), links.succ[rows]
    terminal = np.zeros((b, length), np.bool_)
    terminal[:, :-1] = after[:, :-1] != rows[:, 1:]  # of the last row it makes no difference
    window, step = np.nonzero(terminal)
    terminal[window, step] = ~_goes_on(storage, rows[window, step], after[window, step], rows[window, step + 1])
    columns = Rows(
        state=held.state[at],
        next_state=held.state[after.ravel()],
        action=held.action[at],
        reward=held.effective[at],
        mask=(~links.terminal[after.ravel()]).astype(np.float32),
        terminal=terminal.ravel(),
    )
    starts = np.arange(b) * length
    raw = gather_adjacent(columns, starts, horizon=horizon, returned=returned, discount=config.discount)
    steps, live = rows[:, :horizon], raw.valid > 0
    decided = live & (held.decision_tick[steps] == held.tick[steps[:, :1]])
    state = raw.observations[STATE]
    return raw._replace(
        observations=preprocess.observe_rows(state, storage.texts_at(rows[:, 0])),
        actions=preprocess.encode(state, raw.actions),
        next_observations=preprocess.observe_rows(
            raw.next_observations[STATE], storage.texts_at(after[:, returned - 1])
        ),
        bc_weight=raw.bc_weight if bc_all else held.bc_weight[steps] * raw.valid,
        bc_dims=storage.human_parts.bc_dims(steps),
        delay=decided.argmax(1).astype(np.int32),
    )


def _goes_on(storage: StepStorage, last: np.ndarray, final: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return where episodes from rows `first` int64[K] on continue those with `last` step and `final` row, bool[K]."""
    held = storage.steps
    same = (held.state[final] == held.state[first]).all(1) & storage.links.terminal[final]
    if held.task is not None:
        same &= held.task[final] == held.task[first]
    return same & (held.tick[first] == 0) & held.is_demo[last] & held.is_demo[first]


class QCWindowSampler:
    """Windows of `length` neighbouring steps of a few partitions, one after the other."""

    def __init__(self, partitions: Sequence[Partition], length: int) -> None:
        self._partitions, self._length = partitions, length

    def __len__(self) -> int:
        return max(0, sum(map(len, self._parts())) - self._length + 1)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw windows with replacement: storage rows of their steps, int64[*shape, length]."""
        parts = self._parts()
        ends = np.cumsum([len(p) for p in parts])
        starts = rng.integers(ends[-1] - self._length + 1, size=shape)
        at = starts[..., None] + np.arange(self._length)
        part = np.searchsorted(ends, at, side="right")
        out = np.empty(at.shape, np.int64)
        for i, rows in enumerate(parts):
            chosen = part == i
            out[chosen] = rows[at[chosen] - (ends[i] - len(rows))]
        return out

    def _parts(self) -> list[np.ndarray]:
        return [rows for partition in self._partitions for rows in partition.followed()]
