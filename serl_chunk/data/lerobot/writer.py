"""A LeRobot data set as a target of conversions.

What is where while it is being written, below the data set's folder:

    .staging/staged_<number>/       an episode that a worker has written, as a whole
    .staging/placed_<index>/        the same with its place in the data set
        rows.arrow, <camera>.mp4    gone when they are in one of the data set's files
        beside.arrow                until the end, with what the tables about episodes need
    .staging/tasks.json             texts of the tasks, in the order in which they came
    .staging/*.part                 a file of the data set that is not complete

Which episodes share a file follows from their sizes alone (`piles`), so that a data set that was continued after an
interruption is that of an uninterrupted conversion, byte for byte.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from serl_chunk.data.lerobot import dataset_layout, sidecar
from serl_chunk.data.lerobot.arrow import pa, sync, write_arrow
from serl_chunk.data.lerobot.images import Histogram, newest
from serl_chunk.data.lerobot.schema import cameras_of, check_stamps, write_rows
from serl_chunk.data.lerobot.shards import BESIDE, ROWS, STAGING, PendingShards
from serl_chunk.data.source import Json
from serl_chunk.data.validate import check_episode
from serl_chunk.types import STATE, ConfigError, DataError, Episode, SparseRows

MODES, CODECS = ("image", "video"), ("png", "jpeg")


@dataclasses.dataclass(frozen=True)
class LeRobotSink:
    """See `data.sink.Sink`.

    Args:
        folder: of the data set.
        version: "v3.0" or "v2.1".
        mode: "image" keeps every frame as a file of its own, as exact as it came; "video" keeps mp4 files.
        image_codec: "png" or "jpeg", of frames that are not stored as one of them already: such are copied.
        jpeg_quality: 1 to 95.
        task: text of the task of episodes that have none.
        robot_type: for LeRobot's information; "" takes the first episode's robot.
        data_file_mb, video_file_mb: at which size (MB) a file is closed and the next one begun (v3.0).
        tolerance_s: seconds by which a step may leave its place at the rate; None takes any for equal.

    Raises ConfigError for values that are none of these.
    """

    folder: Path
    version: str = dataset_layout.V30
    mode: str = "image"
    image_codec: str = "png"
    jpeg_quality: int = 95
    task: str = ""
    robot_type: str = ""
    data_file_mb: float = 100.0
    video_file_mb: float = 200.0
    tolerance_s: float | None = 1e-4

    def __post_init__(self) -> None:
        valid = (("version", dataset_layout.VERSIONS), ("mode", MODES), ("image_codec", CODECS))
        for name, values in valid:
            if getattr(self, name) not in values:
                raise ConfigError(f"LeRobot {name} {getattr(self, name)!r}: valid are {', '.join(values)}")
        if not 1 <= self.jpeg_quality <= 95:
            raise ConfigError(f"jpeg_quality must lie in 1..95, got {self.jpeg_quality}")
        for name in ("data_file_mb", "video_file_mb", "tolerance_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value}")

    def layout(self, sample: Episode, hz: float | None) -> Json:
        """See Sink; raises ConfigError where a library is missing."""
        if hz is None or not hz > 0:
            raise DataError("a LeRobot data set needs a rate, which is unknown here: pass --hz")
        pa.int64()  # raises where pyarrow is missing
        cameras = {name: list(rows.values.shape[1:3]) for name, rows in cameras_of(sample).items()}
        for name in cameras:
            if "/" in name:
                raise DataError(f"camera {name!r}: LeRobot admits no slash in a name; rename it")
        videos: Json = {}
        if self.mode == "video":
            from serl_chunk.data.lerobot import video

            videos = {name: video.codec_for(*size) for name, size in cameras.items()}
        return {
            "version": self.version,
            "hz": float(hz),
            "state_dim": sample.steps.observation[STATE].shape[1],
            "action_dim": sample.steps.action.shape[1],
            "cameras": cameras,
            "videos": videos,
            "image_codec": self.image_codec,
            "jpeg_quality": self.jpeg_quality,
            "robot_type": self.robot_type or sample.begin.robot or "unknown",
            "data_file_mb": self.data_file_mb,
            "video_file_mb": self.video_file_mb,
        }

    def stage(self, layout: Json, number: int, episode: Episode) -> Json:
        """See Sink; raises OSError where the disk is at fault."""
        where = f"episode {episode.begin.episode_id}"
        check_episode(where, episode, None)
        self._check_fit(where, layout, episode)
        if self.tolerance_s is not None:
            check_stamps(where, episode.steps.stamp, layout["hz"], self.tolerance_s)
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
            write_arrow(part / BESIDE, schema, [pa.RecordBatch.from_pylist([row], schema=schema)])
            sync(part)
            os.replace(part, final)
            sync(final.parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return {
            "number": number,
            "length": episode.steps.n,
            "task": task,
            "bytes": {p.name: p.stat().st_size for p in sorted(final.iterdir()) if p.name != BESIDE},
        }

    def placed(self, layout: Json, staged: list[Json]) -> int:
        """See Sink. An episode is there for good with its place, also where its data set's file is still to come."""
        piles = PendingShards(self.folder, layout)
        if piles.complete():
            return len(staged)
        n = piles.clean_up(len(staged))
        piles.set_tasks([entry["task"] for entry in staged[:n]])
        piles.settle(staged[:n])
        return n

    def place(self, layout: Json, index: int, staged: Json) -> None:
        """See Sink."""
        piles = PendingShards(self.folder, layout)
        piles.add(index, staged)
        piles.flush_full(index)

    def finish(self, layout: Json, staged: list[Json]) -> None:
        """See Sink."""
        from serl_chunk.data.lerobot.metadata import write_metadata

        piles = PendingShards(self.folder, layout)
        if not piles.complete():
            piles.set_tasks([entry["task"] for entry in staged])
            piles.settle(staged, to_the_end=True)
            write_metadata(self.folder, layout, staged, piles)
        shutil.rmtree(self.folder / STAGING, ignore_errors=True)

    def _check_fit(self, where: str, layout: Json, episode: Episode) -> None:
        shapes = {
            "state_dim": episode.steps.observation[STATE].shape[1],
            "action_dim": episode.steps.action.shape[1],
            "cameras": {name: list(rows.values.shape[1:3]) for name, rows in cameras_of(episode).items()},
        }
        for name, value in shapes.items():
            if value != layout[name]:
                raise DataError(
                    f"{where}: {name} {value} among episodes with {name} {layout[name]}; LeRobot wants the same of "
                    "all. --cameras chooses what is read, and episodes of two robots are two data sets"
                )

    def _write_video(self, path: Path, layout: Json, name: str, rows: SparseRows, n: int) -> Histogram:
        from serl_chunk.data.lerobot import video

        histogram = Histogram(len(rows.index))

        def frames() -> Iterator[np.ndarray]:
            at, image = -1, np.empty(0)
            for frame in newest(rows.index, n):
                if frame != at:
                    at, image = int(frame), rows.values[int(frame)]
                    if histogram.wants(at):
                        histogram.add(image, name)
                yield image

        height, width = layout["cameras"][name]
        video.encode(path, frames(), height, width, layout["hz"], layout["videos"][name])
        sync(path)
        return histogram
