"""The description of a whole data set, written last: LeRobot's `meta` folder with exact statistics, and the sidecar."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.lerobot import dataset_layout as ds
from serl_chunk.data.lerobot import sidecar
from serl_chunk.data.lerobot.arrow import Table, matrix, pa, pq, publish, write_parquet
from serl_chunk.data.lerobot.shards import ROWS, PendingShards, tasks_of
from serl_chunk.data.normalise.running_statistics import Statistics
from serl_chunk.data.source import Json

_QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_AT_ONCE = 256  # episodes of a row group of the table of episodes


class Metadata:
    """Writer of `meta`. The data and video files are complete, the episodes still in their places."""

    def __init__(self, folder: Path, layout: Json, staged: Sequence[Json], shards: PendingShards) -> None:
        self.folder, self.layout, self.staged, self.shards = folder, layout, staged, shards
        self.lengths, self.tasks = [entry["length"] for entry in staged], list(tasks_of(staged))
        self.files = shards.groups(ROWS, staged)
        self.frames = dict.fromkeys(layout["cameras"], 0)
        self.counts = {camera: np.zeros((3, 256), np.int64) for camera in layout["cameras"]}
        dims = {ds.STATE: layout["state_dim"], ds.ACTION: layout["action_dim"]}
        self.streams = {name: Statistics(dim, tuple(_QUANTILES.values())) for name, dim in dims.items()}
        self.columns = [*dims, *ds.SCALARS]

    def write(self) -> None:
        """Write all of it, `info.json` last."""
        if self.layout["version"] == ds.V30:
            self.write_episodes()
            self.write_statistics()
            self.write_tasks()
        else:
            self.write_lines()
        self.write_sidecar()
        self.write_info()

    def write_episodes(self) -> None:
        """`meta/episodes`: place and statistics of each episode; accumulates those of all."""
        names = ("min", "max", "mean", "std", *_QUANTILES, "count")
        rows = (
            place | {f"stats/{feature}/{name}": each[name] for feature, each in statistics.items() for name in names}
            for place, statistics in zip(self._places(), self._statistics(), strict=True)
        )
        first = next(rows)
        schema = pa.Table.from_pylist([first]).schema
        tables = _tables(itertools.chain([first], rows), schema, _AT_ONCE)
        write_parquet(self.shards.part("episodes"), self.folder / ds.file_of(ds.EPISODES, 0), schema, tables)

    def write_statistics(self) -> None:
        """`meta/stats.json`, after `write_episodes`."""
        out = {}
        for name, stream in self.streams.items():
            m = stream.moments
            out[name] = _lists(m.low, m.high, m.mean, m.std, m.count, stream.quantile())
        for name in ds.SCALARS:  # one column at a time: 8 bytes a step
            parts = [pq.read_table(str(p), columns=[name]).column(0).to_numpy() for p in self._paths()]
            out[name] = _of_values(np.concatenate(parts)[:, None])
        for camera, counts in self.counts.items():
            out[ds.CAMERA + camera] = _of_frames(counts, self.frames[camera])
        self._write("stats.json", [json.dumps(out, indent=4)])

    def write_tasks(self) -> None:
        """`meta/tasks.parquet`: lerobot looks a text up by its place, in pandas' index."""
        index = "__index_level_0__"
        number = {"pandas_type": "int64", "numpy_type": "int64"}
        text = {"pandas_type": "unicode", "numpy_type": "object"}
        pandas = {
            "index_columns": [index],
            "column_indexes": [{"name": None, "field_name": None, **text, "metadata": {"encoding": "UTF-8"}}],
            "columns": [
                {"name": ds.TASK_INDEX, "field_name": ds.TASK_INDEX, **number, "metadata": None},
                {"name": None, "field_name": index, **text, "metadata": None},
            ],
            "creator": {"library": "pyarrow", "version": pa.__version__},
            "pandas_version": "2.0.0",
        }
        schema = pa.schema([(ds.TASK_INDEX, pa.int64()), (index, pa.string())], metadata={"pandas": json.dumps(pandas)})
        rows = [{ds.TASK_INDEX: i, index: task} for i, task in enumerate(self.tasks)]
        write_parquet(self.shards.part("tasks"), self.folder / ds.TASKS, schema, [pa.Table.from_pylist(rows, schema)])

    def write_lines(self) -> None:
        """Version 2.1's tables, one JSON object a line."""
        tasks = [{"task_index": i, "task": text} for i, text in enumerate(self.tasks)]
        episodes = [
            {"episode_index": i, "tasks": [entry["task"]], "length": entry["length"]}
            for i, entry in enumerate(self.staged)
        ]
        names = ("min", "max", "mean", "std", "count")
        statistics = (
            {"episode_index": i, "stats": {f: {name: each[name] for name in names} for f, each in stats.items()}}
            for i, stats in enumerate(self._statistics())
        )
        for name, rows in (("tasks", tasks), ("episodes", episodes), ("episodes_stats", statistics)):
            self._write(f"{name}.jsonl", (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def write_sidecar(self) -> None:
        found = {name for i in range(len(self.staged)) for name, v in self.shards.sidecar(i).items() if v}
        schema = sidecar.schema(staged=False, absent=sidecar.OPTIONAL.keys() - found)
        rows = ({"episode_index": i, **self.shards.sidecar(i)} for i in range(len(self.staged)))
        tables = _tables(rows, schema, sidecar.GROUP)
        write_parquet(self.shards.part("beside"), self.folder / ds.SIDE, schema, tables)

    def write_info(self) -> None:
        layout, n = self.layout, len(self.staged)
        patterns = ds.PATTERNS[layout["version"]]
        info = {
            "codebase_version": layout["version"],
            "robot_type": layout["robot_type"],
            "total_episodes": n,
            "total_frames": sum(self.lengths),
            "total_tasks": len(self.tasks),
            "chunks_size": ds.CHUNK,
            "fps": ds.fps(layout["hz"]),
            "splits": {"train": f"0:{n}"},
            "data_path": patterns.data,
            "video_path": patterns.video if layout["videos"] else None,
            "features": ds.features(layout),
        }
        if layout["version"] == ds.V30:
            info |= {"data_files_size_in_mb": layout["data_file_mb"], "video_files_size_in_mb": layout["video_file_mb"]}
        else:
            info |= {"total_videos": n * len(layout["videos"]), "total_chunks": -(-n // ds.CHUNK)}
        self._write("info.json", [json.dumps(info, indent=4, ensure_ascii=False)])

    def _places(self) -> Iterator[Json]:
        """Of every episode: its columns of the table of episodes, in their order there."""
        first = np.concatenate([[0], np.cumsum(self.lengths)]).tolist()
        files = [number for number, group in enumerate(self.files) for _ in group]
        videos: list[Json] = [{} for _ in self.staged]
        for camera in self.layout["videos"]:
            key = f"videos/{ds.CAMERA}{camera}"
            for number, group in enumerate(self.shards.groups(f"{camera}.mp4", self.staged)):
                for i in group:
                    at = [(first[k] - first[group.start]) / self.layout["hz"] for k in (i, i + 1)]
                    times = {f"{key}/from_timestamp": at[0], f"{key}/to_timestamp": at[1]}
                    videos[i] |= _place(key, number) | times
        for i, entry in enumerate(self.staged):
            row = {ds.EPISODE_INDEX: i, "tasks": [entry["task"]], "length": entry["length"]}
            rows = {"dataset_from_index": first[i], "dataset_to_index": first[i + 1]}
            yield row | _place("data", files[i]) | rows | _place("meta/episodes", 0) | videos[i]

    def _statistics(self) -> Iterator[Json]:
        """Of every episode: feature -> statistics. Adds to all streams and counts."""
        for i, values in enumerate(self._values()):
            for name, stream in self.streams.items():
                stream.add(values[name])
            out = {name: _of_values(values[name]) for name in self.columns}
            for each in self.shards.sidecar(i)["histograms"]:
                counts = np.frombuffer(each["counts"], np.int64).reshape(3, 256)
                self.counts[each["name"]] += counts
                self.frames[each["name"]] += each["frames"]
                out[ds.CAMERA + each["name"]] = _of_frames(counts, each["frames"])
            yield out

    def _values(self) -> Iterator[dict[str, np.ndarray]]:
        """Of every episode: column of numbers -> [T, D]."""
        for path in self._paths():
            with pq.ParquetFile(str(path)) as file:
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, columns=self.columns)
                    yield {name: matrix(f"{path}: {name}", table.column(name)) for name in self.columns}

    def _paths(self) -> list[Path]:
        return [self.shards.file(ROWS, number) for number in range(len(self.files))]

    def _write(self, name: str, lines: Iterable[str]) -> None:
        part = self.shards.part(name)
        with part.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        publish(part, self.folder / "meta" / name)


def _tables(rows: Iterator[Json], schema: Any, size: int) -> Iterator[Table]:
    while group := list(itertools.islice(rows, size)):
        yield pa.Table.from_pylist(group, schema=schema)


def _place(key: str, number: int) -> Json:
    chunk, index = divmod(number, ds.CHUNK)
    return {f"{key}/chunk_index": chunk, f"{key}/file_index": index}


def _of_values(values: np.ndarray) -> Json:
    """Of numbers or flags [N >= 1, D], all of them in memory: lists of D numbers."""
    x = values.astype(np.float64)
    quantiles = np.quantile(x, list(_QUANTILES.values()), axis=0)
    return _lists(x.min(0), x.max(0), x.mean(0), x.std(0), len(x), quantiles)


def _lists(low: Any, high: Any, mean: Any, std: Any, count: int, quantiles: np.ndarray) -> Json:
    vectors = {"min": low.tolist(), "max": high.tolist(), "mean": mean.tolist(), "std": std.tolist(), "count": [count]}
    return vectors | dict(zip(_QUANTILES, quantiles.tolist(), strict=True))


def _of_frames(counts: np.ndarray, frames: int) -> Json:
    """Of images by how often each value occurs in each channel, int64[3, 256]: in [0, 1], of shape [3, 1, 1]."""
    value = np.arange(256) / 255
    n = counts.sum(1)
    mean = counts @ value / n
    std = np.sqrt((counts * np.square(value - mean[:, None])).sum(1) / n)
    present = counts > 0
    rows: dict[str, Any] = {"min": value[present.argmax(1)], "max": value[255 - present[:, ::-1].argmax(1)]}
    rows |= {"mean": mean, "std": std}
    ranks = np.cumsum(counts, 1)

    def at_rank(wanted: np.ndarray) -> np.ndarray:
        return np.array([value[np.searchsorted(r, k, side="right")] for r, k in zip(ranks, wanted, strict=True)])

    for name, q in _QUANTILES.items():
        at = q * (n - 1)
        below = np.floor(at)
        low, high = at_rank(below), at_rank(np.minimum(below + 1, n - 1))
        rows[name] = low + (at - below) * (high - low)
    return {name: row.reshape(3, 1, 1).tolist() for name, row in rows.items()} | {"count": [frames]}
