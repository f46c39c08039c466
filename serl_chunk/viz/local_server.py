"""HTTP for pages on this machine: a server on loopback alone, behind one secret path, and its requests' checks."""

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

from serl_chunk.io import os_reason
from serl_chunk.types import ConfigError, SerlChunkError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_BODY = 4096  # bytes
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
Answer = tuple[str, bytes, bool]
"""Media type, content, and whether a browser may keep it."""


class RequestError(SerlChunkError):
    """A request that is not answered as wished."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class LocalServer(ThreadingHTTPServer):
    """Serves a page on a loopback port; each connection has a thread. Raises ConfigError where the port is no use.

    Args:
        port: 0 takes a free one.
        parameter: of the port, for errors.
        printed_by: what prints the address, for a browser that has another one.
    """

    daemon_threads = True

    def __init__(
        self, handler: type[LocalHandler], port: int = 0, *, parameter: str = "port", printed_by: str = "the program"
    ) -> None:
        self.token, self.printed_by = secrets.token_urlsafe(24), printed_by
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"must be 0..65535, got {port}", parameter=parameter)
        try:
            super().__init__((HOST, port), handler)
        except OSError as error:
            taken = "is in use by another program" if error.errno == errno.EADDRINUSE else os_reason(error)
            text = f"{port} cannot be opened ({taken}). Choose another port, or 0 for a free one"
            raise ConfigError(text, parameter=parameter) from error

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


class LocalHandler(BaseHTTPRequestHandler):
    """Answers requests of this machine that know the secret path, by `get` and `post`."""

    server: LocalServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "serl-chunk", ""
    timeout = 60  # seconds that a connection may stay silent

    def get(self, path: list[str]) -> Answer | None:
        """Return the answer to the parts of a path; None: it was sent. Raises SerlChunkError."""
        raise NotImplementedError

    def post(self, path: list[str]) -> Answer:
        """The same of a request that changes something; its content is `body`."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self._respond(self.get)

    def do_POST(self) -> None:
        self._respond(self.post)

    def log_message(self, format: str, *args: Any) -> None: ...  # a line would hold the token

    def head(self, status: HTTPStatus, kind: str, *, keep: bool = False, length: int | None = None) -> None:
        """Send the head of an answer. Without a length the connection's end is that of the content."""
        self.send_response(status)
        headers = _HEADERS | {"Content-Type": kind, "Cache-Control": "private, max-age=3600" if keep else "no-store"}
        if length is not None:
            headers["Content-Length"] = str(length)
        for name, value in headers.items():
            self.send_header(name, value)
        # The rest of a refused request's body may be unread.
        if length is None or (self.command == "POST" and status is not HTTPStatus.OK):
            self.send_header("Connection", "close")
        self.end_headers()

    def body(self) -> dict[str, Any]:
        """Return the JSON object that came with the request. Raises RequestError."""
        size = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json" or not size.isascii() or not size.isdigit():
            raise RequestError(HTTPStatus.BAD_REQUEST, "the body must be JSON of a known length")
        if len(size) > 9 or int(size) > MAX_BODY:
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {MAX_BODY} bytes")
        try:
            content = json.loads(self.rfile.read(int(size)))
        except ValueError as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is no JSON ({error})") from error
        except RecursionError as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, "the body is JSON nested too deeply") from error
        if not isinstance(content, dict):
            raise RequestError(HTTPStatus.BAD_REQUEST, "the body must be an object")
        return content

    def _respond(self, answer: Callable[[list[str]], Answer | None]) -> None:
        try:
            found = answer(self._path())
            if found is None:
                return
            status, kind, content, keep = HTTPStatus.OK, *found
        except RequestError as error:
            status, kind, content, keep = error.status, *json_answer({"error": error.message})
        except SerlChunkError as error:
            status, kind, content, keep = HTTPStatus.UNPROCESSABLE_ENTITY, *json_answer({"error": str(error)})
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            logger.exception("a request failed")
            text = {"error": f"the viewer failed: {error!r}"}
            status, kind, content, keep = HTTPStatus.INTERNAL_SERVER_ERROR, *json_answer(text)
        self.head(status, kind, keep=keep, length=len(content))
        self.wfile.write(content)

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
            raise RequestError(
                HTTPStatus.FORBIDDEN, f"open the address that {self.server.printed_by} printed, all of it"
            )
        return parts[1:]


def count(text: str) -> int:
    """Return the number in a part of a path. Raises RequestError."""
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise RequestError(HTTPStatus.NOT_FOUND, f"{text!r} is no number")
    return int(text)


def json_answer(value: Any) -> Answer:
    """Return a value as JSON."""
    return "application/json", json.dumps(value, allow_nan=False, separators=(",", ":")).encode(), False


def file_answer(path: Path) -> Answer:
    """Return a file of a page."""
    return _TYPES[path.suffix], path.read_bytes(), False
