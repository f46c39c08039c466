"""The episode viewer's server: the list, an episode, its frames and labels, for a page on this machine.

Labels go to a run's journal, or to the `labels.json` of HDF5 and LeRobot data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from serl_chunk.data.frames import RecentlyUsed
from serl_chunk.data.labels import DISCARD, LABELS, as_recorded, correction, read_labels, write_label
from serl_chunk.data.source import Source
from serl_chunk.data.validate import cameras_of
from serl_chunk.runs.amend import RunAmender
from serl_chunk.runs.episodes import RunSource
from serl_chunk.types import ConfigError, DataError, SerlChunkError
from serl_chunk.viewer.catalogue import LABELLED_FORMATS, Catalogue, Row, place_of
from serl_chunk.viewer.content import episode_json, frame_file, media_type
from serl_chunk.viz.local_server import Answer, LocalHandler, LocalServer, RequestError, count, file_answer, json_answer

CACHE_BYTES = 64 << 20  # of image files
PAGE_ROWS = 500  # of the list, in one answer
ASSETS = Path(__file__).parent / "page"


class Labelling:
    """Labels of the episodes in a catalogue, written where they belong.

    Those of a run become corrections in its journal; a learner that holds the run is never disturbed. Those of files
    lie next to them. Other formats have no names that last, and no labels.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        source = catalogue.source
        self._catalogue, self._source = catalogue, source
        self._amender = RunAmender(source.path) if isinstance(source, RunSource) else None
        self.final_discard = self._amender is not None  # a discard cannot be taken back
        self.refusal = ""  # why there can be no label
        if self._amender is None and source.format not in LABELLED_FORMATS:
            self.refusal = (
                f"episodes of format {source.format} take no labels: runs, HDF5 files (one an episode) and LeRobot "
                "data sets do. Open one of these alone, or convert them first (serl-chunk data convert)"
            )

    def set(self, number: int, label: object) -> Row:
        """Write the label of an episode that a page sent, or take it back (None); returns its new row.

        Raises SerlChunkError.
        """
        if label is not None and label not in LABELS:
            raise DataError(f"label is {label!r}; valid: {', '.join(LABELS)} or null")
        if number >= self._catalogue.gathered:
            raise DataError(f"episode {number} is not listed yet")
        if self.refusal:
            raise ConfigError(self.refusal)
        wanted = None if label is None else str(label)
        if self._amender is not None:
            return self._amend(self._amender, number, wanted)
        key = self._catalogue.keys[number]
        folder, name = place_of(self._source, key)
        try:
            episode = self._source.read(key)  # as recorded: the former label may be of another episode
        except SerlChunkError:
            if label not in (DISCARD, None):
                raise
            episode = None
        write_label(folder, name, wanted, episode)
        return self._catalogue.refresh(number, read_labels(folder).get(name))

    def _amend(self, amender: RunAmender, number: int, label: str | None) -> Row:
        source, key = self._source, self._catalogue.keys[number]
        assert isinstance(source, RunSource)
        entry = source.about(key)
        if label != DISCARD and not entry.ended:
            text = "its end was not recorded, so that its last step proves nothing: it can only be discarded"
            raise DataError(f"{source.path}: episode {key}: {text}")
        end, last = entry.end, entry.last_reward
        amend = as_recorded(end, last) if label is None else correction(label, end, last)
        amender.amend(key.rpartition("/")[0], entry.actor_id, amend)
        source.amended(key, amend)
        return self._catalogue.mark(number, DISCARD) if label == DISCARD else self._catalogue.refresh(number)

    def close(self) -> None:
        if self._amender is not None:
            self._amender.close()


class EpisodePages:
    """Answers the requests of the viewer's page: the catalogue of a source, its frames and its labels.

    `listing`, `known`: see `Catalogue`.
    """

    def __init__(self, source: Source, listing: Source | None = None, known: Sequence[str] = ()) -> None:
        self.source = source
        self.catalogue = Catalogue(source, listing, known)
        self.labelling = Labelling(self.catalogue)
        self.notes = source.notes()
        self._files = RecentlyUsed(CACHE_BYTES, len)

    def info(self) -> dict[str, Any]:
        """Return what is true of all episodes."""
        return {
            "path": str(self.source.path), "format": self.source.format, "hz": self.source.hz or 0.0,
            "total": len(self.catalogue.keys), "notes": self.notes,
            "refusal": self.labelling.refusal, "final_discard": self.labelling.final_discard,
        }  # fmt: skip

    def episode(self, number: int) -> dict[str, Any]:
        """Return the content of an episode's page, with its row. Raises DataError."""
        rows = self.catalogue.rows(number, 1)
        content = episode_json(self.catalogue.read(number), self.source)
        return content | {"row": rows[0].json() if rows else None}

    def frame(self, number: int, camera: str, i: int) -> bytes:
        """Return frame `i` of a camera as a JPEG or PNG file. Raises DataError."""
        episode = self.catalogue.read(number)
        rows = cameras_of(episode).get(camera)
        if rows is None or i >= len(rows.index):
            raise DataError(f"episode {episode.begin.episode_id} has no frame {i} of camera {camera!r}")
        file: bytes = self._files.get((number, camera, i), lambda: frame_file(rows, i))
        return file

    def get(self, path: list[str]) -> Answer:
        """Return the answer to the parts of a path. Raises SerlChunkError."""
        match path:
            case [""]:
                return file_answer(ASSETS / "page.html")
            case ["page.css" | "page.js" as name]:
                return file_answer(ASSETS / name)
            case ["info"]:
                return json_answer(self.info())
            case ["list", first]:
                rows = self.catalogue.rows(count(first), PAGE_ROWS)
                total, gathered = len(self.catalogue.keys), self.catalogue.gathered
                return json_answer({"total": total, "gathered": gathered, "rows": [row.json() for row in rows]})
            case ["episode", number]:
                return json_answer(self.episode(self._number(number)))
            case ["frame", number, camera, i]:
                file = self.frame(self._number(number), camera, count(i))
                return media_type(file), file, True
        raise RequestError(HTTPStatus.NOT_FOUND, "no such page")

    def post(self, path: list[str], body: Callable[[], dict[str, Any]]) -> Answer:
        """The same of a label; `body` reads what came with it."""
        match path:
            case ["label", number]:
                n = self._number(number)
                return json_answer({"row": self.labelling.set(n, body().get("label")).json()})
        raise RequestError(HTTPStatus.NOT_FOUND, "no such page")

    def _number(self, text: str) -> int:
        number, total = count(text), len(self.catalogue.keys)
        if number >= total:
            raise RequestError(HTTPStatus.NOT_FOUND, f"there is no episode {number}, only 0..{total - 1}")
        return number

    def close(self) -> None:
        self.catalogue.close()
        self.labelling.close()


class Viewer(LocalServer):
    """Serves the pages of a source's episodes on a loopback port.

    Raises ConfigError where the port cannot be used. `port`: 0 takes a free one.
    """

    def __init__(self, source: Source, listing: Source | None = None, port: int = 0) -> None:
        self.pages = EpisodePages(source, listing)
        super().__init__(_Handler, port, printed_by="`serl-chunk view`")

    def close(self) -> None:
        self.server_close()
        self.pages.close()


class _Handler(LocalHandler):
    server: Viewer

    def get(self, path: list[str]) -> Answer:
        return self.server.pages.get(path)

    def post(self, path: list[str]) -> Answer:
        return self.server.pages.post(path, self.body)
