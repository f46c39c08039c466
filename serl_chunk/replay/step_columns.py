"""Columns with one row per step: what was recorded, how steps follow one another, and which part was a human's."""

from __future__ import annotations

import numpy as np

from serl_chunk.replay.episode import StoredEpisode
from serl_chunk.types import STATE, Observation, RobotSpec, SparseRows, StepBlock

HELD_COLUMNS = ("reward", "source", "decision_tick", "lost_ticks")  # of `STEP_COLUMNS`: nothing here reads the others


class StepColumns:
    """Steps as recorded, and what they are trained on as.

    `task[row]` is the number of the episode's text, see `tasks.TaskTable`, where an agent reads it.
    """

    def __init__(self, spec: RobotSpec, rows: int, *, tasks: bool) -> None:
        self.state = np.empty((rows, spec.state_dim), np.float32)
        self.action = np.empty((rows, spec.action_dim), np.float32)  # as executed, robot units
        self.reward = np.empty(rows, np.float32)  # as recorded
        self.effective = np.empty(rows, np.float32)  # as trained on
        self.source = np.empty(rows, np.uint8)
        self.tick = np.empty(rows, np.int32)
        self.decision_tick = np.empty(rows, np.int32)
        self.lost_ticks = np.zeros(rows, np.int32)
        self.is_demo = np.zeros(rows, np.bool_)  # a demonstration or a human supplied the action
        self.bc_weight = np.zeros(rows, np.float32)
        self.task = np.empty(rows, np.int32) if tasks else None

    @property
    def nbytes(self) -> int:
        return _nbytes(self)

    def write(self, rows: np.ndarray, episode: StoredEpisode, block: StepBlock) -> None:
        """Write checked steps behind those `episode` has into `rows` int64[T]."""
        self.state[rows] = block.observation[STATE]
        self.action[rows] = block.action
        self.tick[rows] = np.arange(episode.length, episode.length + block.n)
        for name in HELD_COLUMNS:
            getattr(self, name)[rows] = getattr(block, name)
        if self.task is not None:
            self.task[rows] = episode.task

    def write_final(self, row: np.ndarray, episode: StoredEpisode, observation: Observation | None) -> None:
        """Write a final observation, or a copy of the last one, into `row` int64[1]."""
        last = episode.rows[-1]
        for column in (self.action, *(getattr(self, name) for name in HELD_COLUMNS)):
            column[row] = column[last]  # never read as a step; defined all the same
        self.reward[row] = self.lost_ticks[row] = 0
        self.tick[row] = episode.length
        self.state[row] = self.state[last] if observation is None else observation[STATE]
        if self.task is not None:
            self.task[row] = episode.task


class Links:
    """How the rows of episodes follow one another: they need not be neighbours.

    `succ[row]` is the next tick's row. Where windows end, at a final observation or the newest step of an open episode,
    `live[row]` is False and `succ[row]` is the row itself, so that following it is always safe.
    """

    def __init__(self, rows: int) -> None:
        self.succ = np.empty(rows, np.int64)
        self.pred = np.empty(rows, np.int64)  # the tick before's row; an episode's first row leads to itself
        self.live = np.zeros(rows, np.bool_)
        self.terminal = np.zeros(rows, np.bool_)  # the observation after a true termination

    @property
    def nbytes(self) -> int:
        return _nbytes(self)

    def append(self, episode: StoredEpisode, rows: np.ndarray, lost_ticks: np.ndarray) -> None:
        """Link `rows` int64[K] behind the episode's last row; the newest one ends every window for now.

        `lost_ticks`: the column.
        """
        self.terminal[rows] = False
        before = np.concatenate([episode.rows[-1:], rows[:-1]])
        after = rows if len(episode.rows) else rows[1:]
        # Neither the step before a gap nor the one after it leads to what was observed one tick later.
        joined = (lost_ticks[before] == 0) & (lost_ticks[after] == 0)
        self.succ[before] = np.where(joined, after, before)
        self.pred[after] = before
        if not len(episode.rows):
            self.pred[rows[0]] = rows[0]
        self.live[before] = joined
        self._end_at(rows[-1])
        episode.rows = np.concatenate([episode.rows, rows])

    def close(self, episode: StoredEpisode, lost_ticks: np.ndarray) -> None:
        """Say how the (closed) episode ended; may be called again after a correction."""
        last, final = episode.rows[-2], episode.rows[-1]
        # Else the last step's observation is where windows end.
        usable = episode.last == episode.length and lost_ticks[last] == 0
        self.live[last] = usable
        self.succ[last] = final if usable else last
        self.terminal[final] = episode.terminated

    def drop_last(self, episode: StoredEpisode) -> np.ndarray:
        """Take the last row off the episode, int64[1]."""
        dropped, episode.rows = episode.rows[-1:], episode.rows[:-1]
        self._end_at(episode.rows[-1])
        return dropped

    def _end_at(self, row: int) -> None:
        self.live[row], self.succ[row] = False, row


class HumanParts:
    """Of steps that a human had a part of, which numbers of the command these were; no memory before the first one.

    `dims[row]` has the bits of the human's numbers, uint8[A / 8 rounded up], or 0. `alone[row]`: these alone are
    imitated.
    """

    def __init__(self, action_dim: int, rows: int) -> None:
        self._action_dim, self._rows = action_dim, rows
        self.dims: np.ndarray | None = None
        self.alone: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        return _nbytes(self)

    def note(self, rows: np.ndarray, sparse: SparseRows | None) -> None:
        """Note what `StepBlock.sparse` says of steps that are written into `rows` int64[T]."""
        self.clear(rows)
        if self.dims is None and sparse is not None:
            self.dims = np.zeros((self._rows, -(-self._action_dim // 8)), np.uint8)
        if self.dims is not None:
            self.dims[rows] = 0
            if sparse is not None:
                parts = sparse.values * ~sparse.values.astype(bool).all(1, keepdims=True)  # the whole one is no part
                self.dims[rows[sparse.index]] = np.packbits(parts, axis=1)

    def clear(self, rows: np.ndarray) -> None:
        if self.alone is not None:
            self.alone[rows] = False

    def imitate_alone(self, rows: np.ndarray, alone: np.ndarray) -> None:
        """Set of which of `rows` int64[K] the human's numbers alone are imitated: `alone` bool[K]."""
        if self.alone is None and alone.any():
            self.alone = np.zeros(self._rows, np.bool_)
        if self.alone is not None:
            self.alone[rows] = alone

    def bc_dims(self, steps: np.ndarray) -> np.ndarray | None:
        """Return `ChunkBatch.bc_dims` float32[B, L, A] of rows `steps` int64[B, L]; None before a step needs it."""
        if self.dims is None or self.alone is None:
            return None
        out = np.ones((*steps.shape, self._action_dim), np.float32)
        alone = self.alone[steps]
        out[alone] = np.unpackbits(self.dims[steps[alone]], axis=1, count=self._action_dim)
        return out


def _nbytes(columns: StepColumns | Links | HumanParts) -> int:
    return sum(v.nbytes for v in vars(columns).values() if isinstance(v, np.ndarray))
