"""Frames that are decoded on access: a long episode's images never lie in memory together."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import numpy as np

from serl_chunk.types import IMAGE_PREFIX, REPEAT_PREFIX, End, Observation, SparseRows, StepBlock

Codec = Literal["jpeg", "png"]


class Encoded(NamedTuple):
    """An image file as it is stored."""

    codec: Codec
    data: bytes


class Frames(ABC):
    """Images uint8[N, H, W, 3], RGB, of one camera, each decoded anew when it is asked for.

    It looks like such an array where only single frames and selections of frames are asked for: `len`, `shape`,
    `dtype`, `ndim`, `nbytes`; an integer gives the image uint8[H, W, 3], a slice, a mask or an array of integers gives
    the Frames of these; `np.asarray` decodes them all. Subclasses hold paths and never open files, so that a process
    may send them to another one.

    Args:
        shape: [H, W, 3] of every frame.
        at: where each frame lies, in the subclass's own numbering.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, shape: tuple[int, int, int], at: np.ndarray) -> None:
        self.shape = (len(at), *shape)
        self._at = at

    @abstractmethod
    def decode(self, at: int) -> np.ndarray:
        """The image uint8[H, W, 3] that lies at `at`. Raises DataError naming the file and the place."""

    def encoded_at(self, at: int) -> Encoded | None:
        """The stored file of that image, where it is stored as JPEG or PNG of RGB; raises DataError."""
        return None

    def encoded(self, i: int) -> Encoded | None:
        """The stored file of frame `i`, None where it is stored otherwise. Converters copy it instead of encoding."""
        return self.encoded_at(int(self._at[i]))

    def __len__(self) -> int:
        return len(self._at)

    @property
    def nbytes(self) -> int:
        """Of the decoded images."""
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
        out = np.empty(self.shape, np.uint8)
        for i in range(len(self)):
            out[i] = self[i]
        return out if dtype is None else out.astype(dtype)


def decode_image(data: bytes, where: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """A JPEG or PNG file as uint8[H, W, 3] in the order of its channels; raises DataError beginning with `where`.

    `shape`: what it must have; the file's header is checked before anything is decoded.
    """
    import io

    from PIL import Image  # slow to import, and few episodes need it

    from serl_chunk.types import DataError

    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            if shape is not None and (image.height, image.width) != tuple(shape[:2]):
                raise DataError(
                    f"{where}: an image of {image.height}x{image.width} pixels among those of {shape[0]}x{shape[1]}"
                )
            return np.asarray(image.convert("RGB"))
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{where}: not a whole JPEG or PNG image ({error})") from error


class SingleFrame:
    """An image uint8[H, W, 3] of `frames`, which has one. `np.asarray` decodes it, `frame[None]` is `frames` itself."""

    dtype = np.dtype(np.uint8)
    ndim = 3

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self.shape = frames.shape[1:]

    @property
    def nbytes(self) -> int:
        """Of the decoded image."""
        return self._frames.nbytes

    @property
    def encoded(self) -> Encoded | None:
        """The stored file of the image, where it is stored as JPEG or PNG."""
        return self._frames.encoded(0)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, i: Any) -> Any:
        return self._frames if i is None else self._frames[0][i]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a frame is decoded: there is no array to share")
        image: np.ndarray = self._frames[0]
        return image if dtype is None else image.astype(dtype)


def observation_at(steps: StepBlock, i: int) -> Observation:
    """As `steps.observation_at(i)`, but that images which are `Frames` stay where they are."""
    out: dict[str, Any] = {k: v[i] for k, v in steps.observation.items()}
    for key, rows in steps.sparse.items():
        at = np.flatnonzero(rows.index == i)
        if key.startswith(IMAGE_PREFIX) and len(at):
            part = rows.values[at[:1]]
            out[key] = SingleFrame(part) if isinstance(part, Frames) else part[0]
    return out


def with_repeated_frames(steps: StepBlock, end: End) -> tuple[StepBlock, End]:
    """Put an episode's frames in the place of the ticks by which `repeat/<camera>` and `end.repeats` name them.

    `steps` are the episode's, from its first one on. A tick that recorded no frame there gives none: no other frame is
    shown in its place. Images that are `Frames` stay where they are.
    """
    if end.repeats is None and not any(key.startswith(REPEAT_PREFIX) for key in steps.sparse):
        return steps, end
    sparse: dict[str, SparseRows] = {}
    for key, rows in steps.sparse.items():
        if not key.startswith(REPEAT_PREFIX):
            sparse.setdefault(key, rows)
            continue
        key = IMAGE_PREFIX + key.removeprefix(REPEAT_PREFIX)
        if key in steps.sparse:
            sparse[key] = _filled_in(steps.sparse[key], rows)
    final: dict[str, Any] | None = None if end.final_observation is None else dict(end.final_observation)
    for camera, tick in (end.repeats or {}).items():
        frames = steps.sparse.get(IMAGE_PREFIX + camera)
        if final is not None and frames is not None and len(at := np.flatnonzero(frames.index == tick)):
            part = frames.values[at]
            final[IMAGE_PREFIX + camera] = SingleFrame(part) if isinstance(part, Frames) else part[0]
    return dataclasses.replace(steps, sparse=sparse), end._replace(final_observation=final, repeats=None)


def _filled_in(frames: SparseRows, repeats: SparseRows) -> SparseRows:
    """`frames` on their own ticks, and on those whose entry of `repeats` is one of these."""
    at = np.minimum(np.searchsorted(frames.index, repeats.values), len(frames.index) - 1)
    known = (frames.index[at] == repeats.values) & ~np.isin(repeats.index, frames.index)
    index = np.concatenate([frames.index, repeats.index[known]])
    order = np.argsort(index)
    which = np.concatenate([np.arange(len(frames.index)), at[known]])
    return SparseRows(index[order].astype(np.int32), frames.values[which[order]])
