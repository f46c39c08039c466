"""Arrays that hold every step and every image exactly once, and the free places in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from serl_chunk.data.prompts import Prompts, RowTexts
from serl_chunk.replay.episode import StoredEpisode
from serl_chunk.replay.features import Embedder, FeatureTable, ObservationFeatures, RowTable
from serl_chunk.replay.frame_storage import Fetch, FrameStorage, FreeList, final_rows
from serl_chunk.types import (
    HUMAN_DIMS,
    IMAGE_PREFIX,
    PROMPT,
    STATE,
    Begin,
    CameraSpec,
    ConfigError,
    DataError,
    Observation,
    RobotSpec,
    SparseRows,
    StepBlock,
    human_dims_fault,
)

HELD_COLUMNS = ("reward", "source", "decision_tick", "lost_ticks")  # of `STEP_COLUMNS`: nothing here reads the others


class TaskTable:
    """Numbers texts in the order in which they come; a text keeps its number for as long as the replay exists.

    An episode without a text has that of the experiment. The caller of `number` and `texts_at` holds the replay's lock.
    `prompts`: that the texts must fit; `own`: the experiment's text.
    """

    def __init__(self, prompts: Prompts, own: str) -> None:
        self._prompts, self._own = prompts, own
        self._numbers: dict[str, int] = {}
        self._texts: list[str] = []

    def __len__(self) -> int:
        return len(self._texts)

    def check(self, begin: Begin) -> str:
        """Return the text of an episode. Raises DataError where it is too long for a prompt."""
        text = begin.task or self._own
        try:
            self._prompts.check(text)
        except ConfigError as error:
            raise DataError(f"episode {begin.episode_id}: {error}") from error
        return text

    def number(self, begin: Begin) -> int:
        """Return the number of an episode's text, a new one for a new text. Raises DataError as `check`."""
        text = self.check(begin)
        if text not in self._numbers:
            self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return self._numbers[text]

    def texts_at(self, numbers: np.ndarray) -> RowTexts:
        """Return the texts `numbers` int32[B]. Texts are never taken out: it stays valid without the lock."""
        return RowTexts(self._texts, numbers)


class _Columns:
    @property
    def nbytes(self) -> int:
        return sum(v.nbytes for v in vars(self).values() if isinstance(v, np.ndarray))


class StepColumns(_Columns):
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


class Links(_Columns):
    """How the rows of episodes follow one another: they need not be neighbours.

    `succ[row]` is the next tick's row. Where windows end, at a final observation or the newest step of an open episode,
    `live[row]` is False and `succ[row]` is the row itself, so that following it is always safe.
    """

    def __init__(self, rows: int) -> None:
        self.succ = np.empty(rows, np.int64)
        self.pred = np.empty(rows, np.int64)  # the tick before's row; an episode's first row leads to itself
        self.live = np.zeros(rows, np.bool_)
        self.terminal = np.zeros(rows, np.bool_)  # the observation after a true termination

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


class HumanParts(_Columns):
    """Of steps that a human had a part of, which numbers of the command these were; no memory before the first one.

    `dims[row]` has the bits of the human's numbers, uint8[A / 8 rounded up], or 0. `alone[row]`: these alone are
    imitated.
    """

    def __init__(self, action_dim: int, rows: int) -> None:
        self._action_dim, self._rows = action_dim, rows
        self.dims: np.ndarray | None = None
        self.alone: np.ndarray | None = None

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
        return imitated_dims(self.dims, self.alone, steps, self._action_dim)


def imitated_dims(dims: Any, alone: Any, steps: Any, action_dim: int) -> Any:
    """Return `HumanParts.bc_dims` of its columns, by the library that has `steps`."""
    if dims is None or alone is None:
        return None
    xp = steps.__array_namespace__()
    parts = xp.unpackbits(dims[steps], axis=-1, count=action_dim)
    return xp.where(alone[steps][..., None], parts, np.uint8(1)).astype(np.float32)


Observe = Callable[[np.ndarray, RowTexts | None], dict[str, np.ndarray]]  # `Preprocess.observe_rows`


class StepStorage:
    """One row per step, and one more per closed episode for its final observation; for all partitions.

    `steps`, `links`, `human_parts` and `frames` have columns of all rows. `features` has what `embed` computes: of a
    frame by its slot, else by places that rows are given. Arrays become resident as they are written.
    """

    def __init__(
        self, spec: RobotSpec, cameras: Sequence[CameraSpec],
        *, rows: int, frames: int, max_image_age: int, cache_bytes: int = 0, deferred: int = 0,
        embed: Embedder | None = None, observations: int = 0, tasks: TaskTable | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.tasks = spec, tasks
        self.changed: list[np.ndarray] | None = None  # rows written since they were mirrored; None: there is no mirror
        self.row_slots = FreeList(rows)
        self.steps = StepColumns(spec, rows, tasks=tasks is not None)
        self.links = Links(rows)
        self.human_parts = HumanParts(spec.action_dim, rows)
        # Features stand for decoded images: each is looked at once.
        self.frames = FrameStorage(
            spec.name, cameras, rows=rows, frames=frames, max_image_age=max_image_age,
            cache_bytes=0 if embed is not None else cache_bytes, deferred=deferred,
        )  # fmt: skip
        self.features = ObservationFeatures(
            embed, self.frames.cameras, self.frames.frame, frames=frames + deferred, observations=observations,
            texts=tasks is not None,
        )  # fmt: skip

    @property
    def cameras(self) -> tuple[CameraSpec, ...]:
        return self.frames.cameras

    @property
    def nbytes(self) -> int:
        parts = (self.steps, self.links, self.human_parts, self.frames, self.row_slots)
        return sum(part.nbytes for part in parts) + self.image_nbytes

    @property
    def image_nbytes(self) -> int:
        """Bytes of images and their features."""
        return self.frames.image_nbytes + sum(table.nbytes for table in self.features.tables)

    def check(self, block: StepBlock) -> None:
        """Raise DataError unless the arrays of `block` fit this robot and hold finite numbers."""
        n, spec = block.n, self.spec
        self._check_vector(block.episode_id, "state", block.observation.get(STATE), (n, spec.state_dim))
        self._check_vector(block.episode_id, "action", block.action, (n, spec.action_dim))
        self._check_vector(block.episode_id, "reward", block.reward, (n,))
        self.frames.check(block.episode_id, block.sparse)
        if fault := human_dims_fault(block):
            raise DataError(f"episode {block.episode_id}: {fault}. Check the source of interventions")

    def check_final(self, episode_id: str, observation: Observation) -> None:
        self._check_vector(episode_id, "final state", observation.get(STATE), (self.spec.state_dim,))
        self.frames.check(episode_id, final_rows(observation))

    def _check_vector(self, episode_id: str, name: str, value: np.ndarray | None, shape: tuple[int, ...]) -> None:
        if value is None or value.shape != shape:
            found = "none" if value is None else str(value.shape)
            raise DataError(
                f"episode {episode_id}: {name} has shape {found}, robot {self.spec.name!r} needs {shape}; "
                "was it recorded on another robot?"
            )
        if not np.isfinite(value).all():
            raise DataError(f"episode {episode_id}: {name} holds a number that is not finite; check the driver")

    def space_for(self, n: int, rows: Mapping[str, SparseRows], *, demonstration: bool) -> np.ndarray:
        """Return what `n` steps with sparse `rows` take at most, int64[C + F].

        That is slots of each camera, and places of each of the `features.row_tables`.
        """
        frames = self.frames.counts(rows, demonstration=demonstration)
        return np.array([*frames, *[n] * len(self.features.row_tables)], np.int64)

    def append(self, episode: StoredEpisode, block: StepBlock) -> np.ndarray:
        """Write checked steps behind those `episode` has; return what they took, as `space_for`."""
        rows = self.row_slots.take(block.n)
        self.steps.write(rows, episode, block)
        self.human_parts.note(rows, block.sparse.get(HUMAN_DIMS))
        taken = self._enter(episode, rows, block.sparse)
        episode.length += block.n
        return taken

    def append_final(
        self, episode: StoredEpisode, observation: Observation | None, repeats: Mapping[str, int] | None = None
    ) -> np.ndarray:
        """Write the checked final observation of an `End`, or a copy of the last one; return what it took."""
        rows = self.row_slots.take(1)
        self.steps.write_final(rows, episode, observation)
        self.human_parts.clear(rows)
        return self._enter(episode, rows, final_rows(observation, repeats), final=True)

    def _enter(
        self, episode: StoredEpisode, rows: np.ndarray, sparse: Mapping[str, SparseRows], *, final: bool = False
    ) -> np.ndarray:
        """Place the frames of `rows` int64[K] and link them behind the episode's; return what they took."""
        frames = self.frames.counts(sparse, demonstration=episode.demonstration)
        for c, slots in enumerate(self.frames.place(episode, rows, sparse)):
            if (table := self.features.of_frames.get(c)) is not None:
                table.placed(slots)
        self.links.append(episode, rows, self.steps.lost_ticks)
        # After a termination, which a correction may yet bring, the final row is shown with frames of any age.
        shown = (self.frames.frame[rows] >= 0).all(1) if final else self.frames.recent[rows]
        places = [table.enter(rows, shown, held) for table, held in self._row_places(episode)]
        return np.array([*frames, *places], np.int64)

    def _row_places(self, episode: StoredEpisode) -> Iterator[tuple[RowTable, list[np.ndarray]]]:
        return zip(self.features.row_tables, episode.places, strict=True)

    def reopen(self, episode: StoredEpisode) -> np.ndarray:
        """Remove the final row, which no observation was given for; return what is free again, as `space_for`."""
        places = [table.withdraw(int(episode.rows[-1]), held) for table, held in self._row_places(episode)]
        self.row_slots.give_back(self.links.drop_last(episode))
        return np.array([*[0] * len(self.cameras), *places], np.int64)

    def texts_at(self, rows: np.ndarray, frames: bool | None = None) -> RowTexts | None:
        """Return the tasks' texts at `rows` int64[B]; None without language, or with features of it in batches.

        `frames`: see `seen_at`; with images alone there are texts.
        """
        return None if PROMPT in self.features.replaced and not frames else self._texts_at(rows)

    def _texts_at(self, rows: np.ndarray) -> RowTexts | None:
        if self.tasks is None or self.steps.task is None:
            return None
        return self.tasks.texts_at(self.steps.task[rows])

    def seen_at(
        self, rows: np.ndarray, observe: Observe, frames: bool | None = None
    ) -> tuple[dict[str, np.ndarray], list[Fetch]]:
        """Return what batches have of the cameras at `rows` int64[B], fresh arrays by key, and what completes them.

        `images/<camera>` uint8[B, H, W, 3], or features float16[B, ...] in place of those that they are computed of.

        Args:
            frames: True: images alone; False: features alone.
        """
        features, out, pending = self.features, dict[str, np.ndarray](), list[Fetch]()
        if not frames:
            out, pending = features.at(rows, functools.partial(self._inputs, observe=observe))
        for c, camera in enumerate(self.cameras):
            key = IMAGE_PREFIX + camera.name
            if frames or (frames is None and key not in features.replaced):
                out[key], load = self.frames.at(c, self.frames.frame[rows, c])
                pending += [] if load is None else [load]
        return out, pending

    def missing_features(self, limit: int, observe: Observe) -> tuple[int, Fetch] | None:
        """Return what computes up to `limit` features that are missing, and how many these are; None: none is."""
        return self.features.missing(limit, functools.partial(self._inputs, observe=observe))

    def _inputs(
        self, table: FeatureTable, places: np.ndarray, observe: Observe
    ) -> tuple[dict[str, np.ndarray], list[Fetch]]:
        """What an agent reads of what `places` int64[K] of a table hold, and what completes it."""
        rows = table.row[places] if isinstance(table, RowTable) else None
        inputs = {} if rows is None else observe(self.steps.state[rows], self._texts_at(rows))
        loads: list[Fetch] = []
        for c in table.cameras:
            key = IMAGE_PREFIX + self.cameras[c].name
            inputs[key], load = self.frames.at(c, places if rows is None else self.frames.frame[rows, c])
            loads += [] if load is None else [load]
        return {key: inputs[key] for key in table.group.reads}, loads

    def note(self, rows: np.ndarray) -> None:
        """Note that `rows` int64[K], links included, are not what a mirror has."""
        if self.changed is not None:
            self.changed.append(rows)

    def release(self, episode: StoredEpisode) -> None:
        self.row_slots.give_back(episode.rows)
        self.frames.release(episode)
        for c, table in self.features.of_frames.items():
            for part in episode.frames[c]:
                table.released(part)
        for row_table, held in self._row_places(episode):
            for part in held:
                row_table.leave(part)
