"""What a LeRobot data set says about itself, checked: lerobot believes it, and then reads None or a wrong task."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.lerobot import dataset_layout
from serl_chunk.data.lerobot.arrow import pa, pq
from serl_chunk.types import DataError

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class EpisodePlace:
    """Where an episode is: rows `first <= r < first + length` of a Parquet file."""

    file: Path
    first: int
    length: int
    index: int | None  # of its first row in the data set; None where nothing says
    videos: dict[str, tuple[Path, float]]  # feature -> video and the episode's first second in it


@dataclasses.dataclass(frozen=True)
class Index:
    """A data set's own description.

    Fields:
        path: its folder.
        version: "v3.0" or "v2.1".
        fps: steps a second, None where it is not said.
        features: as in info.json, without those that are not in the files (videos are).
        tasks: texts by task_index.
        lengths: int64[N], steps of each episode.
        files, file_of, first: data files; for each episode the number of its file and the row there (v3.0).
        videos: feature -> (chunk, file, first second) of each episode (v3.0).
    """

    path: Path
    version: str
    fps: float | None
    features: Json
    tasks: tuple[str, ...]
    lengths: np.ndarray
    patterns: dataset_layout.Patterns
    files: tuple[Path, ...] = ()
    file_of: np.ndarray | None = None
    first: np.ndarray | None = None
    videos: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)

    def place(self, i: int) -> EpisodePlace:
        """Of episode `i`."""
        start = int(self.lengths[:i].sum())
        length = int(self.lengths[i])
        keys = [name for name, feature in self.features.items() if feature["dtype"] == "video"]
        if self.file_of is None or self.first is None:
            videos = {key: (self.path / dataset_layout.file_of(self.patterns.video, i, key), 0.0) for key in keys}
            return EpisodePlace(self.path / dataset_layout.file_of(self.patterns.data, i), 0, length, start, videos)
        videos = {}
        for key in keys:
            chunk, file, seconds = (column[i] for column in self.videos[key])
            name = self.patterns.video.format(video_key=key, chunk_index=int(chunk), file_index=int(file))
            videos[key] = (self.path / name, float(seconds))
        return EpisodePlace(self.files[int(self.file_of[i])], int(self.first[i]), length, start, videos)


def read_index(path: Path) -> Index:
    """The description of the data set in folder `path`; raises DataError beginning with the file that is wrong."""
    info = _json(path / dataset_layout.INFO)
    version = str(info.get("codebase_version", ""))
    if not version.startswith("v3.") and version != dataset_layout.V21:
        raise DataError(
            f"{path / dataset_layout.INFO}: codebase_version is {version!r}; v3.0 and v2.1 are read. "
            "lerobot converts older ones: python -m lerobot.datasets.v30.convert_dataset_v21_to_v30"
        )
    features = info.get("features")
    if not isinstance(features, dict) or not all(isinstance(f, dict) and "dtype" in f for f in features.values()):
        raise DataError(
            f"{path / dataset_layout.INFO}: has no features, or features without a dtype; it is no LeRobot data set"
        )
    for name, feature in features.items():
        shape = feature.get("shape")
        if shape is not None and not (isinstance(shape, list) and all(isinstance(size, int) for size in shape)):
            raise DataError(f"{path / dataset_layout.INFO}: the shape of {name} is {shape!r}, not a list of sizes")
    fps = info.get("fps")
    if fps is not None and not (isinstance(fps, int | float) and fps > 0):
        raise DataError(f"{path / dataset_layout.INFO}: fps is {fps!r}, not a rate in steps a second")
    known = dataset_layout.PATTERNS[dataset_layout.V21 if version == dataset_layout.V21 else dataset_layout.V30]
    patterns = dataset_layout.Patterns(info.get("data_path") or known.data, info.get("video_path") or known.video)
    try:
        dataset_layout.file_of(patterns.data, 0), dataset_layout.file_of(patterns.video, 0, "camera")
    except (LookupError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path / dataset_layout.INFO}: data_path or video_path is no pattern of file names ({error})"
        ) from error
    common: Json = {"path": path, "version": version, "fps": fps, "features": features, "patterns": patterns}
    if version == dataset_layout.V21:
        index = Index(**common, tasks=_tasks_v21(path), lengths=_lengths_v21(path))
    else:
        index = _index_v30(common, info)
    n = info.get("total_episodes", len(index.lengths))
    if n != len(index.lengths):
        raise DataError(
            f"{path / dataset_layout.INFO}: total_episodes is {n}, the table of episodes has {len(index.lengths)}; "
            "the data set was not written to its end"
        )
    if not len(index.lengths):
        raise DataError(f"{path}: a data set without episodes")
    return index


def check_columns(path: Path, schema: Any, features: Json) -> None:
    """Raise DataError unless the Parquet file at `path` has the columns that info.json declares, and no others."""
    declared = {name for name, feature in features.items() if feature["dtype"] != "video"}
    absent, undeclared = sorted(declared - set(schema.names)), sorted(set(schema.names) - declared)
    if absent:
        raise DataError(
            f"{path}: has no column {', '.join(absent)}, which meta/info.json declares (lerobot would read None); "
            "remove the feature there or write the data set again"
        )
    if undeclared:
        raise DataError(
            f"{path}: has the column {', '.join(undeclared)}, which meta/info.json does not declare (lerobot would "
            "refuse it); declare it there under features, or remove it"
        )


def _index_v30(common: Json, info: Json) -> Index:
    path: Path = common["path"]
    tables = _several(path, "meta/episodes")
    columns = _schema(tables[0]).names
    videos = [name for name, feature in common["features"].items() if feature["dtype"] == "video"]
    parts = ("chunk_index", "file_index", "from_timestamp")
    needed = [dataset_layout.EPISODE_INDEX, "length", *(f"videos/{key}/{part}" for key in videos for part in parts)]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise DataError(f"{tables[0]}: has no column {missing[0]}; the table of episodes is not complete")
    wanted = [*needed, *(name for name in ("dataset_from_index",) if name in columns)]
    table = pa.concat_tables([_read(each, wanted) for each in tables])
    column = {name: _whole(tables[0], name, table.column(name)) for name in wanted}
    number = column[dataset_layout.EPISODE_INDEX]
    if (number != np.arange(len(number))).any():
        row = int(np.flatnonzero(number != np.arange(len(number)))[0])
        raise DataError(
            f"{tables[0]}: row {row} is episode {int(number[row])}; lerobot takes row i for episode i: sort the table, "
            "and number the episodes from 0 on without holes"
        )
    lengths = column["length"].astype(np.int64)
    if (lengths < 1).any():
        raise DataError(f"{tables[0]}: episode {int(np.argmin(lengths))} has no steps; remove it")
    start = np.concatenate([[0], np.cumsum(lengths)])
    first = column.get("dataset_from_index")
    if first is not None and (first != start[:-1]).any():
        i = int(np.flatnonzero(first != start[:-1])[0])
        raise DataError(
            f"{tables[0]}: episode {i} begins at row {int(first[i])} of the data set, the lengths of those before it "
            f"say {int(start[i])}"
        )
    files, rows = _several(path, "data"), []
    for file in files:
        about = _metadata(file)
        check_columns(file, about.schema.to_arrow_schema(), common["features"])
        rows.append(about.num_rows)
    ends = np.cumsum(rows)
    if ends[-1] != start[-1]:
        raise DataError(
            f"{path / 'data'}: {int(ends[-1])} rows in {len(files)} files, the episodes have {int(start[-1])}; a file "
            "is missing or was not written to its end"
        )
    file_of = np.searchsorted(ends, start[:-1], side="right")
    spanning = np.flatnonzero(start[1:] > ends[file_of])
    if len(spanning):
        raise DataError(
            f"{files[int(file_of[spanning[0]])]}: episode {int(spanning[0])} begins in this file and ends in the next; "
            "write the data set again with whole episodes a file"
        )
    return Index(
        **common,
        tasks=_tasks_v30(path / dataset_layout.TASKS),
        lengths=lengths,
        files=tuple(files),
        file_of=file_of,
        first=start[:-1] - np.concatenate([[0], ends])[file_of],
        videos={key: tuple(column[f"videos/{key}/{part}"] for part in parts) for key in videos},  # type: ignore[misc]
    )


def _tasks_v30(path: Path) -> tuple[str, ...]:
    """lerobot takes row i for task i, and what pandas calls the index for its text."""
    schema = _schema(path)
    try:
        about = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
    except ValueError as error:
        raise DataError(
            f"{path}: what pandas noted of the table's index is damaged ({error}); write it with pandas: "
            "DataFrame({'task_index': ...}, index=texts).to_parquet"
        ) from error
    listed = about.get("index_columns") if isinstance(about, dict) else None
    index = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(index, str) or index not in schema.names or dataset_layout.TASK_INDEX not in schema.names:
        raise DataError(
            f"{path}: nothing says that the tasks' texts are the table's pandas index (columns: "
            f"{', '.join(schema.names)}), so that lerobot would read numbers for texts; write it with pandas: "
            "DataFrame({'task_index': ...}, index=texts).to_parquet"
        )
    table = _read(path, [dataset_layout.TASK_INDEX, index])
    numbers, texts = table.column(dataset_layout.TASK_INDEX).to_pylist(), table.column(index).to_pylist()
    if numbers != list(range(len(numbers))):
        raise DataError(
            f"{path}: task_index is {numbers[:8]}: lerobot takes row i for task i and would give wrong texts; sort the "
            "table, and number the tasks from 0 on without holes"
        )
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{path}: its index holds {type(texts[0]).__name__}, not the tasks' texts")
    return tuple(texts)


def _tasks_v21(path: Path) -> tuple[str, ...]:
    rows = _lines(path / "meta/tasks.jsonl", ("task_index", "task"))
    if not all(type(row["task_index"]) is int for row in rows):
        raise DataError(f"{path / 'meta/tasks.jsonl'}: tasks must be numbered from 0 on, without holes")
    texts = {row["task_index"]: str(row["task"]) for row in rows}
    if sorted(texts) != list(range(len(texts))) or len(texts) != len(rows):
        raise DataError(f"{path / 'meta/tasks.jsonl'}: tasks must be numbered from 0 on, without holes")
    return tuple(texts[i] for i in range(len(texts)))


def _lengths_v21(path: Path) -> np.ndarray:
    rows = _lines(path / "meta/episodes.jsonl", ("episode_index", "length"))
    if [row["episode_index"] for row in rows] != list(range(len(rows))):
        raise DataError(f"{path / 'meta/episodes.jsonl'}: line i must be episode i, from 0 on and without holes")
    for number, row in enumerate(rows, 1):
        if type(row["length"]) is not int or row["length"] < 1:
            raise DataError(
                f"{path / 'meta/episodes.jsonl'}: line {number}: length is {row['length']!r}, not a number of steps"
            )
    return np.array([row["length"] for row in rows], np.int64)


def _several(path: Path, folder: str) -> list[Path]:
    found = sorted((path / folder).glob("*/*.parquet"))
    if not found:
        raise DataError(
            f"{path / folder}: no chunk-*/*.parquet there; the data set is not complete (lerobot would ask the hub)"
        )
    return found


def _json(path: Path) -> Json:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path.name == "info.json":
            raise DataError(f"{path.parent.parent}: this is no LeRobot data set, it has no meta/info.json") from None
        raise DataError(f"{path}: no such file; the data set is not complete (lerobot would ask the hub)") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds no JSON object")
    return value


def _lines(path: Path, fields: tuple[str, ...]) -> list[Json]:
    out = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; the data set is not complete (lerobot would ask the hub)") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            out.append({field: row[field] for field in fields})
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path}: line {number} is damaged ({error}); valid: {', '.join(fields)}") from error
    return out


def _metadata(path: Path) -> Any:
    try:
        return pq.read_metadata(str(path))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; the data set is not complete (lerobot would ask the hub)") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the file is truncated, damaged or not Parquet ({error})") from error


def _schema(path: Path) -> Any:
    return _metadata(path).schema.to_arrow_schema()


def _read(path: Path, columns: list[str]) -> Any:
    try:
        return pq.read_table(str(path), columns=columns)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the file is truncated, damaged or not Parquet ({error})") from error


def _whole(path: Path, name: str, column: Any) -> np.ndarray:
    if column.null_count:
        raise DataError(f"{path}: column {name} has rows without a value")
    values = column.to_numpy()
    if values.dtype.kind not in "iuf":
        raise DataError(f"{path}: column {name} holds {column.type}, not numbers")
    return values
