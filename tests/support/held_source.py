"""A source of episodes in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from serl_chunk.data.normalise.chunk_statistics import StatsRequest, compute, write_norm_stats
from serl_chunk.types import DataError, Episode


class HeldSource:
    """Gives its episodes by their keys, or by their positions; those that are an error are raised."""

    format, path = "memory", Path("memory")

    def __init__(
        self, episodes: Mapping[str, Episode | DataError] | Iterable[Episode], hz: float | None = 50.0
    ) -> None:
        named = episodes if isinstance(episodes, Mapping) else {str(i): e for i, e in enumerate(episodes)}
        self.episodes: dict[str, Episode | DataError] = dict(named)
        self.hz, self.reads = hz, dict.fromkeys(self.episodes, 0)

    def keys(self) -> list[str]:
        return list(self.episodes)

    def read(self, key: str) -> Episode:
        self.reads[key] += 1
        episode = self.episodes[key]
        if isinstance(episode, DataError):
            raise episode
        return episode

    def notes(self) -> list[str]:
        return ["the rate was guessed"]


def written_statistics(folder: Path, episodes: Iterable[Episode], **request: Any) -> str:
    """The file of statistics of `episodes`."""
    computed = compute(HeldSource(episodes), StatsRequest(**request))
    return str(write_norm_stats(folder, {k: m.stats for k, m in computed.vectors.items()}, computed.note()))
