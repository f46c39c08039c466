"""Calibration of the critic: its values at decisions, and the returns realised from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.runs.metrics import Row

BINS = 10
LEAST_EPISODES = 5  # in a bin, for an interval
_NORMAL = 1.96  # deviations of a two-sided 95 % interval


class Decisions(NamedTuple):
    """N decisions with a recorded value."""

    value: np.ndarray  # float64[N], the critic's, of the chosen chunk
    realised: np.ndarray  # float64[N], discounted return from there to the episode's end
    episode: np.ndarray  # int64[N], which episode each belongs to

    @property
    def bias(self) -> float:
        return float(self.value.mean() - self.realised.mean())


class Bin(NamedTuple):
    """Decisions of about the same value."""

    value: float  # their mean value
    realised: float  # their mean realised return
    half: float  # of the 95 % interval of `realised`; NaN for fewer than LEAST_EPISODES episodes


def decisions(rows: Iterable[Row]) -> Decisions:
    """Return the decisions in episode rows whose value and return are both known."""
    pairs = ((i, pair) for i, row in enumerate(rows) for pair in zip(row["q"], row["g"], strict=False))
    found = [(*pair, i) for i, pair in pairs if None not in pair]
    table = np.array(found, float).reshape(-1, 3)
    return Decisions(table[:, 0], table[:, 1], table[:, 2].astype(np.int64))


def binned(d: Decisions, bins: int = BINS) -> list[Bin]:
    """Return `bins` equally large groups of decisions, ordered by value; fewer where there are fewer decisions.

    The interval counts episodes, not decisions: those of one episode share its fate. It is the normal one with the
    variance of a mean over clusters, sum_e (sum_{i in e} (g_i - m))^2 * E / ((E - 1) N^2), for E episodes and N
    decisions (Liang and Zeger 1986, for a mean).
    """
    out = []
    for group in np.array_split(np.argsort(d.value, kind="stable"), min(bins, len(d.value))):
        value, realised = d.value[group].mean(), d.realised[group].mean()
        residual = np.bincount(d.episode[group], d.realised[group] - realised)
        episodes = len(np.unique(d.episode[group]))
        half = np.nan
        if episodes >= LEAST_EPISODES:
            half = _NORMAL * np.sqrt((residual**2).sum() * episodes / (episodes - 1)) / len(group)
        out.append(Bin(float(value), float(realised), float(half)))
    return out


def value_range(config: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the range of the critic of a run's `config.json`; None where it is unbounded, or not recorded."""
    critic = (config.get("agent") or {}).get("critic") or {}
    if critic.get("loss") not in ("bounded", "hl_gauss"):
        return None
    low, high = critic.get("value_low", 0.0), critic.get("value_high", 1.0)  # runs of version 0.1 name none
    return float(low), float(high)
