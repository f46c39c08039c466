"""Coded episodes whose images stay in files, as demonstrations have them."""

import dataclasses

import numpy as np

from serl_chunk.data.frames import Frames
from serl_chunk.types import SparseRows


class Files(Frames):
    """Frames in memory that count how often each is decoded, as files would be."""

    def __init__(self, images: np.ndarray) -> None:
        super().__init__(images.shape[1:], np.arange(len(images)))
        self.images, self.decoded, self.together = images, [], []

    def decode(self, at: int) -> np.ndarray:
        self.decoded.append(at)
        return self.images[at]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.together.append(self._at.tolist())
        return super().__array__(dtype, copy)


class One:
    """A single frame that is decoded when it is looked at, as `load_demos` has them in final observations."""

    def __init__(self, frames: Files) -> None:
        self.frames, self.shape, self.dtype, self.ndim = frames, frames.shape[1:], frames.dtype, 3

    def __getitem__(self, i):
        assert i is None
        return self.frames


def lazy(episode, *, final=False):
    """The episode with its images as Frames; its final observation's too with `final`."""
    sparse = {
        k: SparseRows(r.index, Files(r.values)) if k.startswith("images/") else r
        for k, r in episode.steps.sparse.items()
    }
    end = episode.end
    if final and end.final_observation is not None:
        images = {k: One(Files(v[None])) for k, v in end.final_observation.items() if k.startswith("images/")}
        end = end._replace(final_observation=end.final_observation | images)
    return episode._replace(steps=dataclasses.replace(episode.steps, sparse=sparse), end=end)
