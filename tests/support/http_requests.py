"""Requests of a server of pages, as a browser sends them."""

from __future__ import annotations

import http.client
import json
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.headers["Content-Type"] == "application/json"
        return json.loads(self.body)


class Requests:
    """Requests of one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.port is not None
        self.port, self.prefix = parts.port, parts.path

    def request(
        self, path: str, *, whole: bool = False, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """`path` is behind the secret one, unless it is the `whole` path."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            method = "GET" if body is None else "POST"
            connection.request(method, path if whole else self.prefix + path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        answer = self.request(path)
        assert answer.status == 200, answer
        return answer.json
