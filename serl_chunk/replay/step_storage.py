"""Arrays that hold every step and every image exactly once, and the free places in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from serl_chunk.data.frames import Frames
from serl_chunk.data.prompts import RowTexts
from serl_chunk.replay.episode import StoredEpisode
from serl_chunk.replay.features import Embedder, FeatureTable, ObservationFeatures, RowTable
from serl_chunk.replay.frame_cache import EncodedFrames, Fetch, copy_frames, frame_caches
from serl_chunk.replay.free_list import FreeList
from serl_chunk.replay.tasks import TaskTable
from serl_chunk.types import (
    HUMAN_DIMS,
    IMAGE_PREFIX,
    PROMPT,
    REPEAT_PREFIX,
    STATE,
    CameraSpec,
    DataError,
    Observation,
    RobotSpec,
    SparseRows,
    StepBlock,
    human_dims_fault,
)

NO_FRAME = np.iinfo(np.int32).max  # age of a camera that has not been read in the episode so far
Observe = Callable[[np.ndarray, RowTexts | None], dict[str, np.ndarray]]  # `Preprocess.observe_rows`
HELD_COLUMNS = ("reward", "source", "decision_tick", "lost_ticks")  # of `STEP_COLUMNS`: nothing here reads the others


class StepStorage:
    """Columns with one row per step, and one more per closed episode for its final observation; for all partitions.

    Rows of an episode need not be neighbours (several robots write at once): `succ[row]` is the next tick's row. Where
    windows end, at a final observation or the newest step of an open episode, `live[row]` is False and `succ[row]` is
    the row itself, so that following it is always safe.

    Images are held once, `images[c][slot]` uint8[H, W, 3]. `frame[row, c]` is the slot of camera c's newest frame at or
    before the row within the episode, or -1; `age[row, c]` the ticks since the camera gave it; `recent[row]`, whether
    all ages are at most `max_image_age`. JPEG frames are decoded when they are first shown (`encoded[c]`). Images of
    demonstrations that come as `Frames` stay in their files: slots beyond those of `images[c]` are the numbers of
    `deferred[c]`. `features` has what `embed` computes: of a frame by its slot, else by places that rows are given.
    Arrays become resident as they are written.

    `task[row]` is the number in `tasks` of the episode's text, where an agent reads it.
    """

    def __init__(
        self, spec: RobotSpec, cameras: Sequence[CameraSpec],
        *, rows: int, frames: int, max_image_age: int, cache_bytes: int = 0, deferred: int = 0,
        embed: Embedder | None = None, observations: int = 0, tasks: TaskTable | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.cameras, self.max_image_age, self.tasks = spec, tuple(cameras), max_image_age, tasks
        n, c = rows, len(self.cameras)
        self.state = np.empty((n, spec.state_dim), np.float32)
        self.action = np.empty((n, spec.action_dim), np.float32)  # as executed, robot units
        self.reward = np.empty(n, np.float32)  # as recorded
        self.effective = np.empty(n, np.float32)  # as trained on
        self.source = np.empty(n, np.uint8)
        self.tick = np.empty(n, np.int32)
        self.decision_tick = np.empty(n, np.int32)
        self.lost_ticks = np.zeros(n, np.int32)
        self.succ = np.empty(n, np.int64)
        self.pred = np.empty(n, np.int64)  # the tick before's row; an episode's first row leads to itself
        self.live = np.zeros(n, np.bool_)
        self.terminal = np.zeros(n, np.bool_)  # the observation after a true termination
        self.is_demo = np.zeros(n, np.bool_)  # a demonstration or a human supplied the action
        self.bc_weight = np.zeros(n, np.float32)
        # Of steps that a human had a part of, the bits of the human's numbers, uint8[n, A / 8 rounded up]; else 0. And
        # those of which these alone are imitated, bool[n]. None before the first such step.
        self.human_dims: np.ndarray | None = None
        self.bc_human: np.ndarray | None = None
        self.task = None if tasks is None else np.empty(n, np.int32)
        self.frame = np.empty((n, c), np.int64)
        self.age = np.empty((n, c), np.int32)  # ticks
        self.recent = np.empty(n, np.bool_)
        self.images = [np.empty((frames, cam.height, cam.width, 3), np.uint8) for cam in self.cameras]
        self.encoded = [EncodedFrames(i, cam.name) for i, cam in zip(self.images, self.cameras, strict=True)]
        # Features stand for decoded images: each is looked at once.
        self.deferred = frame_caches(self.cameras, 0 if embed is not None else cache_bytes, most=deferred)
        self.features = ObservationFeatures(
            embed, self.cameras, self.frame, frames=frames + deferred, observations=observations,
            texts=tasks is not None,
        )  # fmt: skip
        self.row_slots = FreeList(n)
        self.frame_slots = [FreeList(frames) for _ in self.cameras]

    @property
    def nbytes(self) -> int:
        columns = (v.nbytes for v in vars(self).values() if isinstance(v, np.ndarray))
        return sum(columns) + sum(slots.nbytes for slots in (self.row_slots, *self.frame_slots)) + self.image_nbytes

    @property
    def image_nbytes(self) -> int:
        """Bytes of images and their features."""
        return sum(a.nbytes for parts in (self.images, self.deferred, self.features.tables) for a in parts)

    def check(self, block: StepBlock) -> None:
        """Raise DataError unless the arrays of `block` fit this robot and hold finite numbers."""
        n, spec = block.n, self.spec
        self._check_vector(block.episode_id, "state", block.observation.get(STATE), (n, spec.state_dim))
        self._check_vector(block.episode_id, "action", block.action, (n, spec.action_dim))
        self._check_vector(block.episode_id, "reward", block.reward, (n,))
        self._check_images(block.episode_id, block.sparse)
        if fault := human_dims_fault(block):
            raise DataError(f"episode {block.episode_id}: {fault}. Check the source of interventions")

    def check_final(self, episode_id: str, observation: Observation) -> None:
        self._check_vector(episode_id, "final state", observation.get(STATE), (self.spec.state_dim,))
        self._check_images(episode_id, final_rows(observation))

    def _check_vector(self, episode_id: str, name: str, value: np.ndarray | None, shape: tuple[int, ...]) -> None:
        if value is None or value.shape != shape:
            found = "none" if value is None else str(value.shape)
            raise DataError(
                f"episode {episode_id}: {name} has shape {found}, robot {self.spec.name!r} needs {shape}; "
                "was it recorded on another robot?"
            )
        if not np.isfinite(value).all():
            raise DataError(f"episode {episode_id}: {name} holds a number that is not finite; check the driver")

    def _check_images(self, episode_id: str, rows: Mapping[str, SparseRows]) -> None:
        for camera in self.cameras:
            index, values = rows.get(IMAGE_PREFIX + camera.name, (None, None))
            need = (0 if index is None else len(index), camera.height, camera.width, 3)
            if values is not None and (values.shape != need or values.dtype != np.uint8):
                raise DataError(
                    f"episode {episode_id}: frames of camera {camera.name!r} are {values.dtype}{values.shape}, "
                    f"robot {self.spec.name!r} needs uint8{need}"
                )

    def space_for(self, n: int, rows: Mapping[str, SparseRows], *, demonstration: bool) -> np.ndarray:
        """Return what `n` steps with sparse `rows` take at most, int64[C + F].

        That is frames per camera in `images`, and places of each of the `features.row_tables`.
        """
        counts = np.repeat([0, n], [len(self.cameras), len(self.features.row_tables)])
        for c, camera in enumerate(self.cameras):
            found = rows.get(IMAGE_PREFIX + camera.name)
            if found is not None and not (demonstration and isinstance(found.values, Frames)):
                counts[c] = len(found.index)
        return counts

    def deferred_in(self, block: StepBlock, final: Observation | None) -> bool:
        both = [rows.get(IMAGE_PREFIX + c.name) for rows in (block.sparse, final_rows(final)) for c in self.cameras]
        return any(r is not None and isinstance(r.values, Frames) for r in both)

    def append(self, episode: StoredEpisode, block: StepBlock) -> np.ndarray:
        """Write checked steps behind those `episode` has; return what they took, as `space_for`."""
        n, taken = block.n, self.space_for(block.n, block.sparse, demonstration=episode.demonstration)
        rows = self.row_slots.take(n)
        self.state[rows] = block.observation[STATE]
        self.action[rows] = block.action
        self.tick[rows] = np.arange(episode.length, episode.length + n)
        for name in HELD_COLUMNS:
            getattr(self, name)[rows] = getattr(block, name)
        for c, camera in enumerate(self.cameras):
            new, same = block.sparse.get(IMAGE_PREFIX + camera.name), block.sparse.get(REPEAT_PREFIX + camera.name)
            self._place_frames(episode, c, rows, new, same)
        self._note_human_dims(rows, block.sparse.get(HUMAN_DIMS))
        taken[len(self.cameras) :] = self._finish_rows(episode, rows)
        episode.length += n
        return taken

    def _note_human_dims(self, rows: np.ndarray, dims: SparseRows | None) -> None:
        if self.human_dims is None and dims is not None:
            self.human_dims = np.zeros((len(self.source), -(-self.spec.action_dim // 8)), np.uint8)
        if self.human_dims is not None:
            self.human_dims[rows] = 0
            if dims is not None:
                parts = dims.values * ~dims.values.astype(bool).all(1, keepdims=True)  # the whole action is no part
                self.human_dims[rows[dims.index]] = np.packbits(parts, axis=1)

    def imitate_human_alone(self, rows: np.ndarray, alone: np.ndarray) -> None:
        """Set of which of `rows` int64[K] the human's numbers alone are imitated: `alone` bool[K]."""
        if self.bc_human is None and alone.any():
            self.bc_human = np.zeros(len(self.source), np.bool_)
        if self.bc_human is not None:
            self.bc_human[rows] = alone

    def bc_dims(self, steps: np.ndarray) -> np.ndarray | None:
        """Return `ChunkBatch.bc_dims` float32[B, L, A] of rows `steps` int64[B, L]; None before a step needs it."""
        if self.human_dims is None or self.bc_human is None:
            return None
        out = np.ones((*steps.shape, self.spec.action_dim), np.float32)
        alone = self.bc_human[steps]
        out[alone] = np.unpackbits(self.human_dims[steps[alone]], axis=1, count=self.spec.action_dim)
        return out

    def append_final(
        self, episode: StoredEpisode, observation: Observation | None, repeats: Mapping[str, int] | None = None
    ) -> np.ndarray:
        """Write the checked final observation of an `End`, or a copy of the last one; return what it took."""
        rows = self.row_slots.take(1)
        last = episode.rows[-1]
        for column in (self.action, *(getattr(self, name) for name in HELD_COLUMNS)):
            column[rows] = column[last]  # never read as a step; defined all the same
        self.reward[rows] = self.lost_ticks[rows] = 0
        self.tick[rows] = episode.length
        self.state[rows] = self.state[last] if observation is None else observation[STATE]
        images = final_rows(observation)
        taken = self.space_for(1, images, demonstration=episode.demonstration)
        for c, camera in enumerate(self.cameras):
            tick = (repeats or {}).get(camera.name)
            same = None if tick is None else SparseRows(np.zeros(1, np.int32), np.array([tick], np.int32))
            self._place_frames(episode, c, rows, images.get(IMAGE_PREFIX + camera.name), same)
        taken[len(self.cameras) :] = self._finish_rows(episode, rows, final=True)
        return taken

    def _place_frames(
        self, episode: StoredEpisode, c: int, rows: np.ndarray, new: SparseRows | None, same: SparseRows | None
    ) -> None:
        """Store `new` frames of camera c and point `rows` at the newest frame each of them may show.

        `same`: the rows that show an earlier tick's frame again. One that is not the newest there is not held.
        """
        first_tick, (index, values) = episode.length, new or (np.empty(0, np.int32), None)
        if isinstance(values, Frames) and episode.demonstration:  # demonstrations stay, and their files with them
            slots = len(self.images[c]) + self.deferred[c].add(values)
        else:
            slots = self.frame_slots[c].take(len(index))
            if values is not None:
                self.encoded[c].put(slots, values)
                episode.frames[c].append(slots)
        self.features.frames_placed(c, slots)
        # Entry 0 stands for the newest frame before these rows.
        known = np.concatenate([[episode.latest_frame[c]], slots])
        recorded = np.concatenate([[episode.recorded_tick[c]], first_tick + index])
        at = np.arange(len(rows))
        newest = np.searchsorted(index, at, side="right")
        frame = known[newest]
        given = np.full(len(rows), episode.latest_frame_tick[c])
        given[index] = first_tick + index
        if same is not None:
            again = same.index[recorded[newest[same.index]] == same.values]
            given[again] = first_tick + again
        given = np.maximum.accumulate(given)
        self.frame[rows, c] = frame
        self.age[rows, c] = np.where(frame >= 0, first_tick + at - given, NO_FRAME)
        episode.latest_frame[c], episode.latest_frame_tick[c] = known[-1], given[-1]
        episode.recorded_tick[c] = recorded[-1]

    def _finish_rows(self, episode: StoredEpisode, rows: np.ndarray, *, final: bool = False) -> list[int]:
        """Link `rows` behind the episode's last row; the newest one ends every window for now.

        Returns the new places of each of the `features.row_tables`.
        """
        self.recent[rows] = (self.age[rows] <= self.max_image_age).all(1)
        self.terminal[rows] = False
        if self.bc_human is not None:
            self.bc_human[rows] = False
        if self.task is not None:
            self.task[rows] = episode.task
        before = np.concatenate([episode.rows[-1:], rows[:-1]])
        after = rows if len(episode.rows) else rows[1:]
        # Neither the step before a gap nor the one after it leads to what was observed one tick later.
        joined = (self.lost_ticks[before] == 0) & (self.lost_ticks[after] == 0)
        self.succ[before] = np.where(joined, after, before)
        self.pred[after] = before
        if not len(episode.rows):
            self.pred[rows[0]] = rows[0]
        self.live[before] = joined
        self.succ[rows[-1]] = rows[-1]
        self.live[rows[-1]] = False
        episode.rows = np.concatenate([episode.rows, rows])
        # After a termination, which a correction may yet bring, the final row is shown with frames of any age.
        shown = (self.frame[rows] >= 0).all(1) if final else self.recent[rows]
        return self.features.enter(rows, shown, episode.places)

    def close(self, episode: StoredEpisode) -> None:
        """Make the links say how the (closed) episode ended; may be called again after a correction."""
        last, final = episode.rows[-2], episode.rows[-1]
        # Else the last step's observation is where windows end.
        usable = episode.last == episode.length and self.lost_ticks[last] == 0
        self.live[last] = usable
        self.succ[last] = final if usable else last
        self.terminal[final] = episode.terminated

    def reopen(self, episode: StoredEpisode) -> np.ndarray:
        """Remove the final row, which no observation was given for; return what is free again, as `space_for`."""
        freed = self.space_for(0, {}, demonstration=episode.demonstration)
        freed[len(self.cameras) :] = self.features.withdraw(int(episode.rows[-1]), episode.places)
        self.row_slots.give_back(episode.rows[-1:])
        episode.rows = episode.rows[:-1]
        last = episode.rows[-1]
        self.live[last], self.succ[last] = False, last
        return freed

    def texts_at(self, rows: np.ndarray) -> RowTexts | None:
        """Return the tasks' texts at `rows` int64[B]; None without language, or with features of it in batches."""
        return None if PROMPT in self.features.replaced else self._texts_at(rows)

    def _texts_at(self, rows: np.ndarray) -> RowTexts | None:
        if self.tasks is None or self.task is None:
            return None
        return self.tasks.texts_at(self.task[rows])

    def images_at(self, c: int, slots: np.ndarray) -> tuple[np.ndarray, Fetch | None]:
        """Images uint8[B, H, W, 3] of camera c at `slots` int64[B], and what fills in those in files.

        Demonstrations with files never leave: filling in needs no lock.
        """
        held = len(self.images[c])
        self.encoded[c].settle(slots)
        away = slots >= held
        if not away.any():
            return self.images[c][slots], None
        out = np.empty((len(slots), *self.images[c].shape[1:]), np.uint8)
        copy_frames(out, np.flatnonzero(~away), self.images[c], slots[~away])
        at = np.flatnonzero(away)
        return out, functools.partial(self.deferred[c].fill, out, at, slots[at] - held)

    def seen_at(self, rows: np.ndarray, observe: Observe) -> tuple[dict[str, np.ndarray], list[Fetch]]:
        """Return what batches have of the cameras at `rows` int64[B], fresh arrays by key, and what completes them.

        `images/<camera>` uint8[B, H, W, 3], or features float16[B, ...] in place of those that they are computed of.
        """
        out, pending = self.features.at(rows, functools.partial(self._inputs, observe=observe))
        for c, camera in enumerate(self.cameras):
            if (key := IMAGE_PREFIX + camera.name) not in self.features.replaced:
                out[key], load = self.images_at(c, self.frame[rows, c])
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
        inputs = {} if rows is None else observe(self.state[rows], self._texts_at(rows))
        loads: list[Fetch] = []
        for c in table.cameras:
            key = IMAGE_PREFIX + self.cameras[c].name
            inputs[key], load = self.images_at(c, places if rows is None else self.frame[rows, c])
            loads += [] if load is None else [load]
        return {key: inputs[key] for key in table.group.reads}, loads

    def release(self, episode: StoredEpisode) -> None:
        self.row_slots.give_back(episode.rows)
        for c, own in enumerate(episode.frames):
            for part in own:
                self.encoded[c].drop(part)
                self.frame_slots[c].give_back(part)
                self.features.frames_released(c, part)
        self.features.leave(episode.places)


def final_rows(observation: Observation | None) -> dict[str, SparseRows]:
    """Return the images of a final observation as rows of one step."""
    values = (observation or {}).items()
    return {key: SparseRows(np.zeros(1, np.int32), image[None]) for key, image in values if key != STATE}
