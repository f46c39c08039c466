"""Episodes that wait for their file: how many of them share one, and putting them into it.

A pile is what waits for the next data file, or for the next video file of one camera. It is full when it has reached
the size of a file; then, or at the end, it becomes one. Nothing is kept in memory between two calls: what waits is
told by the files in the staging folder, and a file of the data set appears in one step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serl_chunk.data.lerobot import dataset_layout
from serl_chunk.data.lerobot.arrow import Table, pq, publish, read_arrow, sync, write_parquet
from serl_chunk.data.lerobot.schema import parquet_options, placed_table, schema
from serl_chunk.data.source import Json
from serl_chunk.types import DataError

STAGING = ".staging"
ROWS, BESIDE, TASKS = "rows.arrow", "beside.arrow", "tasks.json"


class ShardRange(NamedTuple):
    """Episodes `start <= i < stop` that share a file."""

    start: int
    stop: int


def groups_of(sizes: Sequence[int], limit: float, *, to_the_end: bool) -> list[ShardRange]:
    """How episodes of these sizes (bytes) share files: one is closed as soon as it has reached `limit` bytes."""
    out, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        total += size
        if total >= limit:
            out.append(ShardRange(start, i + 1))
            start, total = i + 1, 0
    if to_the_end and start < len(sizes):
        out.append(ShardRange(start, len(sizes)))
    return out


class PendingShards:
    """All piles of the data set in `folder`."""

    def __init__(self, folder: Path, layout: Json) -> None:
        self._folder, self._layout = folder, layout
        self._staging = folder / STAGING
        self._patterns = dataset_layout.PATTERNS[layout["version"]]
        self.names = [ROWS, *(f"{camera}.mp4" for camera in layout["videos"])]

    def complete(self) -> bool:
        """Whether nothing is left to do but to clean up: `info.json` comes last."""
        return (self._folder / dataset_layout.INFO).exists()

    def file(self, name: str, number: int) -> Path:
        """The `number`-th file that a pile has become or will become."""
        if name == ROWS:
            return self._folder / dataset_layout.file_of(self._patterns.data, number)
        key = dataset_layout.CAMERA + name.removesuffix(".mp4")
        return self._folder / dataset_layout.file_of(self._patterns.video, number, key)

    def groups(self, name: str, staged: Sequence[Json], *, to_the_end: bool = True) -> list[ShardRange]:
        """The episodes of each file, of all episodes in their order."""
        return groups_of([entry["bytes"][name] for entry in staged], self._limit(name), to_the_end=to_the_end)

    def beside(self, index: int, column: str) -> Any:
        """What else is known of a placed episode: one value of its row, see `beside.schema`."""
        return read_arrow(self._placed(index) / BESIDE).column(column)[0].as_py()

    def beside_row(self, index: int) -> Json:
        """All of them."""
        return read_arrow(self._placed(index) / BESIDE).to_pylist()[0]

    def part(self, name: str) -> Path:
        """Where a file is written until it is complete."""
        return self._staging / f"{name}.part"

    def clean_up(self, n: int) -> int:
        """Remove what has no place, and what is half done; gives how many of `n` episodes have one, from 0 on."""
        there = 0
        while there < n and self._placed(there).is_dir():
            there += 1
        for path in self._staging.glob("*") if self._staging.is_dir() else ():
            kind, _, number = path.name.partition("_")
            if kind == "placed" and number.isdigit() and int(number) < there:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != TASKS:
                path.unlink()
        return there

    def set_tasks(self, texts: Sequence[str]) -> None:
        """The tasks of the placed episodes."""
        self._staging.mkdir(parents=True, exist_ok=True)
        part = self.part(TASKS)
        part.write_text(json.dumps(list(dict.fromkeys(texts))))
        publish(part, self._staging / TASKS)

    def tasks(self) -> list[str]:
        """Texts of the tasks; a task's place is its `task_index`."""
        path = self._staging / TASKS
        return json.loads(path.read_text()) if path.exists() else []

    def add(self, index: int, staged: Json) -> None:
        """Give a staged episode its place."""
        known = self.tasks()
        if staged["task"] not in known:
            self.set_tasks([*known, staged["task"]])
        os.replace(self._staging / f"staged_{staged['number']}", self._placed(index))
        sync(self._staging)

    def flush_full(self, index: int) -> None:
        """After episode `index` was added: make files of the piles that have become full."""
        for name in self.names:
            start = index
            while start > 0 and (self._placed(start - 1) / name).exists():
                start -= 1
            group = ShardRange(start, index + 1)
            sizes = [(self._placed(i) / name).stat().st_size for i in range(*group)]
            if sum(sizes) >= self._limit(name):
                self._merge(name, self._next_number(name, index), group)

    def settle(self, staged: Sequence[Json], *, to_the_end: bool = False) -> None:
        """Make every file that there should be of the placed episodes `staged`, all of them in order."""
        for name in self.names:
            for number, group in enumerate(self.groups(name, staged, to_the_end=to_the_end)):
                if self.file(name, number).exists():
                    self._drop(name, group)
                else:
                    self._merge(name, number, group)

    def _limit(self, name: str) -> float:
        if self._layout["version"] == dataset_layout.V21:
            return 0  # a file an episode
        return 1e6 * self._layout["data_file_mb" if name == ROWS else "video_file_mb"]

    def _next_number(self, name: str, index: int) -> int:
        """How many files a pile has become; there is at most one an episode."""
        if self._layout["version"] == dataset_layout.V21:
            return index
        number = 0
        while self.file(name, number).exists():
            number += 1
        return number

    def _merge(self, name: str, number: int, group: ShardRange) -> None:
        path = self.file(name, number)
        parts = [self._placed(i) / name for i in range(*group)]
        missing = [part for part in parts if not part.exists()]
        if missing:
            raise DataError(f"{missing[0]}: is gone, and {path.name} needs it; convert into a new folder")
        part = self.part(path.name)
        if name == ROWS:
            self._merge_rows(part, path, group, parts, number)
        else:
            from serl_chunk.data.lerobot import video

            lengths = [self.beside(i, "length") for i in range(*group)]
            video.join(part, parts, lengths, self._layout["hz"])
            publish(part, path)
        self._drop(name, group)

    def _merge_rows(self, part: Path, path: Path, group: ShardRange, parts: Sequence[Path], number: int) -> None:
        tasks = {text: i for i, text in enumerate(self.tasks())}
        first = _rows_until(self.file(ROWS, number - 1)) if number else 0

        def tables() -> Iterator[Table]:
            at = first
            for episode, each in zip(range(*group), parts, strict=True):
                table = read_arrow(each)
                yield placed_table(table, self._layout, episode, at, tasks[self.beside(episode, "task")])
                at += table.num_rows

        write_parquet(part, path, schema(self._layout, placed=True), tables(), **parquet_options(self._layout))

    def _drop(self, name: str, group: ShardRange) -> None:
        """What is in a file of the data set need not wait any more."""
        for i in range(*group):
            (self._placed(i) / name).unlink(missing_ok=True)

    def _placed(self, index: int) -> Path:
        return self._staging / f"placed_{index}"


def _rows_until(path: Path) -> int:
    """How many rows the data set has, up to and with the data file at `path`."""
    about = pq.read_metadata(str(path))
    group = about.row_group(about.num_row_groups - 1)
    column = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == dataset_layout.INDEX)
    return int(column.statistics.max) + 1
