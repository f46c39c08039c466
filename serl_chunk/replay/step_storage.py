"""Arrays that hold every step and every image exactly once, and the free places in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from serl_chunk.data.prompts import RowTexts
from serl_chunk.replay.episode import StoredEpisode
from serl_chunk.replay.features import Embedder, FeatureTable, ObservationFeatures, RowTable
from serl_chunk.replay.frame_cache import Fetch
from serl_chunk.replay.frame_storage import FrameStorage, final_rows
from serl_chunk.replay.free_list import FreeList
from serl_chunk.replay.step_columns import HumanParts, Links, StepColumns
from serl_chunk.replay.tasks import TaskTable
from serl_chunk.types import (
    HUMAN_DIMS,
    IMAGE_PREFIX,
    PROMPT,
    STATE,
    CameraSpec,
    DataError,
    Observation,
    RobotSpec,
    SparseRows,
    StepBlock,
    human_dims_fault,
)

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
        return self._space(self.frames.counts(rows, demonstration=demonstration), [n] * len(self.features.row_tables))

    def _space(self, frames: Sequence[int], places: Sequence[int]) -> np.ndarray:
        return np.array([*frames, *places], np.int64)

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
            self.features.frames_placed(c, slots)
        self.links.append(episode, rows, self.steps.lost_ticks)
        # After a termination, which a correction may yet bring, the final row is shown with frames of any age.
        shown = (self.frames.frame[rows] >= 0).all(1) if final else self.frames.recent[rows]
        return self._space(frames, self.features.enter(rows, shown, episode.places))

    def close(self, episode: StoredEpisode) -> None:
        """Make the links say how the (closed) episode ended; may be called again after a correction."""
        self.links.close(episode, self.steps.lost_ticks)

    def reopen(self, episode: StoredEpisode) -> np.ndarray:
        """Remove the final row, which no observation was given for; return what is free again, as `space_for`."""
        places = self.features.withdraw(int(episode.rows[-1]), episode.places)
        self.row_slots.give_back(self.links.drop_last(episode))
        return self._space([0] * len(self.cameras), places)

    def texts_at(self, rows: np.ndarray) -> RowTexts | None:
        """Return the tasks' texts at `rows` int64[B]; None without language, or with features of it in batches."""
        return None if PROMPT in self.features.replaced else self._texts_at(rows)

    def _texts_at(self, rows: np.ndarray) -> RowTexts | None:
        if self.tasks is None or self.steps.task is None:
            return None
        return self.tasks.texts_at(self.steps.task[rows])

    def seen_at(self, rows: np.ndarray, observe: Observe) -> tuple[dict[str, np.ndarray], list[Fetch]]:
        """Return what batches have of the cameras at `rows` int64[B], fresh arrays by key, and what completes them.

        `images/<camera>` uint8[B, H, W, 3], or features float16[B, ...] in place of those that they are computed of.
        """
        out, pending = self.features.at(rows, functools.partial(self._inputs, observe=observe))
        for c, camera in enumerate(self.cameras):
            if (key := IMAGE_PREFIX + camera.name) not in self.features.replaced:
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

    def release(self, episode: StoredEpisode) -> None:
        self.row_slots.give_back(episode.rows)
        self.frames.release(episode)
        for c, own in enumerate(episode.frames):
            for part in own:
                self.features.frames_released(c, part)
        self.features.leave(episode.places)
