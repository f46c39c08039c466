"""What describes a whole data set, written last: LeRobot's `meta` folder and the file beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.lerobot import column_stats, dataset_layout, sidecar
from serl_chunk.data.lerobot.arrow import Table, pa, pq, publish, write_parquet
from serl_chunk.data.lerobot.shards import ROWS, PendingShards
from serl_chunk.data.normalise.running_statistics import Statistics
from serl_chunk.data.source import Json
from serl_chunk.types import DataError

_AT_ONCE = 256  # episodes of a row group of the table about them
_VECTORS = (dataset_layout.STATE, dataset_layout.ACTION)


def write_metadata(folder: Path, layout: Json, staged: Sequence[Json], piles: PendingShards) -> None:
    """Write `meta`, `info.json` last. The data and video files are complete, the episodes still in their places."""
    about = _About(folder, layout, staged, piles)
    if layout["version"] == dataset_layout.V30:
        about.write_episodes()
        about.write_statistics()
        about.write_tasks()
    else:
        about.write_lines()
    about.write_beside()
    about.write_info()


class _About:
    """Args as for `write_metadata`."""

    def __init__(self, folder: Path, layout: Json, staged: Sequence[Json], piles: PendingShards) -> None:
        self.folder, self.layout, self.staged, self.piles = folder, layout, staged, piles
        self.columns = [*_VECTORS, *dataset_layout.SCALARS]
        self.lengths = [entry["length"] for entry in staged]
        self.files = piles.groups(ROWS, staged)
        self.frames = dict.fromkeys(layout["cameras"], 0)
        self.counts = {camera: np.zeros((3, 256), np.int64) for camera in layout["cameras"]}
        dims = {dataset_layout.STATE: layout["state_dim"], dataset_layout.ACTION: layout["action_dim"]}
        self.streams = {name: Statistics(dim, tuple(column_stats.QUANTILES.values())) for name, dim in dims.items()}

    def write_episodes(self) -> None:
        """`meta/episodes`: where each episode is, and its statistics; takes in those of all, too."""
        columns: dict[str, Any] = {
            dataset_layout.EPISODE_INDEX: pa.int64(),
            "tasks": pa.list_(pa.string()),
            "length": pa.int64(),
            "data/chunk_index": pa.int64(),
            "data/file_index": pa.int64(),
            "dataset_from_index": pa.int64(),
            "dataset_to_index": pa.int64(),
            "meta/episodes/chunk_index": pa.int64(),
            "meta/episodes/file_index": pa.int64(),
        }
        for camera in self.layout["videos"]:
            key = f"videos/{dataset_layout.CAMERA}{camera}"
            columns |= {f"{key}/chunk_index": pa.int64(), f"{key}/file_index": pa.int64()}
            columns |= {f"{key}/from_timestamp": pa.float64(), f"{key}/to_timestamp": pa.float64()}
        for feature in (*self.columns, *(dataset_layout.CAMERA + c for c in self.layout["cameras"])):
            image = feature.startswith(dataset_layout.CAMERA)
            kind = pa.list_(pa.list_(pa.list_(pa.float64()))) if image else pa.list_(pa.float64())
            for name in ("min", "max", "mean", "std", *column_stats.QUANTILES):
                columns[f"stats/{feature}/{name}"] = kind
            columns[f"stats/{feature}/count"] = pa.list_(pa.int64())
        schema = pa.schema(list(columns.items()))

        def tables() -> Iterator[Table]:
            rows: list[Json] = []
            for place, statistics in zip(self._places(), self._statistics(), strict=True):
                flat = {f"stats/{f}/{name}": v for f, each in statistics.items() for name, v in each.items()}
                rows.append(place | flat)
                if len(rows) == _AT_ONCE:
                    yield pa.Table.from_pylist(rows, schema=schema)
                    rows = []
            if rows:
                yield pa.Table.from_pylist(rows, schema=schema)

        path = self.folder / dataset_layout.file_of(dataset_layout.EPISODES, 0)
        write_parquet(self.piles.part("episodes"), path, schema, tables())

    def write_statistics(self) -> None:
        """`meta/stats.json`, after `write_episodes`."""
        again = [name for name, stream in self.streams.items() if stream.unsettled]
        for values in self._values() if again else ():
            for name in again:
                self.streams[name].refine(values[name])
        out = {name: column_stats.of_stream(stream) for name, stream in self.streams.items()}
        for name in dataset_layout.SCALARS:  # one column at a time: 8 bytes a step
            parts = [pq.read_table(str(p), columns=[name]).column(0).to_numpy() for p in self._paths()]
            out[name] = column_stats.of_values(np.concatenate(parts)[:, None])
        for camera, counts in self.counts.items():
            out[dataset_layout.CAMERA + camera] = column_stats.of_frames(counts, self.frames[camera])
        self._write("stats.json", json.dumps(out, indent=4))

    def write_tasks(self) -> None:
        """`meta/tasks.parquet`: lerobot looks a text up by its place, in what pandas calls the index."""
        texts = self.piles.tasks()
        index = "__index_level_0__"
        kinds = ({"pandas_type": "int64", "numpy_type": "int64"}, {"pandas_type": "unicode", "numpy_type": "object"})
        pandas = {
            "index_columns": [index],
            "column_indexes": [{"name": None, "field_name": None, **kinds[1], "metadata": {"encoding": "UTF-8"}}],
            "columns": [
                {
                    "name": dataset_layout.TASK_INDEX,
                    "field_name": dataset_layout.TASK_INDEX,
                    **kinds[0],
                    "metadata": None,
                },
                {"name": None, "field_name": index, **kinds[1], "metadata": None},
            ],
            "creator": {"library": "pyarrow", "version": pa.__version__},
            "pandas_version": "2.0.0",
        }
        schema = pa.schema(
            [(dataset_layout.TASK_INDEX, pa.int64()), (index, pa.string())], metadata={"pandas": json.dumps(pandas)}
        )
        table = pa.table([pa.array(range(len(texts)), pa.int64()), pa.array(texts, pa.string())], schema=schema)
        write_parquet(self.piles.part("tasks"), self.folder / dataset_layout.TASKS, schema, [table])

    def write_lines(self) -> None:
        """Version 2.1's tables, one JSON object a line."""
        tasks = [{"task_index": i, "task": text} for i, text in enumerate(self.piles.tasks())]
        episodes = [
            {"episode_index": i, "tasks": [entry["task"]], "length": entry["length"]}
            for i, entry in enumerate(self.staged)
        ]
        named = ("min", "max", "mean", "std", "count")
        statistics = (
            {"episode_index": i, "stats": {f: {name: each[name] for name in named} for f, each in stats.items()}}
            for i, stats in enumerate(self._statistics())
        )
        for name, rows in (("tasks", tasks), ("episodes", episodes), ("episodes_stats", statistics)):
            path = self.folder / "meta" / f"{name}.jsonl"
            with self.piles.part(name).open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            publish(self.piles.part(name), path)

    def write_beside(self) -> None:
        """See `beside`."""
        schema = sidecar.schema(staged=False)

        def tables() -> Iterator[Table]:
            for start in range(0, len(self.staged), sidecar.GROUP):
                stop = min(start + sidecar.GROUP, len(self.staged))
                rows = [{"episode_index": i, **self.piles.beside_row(i)} for i in range(start, stop)]
                yield pa.Table.from_pylist(rows, schema=schema)

        write_parquet(self.piles.part("beside"), self.folder / dataset_layout.SIDE, schema, tables())

    def write_info(self) -> None:
        """`meta/info.json`."""
        layout, n = self.layout, len(self.staged)
        v30 = layout["version"] == dataset_layout.V30
        patterns = dataset_layout.PATTERNS[layout["version"]]
        info = {
            "codebase_version": layout["version"],
            "robot_type": layout["robot_type"],
            "total_episodes": n,
            "total_frames": sum(self.lengths),
            "total_tasks": len(self.piles.tasks()),
            "chunks_size": dataset_layout.CHUNK,
            "fps": dataset_layout.fps(layout["hz"]),
            "splits": {"train": f"0:{n}"},
            "data_path": patterns.data,
            "video_path": patterns.video if layout["videos"] else None,
            "features": dataset_layout.features(layout),
        }
        if v30:
            info |= {"data_files_size_in_mb": layout["data_file_mb"], "video_files_size_in_mb": layout["video_file_mb"]}
        else:
            info |= {"total_videos": n * len(layout["videos"]), "total_chunks": -(-n // dataset_layout.CHUNK)}
        self._write("info.json", json.dumps(info, indent=4, ensure_ascii=False))

    def _places(self) -> Iterator[Json]:
        """The rows of `meta/episodes`, without statistics."""
        first = np.concatenate([[0], np.cumsum(self.lengths)]).tolist()
        places = [_place("data", number) for number, group in enumerate(self.files) for _ in range(*group)]
        for camera in self.layout["videos"]:
            key = f"videos/{dataset_layout.CAMERA}{camera}"
            for number, group in enumerate(self.piles.groups(f"{camera}.mp4", self.staged)):
                for i in range(*group):
                    at = [(first[k] - first[group.start]) / self.layout["hz"] for k in (i, i + 1)]
                    times = {f"{key}/from_timestamp": at[0], f"{key}/to_timestamp": at[1]}
                    places[i] = places[i] | _place(key, number) | times
        for i, (entry, place) in enumerate(zip(self.staged, places, strict=True)):
            yield (
                place
                | _place("meta/episodes", 0)
                | {
                    dataset_layout.EPISODE_INDEX: i,
                    "tasks": [entry["task"]],
                    "length": entry["length"],
                    "dataset_from_index": first[i],
                    "dataset_to_index": first[i + 1],
                }
            )

    def _statistics(self) -> Iterator[Json]:
        """Of every episode: feature -> statistics. On the way all streams and counts are fed."""
        for i, values in enumerate(self._values()):
            for name, stream in self.streams.items():
                stream.add(values[name])
            out = {name: column_stats.of_values(values[name]) for name in self.columns}
            for each in self.piles.beside(i, "histograms"):
                counts = np.frombuffer(each["counts"], np.int64).reshape(3, 256)
                self.counts[each["name"]] += counts
                self.frames[each["name"]] += each["frames"]
                out[dataset_layout.CAMERA + each["name"]] = column_stats.of_frames(counts, each["frames"])
            yield out

    def _values(self) -> Iterator[dict[str, np.ndarray]]:
        """Of every episode: column of numbers -> [T, D]."""
        for path in self._paths():
            with pq.ParquetFile(str(path)) as file:
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, columns=self.columns)
                    yield {name: matrix(f"{path}: {name}", table.column(name)) for name in self.columns}

    def _paths(self) -> list[Path]:
        return [self.piles.file(ROWS, number) for number in range(len(self.files))]

    def _write(self, name: str, text: str) -> None:
        part = self.piles.part(name)
        part.write_text(text, encoding="utf-8")
        publish(part, self.folder / "meta" / name)


def matrix(where: str, column: Any, first: int = 0) -> np.ndarray:
    """A column of numbers, or of lists of them, as [N, D].

    Raises DataError, beginning with `where`, for lists of unequal lengths and for what are no lists. `first` is the row
    of the file that the column begins with.
    """
    array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if not pa.types.is_nested(array.type):
        return array.to_numpy(zero_copy_only=False)[:, None]
    if pa.types.is_struct(array.type) or pa.types.is_map(array.type) or pa.types.is_union(array.type):
        raise DataError(f"{where} holds {array.type}, not numbers or lists of them")
    if not pa.types.is_fixed_size_list(array.type):
        # Cut anew by `reshape`, lists of 2 and 4 values would become two of 3.
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(lengths != lengths[0])
        if len(wrong):
            t = int(wrong[0])
            raise DataError(
                f"{where} has lists of several lengths: {int(lengths[0])} values in row {first}, {int(lengths[t])} in "
                f"row {first + t}"
            )
    return array.flatten().to_numpy(zero_copy_only=False).reshape(len(array), -1)


def _place(key: str, number: int) -> Json:
    chunk, index = divmod(number, dataset_layout.CHUNK)
    return {f"{key}/chunk_index": chunk, f"{key}/file_index": index}
