"""Images that are decoded when a batch shows them, of demonstrations' files or encoded ones.

Of a window, the frames at its start and at its end are looked at, never the H between them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from serl_chunk.data.frames import Frames
from serl_chunk.types import CameraSpec, DataError

log = logging.getLogger(__name__)

_SMALL = 4096  # bytes of an image below which a loop over them costs more than a copy
_LOGGED = 3  # frames that could not be decoded and are logged one by one
_THREADS = 4  # decoding: image libraries and files release the interpreter for most of their work

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


def frame_caches(cameras: Sequence[CameraSpec], nbytes: int, most: int) -> list[FrameCache]:
    """Make one cache per camera, of as many frames each as fit into `nbytes` together, `most` at most."""
    frames, threads = cached_frames(cameras, nbytes, most), ThreadPoolExecutor(_THREADS, thread_name_prefix="frames")
    return [FrameCache(camera, frames, threads) for camera in cameras]


def cached_frames(cameras: Sequence[CameraSpec], nbytes: int, most: int) -> int:
    """Return the frames per camera that `nbytes` for all `cameras` allow, `most` at most."""
    return min(most, nbytes // max(1, sum(c.height * c.width * 3 for c in cameras)))
