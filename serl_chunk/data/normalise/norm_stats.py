"""Normalisation statistics in a file of openpi's layout.

    {"norm_stats": {"state": {"mean": [...], "std": [...], "q01": [...], "q99": [...]}, "actions": {...}},
     "serl_chunk": {...}}

openpi ignores the second key, which describes the numbers (see `data.normalise.chunk_statistics`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.io import atomic_write, os_reason
from serl_chunk.types import DataError

FILE = "norm_stats.json"


class NormStats(NamedTuple):
    """Statistics of one vector, float64[D]; quantiles are None in files of openpi's that have none."""

    mean: np.ndarray
    std: np.ndarray
    q01: np.ndarray | None
    q99: np.ndarray | None


def write_norm_stats(out: Path | str, vectors: Mapping[str, NormStats], note: Mapping[str, Any]) -> Path:
    """Write `out`, a .json file, or `norm_stats.json` in a folder `out`, whole or not at all, and return the file.

    `note` goes under the key `serl_chunk`. Missing folders are made. Raises DataError where it cannot be written.
    """
    path = Path(out)
    path = path if path.suffix == ".json" else path / FILE
    plain = {name: stats._asdict() for name, stats in vectors.items()}
    content = {"norm_stats": plain, "serl_chunk": dict(note)}
    text = json.dumps(content, indent=2, allow_nan=False, default=np.ndarray.tolist) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text, durable=True)
    except OSError as error:
        raise DataError(f"{path}: cannot write the statistics: {os_reason(error)}") from error
    return path


def read_norm_stats(path: Path | str) -> dict[str, NormStats]:
    """Read a file of `write_norm_stats` or openpi, or `norm_stats.json` in a folder.

    Raises DataError, naming the vector and field, where it is not JSON of that layout: finite numbers, lists of one
    length, no negative std, no q99 below its q01.
    """
    path, content = _content(path)
    vectors = content.get("norm_stats") if isinstance(content, dict) else None
    if not isinstance(vectors, dict) or not vectors:
        raise DataError(
            f'{path}: no statistics (expected a JSON object "norm_stats": {{"state": ..., "actions": ...}})'
        )
    return {name: _stats(f"{path}: {name}", fields) for name, fields in vectors.items()}


def read_note(path: Path | str) -> dict[str, Any]:
    """Read what stands under the key `serl_chunk`, see `StatsResult.note`; empty in a file of openpi's."""
    _, content = _content(path)
    note = content.get("serl_chunk", {}) if isinstance(content, dict) else {}
    return note if isinstance(note, dict) else {}


def _content(path: Path | str) -> tuple[Path, Any]:
    path = Path(path).expanduser()
    path = path / FILE if path.is_dir() else path
    try:
        return path, json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as statistics: {error}") from error


def _stats(where: str, fields: Any) -> NormStats:
    if not isinstance(fields, dict):
        raise DataError(f"{where} must be an object with mean, std, q01 and q99")
    found: dict[str, np.ndarray | None] = {}
    for name in NormStats._fields:
        value = fields.get(name)
        if value is None and name in ("q01", "q99"):
            found[name] = None
            continue
        try:
            numbers = np.array(value, np.float64)
        except (TypeError, ValueError):
            numbers = np.array(np.nan)
        if numbers.ndim != 1 or not numbers.size or not np.isfinite(numbers).all():
            raise DataError(f"{where}: {name} must be a list of finite numbers")
        found[name] = numbers
    stats = NormStats(**found)  # type: ignore[arg-type]
    lengths = {k: len(v) for k, v in found.items() if v is not None}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{where}: fields of different lengths: {lengths}")
    if (stats.std < 0).any():
        raise DataError(f"{where}: std is negative in dimension {int(np.argmax(stats.std < 0))}")
    if stats.q01 is not None and stats.q99 is not None and (stats.q99 < stats.q01).any():
        raise DataError(f"{where}: q99 is below q01 in dimension {int(np.argmax(stats.q99 < stats.q01))}")
    return stats
