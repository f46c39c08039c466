"""A LeRobot data set's own description, checked: lerobot trusts it, and then reads None or a wrong task."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.data.lerobot import dataset_layout as ds
from serl_chunk.data.lerobot.arrow import pa, pq, reading
from serl_chunk.data.source import Json
from serl_chunk.data.validate import first_true
from serl_chunk.types import DataError

_INCOMPLETE = "the data set is not complete (lerobot would download it)"


class EpisodePlace(NamedTuple):
    """Place of an episode: rows `first <= r < first + length` of a Parquet file."""

    file: Path
    first: int
    length: int
    from_index: int  # of its first row in the data set
    videos: dict[str, tuple[Path, float]]  # feature -> video and the episode's first second in it


class Index(NamedTuple):
    """A data set's own description."""

    version: str  # "v3.0" or "v2.1"
    fps: float | None  # steps a second, None where it is not recorded
    features: Json  # as in info.json
    tasks: tuple[str, ...]  # texts by task_index
    episodes: list[EpisodePlace]


def read_index(path: Path) -> Index:
    """Read the description of the data set in folder `path`. Raises DataError starting with the file at fault."""
    file = path / ds.INFO
    if not file.exists():
        raise DataError(f"{path}: this is no LeRobot data set, it has no meta/info.json")
    with _reading(file, "cannot be read"):
        info = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(info, dict):
        raise DataError(f"{file}: holds no JSON object")
    version = str(info.get("codebase_version", ""))
    v21 = version == ds.V21
    if not version.startswith("v3.") and not v21:
        raise DataError(
            f"{file}: codebase_version is {version!r} (expected v3.0 or v2.1). Convert older ones with lerobot: python "
            "-m lerobot.datasets.v30.convert_dataset_v21_to_v30"
        )
    features = info.get("features")
    if not isinstance(features, dict) or not all(isinstance(f, dict) and "dtype" in f for f in features.values()):
        raise DataError(f"{file}: has no features, or features without a dtype; it is no LeRobot data set")
    for name, feature in features.items():
        shape = feature.get("shape")
        if shape is not None and not (isinstance(shape, list) and all(isinstance(size, int) for size in shape)):
            raise DataError(f"{file}: the shape of {name} is {shape!r}, not a list of sizes")
    fps = info.get("fps")
    if fps is not None and not (isinstance(fps, int | float) and fps > 0):
        raise DataError(f"{file}: fps is {fps!r}, not a rate in steps a second")
    known = ds.PATTERNS[ds.V21 if v21 else ds.V30]
    patterns = ds.Patterns(info.get("data_path") or known.data, info.get("video_path") or known.video)
    try:
        ds.file_of(patterns.data, 0), ds.file_of(patterns.video, 0, "camera")
        if not v21:
            patterns.video.format(video_key="camera", chunk_index=0, file_index=0)
    except (LookupError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: data_path or video_path is no pattern of file names ({error})") from error
    videos = [name for name, feature in features.items() if feature["dtype"] == "video"]
    episodes = _episodes_v21(path, videos, patterns) if v21 else _episodes_v30(path, features, videos, patterns)
    tasks = _tasks_v21(path / "meta/tasks.jsonl") if v21 else _tasks_v30(path / ds.TASKS)
    n = info.get("total_episodes", len(episodes))
    if n != len(episodes):
        raise DataError(
            f"{file}: total_episodes is {n}, the table of episodes has {len(episodes)}; the data set is incomplete"
        )
    if not episodes:
        raise DataError(f"{path}: a data set without episodes")
    return Index(version, fps, features, tasks, episodes)


def check_columns(path: Path, schema: Any, features: Json) -> None:
    """Raise DataError unless the Parquet file at `path` has the columns that info.json declares, and no others."""
    declared = {name for name, feature in features.items() if feature["dtype"] != "video"}
    absent, undeclared = sorted(declared - set(schema.names)), sorted(set(schema.names) - declared)
    if absent:
        raise DataError(
            f"{path}: has no column {', '.join(absent)}, which meta/info.json declares (lerobot would read None). "
            "Remove the feature there or write the data set again"
        )
    if undeclared:
        raise DataError(
            f"{path}: has the column {', '.join(undeclared)}, which meta/info.json does not declare (lerobot would "
            "refuse it). Declare it there under features, or remove it"
        )


def _episodes_v21(path: Path, videos: list[str], patterns: ds.Patterns) -> list[EpisodePlace]:
    file = path / "meta/episodes.jsonl"
    rows = _lines(file, ("episode_index", "length"))
    if [row["episode_index"] for row in rows] != list(range(len(rows))):
        raise DataError(f"{file}: line i must be episode i, from 0 on and without holes")
    out, start = [], 0
    for i, length in enumerate(row["length"] for row in rows):
        if type(length) is not int or length < 1:
            raise DataError(f"{file}: line {i + 1}: length is {length!r}, not a number of steps")
        places = {key: (path / ds.file_of(patterns.video, i, key), 0.0) for key in videos}
        out.append(EpisodePlace(path / ds.file_of(patterns.data, i), 0, length, start, places))
        start += length
    return out


def _episodes_v30(path: Path, features: Json, videos: list[str], patterns: ds.Patterns) -> list[EpisodePlace]:
    tables = _several(path, "meta/episodes")
    columns = _read(pq.read_metadata, tables[0]).schema.to_arrow_schema().names
    parts = ("chunk_index", "file_index", "from_timestamp")
    needed = [ds.EPISODE_INDEX, "length", *(f"videos/{key}/{part}" for key in videos for part in parts)]
    if missing := [name for name in needed if name not in columns]:
        raise DataError(f"{tables[0]}: has no column {missing[0]}; the table of episodes is not complete")
    wanted = [*needed, *({"dataset_from_index"} & set(columns))]
    table = pa.concat_tables([_read(pq.read_table, each, columns=wanted) for each in tables])
    column = {name: _whole(tables[0], name, table.column(name)) for name in wanted}
    number = column[ds.EPISODE_INDEX]
    if (i := first_true(number != np.arange(len(number)))) is not None:
        raise DataError(
            f"{tables[0]}: row {i} is episode {int(number[i])}; lerobot takes row i for episode i. Sort "
            "the table, and number the episodes from 0 on without holes"
        )
    lengths = column["length"].astype(np.int64)
    if (lengths < 1).any():
        raise DataError(f"{tables[0]}: episode {int(np.argmin(lengths))} has no steps. Remove it")
    start = np.concatenate([[0], np.cumsum(lengths)])
    first = column.get("dataset_from_index")
    if first is not None and (i := first_true(first != start[:-1])) is not None:
        raise DataError(
            f"{tables[0]}: episode {i} begins at row {int(first[i])} of the data set (expected {int(start[i])}, by the "
            "lengths of those before it)"
        )
    files, rows = _several(path, "data"), []
    for file in files:
        about = _read(pq.read_metadata, file)
        check_columns(file, about.schema.to_arrow_schema(), features)
        rows.append(about.num_rows)
    ends = np.cumsum(rows)
    if ends[-1] != start[-1]:
        raise DataError(
            f"{path / 'data'}: {int(ends[-1])} rows in {len(files)} files, the episodes have {int(start[-1])}; a file "
            "is missing or was not written to its end"
        )
    file_of = np.searchsorted(ends, start[:-1], side="right")
    if (i := first_true(start[1:] > ends[file_of])) is not None:
        raise DataError(
            f"{files[int(file_of[i])]}: episode {i} begins in this file and ends in the next. "
            "Write the data set again with whole episodes a file"
        )

    def video(key: str, i: int) -> tuple[Path, float]:
        chunk, number, second = (column[f"videos/{key}/{part}"][i] for part in parts)
        name = patterns.video.format(video_key=key, chunk_index=int(chunk), file_index=int(number))
        return path / name, float(second)

    rows_before = np.concatenate([[0], ends])[file_of]
    return [
        EpisodePlace(files[int(file)], int(begin - before), int(n), int(begin), {key: video(key, i) for key in videos})
        for i, (file, before, begin, n) in enumerate(zip(file_of, rows_before, start[:-1], lengths, strict=True))
    ]


def _tasks_v30(path: Path) -> tuple[str, ...]:
    """lerobot takes row i for task i, and pandas' index of the table for the texts."""
    schema = _read(pq.read_metadata, path).schema.to_arrow_schema()
    remedy = "Write it with pandas: DataFrame({'task_index': ...}, index=texts).to_parquet"
    try:
        about = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
    except ValueError as error:
        raise DataError(f"{path}: pandas' description of the table's index is damaged ({error}). {remedy}") from error
    listed = about.get("index_columns") if isinstance(about, dict) else None
    index = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(index, str) or index not in schema.names or ds.TASK_INDEX not in schema.names:
        raise DataError(
            f"{path}: the tasks' texts are not the table's pandas index (columns: {', '.join(schema.names)}), so that "
            f"lerobot would read numbers for texts. {remedy}"
        )
    table = _read(pq.read_table, path, columns=[ds.TASK_INDEX, index])
    numbers, texts = table.column(ds.TASK_INDEX).to_pylist(), table.column(index).to_pylist()
    if numbers != list(range(len(numbers))):
        raise DataError(
            f"{path}: task_index is {numbers[:8]}: lerobot takes row i for task i and would read wrong texts. Sort the "
            "table, and number the tasks from 0 on without holes"
        )
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{path}: its index holds {type(texts[0]).__name__}, not the tasks' texts")
    return tuple(texts)


def _tasks_v21(path: Path) -> tuple[str, ...]:
    rows = _lines(path, ("task_index", "task"))
    texts = {row["task_index"]: str(row["task"]) for row in rows if type(row["task_index"]) is int}
    if sorted(texts) != list(range(len(rows))):
        raise DataError(f"{path}: tasks must be numbered from 0 on, without holes")
    return tuple(texts[i] for i in range(len(texts)))


def _several(path: Path, folder: str) -> list[Path]:
    if found := sorted((path / folder).glob("*/*.parquet")):
        return found
    raise DataError(f"{path / folder}: no chunk-*/*.parquet there; {_INCOMPLETE}")


@contextlib.contextmanager
def _reading(path: Path, fault: str) -> Iterator[None]:
    with reading(f"{path}: {fault}"):
        if not path.exists():
            raise DataError(f"{path}: no such file; {_INCOMPLETE}")
        yield


def _lines(path: Path, fields: tuple[str, ...]) -> list[Json]:
    out = []
    with _reading(path, "cannot be read"):
        text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            out.append({field: row[field] for field in fields})
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path}: line {number} is damaged ({error}); valid: {', '.join(fields)}") from error
    return out


def _read(read: Callable[..., Any], path: Path, **options: Any) -> Any:
    """Return what pyarrow's `read` makes of a Parquet file."""
    with _reading(path, "the file is truncated, damaged or not Parquet"):
        return read(str(path), **options)


def _whole(path: Path, name: str, column: Any) -> np.ndarray:
    if column.null_count:
        raise DataError(f"{path}: column {name} has rows without a value")
    values = column.to_numpy()
    if values.dtype.kind not in "iuf":
        raise DataError(f"{path}: column {name} holds {column.type}, not numbers")
    return values
