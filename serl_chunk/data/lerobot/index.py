"""A LeRobot data set's own description, and where its episodes are.

What must be known to read the rows is required. Where a data set departs from lerobot's conventions and can be read
all the same, `Index.notes` has what was read, and `Index.departures` what lerobot itself would do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.data.lerobot import dataset_layout as ds
from serl_chunk.data.lerobot.arrow import pa, pq, reading
from serl_chunk.data.source import Json
from serl_chunk.data.validate import check_pointer, first_true
from serl_chunk.io import plural
from serl_chunk.types import DataError

_INCOMPLETE = "the data set is not complete (lerobot would download it)"


class EpisodePlace(NamedTuple):
    """Place of an episode: rows `first <= r < first + length` of a Parquet file."""

    number: int  # its episode_index
    file: Path
    first: int
    length: int
    videos: dict[str, tuple[Path, float]]  # feature -> video and the episode's first second in it


@dataclasses.dataclass(frozen=True)
class Index:
    """A data set's own description.

    With `skip_bad` the episodes are the longest prefix whose rows and table agree; `notes` has what is left out.
    """

    path: Path
    skip_bad: bool
    version: str  # as in info.json
    fps: float | None  # steps a second, None where it is not recorded
    features: Json  # of the columns that the files have, and of videos: as in info.json, where it declares them
    tasks: dict[int, str] = dataclasses.field(default_factory=dict)  # texts by task_index
    episodes: dict[str, EpisodePlace] = dataclasses.field(default_factory=dict)  # by key
    notes: list[str] = dataclasses.field(default_factory=list)
    departures: list[str] = dataclasses.field(default_factory=list)

    @property
    def v2(self) -> bool:
        """One file an episode, and tables in JSON: versions 2.0 and 2.1."""
        return self.version.startswith("v2.")

    @property
    def videos(self) -> list[str]:
        return [name for name, feature in self.features.items() if feature.get("dtype") == "video"]

    def lose(self, reason: str) -> None:
        """Note what is left out for this `reason`; without `skip_bad` raise it as DataError."""
        if not self.skip_bad:
            raise DataError(
                f"{reason}. `serl-chunk data repair {self.path} --out DIR` keeps the episodes that are whole"
            )
        self.notes.append(f"left out: {reason}")

    def until_damaged(self, files: Sequence[Path], read: Callable[[Path], Any]) -> list[Any]:
        """Return what `read` makes of each file: with `skip_bad`, up to the first damaged one."""
        out: list[Any] = []
        for file in files:
            try:
                out.append(read(file))
            except DataError as error:
                if not out:
                    raise
                self.lose(str(error))
                break
        return out


def read_index(path: Path, *, skip_bad: bool = False) -> Index:
    """Read the description of the data set in folder `path`. Raises DataError starting with the file at fault."""
    file = path / ds.INFO
    if not file.exists():
        raise DataError(f"{path}: this is no LeRobot data set, it has no meta/info.json")
    with _reading(file, "cannot be read"):
        info = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(info, dict):
        raise DataError(f"{file}: holds no JSON object")
    version = str(info.get("codebase_version", ""))
    if not version.startswith(("v2.", "v3.")):
        raise DataError(
            f"{file}: codebase_version is {version!r} (expected v3.0, v2.1 or v2.0). Convert older ones with lerobot: "
            "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30"
        )
    features = info.get("features")
    if not isinstance(features, dict) or not all(isinstance(feature, dict) for feature in features.values()):
        raise DataError(f"{file}: has no features, or features that are no JSON objects; it is no LeRobot data set")
    fps = info.get("fps")
    if fps is not None and not (isinstance(fps, int | float) and fps > 0):
        raise DataError(f"{file}: fps is {fps!r}, not a rate in steps a second")
    index = Index(path, skip_bad, version, fps, dict(features))
    known = ds.PATTERNS[ds.V21 if index.v2 else ds.V30]
    patterns = ds.Patterns(info.get("data_path") or known.data, info.get("video_path") or known.video)
    try:
        ds.file_of(patterns.data, 0), ds.file_of(patterns.video, 0, "camera")
        if not index.v2:
            patterns.video.format(video_key="camera", chunk_index=0, file_index=0)
    except (LookupError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: data_path or video_path is no pattern of file names ({error})") from error
    places = _episodes_v2(index, patterns) if index.v2 else _episodes_v30(index, patterns)
    index.episodes.update((f"episode_{place.number:06d}", place) for place in places)
    n, there = info.get("total_episodes", len(places)), len(places)
    if n != there and not index.notes:
        index.lose(f"{file}: total_episodes is {n}, the table of episodes has {there}: the data set is incomplete")
    if not places:
        raise DataError(f"{path}: a data set without episodes")
    index.tasks.update(_tasks_v2(index) if index.v2 else _tasks_v30(index))
    return index


def _set_columns(index: Index, *files: Any) -> None:
    """Make `index.features` those of the columns in these `files` (their metadata), and of videos."""
    features = index.features
    found = {field.name: field.type for each in files for field in each.schema.to_arrow_schema()}
    absent = sorted(name for name in features if name not in found and name not in index.videos)
    undeclared = sorted(found.keys() - features.keys())
    if needed := [name for name in absent if name in ds.READ and name not in ds.AUTOMATIC]:
        raise DataError(
            f"{index.path / 'data'}: no column {', '.join(needed)} in its files, which meta/info.json declares. Remove "
            "the feature there or write the data set again"
        )
    if absent:
        text = f"meta/info.json declares {', '.join(absent)}, which the data lack"
        index.departures.append(f"{text}: lerobot would read None. Remove it there")
    if undeclared:
        text = f"meta/info.json does not declare {', '.join(undeclared)}, which the data have"
        index.departures.append(f"{text}: lerobot would refuse them. Declare it there under features, or remove it")
    for name in absent:
        del features[name]
    for name, kind in found.items():
        about = features.setdefault(name, {"dtype": str(getattr(kind, "value_type", kind))})
        if pa.types.is_fixed_size_list(kind) and not pa.types.is_nested(kind.value_type):
            features[name] = about | {"shape": [kind.list_size]}  # the rows tell, whatever is declared


def _episodes_v2(index: Index, patterns: ds.Patterns) -> list[EpisodePlace]:
    file = index.path / "meta/episodes.jsonl"
    lengths: dict[int, int] = {}
    for line, row in enumerate(_lines(index, file, ("episode_index", "length")), 1):
        number, length = row["episode_index"], row["length"]
        if type(number) is not int or type(length) is not int or length < 1 or number in lengths:
            raise DataError(
                f"{file}: line {line}: episode_index is {number!r} and length {length!r}, not a new number and a "
                "number of steps"
            )
        lengths[number] = length
    _check_numbers(index, file, list(lengths))
    places = []
    for number, length in sorted(lengths.items()):
        videos = {key: (index.path / ds.file_of(patterns.video, number, key), 0.0) for key in index.videos}
        places.append(EpisodePlace(number, index.path / ds.file_of(patterns.data, number), 0, length, videos))
    if (first := next((place.file for place in places if place.file.exists()), None)) is not None:
        _set_columns(index, _read(pq.read_metadata, first))
    return places


def _check_numbers(index: Index, file: Path, numbers: list[int]) -> None:
    if numbers != list(range(len(numbers))):
        text = f"{file}: its episodes are numbered {', '.join(map(str, numbers[:8]))}"
        index.departures.append(
            f"{text}: lerobot would take row i for episode i. Sort it, and number them without holes"
        )


def _episodes_v30(index: Index, patterns: ds.Patterns) -> list[EpisodePlace]:
    path = index.path
    tables = _several(path, "meta/episodes")
    columns = _read(pq.read_metadata, tables[0]).schema.to_arrow_schema().names
    parts = ("chunk_index", "file_index", "from_timestamp")
    filmed = {key: [f"videos/{key}/{part}" for part in parts] for key in index.videos}
    filmed = {key: names for key, names in filmed.items() if set(names) <= set(columns)}
    needed = [ds.EPISODE_INDEX, "length", *(name for names in filmed.values() for name in names)]
    if missing := [name for name in needed if name not in columns]:
        raise DataError(f"{tables[0]}: has no column {missing[0]}; the table of episodes is not complete")
    wanted = [*needed, *({"dataset_from_index"} & set(columns))]
    read = index.until_damaged(tables, lambda each: _read(pq.read_table, each, columns=wanted))
    table = pa.concat_tables(read)
    column = {name: _whole(tables[0], name, table.column(name)) for name in wanted}
    _check_numbers(index, tables[0], column[ds.EPISODE_INDEX].tolist())
    order = np.argsort(column[ds.EPISODE_INDEX], kind="stable")
    column = {name: values[order] for name, values in column.items()}
    number, lengths = column[ds.EPISODE_INDEX], column["length"].astype(np.int64)
    if (i := first_true(np.diff(number) == 0)) is not None:
        raise DataError(f"{tables[0]}: two rows are of episode {int(number[i])}. Remove one")
    if (i := first_true(lengths < 1)) is not None:
        raise DataError(f"{tables[0]}: episode {int(number[i])} has no steps. Remove it")
    start = np.concatenate([[0], np.cumsum(lengths)])
    files = _several(path, "data")
    about = index.until_damaged(files, lambda file: _read(pq.read_metadata, file))
    _set_columns(index, *about)
    first = column.get("dataset_from_index")
    if first is not None and (i := first_true(first != start[:-1])) is not None:
        text = (
            f"{tables[0]}: episode {int(number[i])} begins at row {int(first[i])} of the data set, by the lengths of "
        )
        text += f"those before it at {int(start[i])}"
        if ds.EPISODE_INDEX not in index.features:  # else the rows themselves tell
            raise DataError(f"{text}. Correct dataset_from_index or length")
        index.departures.append(f"{text}: lerobot would read other rows. Correct dataset_from_index")
    ends = np.cumsum([each.num_rows for each in about])
    file_of = np.searchsorted(ends, start[:-1], side="right")
    kept = len(number)
    if ends[-1] != start[-1]:
        kept = int(np.searchsorted(start[1:], ends[-1], side="right"))
        index.lose(
            f"{path / 'data'}: {int(ends[-1])} rows in {plural(len(about), 'file')}, the episodes have "
            f"{int(start[-1])}{_listed(number[kept:])}; a file is missing or was not written to its end"
        )
    if (i := first_true(start[1 : kept + 1] > ends[file_of[:kept]])) is not None:
        index.lose(
            f"{files[int(file_of[i])]}: episode {int(number[i])} begins in this file and ends in the next"
            f"{_listed(number[i:])}; files hold whole episodes"
        )
        kept = i

    def video(key: str, i: int) -> tuple[Path, float]:
        chunk, file, second = (column[name][i] for name in filmed[key])
        name = patterns.video.format(video_key=key, chunk_index=int(chunk), file_index=int(file))
        return path / name, float(second)

    return [
        EpisodePlace(
            int(number[i]), files[int(file_of[i])], int(start[i] - (ends[file_of[i] - 1] if file_of[i] else 0)),
            int(lengths[i]), {key: video(key, i) for key in filmed},
        )
        for i in range(kept)
    ]  # fmt: skip


def _listed(numbers: np.ndarray) -> str:
    return f" (episodes {', '.join(map(str, numbers.tolist()))})" if len(numbers) else ""


def _tasks_v30(index: Index) -> dict[int, str]:
    """Find the texts: pandas' index of the table, where lerobot looks, else a column of texts."""
    path = index.path / ds.TASKS
    if not path.exists():
        return _no_tasks(index, path)
    table = _read(pq.read_table, path)
    texts = [field.name for field in table.schema if "string" in str(field.type)]
    try:
        about = json.loads((table.schema.metadata or {}).get(b"pandas", b"{}"))
        listed = about["index_columns"][0]
    except (ValueError, LookupError, TypeError):
        listed = None
    names = [name for name in (listed, "__index_level_0__", "task", *texts) if name in texts]
    if not names:
        columns = ", ".join(table.column_names)
        index.notes.append(f"{path}: has no column of texts (it has: {columns}): task sets the text")
        return {}
    if listed not in texts:
        index.notes.append(f"{path}: has no pandas index of texts: the tasks' texts are its column {names[0]}")
        index.departures.append(
            f"{path}: the tasks' texts are not the table's pandas index: lerobot would read numbers for texts. Write "
            "it with pandas: DataFrame({'task_index': ...}, index=texts).to_parquet"
        )
    given = ds.TASK_INDEX in table.column_names
    numbers = table.column(ds.TASK_INDEX).to_pylist() if given else list(range(table.num_rows))
    if numbers != list(range(len(numbers))):
        index.departures.append(
            f"{path}: task_index is {numbers[:8]}: lerobot takes row i for task i and would read wrong texts. Sort the "
            "table, and number the tasks from 0 on without holes"
        )
    return _texts(path, zip(numbers, table.column(names[0]).to_pylist(), strict=True))


def _tasks_v2(index: Index) -> dict[int, str]:
    path = index.path / "meta/tasks.jsonl"
    if not path.exists():
        return _no_tasks(index, path)
    rows = _lines(index, path, ("task_index", "task"))
    return _texts(path, ((row["task_index"], row["task"]) for row in rows))


def _no_tasks(index: Index, path: Path) -> dict[int, str]:
    index.notes.append(f"{path}: no such file: the texts of the tasks are not known; task sets one")
    return {}


def _texts(path: Path, rows: Iterable[tuple[Any, Any]]) -> dict[int, str]:
    out: dict[int, str] = {}
    for number, text in rows:
        if type(number) is not int or out.setdefault(number, text) != text:
            raise DataError(f"{path}: task_index {number!r} is no number, or has two texts. Number the tasks anew")
    return {number: str(text or "") for number, text in out.items()}


def _several(path: Path, folder: str) -> list[Path]:
    if found := sorted((path / folder).glob("*/*.parquet")):
        return found
    raise DataError(f"{path / folder}: no chunk-*/*.parquet there; {_INCOMPLETE}")


@contextlib.contextmanager
def _reading(path: Path, fault: str, remedy: str = "") -> Iterator[None]:
    with reading(f"{path}: {fault}", remedy):
        if not path.exists():
            raise DataError(f"{path}: no such file; {_INCOMPLETE}")
        check_pointer(path)
        yield


def _lines(index: Index, path: Path, fields: tuple[str, ...]) -> list[Json]:
    """Return `fields` of each line: with `skip_bad`, up to the first damaged one."""
    out = []
    with _reading(path, "cannot be read"):
        text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            out.append({field: row[field] for field in fields})
        except (ValueError, LookupError, TypeError) as error:
            index.lose(f"{path}: line {number} is damaged ({error}); valid: {', '.join(fields)}")
            break
    return out


def _read(read: Callable[..., Any], path: Path, **options: Any) -> Any:
    """Return what pyarrow's `read` makes of a Parquet file."""
    with _reading(path, "the file is truncated, damaged or not Parquet", ". Copy or download it again"):
        return read(str(path), **options)


def _whole(path: Path, name: str, column: Any) -> np.ndarray:
    if column.null_count:
        raise DataError(f"{path}: column {name} has rows without a value")
    values = column.to_numpy()
    if values.dtype.kind not in "iuf":
        raise DataError(f"{path}: column {name} holds {column.type}, not numbers")
    return values
