"""What calls of updates take: figures of those since the last metric row, and a trace of JAX's profiler over some."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from serl_chunk.agents.state import Metrics

logger = logging.getLogger(__name__)

PROFILE = "profile"  # in a run folder
_IMITATION = "actor/bc_loss"


class CallFigures:
    """Figures of the calls since the last metric row. For one thread.

    Args:
        publishing: the seconds that publishing took so far, on a thread of its own.
        trace: counts the calls too.
    """

    def __init__(self, publishing: Callable[[], float], trace: UpdateTrace) -> None:
        self._publishing, self.trace = publishing, trace
        self._imitation: list[Any] = []  # loss of each call, or losses of several
        self._aside = {"embed": 0.0, "publish": 0.0}  # seconds of other threads, until the last row

    def called(self, updates: int, metrics: Metrics) -> None:
        """Count a call of so many updates."""
        self.trace.updated(updates, metrics)
        if _IMITATION in metrics:
            self._imitation.append(metrics[_IMITATION])

    def row(self, replay: Mapping[str, Any], updates: int) -> dict[str, float]:
        """Return the figures of a row about so many `updates`, with `Replay.stats`, and begin the next one's."""
        aside = {"embed": float(replay.get("replay/feature_seconds", 0.0)), "publish": self._publishing()}
        out = {f"timer/{name}": (total - self._aside[name]) / max(updates, 1) for name, total in aside.items()}
        losses = [float(loss) for losses in self._imitation for loss in np.ravel(losses)]
        if len(losses) > 1:
            out["actor/bc_loss_std"] = statistics.pstdev(losses)
        self._imitation, self._aside = [], aside
        return out | device_memory()


def device_memory() -> dict[str, float]:
    """Return the bytes in use of the fullest device, the peak of any, and by how many they differ; none of a CPU."""
    found = [stats for device in jax.local_devices() if "bytes_in_use" in (stats := device.memory_stats() or {})]
    if not found:
        return {}
    used = [stats["bytes_in_use"] for stats in found]
    peak = max(stats.get("peak_bytes_in_use", 0) for stats in found)
    return {"device/bytes": max(used), "device/peak_bytes": peak, "device/spread_bytes": max(used) - min(used)}


def free_device_bytes() -> int | None:
    """Return the bytes that the fullest device has left; None where devices report none, as a CPU."""
    found = (device.memory_stats() or {} for device in jax.local_devices())
    return min((s["bytes_limit"] - s["bytes_in_use"] for s in found if "bytes_limit" in s), default=None)


class UpdateTrace:
    """Traces the first `updates` updates after those of the first call, which compiles; 0: none. For one thread.

    The trace is of the whole process: what its devices compute, and what its threads do meanwhile.
    """

    def __init__(self, folder: Path, updates: int) -> None:
        self._folder, self._left, self._total = folder, updates, updates
        self._running = False

    @property
    def over(self) -> bool:
        return self._left <= 0

    def updated(self, updates: int, metrics: Any) -> None:
        """Count a call of `updates` updates, whose results are `metrics`; begin or end the trace with it."""
        if self._running:
            self._left -= updates
            if self._left <= 0:
                self._end(metrics)
        elif self._left > 0:
            jax.block_until_ready(metrics)  # else the trace would begin with the end of this call
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def close(self) -> None:
        """End a trace that is not whole."""
        if self._running:
            self._end(None)

    def _end(self, metrics: Any) -> None:
        jax.block_until_ready(metrics)
        jax.profiler.stop_trace()
        done, self._left, self._running = self._total - max(self._left, 0), 0, False
        logger.info(f"{self._folder}: a trace of {done} updates, for TensorBoard's profile plugin or xprof")
