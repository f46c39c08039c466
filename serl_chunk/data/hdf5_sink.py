"""A folder of episodes in this project's HDF5 layout, one file each, as a target of conversions."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from serl_chunk.data.hdf5 import sync_folder, write_file
from serl_chunk.data.sink import Json
from serl_chunk.types import IMAGE_PREFIX, STATE, DataError, Episode, RobotSpec


@dataclasses.dataclass(frozen=True)
class Hdf5Sink:
    """See `data.sink.Sink`: `folder/episode_<index>.hdf5`, from 0 on.

    An episode is staged as a hidden file of the same folder and renamed when its index is known. The same episode
    always becomes the same bytes.

    Args:
        folder: where the files go.
        spec: the robot, if its layout (which state values are joints, its rate) is wanted.
        compress: gzip the frames, see `data.hdf5.write_episode`.
        joints: which state values are joints, where `spec` is not known.
    """

    folder: Path
    spec: RobotSpec | None = None
    compress: bool = False
    joints: tuple[int, ...] | None = None

    def layout(self, sample: Episode, hz: float | None) -> Json:
        """See Sink. A rate is kept where one is known, and not demanded."""
        return {"hz": hz, **_shapes(sample)}

    def stage(self, layout: Json, number: int, episode: Episode) -> Json:
        """See Sink; raises OSError where the disk is at fault."""
        for name, value in _shapes(episode).items():
            if value != layout[name]:
                raise DataError(
                    f"{name} {value} among episodes with {name} {layout[name]}; --cameras chooses what is read, and "
                    "episodes of two robots are two data sets"
                )
        part = self._part(number)
        part.unlink(missing_ok=True)
        try:
            where = f"episode {episode.begin.episode_id}"
            write_file(
                part, episode, self.spec, compress=self.compress, hz=layout["hz"], joints=self.joints, where=where
            )
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return {"number": number}

    def placed(self, layout: Json, staged: list[Json]) -> int:
        """See Sink."""
        for part in self.folder.glob(".staged_*.part"):
            part.unlink()
        there = (self._file(index).exists() for index in range(len(staged)))
        return next((index for index, is_there in enumerate(there) if not is_there), len(staged))

    def place(self, layout: Json, index: int, staged: Json) -> None:
        """See Sink."""
        os.replace(self._part(staged["number"]), self._file(index))
        sync_folder(self.folder)

    def finish(self, layout: Json, staged: list[Json]) -> None:
        """See Sink. There is nothing to describe."""
        self.placed(layout, staged)

    def _part(self, number: int) -> Path:
        return self.folder / f".staged_{number}.part"

    def _file(self, index: int) -> Path:
        return self.folder / f"episode_{index}.hdf5"


def _shapes(episode: Episode) -> Json:
    """What all episodes of a data set have in common."""
    images = {name: rows.values for name, rows in episode.steps.sparse.items() if name.startswith(IMAGE_PREFIX)}
    return {
        "state_dim": episode.steps.observation[STATE].shape[1],
        "action_dim": episode.steps.action.shape[1],
        "cameras": {
            name.removeprefix(IMAGE_PREFIX): list(frames.shape[1:3])
            for name, frames in sorted(images.items())
            if len(frames)
        },
    }
