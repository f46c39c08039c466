"""A LeRobot data set as a target of conversions.

Files during a conversion, below the data set's folder:

    .staging/staged_<number>/       an episode that a worker has written, as a whole
    .staging/placed_<index>/        the same with its place in the data set
        rows.arrow, <camera>.mp4    removed when they are in one of the data set's files
        beside.arrow                until the end, a row for the tables of episodes
    .staging/*.part                 a file of the data set that is not complete

The episodes that share a file follow from their sizes alone (`shards`), so that a resumed conversion and an
uninterrupted one write the same bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from serl_chunk.data.lerobot import sidecar, video
from serl_chunk.data.lerobot.arrow import pa, write_arrow
from serl_chunk.data.lerobot.metadata import Metadata
from serl_chunk.data.lerobot.rows import Histogram, newest, write_rows
from serl_chunk.data.lerobot.shards import ROWS, SIDECAR, STAGING, PendingShards
from serl_chunk.data.source import Json
from serl_chunk.data.validate import cameras_of, check_episode, check_equal_steps, check_shapes, shapes_of
from serl_chunk.io import fsync_path
from serl_chunk.types import ConfigError, DataError, Episode, SparseRows


@dataclasses.dataclass(frozen=True)
class LeRobotSink:
    """A `data.source.Sink`."""

    folder: Path  # of the data set
    version: Literal["v3.0", "v2.1"] = "v3.0"
    mode: Literal["image", "video"] = "image"  # every frame a file of its own, without loss, or mp4 files
    image_codec: Literal["png", "jpeg"] = "png"  # frames that are stored as one of them already are copied
    task: str = ""  # text of the task of episodes that have none
    data_file_mb: float = 100.0  # size at which a file is closed and the next one begun (v3.0)
    video_file_mb: float = 200.0
    tolerance_s: float | None = 1e-4  # largest distance of a stamp from its place at the rate; None: any

    def __post_init__(self) -> None:
        if self.tolerance_s is not None and not self.tolerance_s > 0:
            raise ConfigError(f"must be above 0, got {self.tolerance_s}", parameter="tolerance_s")

    def layout(self, sample: Episode, hz: float | None) -> Json:
        if hz is None or not hz > 0:
            raise DataError("a LeRobot data set needs a rate, which is unknown here. Set hz")
        pa.int64()  # raises where pyarrow is missing
        shapes = shapes_of(sample)
        if slashed := [name for name in shapes["cameras"] if "/" in name]:
            raise DataError(f"camera {slashed[0]!r}: LeRobot admits no slash in a name. Rename it")
        filmed = shapes["cameras"] if self.mode == "video" else {}
        return {
            "version": self.version,
            "hz": float(hz),
            **shapes,
            "videos": {name: video.codec_for(*size) for name, size in filmed.items()},
            "image_codec": self.image_codec,
            "robot_type": sample.begin.robot or "unknown",
            "data_file_mb": self.data_file_mb,
            "video_file_mb": self.video_file_mb,
        }

    def stage(self, layout: Json, number: int, episode: Episode) -> Json:
        where = f"episode {episode.begin.episode_id}"
        check_episode(where, episode, None)
        check_shapes(where, episode, layout)
        if self.tolerance_s is not None and episode.steps.stamp.any():  # all 0: unknown
            check_equal_steps(where, episode.steps.stamp, layout["hz"], self.tolerance_s)
        final = self.folder / STAGING / f"staged_{number}"
        part = final.with_name(f"{final.name}.part")
        for left in (part, final):
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            histograms = write_rows(part / ROWS, where, layout, episode)
            for name in layout["videos"]:
                rows = cameras_of(episode)[name]
                histograms[name] = self._write_video(part / f"{name}.mp4", layout, name, rows, episode.steps.n)
            task = episode.begin.task or self.task
            row = sidecar.row_of(where, episode, task, histograms)
            schema = sidecar.schema(staged=True)
            write_arrow(part / SIDECAR, schema, [pa.RecordBatch.from_pylist([row], schema=schema)])
            fsync_path(part)
            os.replace(part, final)
            fsync_path(final.parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        sizes = {p.name: p.stat().st_size for p in sorted(final.iterdir()) if p.name != SIDECAR}
        return {"number": number, "length": episode.steps.n, "task": task, "bytes": sizes}

    def placed(self, layout: Json, staged: list[Json]) -> int:
        """See Sink. An episode with a place counts, also before the data set's file with it is written."""
        shards = PendingShards(self.folder, layout)
        if shards.complete():
            return len(staged)
        n = shards.clean_up(len(staged))
        shards.settle(staged[:n])
        return n

    def place(self, layout: Json, staged: list[Json]) -> None:
        PendingShards(self.folder, layout).add(staged)

    def finish(self, layout: Json, staged: list[Json]) -> None:
        shards = PendingShards(self.folder, layout)
        if not shards.complete():
            shards.settle(staged, to_the_end=True)
            Metadata(self.folder, layout, staged, shards).write()
        shutil.rmtree(self.folder / STAGING, ignore_errors=True)

    def _write_video(self, path: Path, layout: Json, name: str, rows: SparseRows, n: int) -> Histogram:
        histogram = Histogram(len(rows.index))

        def frames() -> Iterator[np.ndarray]:
            for at, times in enumerate(np.bincount(newest(rows.index, n))):
                image = rows.values[at]
                histogram.add(at, image, name)
                yield from itertools.repeat(image, times)

        height, width = layout["cameras"][name]
        video.encode(path, frames(), height, width, layout["hz"], layout["videos"][name])
        fsync_path(path)
        return histogram
