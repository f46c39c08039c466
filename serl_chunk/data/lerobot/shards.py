"""Episodes that wait for the data or video file that they share.

A pending shard holds the episodes of the next data file, or of the next video file of one camera. It becomes a file
when it has reached a file's size, or at the end. No state is kept in memory between two calls: the files in the staging
folder are the pending episodes, and a file of the data set appears in one step.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from serl_chunk.data.lerobot import dataset_layout as ds
from serl_chunk.data.lerobot import video
from serl_chunk.data.lerobot.arrow import Table, publish, read_arrow, write_parquet
from serl_chunk.data.lerobot.rows import parquet_options, placed_table, schema
from serl_chunk.data.source import Json
from serl_chunk.io import fsync_path
from serl_chunk.types import DataError

STAGING = ".staging"
ROWS, SIDECAR = "rows.arrow", "beside.arrow"


class PendingShards:
    """All pending shards of the data set in `folder`."""

    def __init__(self, folder: Path, layout: Json) -> None:
        self._folder, self._layout = folder, layout
        self._staging = folder / STAGING
        self._patterns = ds.PATTERNS[layout["version"]]
        self.names = [ROWS, *(f"{camera}.mp4" for camera in layout["videos"])]

    def complete(self) -> bool:
        return (self._folder / ds.INFO).exists()  # it comes last: only cleaning up is left

    def file(self, name: str, number: int) -> Path:
        if name == ROWS:
            return self._folder / ds.file_of(self._patterns.data, number)
        key = ds.CAMERA + name.removesuffix(".mp4")
        return self._folder / ds.file_of(self._patterns.video, number, key)

    def groups(self, name: str, staged: Sequence[Json], *, to_the_end: bool = True) -> list[range]:
        """Return the episodes of each file, which is closed as soon as it has reached its size."""
        out, start, total = [], 0, 0
        for i, entry in enumerate(staged):
            total += entry["bytes"][name]
            if total >= self._limit(name):
                out.append(range(start, i + 1))
                start, total = i + 1, 0
        return out + [range(start, len(staged))] * (to_the_end and start < len(staged))

    def sidecar(self, index: int) -> Json:
        """Return a placed episode's row, see `sidecar.schema`."""
        return read_arrow(self._placed(index) / SIDECAR).to_pylist()[0]

    def part(self, name: str) -> Path:
        return self._staging / f"{name}.part"

    def clean_up(self, n: int) -> int:
        """Remove unplaced episodes and partial files; returns how many of `n` episodes have a place, from 0 on."""
        there = next((i for i in range(n) if not self._placed(i).is_dir()), n)
        for path in self._staging.glob("*") if self._staging.is_dir() else ():
            kind, _, number = path.name.partition("_")
            if kind == "placed" and number.isdigit() and int(number) < there:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return there

    def add(self, staged: Sequence[Json]) -> None:
        """Give the last of the `staged` episodes its place, and write the files of the shards that it makes full."""
        index = len(staged) - 1
        os.replace(self._staging / f"staged_{staged[index]['number']}", self._placed(index))
        fsync_path(self._staging)
        for name in self.names:
            start = index
            while start > 0 and (self._placed(start - 1) / name).exists():
                start -= 1
            group = range(start, index + 1)
            if sum((self._placed(i) / name).stat().st_size for i in group) >= self._limit(name):
                files = (number for number in itertools.count() if not self.file(name, number).exists())
                self._merge(name, index if self._layout["version"] == ds.V21 else next(files), group, staged)

    def settle(self, staged: Sequence[Json], *, to_the_end: bool = False) -> None:
        """Write every due file of the placed episodes `staged`, all of them in order."""
        for name in self.names:
            for number, group in enumerate(self.groups(name, staged, to_the_end=to_the_end)):
                if self.file(name, number).exists():
                    self._drop(name, group)
                else:
                    self._merge(name, number, group, staged)

    def _limit(self, name: str) -> float:
        if self._layout["version"] == ds.V21:
            return 0  # a file an episode
        return 1e6 * self._layout["data_file_mb" if name == ROWS else "video_file_mb"]

    def _merge(self, name: str, number: int, group: range, staged: Sequence[Json]) -> None:
        path = self.file(name, number)
        parts = [self._placed(i) / name for i in group]
        if missing := [part for part in parts if not part.exists()]:
            raise DataError(f"{missing[0]}: no such file; {path.name} needs it. Convert into a new folder")
        part, lengths = self.part(path.name), [entry["length"] for entry in staged[: group.stop]]
        if name == ROWS:
            tables = self._tables(group, parts, sum(lengths[: group.start]), tasks_of(staged), staged)
            write_parquet(part, path, schema(self._layout, placed=True), tables, **parquet_options(self._layout))
        else:
            video.join(part, parts, lengths[group.start :], self._layout["hz"])
            publish(part, path)
        self._drop(name, group)

    def _tables(
        self, group: range, parts: Sequence[Path], first: int, tasks: dict[str, int], staged: Sequence[Json]
    ) -> Iterator[Table]:
        for episode, part in zip(group, parts, strict=True):
            table = read_arrow(part)
            yield placed_table(table, self._layout, episode, first, tasks[staged[episode]["task"]])
            first += table.num_rows

    def _drop(self, name: str, group: range) -> None:
        for i in group:
            (self._placed(i) / name).unlink(missing_ok=True)

    def _placed(self, index: int) -> Path:
        return self._staging / f"placed_{index}"


def tasks_of(staged: Sequence[Json]) -> dict[str, int]:
    """Return text -> `task_index` of the episodes' tasks, in the order of their first episodes."""
    return {text: i for i, text in enumerate(dict.fromkeys(entry["task"] for entry in staged))}
