"""One frame that is decoded when somebody looks at it, where an observation holds an image."""

from __future__ import annotations

from typing import Any

import numpy as np

from serl_chunk.data.frames import Encoded, Frames
from serl_chunk.types import IMAGE_PREFIX, Observation, StepBlock


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
