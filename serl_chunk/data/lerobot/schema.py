"""An episode as rows of LeRobot's tables: one a step, with a frame of every camera."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.lerobot import dataset_layout
from serl_chunk.data.lerobot.arrow import Schema, Table, pa, write_arrow
from serl_chunk.data.lerobot.images import Histogram, files, newest
from serl_chunk.data.source import Json
from serl_chunk.types import IMAGE_PREFIX, STATE, DataError, Episode, Outcome, Source, SparseRows

_BATCH = 32  # rows encoded at once: what lies in memory of an episode
PLACED = (
    dataset_layout.EPISODE_INDEX,
    dataset_layout.INDEX,
    dataset_layout.TASK_INDEX,
)  # columns that depend on an episode's place


def schema(layout: Json, *, placed: bool) -> Schema:
    """Of the data files, or (`placed` False) of an episode that has no place yet."""
    fields = [
        pa.field(dataset_layout.STATE, _vector(layout["state_dim"])),
        pa.field(dataset_layout.ACTION, _vector(layout["action_dim"])),
    ]
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    fields += [pa.field(dataset_layout.CAMERA + c, image) for c in layout["cameras"] if c not in layout["videos"]]
    columns = {n: d for n, d in dataset_layout.SCALARS.items() if placed or n not in PLACED}
    fields += [pa.field(name, pa.from_numpy_dtype(dtype)) for name, dtype in columns.items()]
    return pa.schema(fields, metadata={"huggingface": json.dumps(_huggingface(layout))} if placed else None)


def _vector(dim: int) -> Any:
    return pa.float32() if dim == 1 else pa.list_(pa.float32(), dim)


def _huggingface(layout: Json) -> Json:
    """The features as the `datasets` library knows them; lerobot has its own idea, viewers have not."""
    out: Json = {}
    for name, feature in dataset_layout.features(layout).items():
        if feature["dtype"] == "image":
            out[name] = {"_type": "Image"}
        elif feature["dtype"] != "video":
            value = {"dtype": feature["dtype"], "_type": "Value"}
            n = feature["shape"][0]
            kind = (
                "List" if layout["version"] == dataset_layout.V30 else "Sequence"
            )  # openpi's lerobot has an older library
            out[name] = value if n == 1 else {"feature": value, "length": n, "_type": kind}
    return {"info": {"features": out}}


def check_stamps(where: str, stamp: np.ndarray, hz: float, tolerance_s: float) -> None:
    """Raise DataError, naming the step, where the steps were not taken at the rate that LeRobot assumes.

    Stamps that are all 0 are unknown, and pass.
    """
    off = np.abs(stamp - stamp[0] - np.arange(len(stamp)) / hz)
    late = np.flatnonzero(off > tolerance_s)
    if len(late) and stamp.any():
        t = int(late[0])
        raise DataError(
            f"{where}: step {t} was taken {stamp[t] - stamp[0]:.6f} s after the first one, at {hz:g} Hz that is "
            f"{t / hz:.6f} s, more than {tolerance_s:g} s off; a LeRobot data set has equal steps: raise the tolerance "
            "to have them taken for equal, correct the rate, or leave the episode out"
        )


def cameras_of(episode: Episode) -> dict[str, SparseRows]:
    """The cameras that were read at all, in the order of their names."""
    found = {k.removeprefix(IMAGE_PREFIX): v for k, v in episode.steps.sparse.items() if k.startswith(IMAGE_PREFIX)}
    return {name: found[name] for name in sorted(found) if len(found[name].index)}


def write_rows(path: Path, where: str, layout: Json, episode: Episode) -> dict[str, Histogram]:
    """Write the rows of `episode` to the new Arrow file `path`, a few at a time; gives what its frames look like."""
    columns = _columns(layout, episode)
    histograms: dict[str, Histogram] = {}
    images: dict[str, Iterator[bytes]] = {}
    for name, rows in cameras_of(episode).items():
        if name not in layout["videos"]:
            histograms[name] = Histogram(len(rows.index))
            images[name] = _on_every_row(where, name, rows, episode.steps.n, layout, histograms[name])
    wanted = schema(layout, placed=False)

    def batches() -> Iterator[Any]:
        for start in range(0, episode.steps.n, _BATCH):
            stop = min(start + _BATCH, episode.steps.n)
            arrays = []
            for field in wanted:
                if field.name in columns:
                    arrays.append(_array(columns[field.name][start:stop]))
                    continue
                data = [next(images[field.name.removeprefix(dataset_layout.CAMERA)]) for _ in range(start, stop)]
                paths = pa.nulls(stop - start, pa.string())
                arrays.append(pa.StructArray.from_arrays([pa.array(data, pa.binary()), paths], fields=list(field.type)))
            yield pa.record_batch(arrays, schema=wanted)

    write_arrow(path, wanted, batches())
    return histograms


def _on_every_row(
    where: str, name: str, rows: SparseRows, n: int, layout: Json, histogram: Histogram
) -> Iterator[bytes]:
    """The image file of the newest frame on each of `n` steps."""
    encoded = enumerate(files(rows.values, layout["image_codec"], layout["jpeg_quality"]))
    at, data = -1, b""
    for frame in newest(rows.index, n):
        while at < frame:
            at, (data, image) = next(encoded)
            if histogram.wants(at):
                histogram.add(data if image is None else image, f"{where}: frame {at} of camera {name}")
        yield data


def _columns(layout: Json, episode: Episode) -> dict[str, np.ndarray]:
    """The columns that are numbers, as they are written."""
    steps, end = episode.steps, episode.end
    n = steps.n
    reward = steps.reward.copy()
    if end.reward is not None:
        reward[-1] = end.reward
    last = np.arange(n) == n - 1
    out = {
        dataset_layout.STATE: steps.observation[STATE],
        dataset_layout.ACTION: steps.action,
        dataset_layout.REWARD: reward,
        dataset_layout.DONE: last & (end.terminated or end.truncated),
        dataset_layout.SUCCESS: last & (end.outcome is Outcome.SUCCESS),
        dataset_layout.INTERVENTION: steps.source == Source.HUMAN,
        dataset_layout.TIMESTAMP: np.arange(n) / layout["hz"],
        dataset_layout.FRAME_INDEX: np.arange(n),
        **{dataset_layout.EXTRA + name: getattr(steps, name) for name in dataset_layout.EXTRA_COLUMNS},
    }
    return {
        name: np.ascontiguousarray(v.astype(dataset_layout.SCALARS.get(name, np.dtype(np.float32))))
        for name, v in out.items()
    }


def _array(values: np.ndarray) -> Any:
    if values.ndim == 1 or values.shape[1] == 1:
        return pa.array(values.ravel())
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


def placed_table(table: Table, layout: Json, episode: int, first: int, task: int) -> Table:
    """`table`, an episode's rows, at its place in the data set: its number, its first row's, and its task's."""
    n = table.num_rows
    table = table.append_column(dataset_layout.EPISODE_INDEX, pa.array(np.full(n, episode)))
    table = table.append_column(dataset_layout.INDEX, pa.array(np.arange(first, first + n)))
    table = table.append_column(dataset_layout.TASK_INDEX, pa.array(np.full(n, task)))
    wanted = schema(layout, placed=True)
    return table.select(wanted.names).cast(wanted)


def parquet_options(layout: Json) -> Json:
    """Images are compressed already, and stay where a reader finds them; numbers are worth compressing."""
    scalars = list(dataset_layout.SCALARS)
    vectors = [
        name if dim == 1 else f"{name}.list.element"
        for name, dim in ((dataset_layout.STATE, layout["state_dim"]), (dataset_layout.ACTION, layout["action_dim"]))
    ]
    return {
        "compression": dict.fromkeys([*scalars, *vectors], "snappy"),
        "use_dictionary": scalars,
        "write_statistics": scalars,
    }
