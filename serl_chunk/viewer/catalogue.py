"""The list of a source's episodes: the figures of each, gathered by a thread where a source does not index them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.formats.episodes import EpisodeFiles
from serl_chunk.data.labels import LABELS, OPERATOR, Label, read_labels
from serl_chunk.data.source import Source
from serl_chunk.runs.episodes import RunSource
from serl_chunk.runs.journal_index import EpisodeIndexEntry, lowest_value
from serl_chunk.types import Episode, SerlChunkError
from serl_chunk.types import Source as Actor

logger = logging.getLogger(__name__)

KEPT = 4  # episodes in memory, their frames not decoded
LABELLED_FORMATS = ("episodes", "lerobot")  # which have a labels.json


@dataclasses.dataclass(frozen=True)
class Row:
    """An episode in the list."""

    number: int  # from 0, in the source's order
    key: str
    length: int = 0  # steps
    outcome: str = ""
    by: str = ""
    reward: float | None = None  # sum of the rewards
    human: float | None = None  # share of the steps that a human commanded
    lowest_q: float | None = None  # of its decisions; None where they recorded no value
    task: str = ""
    label: str = ""  # the operator's, of `data.labels.LABELS`
    error: str = ""  # why it cannot be read
    demonstration: bool = False  # of a run: streamed by `record --ip`

    def json(self) -> dict[str, Any]:
        """Return the row as plain values, numbers rounded to six digits."""
        return {k: rounded(v) if isinstance(v, float) else v for k, v in dataclasses.asdict(self).items()}


def rounded(value: float) -> float | None:
    """Round to six significant digits; None for what JSON cannot hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def place_of(source: Source, key: str) -> tuple[Path, str]:
    """Return the folder of the `labels.json` that an episode at rest belongs to, and its key there."""
    if isinstance(source, EpisodeFiles):
        return source.files[key].parent, source.files[key].name
    return source.path, key


def _labels_of(source: Source) -> dict[str, Label]:
    """Return the labels of a source's episodes at rest, by their keys; raises DataError where a file is damaged."""
    keys = source.keys() if source.format in LABELLED_FORMATS else []
    places = {key: place_of(source, key) for key in keys}
    found = {key: read_labels(folder).get(name) for key, (folder, name) in places.items()}
    return {key: label for key, label in found.items() if label is not None}


class Catalogue:
    """All episodes of a source, as rows; reads the newest ones whole. Thread-safe.

    Args:
        source: opened with `ReadOptions.labels` False, so that discarded episodes are listed too.
        listing: the same without cameras, which the list is gathered from; `source` itself where that costs nothing.
        known: keys of an earlier catalogue of the source, which keep their numbers.
    """

    def __init__(self, source: Source, listing: Source | None = None, known: Sequence[str] = ()) -> None:
        self.source, self._listing = source, listing or source
        self.keys = list(dict.fromkeys([*known, *source.keys()]))
        self.labels = _labels_of(source)
        self._rows: list[Row] = []
        self._lock = threading.Lock()  # of the rows and labels
        self._reading = threading.Lock()  # of the episodes
        self._read = functools.lru_cache(KEPT)(lambda key: self._labelled(key, source.read(key)))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._gather, name="serl-chunk-list", daemon=True)

    def start(self) -> None:
        """Gather the rows in a thread."""
        self._thread.start()

    def gather(self) -> list[Row]:
        """Gather the rows in this thread and return all of them."""
        self._gather()
        return self.rows(0, len(self.keys))

    def close(self) -> None:
        """Stop gathering."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _gather(self) -> None:
        for number, key in enumerate(self.keys):
            if self._stopped.is_set():
                return
            row = self._make(number, key)
            with self._lock:
                self._rows.append(row)

    def _make(self, number: int, key: str) -> Row:
        try:
            if isinstance(self.source, RunSource):
                return row_of_entry(number, self.source.about(key))
            row = row_of(number, key, self._labelled(key, self._listing.read(key)))
        except SerlChunkError as error:
            row = Row(number, key, error=str(error))
        except Exception as error:  # a reader's fault must not hide the other episodes
            logger.exception("episode %s cannot be listed", key)
            row = Row(number, key, error=f"{key}: cannot be read ({error!r})")
        label = self.labels.get(key)
        return row if label is None else dataclasses.replace(row, label=label.label)

    def _labelled(self, key: str, episode: Episode) -> Episode:
        label = self.labels.get(key)
        return episode if label is None else label.applied(f"{self.source.path}: {key}", episode)

    def rows(self, first: int, count: int) -> list[Row]:
        """Return up to `count` of the rows gathered so far."""
        with self._lock:
            return self._rows[first : first + count]

    @property
    def gathered(self) -> int:
        return len(self._rows)

    def refresh(self, number: int, label: Label | None = None) -> Row:
        """Make a row anew after its episode was labelled; `label` is the new one of an episode at rest."""
        key = self.keys[number]
        with self._reading:
            self._read.cache_clear()
        with self._lock:
            self.labels.pop(key, None)
            if label is not None:
                self.labels[key] = label
        row = self._make(number, key)
        with self._lock:
            if number < len(self._rows):
                self._rows[number] = row
        return row

    def mark(self, number: int, label: str) -> Row:
        """Change the label of a row alone: its episode is not listed by the source any more."""
        with self._lock:
            self._rows[number] = dataclasses.replace(self._rows[number], label=label)
            return self._rows[number]

    def read(self, number: int) -> Episode:
        """Read an episode, with its label. Raises DataError."""
        with self._reading:
            return self._read(self.keys[number])


def row_of(number: int, key: str, episode: Episode) -> Row:
    """Return the row of an episode that was read."""
    begin, steps, end = episode
    q = steps.sparse.get("decision/q")
    return Row(
        number, key, steps.n, end.outcome.value, end.outcome_by, float(episode.rewards.sum()),
        float(np.mean(steps.source == Actor.HUMAN)), None if q is None else lowest_value(np.asarray(q.values)),
        begin.task,
    )  # fmt: skip


def row_of_entry(number: int, entry: EpisodeIndexEntry) -> Row:
    """Return the row of an episode of a run, from the journal's index."""
    end = entry.corrected_end
    label = end.outcome.value if end.outcome_by == OPERATOR and entry.amends else ""
    return Row(
        number, entry.key, entry.length, end.outcome.value, end.outcome_by, entry.episode_return,
        entry.human_steps / entry.length, entry.lowest_q, entry.task, label if label in LABELS else "",
        demonstration=entry.demonstration,
    )  # fmt: skip
