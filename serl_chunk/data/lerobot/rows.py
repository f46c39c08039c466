"""An episode as rows of LeRobot's tables: one a step, with a frame of every camera."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.frames import Frames, SingleFrame, decode_image, encode_image
from serl_chunk.data.lerobot import dataset_layout as ds
from serl_chunk.data.lerobot.arrow import Schema, Table, pa, write_arrow
from serl_chunk.data.source import Json
from serl_chunk.data.validate import cameras_of
from serl_chunk.types import STATE, Episode, Outcome, Source, SparseRows

SAMPLED = 8  # frames of an episode and camera that go into the statistics
_WIDEST = 160  # pixels of a frame's side that go into them, about
_JPEG_QUALITY = 95
_PNG_LEVEL = 1  # zlib's: files 10 to 20 % larger than at 6, in a quarter of the time
_BATCH = 32  # rows encoded at once: the part of an episode that lies in memory
_PLACED = (ds.EPISODE_INDEX, ds.INDEX, ds.TASK_INDEX)  # columns that depend on an episode's place


def _encode(image: np.ndarray, codec: str = "png") -> bytes:
    """Encode uint8[H, W, 3] as a PNG file, or as a JPEG file with colour at full resolution."""
    if codec == "png":
        return encode_image(image, "PNG", compress_level=_PNG_LEVEL)
    return encode_image(image, "JPEG", quality=_JPEG_QUALITY, subsampling=0)


def lossless_file(image: np.ndarray | SingleFrame) -> bytes:
    """Return the image file of one frame: the stored one where there is one, else a PNG."""
    stored = image.encoded if isinstance(image, SingleFrame) else None
    return stored or _encode(np.asarray(image))


def newest(ticks: np.ndarray, n: int) -> np.ndarray:
    """Return int[n]: for every tick the newest (else the first) of the frames read at `ticks` int[M]."""
    return np.maximum(np.searchsorted(ticks, np.arange(n), side="right") - 1, 0)


class Histogram:
    """Counts of each value in a sample of an episode's frames.

    The sample depends on the number `n` of frames alone, so that an episode converted anew becomes the same bytes.
    """

    def __init__(self, n: int) -> None:
        chosen = np.random.default_rng(n).choice(n, min(n, SAMPLED), replace=False)
        self._chosen = frozenset(chosen.tolist())
        self.frames = len(self._chosen)
        self.counts = np.zeros((3, 256), np.int64)

    def add(self, i: int, image: np.ndarray | bytes, where: str) -> None:
        """Count the pixels (every k-th of a large frame) of frame `i`, decoded or a file. Raises DataError."""
        if i not in self._chosen:
            return
        pixels = decode_image(image, where) if isinstance(image, bytes) else image
        pixels = pixels[:: max(1, pixels.shape[0] // _WIDEST), :: max(1, pixels.shape[1] // _WIDEST)]
        for channel in range(3):
            self.counts[channel] += np.bincount(pixels[..., channel].ravel(), minlength=256)


def schema(layout: Json, *, placed: bool) -> Schema:
    """Return the schema of the data files, or (`placed` False) of an episode that has no place yet.

    Its metadata are the features as the `datasets` library reads them; lerobot ignores them, viewers do not.
    """
    fields: Json = {}
    features: Json = {}
    for name, feature in ds.features(layout).items():
        if feature["dtype"] == "image":
            fields[name] = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
            features[name] = {"_type": "Image"}
        elif feature["dtype"] != "video":
            (n,), dtype = feature["shape"], pa.from_numpy_dtype(np.dtype(feature["dtype"]))
            fields[name] = dtype if n == 1 else pa.list_(dtype, n)
            features[name] = {"dtype": feature["dtype"], "_type": "Value"}
            if n > 1:
                kind = "List" if layout["version"] == ds.V30 else "Sequence"  # openpi's lerobot has an older library
                features[name] = {"feature": features[name], "length": n, "_type": kind}
    if not placed:
        return pa.schema([(name, kind) for name, kind in fields.items() if name not in _PLACED])
    return pa.schema(list(fields.items()), metadata={"huggingface": json.dumps({"info": {"features": features}})})


def write_rows(path: Path, where: str, layout: Json, episode: Episode) -> dict[str, Histogram]:
    """Write the rows of `episode` to the new Arrow file `path`, a few at a time; returns histograms of its frames."""
    columns = _columns(layout, episode)
    histograms: dict[str, Histogram] = {}
    images: dict[str, Iterator[bytes]] = {}
    for name, rows in cameras_of(episode).items():
        if name not in layout["videos"]:
            histograms[name] = Histogram(len(rows.index))
            images[ds.CAMERA + name] = _on_every_row(where, name, rows, episode.steps.n, layout, histograms[name])
    wanted = schema(layout, placed=False)

    def column(field: Any, start: int, stop: int) -> Any:
        if field.name in columns:
            values = columns[field.name][start:stop]
            flat = pa.array(values.ravel())
            wide = values.ndim == 2 and values.shape[1] > 1
            return pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if wide else flat
        data = [next(images[field.name]) for _ in range(start, stop)]
        paths = pa.nulls(stop - start, pa.string())
        return pa.StructArray.from_arrays([pa.array(data, pa.binary()), paths], fields=list(field.type))

    starts = range(0, episode.steps.n, _BATCH)
    spans = ((start, min(start + _BATCH, episode.steps.n)) for start in starts)
    batches = (pa.record_batch([column(field, *span) for field in wanted], schema=wanted) for span in spans)
    write_arrow(path, wanted, batches)
    return histograms


def _on_every_row(
    where: str, name: str, rows: SparseRows, n: int, layout: Json, histogram: Histogram
) -> Iterator[bytes]:
    """The image file of the newest frame on each of `n` steps: the stored one where there is one, else a new one."""
    frames = rows.values
    for at, times in enumerate(np.bincount(newest(rows.index, n))):
        stored = frames.encoded(at) if isinstance(frames, Frames) else None
        image: Any = None if stored else frames[at]
        data = stored or _encode(image, layout["image_codec"])
        histogram.add(at, data if stored else image, f"{where}: frame {at} of camera {name}")
        yield from itertools.repeat(data, times)


def _columns(layout: Json, episode: Episode) -> dict[str, np.ndarray]:
    steps, end = episode.steps, episode.end
    n = steps.n
    last = np.arange(n) == n - 1
    out = {
        ds.STATE: steps.observation[STATE],
        ds.ACTION: steps.action,
        ds.REWARD: episode.rewards,
        ds.DONE: last & (end.terminated or end.truncated),
        ds.SUCCESS: last & (end.outcome is Outcome.SUCCESS),
        ds.INTERVENTION: steps.source == Source.HUMAN,
        ds.TIMESTAMP: np.arange(n) / layout["hz"],
        ds.FRAME_INDEX: np.arange(n),
        **{ds.EXTRA + name: getattr(steps, name) for name in ds.EXTRA_COLUMNS},
    }
    dtype = np.dtype(np.float32)
    return {name: np.ascontiguousarray(v.astype(ds.SCALARS.get(name, dtype))) for name, v in out.items()}


def placed_table(table: Table, layout: Json, episode: int, first: int, task: int) -> Table:
    """Add an episode's number, its first row's in the data set, and its task's to `table`, its rows."""
    n = table.num_rows
    places = (np.full(n, episode), np.arange(first, first + n), np.full(n, task))
    for name, values in zip(_PLACED, places, strict=True):
        table = table.append_column(name, pa.array(values))
    wanted = schema(layout, placed=True)
    return table.select(wanted.names).cast(wanted)


def parquet_options(layout: Json) -> Json:
    """Return options of the data files: images are compressed already and stay readable in place, numbers are not."""
    scalars = list(ds.SCALARS)
    dims = {ds.STATE: layout["state_dim"], ds.ACTION: layout["action_dim"]}
    vectors = [name if dim == 1 else f"{name}.list.element" for name, dim in dims.items()]
    return {
        "compression": dict.fromkeys([*scalars, *vectors], "snappy"),
        "use_dictionary": scalars,
        "write_statistics": scalars,
    }
