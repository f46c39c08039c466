"""The episode viewer's server: the list, an episode, its frames and labels, for a page on this machine."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any

from serl_chunk.data.source import Source
from serl_chunk.types import DataError
from serl_chunk.viewer.catalogue import Catalogue
from serl_chunk.viewer.content import FrameCache, episode_json, media_type
from serl_chunk.viewer.labelling import Labelling, check_label, labelling_of, labels_of
from serl_chunk.viz.local_server import (
    Answer,
    LocalHandler,
    LocalServer,
    RequestError,
    count,
    file_answer,
    json_answer,
)

PAGE_ROWS = 500  # of the list, in one answer
ASSETS = Path(__file__).parent / "page"


class Viewer:
    """What the server shows: the catalogue of a source, its frames and its labels."""

    def __init__(self, source: Source, listing: Source | None = None) -> None:
        self.source = source
        self.catalogue = Catalogue(source, listing, labels_of(source))
        self.labelling: Labelling = labelling_of(source)
        self.notes = source.notes()
        self.frames = FrameCache()

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

    def close(self) -> None:
        self.catalogue.close()
        self.labelling.close()


class Server(LocalServer):
    """Serves a viewer on a loopback port. Raises ConfigError where the port cannot be used.

    Args:
        port: 0 takes a free one.
    """

    def __init__(self, viewer: Viewer, port: int = 0) -> None:
        self.viewer = viewer
        super().__init__(_Handler, port, printed_by="`serl-chunk view`")


class _Handler(LocalHandler):
    server: Server

    def get(self, path: list[str]) -> Answer:
        viewer = self.server.viewer
        match path:
            case [""]:
                return file_answer(ASSETS / "page.html")
            case ["page.css" | "page.js" as name]:
                return file_answer(ASSETS / name)
            case ["info"]:
                return json_answer(viewer.info())
            case ["list", first]:
                rows = viewer.catalogue.rows(count(first), PAGE_ROWS)
                total, gathered = len(viewer.catalogue.keys), viewer.catalogue.gathered
                return json_answer({"total": total, "gathered": gathered, "rows": [row.json() for row in rows]})
            case ["episode", number]:
                return json_answer(viewer.episode(self._number(number)))
            case ["frame", number, camera, i]:
                n = self._number(number)
                file = viewer.frames.get(n, viewer.catalogue.read(n), camera, count(i))
                return media_type(file), file, True
        raise RequestError(HTTPStatus.NOT_FOUND, "no such page")

    def post(self, path: list[str]) -> Answer:
        match path:
            case ["label", number]:
                n, viewer = self._number(number), self.server.viewer
                label = check_label(self.body().get("label"))
                if n >= viewer.catalogue.gathered:
                    raise DataError(f"episode {n} is not listed yet")
                return json_answer({"row": viewer.labelling.set(viewer.catalogue, n, label).json()})
        raise RequestError(HTTPStatus.NOT_FOUND, "no such page")

    def _number(self, text: str) -> int:
        number, total = count(text), len(self.server.viewer.catalogue.keys)
        if number >= total:
            raise RequestError(HTTPStatus.NOT_FOUND, f"there is no episode {number}, only 0..{total - 1}")
        return number
