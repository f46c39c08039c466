"""The viewer's HTTP server: loopback alone, one secret path, a few JSON resources and image files."""

from __future__ import annotations

import errno
import hmac
import json
import logging
import secrets
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from serl_chunk.data.source import Source
from serl_chunk.io import os_reason
from serl_chunk.types import ConfigError, DataError, SerlChunkError
from serl_chunk.viewer.catalogue import Catalogue
from serl_chunk.viewer.content import FrameCache, episode_json, media_type
from serl_chunk.viewer.labelling import Labelling, check_label, labelling_of, labels_of

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
PAGE_ROWS = 500  # of the list, in one answer
MAX_BODY = 4096  # bytes
ASSETS = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class RequestError(SerlChunkError):
    """A request that is not answered as wished."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


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


class Server(ThreadingHTTPServer):
    """Serves a viewer on a loopback port. Raises ConfigError where the port cannot be used.

    Args:
        port: 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, viewer: Viewer, port: int = 0) -> None:
        self.viewer, self.token = viewer, secrets.token_urlsafe(24)
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"must be 0..65535, got {port}", parameter="port")
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            taken = "is in use by another program" if error.errno == errno.EADDRINUSE else os_reason(error)
            text = f"{port} cannot be opened ({taken}). Choose another port, or 0 for a free one"
            raise ConfigError(text, parameter="port") from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):  # a browser that leaves is none
            logger.warning("a request failed", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "serl-chunk", ""
    timeout = 60  # seconds that a connection may stay silent

    def do_GET(self) -> None:
        self._respond(self._get)

    def do_POST(self) -> None:
        self._respond(self._post)

    def log_message(self, format: str, *args: Any) -> None: ...  # a line would hold the token

    def _respond(self, answer: Callable[[list[str]], tuple[str, bytes, bool]]) -> None:
        try:
            status, kind, body, keep = HTTPStatus.OK, *answer(self._path())
        except RequestError as error:
            status, kind, body, keep = error.status, *_json({"error": error.message}), False
        except SerlChunkError as error:
            status, kind, body, keep = HTTPStatus.UNPROCESSABLE_ENTITY, *_json({"error": str(error)}), False
        except ConnectionError:
            raise
        except Exception as error:
            logger.exception("a request failed")
            text = {"error": f"the viewer failed: {error!r}"}
            status, kind, body, keep = HTTPStatus.INTERNAL_SERVER_ERROR, *_json(text), False
        self.send_response(status)
        headers = _HEADERS | {"Content-Type": kind, "Content-Length": str(len(body))}
        headers["Cache-Control"] = "private, max-age=3600" if keep else "no-store"
        for name, value in headers.items():
            self.send_header(name, value)
        if self.command == "POST" and status is not HTTPStatus.OK:
            self.send_header("Connection", "close")  # the rest of its body may be unread
        self.end_headers()
        self.wfile.write(body)

    def _path(self) -> list[str]:
        """Return the parts of the path behind the token. Raises RequestError for a stranger."""
        port = self.server.port
        own = (f"{HOST}:{port}", f"localhost:{port}")
        if self.headers.get("Host", "").lower() not in own:  # a name that was rebound to this address
            raise RequestError(HTTPStatus.FORBIDDEN, "the host name is not this machine's own")
        if (origin := self.headers.get("Origin")) is not None and origin.lower() not in [f"http://{h}" for h in own]:
            raise RequestError(HTTPStatus.FORBIDDEN, "another page may not use the viewer")
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        if not hmac.compare_digest(parts[0].encode(errors="replace"), self.server.token.encode()):
            raise RequestError(HTTPStatus.FORBIDDEN, "open the address that `serl-chunk view` printed, all of it")
        return parts[1:]

    def _get(self, path: list[str]) -> tuple[str, bytes, bool]:
        viewer = self.server.viewer
        match path:
            case [""]:
                return _asset("page.html")
            case ["page.css" | "page.js" as name]:
                return _asset(name)
            case ["info"]:
                return *_json(viewer.info()), False
            case ["list", first]:
                rows = viewer.catalogue.rows(_count(first), PAGE_ROWS)
                total, gathered = len(viewer.catalogue.keys), viewer.catalogue.gathered
                return *_json({"total": total, "gathered": gathered, "rows": [row.json() for row in rows]}), False
            case ["episode", number]:
                return *_json(viewer.episode(self._number(number))), False
            case ["frame", number, camera, i]:
                n = self._number(number)
                file = viewer.frames.get(n, viewer.catalogue.read(n), camera, _count(i))
                return media_type(file), file, True
        raise RequestError(HTTPStatus.NOT_FOUND, "no such page")

    def _post(self, path: list[str]) -> tuple[str, bytes, bool]:
        match path:
            case ["label", number]:
                n, viewer = self._number(number), self.server.viewer
                label = check_label(self._body().get("label"))
                if n >= viewer.catalogue.gathered:
                    raise DataError(f"episode {n} is not listed yet")
                return *_json({"row": viewer.labelling.set(viewer.catalogue, n, label).json()}), False
        raise RequestError(HTTPStatus.NOT_FOUND, "no such page")

    def _number(self, text: str) -> int:
        number, total = _count(text), len(self.server.viewer.catalogue.keys)
        if number >= total:
            raise RequestError(HTTPStatus.NOT_FOUND, f"there is no episode {number}, only 0..{total - 1}")
        return number

    def _body(self) -> dict[str, Any]:
        size = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json" or not size.isascii() or not size.isdigit():
            raise RequestError(HTTPStatus.BAD_REQUEST, "the body must be JSON of a known length")
        if int(size) > MAX_BODY:
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {MAX_BODY} bytes")
        try:
            content = json.loads(self.rfile.read(int(size)))
        except ValueError as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is no JSON ({error})") from error
        if not isinstance(content, dict):
            raise RequestError(HTTPStatus.BAD_REQUEST, "the body must be an object")
        return content


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise RequestError(HTTPStatus.NOT_FOUND, f"{text!r} is no number")
    return int(text)


def _json(value: Any) -> tuple[str, bytes]:
    return "application/json", json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _asset(name: str) -> tuple[str, bytes, bool]:
    file = ASSETS / name
    return _TYPES[file.suffix], file.read_bytes(), False
