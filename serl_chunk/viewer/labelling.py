"""Writes an operator's labels: to a run's journal, or to the `labels.json` of HDF5 and LeRobot data."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from serl_chunk.data.formats.episodes import EpisodeFiles
from serl_chunk.data.labels import DISCARD, LABELS, Label, as_recorded, correction, read_labels, write_label
from serl_chunk.data.source import Source
from serl_chunk.runs.amend import RunAmender
from serl_chunk.runs.episodes import RunSource
from serl_chunk.types import ConfigError, DataError, SerlChunkError
from serl_chunk.viewer.catalogue import Catalogue, Row

_FILES, _LEROBOT = "episodes", "lerobot"  # formats with a labels.json


class Labelling(Protocol):
    """Where the labels of a source go."""

    refusal: str  # why there can be none; empty where there can
    final_discard: bool  # a discard cannot be taken back

    def set(self, catalogue: Catalogue, number: int, label: str | None) -> Row:
        """Write the label of an episode, or take it back (None); returns its new row. Raises SerlChunkError."""

    def close(self) -> None: ...


def labelling_of(source: Source) -> Labelling:
    """Return where the labels of `source` go."""
    if isinstance(source, RunSource):
        return RunLabels(source)
    if isinstance(source, EpisodeFiles) or source.format == _LEROBOT:
        return FileLabels(source)
    return NoLabels(source.format)


def place_of(source: Source, key: str) -> tuple[Path, str]:
    """Return the folder of the `labels.json` that an episode at rest belongs to, and its key there."""
    if isinstance(source, EpisodeFiles):
        return source.files[key].parent, source.files[key].name
    return source.path, key


def labels_of(source: Source) -> dict[str, Label]:
    """Return the labels of a source's episodes at rest, by their keys; raises DataError where a file is damaged."""
    if source.format not in (_FILES, _LEROBOT):
        return {}
    found = {}
    for key in source.keys():
        folder, name = place_of(source, key)
        if (label := read_labels(folder).get(name)) is not None:
            found[key] = label
    return found


class RunLabels:
    """Labels of a run become corrections in its journal. A learner that holds the run is never disturbed."""

    refusal = ""
    final_discard = True

    def __init__(self, source: RunSource) -> None:
        self._source, self._amender = source, RunAmender(source.path)

    def set(self, catalogue: Catalogue, number: int, label: str | None) -> Row:
        key = catalogue.keys[number]
        entry = self._source.about(key)
        if label != DISCARD and not entry.ended:
            text = "its end was not recorded, so that its last step proves nothing: it can only be discarded"
            raise DataError(f"{self._source.path}: episode {key}: {text}")
        end, last = entry.end, entry.last_reward
        amend = as_recorded(end, last) if label is None else correction(label, end, last)
        session, _, _ = key.rpartition("/")
        self._amender.amend(session, entry.actor_id, amend)
        self._source.amended(key, amend)
        return catalogue.mark(number, DISCARD) if label == DISCARD else catalogue.refresh(number)

    def close(self) -> None:
        self._amender.close()


class FileLabels:
    """Labels of episodes at rest, next to their files."""

    refusal = ""
    final_discard = False

    def __init__(self, source: Source) -> None:
        self._source = source

    def set(self, catalogue: Catalogue, number: int, label: str | None) -> Row:
        key = catalogue.keys[number]
        folder, name = place_of(self._source, key)
        try:
            episode = self._source.read(key)  # as recorded: the former label may be of another episode
        except SerlChunkError:
            if label not in (DISCARD, None):
                raise
            episode = None
        write_label(folder, name, label, episode)
        return catalogue.refresh(number, read_labels(folder).get(name))

    def close(self) -> None: ...


class NoLabels:
    """Of formats whose episodes have no names that last."""

    final_discard = False

    def __init__(self, format: str) -> None:
        self.refusal = (
            f"episodes of format {format} take no labels: runs, HDF5 files (one an episode) and LeRobot data sets do. "
            "Convert them first (serl-chunk data convert)"
        )

    def set(self, catalogue: Catalogue, number: int, label: str | None) -> Row:
        raise ConfigError(self.refusal)

    def close(self) -> None: ...


def check_label(label: object) -> str | None:
    """Return a label that a page sent; raises DataError for another value."""
    if label is None or (isinstance(label, str) and label in LABELS):
        return label
    raise DataError(f"label is {label!r}; valid: {', '.join(LABELS)} or null")
