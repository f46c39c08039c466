"""Where converted episodes go: one class per output format. The pipeline that drives them is `data.convert`.

An episode is *staged* by a worker process, all of it or nothing, then *placed* by the main process in the order of the
source. So episodes are encoded in parallel, numbered in order although some are left out, and an interruption at any
moment costs the episodes that were being staged.
"""

from __future__ import annotations

from typing import Any, Protocol

from serl_chunk.types import Episode

Json = dict[str, Any]  # plain values that survive JSON unchanged


class Sink(Protocol):
    """A data set being written to a folder. A plain value: worker processes get copies."""

    def layout(self, sample: Episode, hz: float | None) -> Json:
        """What all episodes have in common, from one of them: dimensions, cameras and their sizes, rate.

        Decided once, kept in the manifest, and given back to every other method, also after an interruption.
        Raises DataError where this format cannot hold such episodes (LeRobot needs a rate), saying what to pass.
        """

    def stage(self, layout: Json, number: int, episode: Episode) -> Json:
        """In a worker: write episode `number` of the source aside; returns what `place` and `finish` need of it.

        What exists of an earlier attempt is replaced. Raises DataError where the episode does not fit the layout.
        """

    def placed(self, layout: Json, staged: list[Json]) -> int:
        """After an interruption: how many of `staged` (in order) are in the data set for good. Cleans up the rest."""

    def place(self, layout: Json, index: int, staged: Json) -> None:
        """Put a staged episode into the data set as its number `index`; called in order, without holes."""

    def finish(self, layout: Json, staged: list[Json]) -> None:
        """Write what describes the whole data set, last; remove what was staged. May be called again."""
