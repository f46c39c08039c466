"""Exact statistics as LeRobot's tables hold them: min, max, mean, std, count and quantiles of every feature."""

from __future__ import annotations

from typing import Any

import numpy as np

from serl_chunk.data.normalise.running_statistics import Statistics
from serl_chunk.data.source import Json

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def of_values(values: np.ndarray) -> Json:
    """Of numbers or flags [N >= 1, D], all of them in memory: lists of D numbers."""
    x = values.astype(np.float64)
    quantiles = np.quantile(x, list(QUANTILES.values()), axis=0)
    return {
        "min": x.min(0).tolist(),
        "max": x.max(0).tolist(),
        "mean": x.mean(0).tolist(),
        "std": x.std(0).tolist(),
        "count": [len(x)],
        **{name: q.tolist() for name, q in zip(QUANTILES, quantiles, strict=True)},
    }


def of_stream(statistics: Statistics) -> Json:
    """Of what `statistics` (made with the quantiles of QUANTILES) has seen."""
    moments = statistics.moments
    return {
        "min": moments.low.tolist(),
        "max": moments.high.tolist(),
        "mean": moments.mean.tolist(),
        "std": moments.std.tolist(),
        "count": [moments.count],
        **{name: q.tolist() for name, q in zip(QUANTILES, statistics.quantile(), strict=True)},
    }


def of_frames(counts: np.ndarray, frames: int) -> Json:
    """Of images by how often each value occurs in each channel, int64[3, 256]: in [0, 1], of shape [3, 1, 1]."""
    value = np.arange(256) / 255
    n = counts.sum(1)
    mean = counts @ value / n
    std = np.sqrt((counts * np.square(value - mean[:, None])).sum(1) / n)
    present = counts > 0
    rows: dict[str, Any] = {
        "min": value[present.argmax(1)],
        "max": value[255 - present[:, ::-1].argmax(1)],
        "mean": mean,
        "std": std,
    }
    ranks = np.cumsum(counts, 1)
    for name, q in QUANTILES.items():
        at = q * (n - 1)
        below, part = np.floor(at), at - np.floor(at)
        low = [value[np.searchsorted(r, k, side="right")] for r, k in zip(ranks, below, strict=True)]
        above = np.minimum(below + 1, n - 1)
        high = [value[np.searchsorted(r, k, side="right")] for r, k in zip(ranks, above, strict=True)]
        rows[name] = np.array(low) + part * (np.array(high) - np.array(low))
    return {name: row.reshape(3, 1, 1).tolist() for name, row in rows.items()} | {"count": [frames]}
