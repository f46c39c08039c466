"""Every image of the replay exactly once, and the frames that its rows show."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from serl_chunk.data.frames import Frames
from serl_chunk.replay.episode import StoredEpisode
from serl_chunk.replay.frame_cache import EncodedFrames, Fetch, copy_frames, frame_caches
from serl_chunk.replay.free_list import FreeList
from serl_chunk.types import (
    IMAGE_PREFIX,
    REPEAT_PREFIX,
    STATE,
    CameraSpec,
    DataError,
    Observation,
    SparseRows,
    StepBlock,
)

NO_FRAME = np.iinfo(np.int32).max  # age of a camera that has not been read in the episode so far


class FrameStorage:
    """Frames of the cameras by slots, and of each row the slots that it shows.

    Images are held once, `images[c][slot]` uint8[H, W, 3]. `frame[row, c]` is the slot of camera c's newest frame at or
    before the row within the episode, or -1; `age[row, c]` the ticks since the camera gave it; `recent[row]`, whether
    all ages are at most `max_image_age`. JPEG frames are decoded when they are first shown (`encoded[c]`). Images of
    demonstrations that come as `Frames` stay in their files: slots beyond those of `images[c]` are the numbers of
    `deferred[c]`. Arrays become resident as they are written.

    Args:
        robot: its name, for errors.
        frames: slots of each camera; `deferred`: frames of each that may stay in files.
    """

    def __init__(
        self, robot: str, cameras: Sequence[CameraSpec],
        *, rows: int, frames: int, max_image_age: int, cache_bytes: int, deferred: int,
    ) -> None:  # fmt: skip
        self.robot, self.cameras, self.max_image_age = robot, tuple(cameras), max_image_age
        self.frame = np.empty((rows, len(self.cameras)), np.int64)
        self.age = np.empty((rows, len(self.cameras)), np.int32)  # ticks
        self.recent = np.empty(rows, np.bool_)
        self.images = [np.empty((frames, cam.height, cam.width, 3), np.uint8) for cam in self.cameras]
        self.encoded = [EncodedFrames(i, cam.name) for i, cam in zip(self.images, self.cameras, strict=True)]
        self.deferred = frame_caches(self.cameras, cache_bytes, most=deferred)
        self.slots = [FreeList(frames) for _ in self.cameras]

    @property
    def nbytes(self) -> int:
        """Bytes of what rows show; images are not part of it."""
        columns = (self.frame, self.age, self.recent)
        return sum(a.nbytes for a in columns) + sum(slots.nbytes for slots in self.slots)

    @property
    def image_nbytes(self) -> int:
        return sum(a.nbytes for a in self.images) + sum(cache.nbytes for cache in self.deferred)

    @property
    def held_bytes(self) -> int:
        """Bytes of the images in slots that are taken; those of files are not among them."""
        return sum(images[0].nbytes * slots.used for images, slots in zip(self.images, self.slots, strict=True))

    def check(self, episode_id: str, rows: Mapping[str, SparseRows]) -> None:
        """Raise DataError unless the frames of `rows` are of these cameras."""
        for camera in self.cameras:
            index, values = rows.get(IMAGE_PREFIX + camera.name, (None, None))
            need = (0 if index is None else len(index), camera.height, camera.width, 3)
            if values is not None and (values.shape != need or values.dtype != np.uint8):
                raise DataError(
                    f"episode {episode_id}: frames of camera {camera.name!r} are {values.dtype}{values.shape}, "
                    f"robot {self.robot!r} needs uint8{need}"
                )

    def counts(self, rows: Mapping[str, SparseRows], *, demonstration: bool) -> list[int]:
        """Return how many slots of each camera the frames of sparse `rows` take."""
        found = [rows.get(IMAGE_PREFIX + camera.name) for camera in self.cameras]
        return [0 if f is None or (demonstration and isinstance(f.values, Frames)) else len(f.index) for f in found]

    def deferred_in(self, block: StepBlock, final: Observation | None) -> bool:
        both = [rows.get(IMAGE_PREFIX + c.name) for rows in (block.sparse, final_rows(final)) for c in self.cameras]
        return any(r is not None and isinstance(r.values, Frames) for r in both)

    def place(self, episode: StoredEpisode, rows: np.ndarray, sparse: Mapping[str, SparseRows]) -> list[np.ndarray]:
        """Store the frames in `sparse` and point `rows` int64[K] at those that they show.

        Frames that rows show again are named there as well. Returns the slots of the new ones, by camera.
        """
        slots = []
        for c, camera in enumerate(self.cameras):
            new, same = sparse.get(IMAGE_PREFIX + camera.name), sparse.get(REPEAT_PREFIX + camera.name)
            slots.append(self._place(episode, c, rows, new, same))
        self.recent[rows] = (self.age[rows] <= self.max_image_age).all(1)
        return slots

    def _place(
        self, episode: StoredEpisode, c: int, rows: np.ndarray, new: SparseRows | None, same: SparseRows | None
    ) -> np.ndarray:
        """Store `new` frames of camera c and point `rows` at the newest frame each of them may show.

        `same`: the rows that show an earlier tick's frame again. One that is not the newest there is not held.
        """
        first_tick, (index, values) = episode.length, new or (np.empty(0, np.int32), None)
        if isinstance(values, Frames) and episode.demonstration:  # demonstrations stay, and their files with them
            slots = len(self.images[c]) + self.deferred[c].add(values)
        else:
            slots = self.slots[c].take(len(index))
            if values is not None:
                self.encoded[c].put(slots, values)
                episode.frames[c].append(slots)
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
        return slots

    def at(self, c: int, slots: np.ndarray) -> tuple[np.ndarray, Fetch | None]:
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

    def release(self, episode: StoredEpisode) -> None:
        """Free the slots of an episode that leaves."""
        for c, own in enumerate(episode.frames):
            for part in own:
                self.encoded[c].drop(part)
                self.slots[c].give_back(part)


def final_rows(observation: Observation | None, repeats: Mapping[str, int] | None = None) -> dict[str, SparseRows]:
    """Return the images of a final observation as rows of one step; `repeats`: as `End`'s."""
    zero, values = np.zeros(1, np.int32), (observation or {}).items()
    rows = {key: SparseRows(zero, image[None]) for key, image in values if key != STATE}
    again = (repeats or {}).items()
    return rows | {REPEAT_PREFIX + name: SparseRows(zero, np.array([tick], np.int32)) for name, tick in again}
