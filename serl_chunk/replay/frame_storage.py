"""Every image of the replay exactly once, and the frames that its rows show."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from serl_chunk.data.frames import Frames
from serl_chunk.replay.episode import StoredEpisode
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

log = logging.getLogger(__name__)

_SMALL = 4096  # bytes of an image below which a loop over them costs more than a copy
_LOGGED = 3  # frames that could not be decoded and are logged one by one
_THREADS = 4  # decoding: image libraries and files release the interpreter for most of their work
NO_FRAME = np.iinfo(np.int32).max  # age of a camera that has not been read in the episode so far


class FreeList:
    """The free ones of `capacity` places. Returned ones are handed out first: memory not needed is never touched."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._returned = np.empty(capacity, np.int64)
        self._n_returned = 0
        self._fresh = 0  # places from here on were never given out

    @property
    def nbytes(self) -> int:
        return self._returned.nbytes

    @property
    def used(self) -> int:
        return self._fresh - self._n_returned

    def take(self, n: int) -> np.ndarray:
        if self.used + n > self.capacity:  # quotas are the caller's business
            raise RuntimeError(f"{n} places requested, {self.capacity - self.used} of {self.capacity} are free")
        old = min(n, self._n_returned)
        self._n_returned -= old
        again = self._returned[self._n_returned : self._n_returned + old]
        fresh = np.arange(self._fresh, self._fresh + n - old)
        self._fresh += len(fresh)
        return np.concatenate([again, fresh])

    def give_back(self, places: np.ndarray) -> None:
        self._returned[self._n_returned : self._n_returned + len(places)] = places
        self._n_returned += len(places)


Fetch = Callable[[], object]  # fills in a part of a batch, without a lock; raises DataError for an unreadable file


class FrameCache:
    """The deferred frames of one camera, numbered from 0 as they are added, and the latest used ones decoded.

    Safe to use from several threads. Memory: `capacity` frames, and 24 bytes for each frame that is deferred.
    """

    def __init__(self, camera: CameraSpec, capacity: int, threads: ThreadPoolExecutor) -> None:
        self.camera, self.capacity = camera, capacity
        self.images = np.empty((capacity, camera.height, camera.width, 3), np.uint8)
        self._holds = np.full(capacity, -1, np.int64)  # frame in each place
        self._used = np.zeros(capacity, np.int64)  # when each place was last used
        self._filled = 0  # places from here on are untouched
        self._sources: list[Frames] = []
        self._count = 0
        # Of each frame; the place is -1 where it is not decoded.
        self._source, self._index, self._place = (np.empty(0, np.int64) for _ in range(3))
        self._clock = self.asked = self.decoded = 0
        self._threads, self._lock = threads, threading.Lock()

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.images, self._holds, self._used, self._source, self._index, self._place))

    @property
    def held_bytes(self) -> int:
        return self._filled * self.camera.height * self.camera.width * 3

    def add(self, frames: Frames) -> np.ndarray:
        """Defer `frames`; returns their numbers, int64[N]."""
        with self._lock:
            first, end = self._count, self._count + len(frames)
            if end > len(self._place):
                more = np.full(max(end, 2 * len(self._place)) - len(self._place), -1, np.int64)
                columns = self._source, self._index, self._place
                self._source, self._index, self._place = (np.concatenate([a, more]) for a in columns)
            self._source[first:end] = len(self._sources)
            self._index[first:end] = np.arange(len(frames))
            self._sources.append(frames)
            self._count = end
            return np.arange(first, end)

    def fill(self, out: np.ndarray, at: np.ndarray, numbers: np.ndarray) -> None:
        """Set `out[at[k]]` to frame `numbers[k]`, for `out` uint8[B, H, W, 3]; each is decoded at most once.

        Raises DataError where a file changed since it was deferred.
        """
        with self._lock:
            self._clock += 1
            places = self._place[numbers]
            known = places >= 0
            copy_frames(out, at[known], self.images, places[known])
            self._used[places[known]] = self._clock
            self.asked += len(numbers)
            if known.all():
                return
            missing, which = np.unique(numbers[~known], return_inverse=True)
            # Behind one another in their file, so that what has to be opened or decoded in order is gone through once.
            cuts = np.flatnonzero(np.diff(self._source[missing])) + 1
            decoded = np.empty((len(missing), *self.images.shape[1:]), np.uint8)
            parts = list(zip(np.split(missing, cuts), np.split(decoded, cuts), strict=True))
            spread = map if len(parts) == 1 else self._threads.map
            list(spread(lambda pair: self._decode(*pair), parts))
            self.decoded += len(missing)
            copy_frames(out, at[~known], decoded, which)
            self._keep(missing, decoded)

    def _decode(self, numbers: np.ndarray, out: np.ndarray) -> None:
        frames, index = self._sources[self._source[numbers[0]]], self._index[numbers]
        images = frames[int(index[0])][None] if len(index) == 1 else np.asarray(frames[index])
        if images.shape != out.shape or images.dtype != np.uint8:
            raise DataError(
                f"frames of camera {self.camera.name!r} of a demonstration are {images.dtype}{images.shape[1:]} now, "
                f"uint8{out.shape[1:]} was expected: its file was changed while the learner used it; start it again"
            )
        out[:] = images

    def _keep(self, numbers: np.ndarray, images: np.ndarray) -> None:
        """Put decoded frames in the places that were used least recently."""
        numbers, images = numbers[: self.capacity], images[: self.capacity]
        fresh = min(len(numbers), self.capacity - self._filled)
        places = np.arange(self._filled, self._filled + fresh)
        self._filled += fresh
        if more := len(numbers) - fresh:
            used = self._used[: self.capacity - fresh]  # not the places that were just taken
            places = np.concatenate([places, np.argpartition(used, more - 1)[:more]])
        replaced = self._holds[places]
        self._place[replaced[replaced >= 0]] = -1
        self._holds[places], self._used[places], self._place[numbers] = numbers, self._clock, places
        self.images[places] = images


class EncodedFrames:
    """Encoded frames that wait for their slots of `images` uint8[K, H, W, 3]; its caller holds the replay's lock."""

    def __init__(self, images: np.ndarray, camera: str) -> None:
        self._images, self._camera = images, camera
        self._waiting: dict[int, Any] = {}
        self.undecodable = 0

    def put(self, slots: np.ndarray, values: Any) -> None:
        """Frame k of `values` uint8[N, H, W, 3] belongs in slot k of `slots`; of JPEG files when it is first shown."""
        if isinstance(values, np.ndarray | Frames):
            self._images[slots] = np.asarray(values)
            return
        for i, slot in enumerate(slots.tolist()):
            self._waiting[slot] = values[i : i + 1]

    def drop(self, slots: np.ndarray) -> None:
        """These slots are free, or hold other frames now."""
        for slot in slots.tolist() if self._waiting else ():
            self._waiting.pop(slot, None)

    def settle(self, slots: np.ndarray) -> None:
        """Decode what waits for these slots. A frame that cannot be is black: its other steps are worth keeping."""
        for slot in set(slots.tolist()) & self._waiting.keys() if self._waiting else ():
            values = self._waiting.pop(slot)
            try:
                self._images[slot] = values[0]
            except DataError as error:
                self._images[slot] = 0
                self.undecodable += 1
                if self.undecodable <= _LOGGED:
                    log.error("camera %s: a frame of an actor cannot be decoded, and is black: %s", self._camera, error)


def copy_frames(out: np.ndarray, at: np.ndarray, images: np.ndarray, places: np.ndarray) -> None:
    """Set `out[at] = images[places]`, without a second copy of the images where they are large."""
    if out[0].nbytes < _SMALL:
        out[at] = images[places]
    elif len(at) == len(out) and (np.diff(at) == 1).all():
        np.take(images, places, axis=0, out=out, mode="clip")  # "raise" would make it buffer the output
    else:
        for i, place in zip(at.tolist(), places.tolist(), strict=True):
            out[i] = images[place]


def cached_frames(cameras: Sequence[CameraSpec], nbytes: int, most: int) -> int:
    """Return the frames per camera that `nbytes` for all `cameras` allow, `most` at most."""
    return min(most, nbytes // max(1, sum(c.height * c.width * 3 for c in cameras)))


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
        cached, threads = cached_frames(cameras, cache_bytes, deferred), ThreadPoolExecutor(_THREADS, "frames")
        self.deferred = [FrameCache(camera, cached, threads) for camera in self.cameras]
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
