"""Frames that are decoded on access: a long episode's images never lie in memory together."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.types import IMAGE_PREFIX, REPEAT_PREFIX, DataError, End, Observation, SparseRows, StepBlock

Shape = tuple[int, int, int]
_JPEG, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
IMAGE_FILES = (_JPEG, b"\x89PNG")  # how the files that are decoded begin


class LazyImages(ABC):
    """Images uint8[N, H, W, 3], RGB, of one camera, decoded on each access.

    An integer index gives the image uint8[H, W, 3]; a slice, a mask or an array of integers gives the images of these;
    `np.asarray` decodes all.

    Args:
        shape: [H, W, 3] of every image.
        at: position of each image, in the subclass's own numbering.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, shape: tuple[int, int, int], at: np.ndarray) -> None:
        self.shape = (len(at), *shape)
        self._at = at

    @abstractmethod
    def decode(self, at: int) -> np.ndarray:
        """Decode the image uint8[H, W, 3] at position `at`. Raises DataError with the file and the position."""

    def __len__(self) -> int:
        return len(self._at)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape))

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, int | np.integer):
            return self.decode(int(self._at[i]))
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._at = self._at[i]
        other.shape = (len(other._at), *self.shape[1:])
        return other

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("frames are decoded: there is no array to share")
        out = np.empty(self.shape, dtype or np.uint8)
        for i in range(len(self)):
            out[i] = self[i]
        return out


class Frames(LazyImages):
    """Images in files. Subclasses hold paths and never open files, so that a process can send them to another."""

    def encoded_at(self, at: int) -> bytes | None:
        """Return the stored file of the image at that position if it is a JPEG or PNG of RGB. Raises DataError."""
        return None

    def encoded(self, i: int) -> bytes | None:
        """Return the stored file of frame `i`, or None. Converters copy it instead of encoding."""
        return self.encoded_at(int(self._at[i]))


class SingleFrame:
    """The image uint8[H, W, 3] of `frames` with N = 1. `np.asarray` decodes it; `frame[None]` is `frames` itself."""

    dtype = np.dtype(np.uint8)
    ndim = 3

    def __init__(self, frames: Frames) -> None:
        self._frames, self.shape, self.nbytes = frames, frames.shape[1:], frames.nbytes

    @property
    def encoded(self) -> bytes | None:
        return self._frames.encoded(0)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, i: Any) -> Any:
        return self._frames if i is None else self._frames[0][i]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a frame is decoded: there is no array to share")
        return np.asarray(self._frames[0], dtype)


@contextlib.contextmanager
def _opened(data: bytes, where: str, shape: Sequence[int] | None) -> Iterator[Any]:
    from PIL import Image  # slow to import, and few episodes need it

    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            if shape is not None and (image.height, image.width) != tuple(shape[:2]):
                raise DataError(
                    f"{where}: the image has {image.height}x{image.width} pixels (expected {shape[0]}x{shape[1]})"
                )
            yield image
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{where}: not a whole JPEG or PNG image ({error})") from error


def decode_image(data: bytes, where: str, shape: Sequence[int] | None = None) -> np.ndarray:
    """Decode a JPEG or PNG file as uint8[H, W, 3] in the order of its channels.

    Raises DataError starting with `where`: it is damaged, or its header has another size than `shape` [H, W, 3].
    """
    with _opened(data, where, shape) as image:
        return np.asarray(image.convert("RGB"))


def encode_image(image: np.ndarray, format: str, **options: Any) -> bytes:
    """Encode uint8[H, W, 3] as a file of Pillow's `format`, with its options."""
    from PIL import Image  # slow to import

    out = io.BytesIO()
    Image.fromarray(image).save(out, format, **options)
    return out.getvalue()


def image_size(data: bytes, where: str) -> tuple[int, int]:
    """Return height and width from the header of a JPEG or PNG file. Raises DataError starting with `where`."""
    with _opened(data, where, None) as image:
        return image.height, image.width


def encoded_file(data: bytes, where: str, shape: Sequence[int]) -> bytes | None:
    """Return `data`, a file that can be copied without decoding, or None where its image is not RGB.

    Raises DataError starting with `where`: the file is no JPEG or PNG, is cut off, or is not of `shape` [H, W, 3].
    """
    if data.startswith(_JPEG) and not data.endswith(_JPEG_END):
        raise DataError(f"{where}: not a whole JPEG or PNG image (it has no end)")
    with _opened(data, where, shape) as image:
        return data if image.mode == "RGB" else None


class FileVersion(NamedTuple):
    """Size and time of a file, which tell it from another one that took its name."""

    size: int
    modified: int  # ns

    @classmethod
    def of(cls, path: Path) -> FileVersion:
        """Return the version of the file at `path` now. Raises OSError."""
        now = os.stat(path)
        return cls(now.st_size, now.st_mtime_ns)

    def check(self, path: Path) -> None:
        """Raise DataError unless the file at `path` still has this version. Raises OSError."""
        if FileVersion.of(path) != self:
            raise DataError(f"{path}: the file was changed while it was being read. Read it again")


class OpenFiles:
    """Keeps the `limit` files open that were read last, for one user at a time."""

    def __init__(self, open_file: Callable[[Path], Any], limit: int) -> None:
        self._open, self.limit = open_file, limit
        self._files: OrderedDict[Path, tuple[FileVersion, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._inherited: list[OrderedDict[Path, Any]] = []
        os.register_at_fork(after_in_child=self._start_over)

    def use(self, path: Path, version: FileVersion, get: Callable[[Any], Any]) -> Any:
        """Return `get(opened file)`; the file stays open. Raises DataError where it no longer has that `version`."""
        with self._lock:
            try:
                version.check(path)
                if path in self._files and self._files[path][0] != version:
                    self._forget(path)
                if path not in self._files:
                    self._files[path] = version, self._open(path)
                self._files.move_to_end(path)
                while len(self._files) > self.limit:
                    self._forget(next(iter(self._files)))
                return get(self._files[path][1])
            except Exception:
                self._forget(path)
                raise

    def close(self, path: Path | None = None) -> None:
        """Close the file at `path`, or all: h5py opens no file for writing that its process holds open."""
        with self._lock:
            for each in [path] if path is not None else list(self._files):
                self._forget(each)

    def _forget(self, path: Path) -> None:
        if path in self._files:
            self._files.pop(path)[1].close()

    def _start_over(self) -> None:
        # A child of fork shares a library's state but not its place in the files, and has none of its threads. The
        # parent's files are kept: freeing a decoder would wait for its threads forever.
        self._inherited.append(self._files)
        self._files, self._lock = OrderedDict(), threading.Lock()


class RecentlyUsed:
    """Values that were used last, up to `limit` bytes of them, one at least. Thread-safe; makes one at a time."""

    def __init__(self, limit: int, size: Callable[[Any], int]) -> None:
        self._limit, self._size_of, self._size = limit, size, 0
        self._values: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of `key`, made where it is not held."""
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
                self._size += self._size_of(self._values[key])
            self._values.move_to_end(key)
            while self._size > self._limit and len(self._values) > 1:
                self._size -= self._size_of(self._values.popitem(last=False)[1])
            return self._values[key]

    def start_over(self) -> None:
        """Take a new lock, in a child of fork: the parent's may be held by a thread that is not there."""
        self._lock = threading.Lock()


def observation_at(steps: StepBlock, i: int) -> Observation:
    """As `steps.observation_at(i)`, but images that are `Frames` stay encoded."""
    out: dict[str, Any] = {k: v[i] for k, v in steps.observation.items()}
    for key, rows in steps.sparse.items():
        if key.startswith(IMAGE_PREFIX) and len(at := np.flatnonzero(rows.index == i)):
            out[key] = single_frame(rows.values[at[:1]])
    return out


def single_frame(frames: Any) -> Any:
    """Return the image of `frames` with N = 1, still encoded where they are `Frames`."""
    return SingleFrame(frames) if isinstance(frames, Frames) else frames[0]


def with_repeated_frames(steps: StepBlock, end: End) -> tuple[StepBlock, End]:
    """Replace `repeat/<camera>` and `end.repeats` by the frames of the ticks that they name.

    `steps` are the whole episode's. A tick that recorded no frame gives none. `Frames` stay encoded.
    """
    if end.repeats is None and not any(key.startswith(REPEAT_PREFIX) for key in steps.sparse):
        return steps, end
    sparse: dict[str, SparseRows] = {}
    for key, rows in steps.sparse.items():
        if not key.startswith(REPEAT_PREFIX):
            sparse.setdefault(key, rows)
            continue
        key = IMAGE_PREFIX + key.removeprefix(REPEAT_PREFIX)
        if (frames := steps.sparse.get(key)) is not None:  # on their own ticks, and on those that repeat one of these
            at = np.minimum(np.searchsorted(frames.index, rows.values), len(frames.index) - 1)
            known = (frames.index[at] == rows.values) & ~np.isin(rows.index, frames.index)
            index = np.concatenate([frames.index, rows.index[known]])
            order = np.argsort(index)
            which = np.concatenate([np.arange(len(frames.index)), at[known]])
            sparse[key] = SparseRows(index[order].astype(np.int32), frames.values[which[order]])
    final: dict[str, Any] | None = None if end.final_observation is None else dict(end.final_observation)
    for camera, tick in (end.repeats or {}).items():
        recorded = steps.sparse.get(IMAGE_PREFIX + camera)
        if final is not None and recorded is not None and len(at := np.flatnonzero(recorded.index == tick)):
            final[IMAGE_PREFIX + camera] = single_frame(recorded.values[at])
    return dataclasses.replace(steps, sparse=sparse), end._replace(final_observation=final, repeats=None)
