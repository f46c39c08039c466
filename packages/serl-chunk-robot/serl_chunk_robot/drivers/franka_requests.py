"""Requests to HIL-SERL's HTTP server: one at a time over a connection, and a thread of those that may take long."""

from __future__ import annotations

import http.client
import json
import threading
from collections import deque
from typing import Any, Callable, Deque, Mapping, Optional, Tuple
from urllib.parse import urlsplit

FAILED = OSError, http.client.HTTPException  # what a request raises
CLOSED, OPEN, AS_IT_IS = 0.0, 1.0, 0.5
TELLS = 0.25  # of a gripper's set point, from 0 or 1: HIL-SERL's actions of -0.5 and 0.5
DEFAULT_URL, TIMEOUT = "http://127.0.0.1:5000/", 0.2  # s of a request
LOOKS = 0.02  # s between two looks whether a lock-out is over


class Http:
    """A server, for one thread. Raises ValueError for what is no URL of one."""

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url if "://" in url else "http://" + url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url}: expected http://HOST:PORT/")
        self.url = f"http://{parts.hostname}:{parts.port or 80}/"
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout)

    def post(self, path: str, body: Any = None) -> bytes:
        """Return what is answered. Raises what FAILED names, for another status than 200 too."""
        content = None if body is None else json.dumps(body).encode()
        try:
            self._connection.request("POST", "/" + path, content, {"Content-Type": "application/json"})
            reply = self._connection.getresponse()
            answer = reply.read()
        except BaseException:
            self._connection.close()  # the next request makes a new one
            raise
        if reply.status != 200:
            raise http.client.HTTPException(f"HTTP {reply.status} {reply.reason}")
        return answer

    def close(self) -> None:
        self._connection.close()


class Orders:
    """Requests that a thread sends one after the other: orders as they come, and commands to open or close a gripper.

    A gripper's request is sent where a set point gets to the other side, so that a robot that is cleared moves none.

    Args:
        lock: seconds between two requests to the gripper; of those that come meanwhile, the last one is sent.
    """

    def __init__(self, http: Http, lock: float) -> None:
        self.told, self.slow = AS_IT_IS, False  # what the gripper was told, and whether it is to close slowly
        self.fault = ""  # what failed; nothing is sent again
        self.clock: Callable[[], float] = lambda: 0.0
        self._http, self._lock = http, lock
        self._orders: Deque[Tuple[str, Any]] = deque()
        self._side = AS_IT_IS  # of the last set point that had one
        self._wanted: Optional[float] = None  # CLOSED or OPEN
        self._acted, self._ends, self._new = float("-inf"), False, threading.Event()

    def order(self, path: str, body: Any = None) -> None:
        self._orders.append((path, body))
        self._new.set()

    def aim(self, place: float) -> None:
        """Take a set point of the gripper, from 0 to 1."""
        side = CLOSED if place <= TELLS else OPEN if place >= 1 - TELLS else AS_IT_IS
        if side not in (AS_IT_IS, self._side):
            self._side = self._wanted = side
            self._new.set()

    def end(self) -> None:
        self._ends = True
        self._new.set()

    def run(self) -> None:
        """Act until the end."""
        while not self._ends:
            self._new.wait(None if self._wanted is None else LOOKS)
            self._new.clear()
            self.act()
        self._http.close()

    def act(self) -> None:
        """Send all orders, and tell the gripper what is new once its lock-out is over."""
        while self._orders:
            self._send(*self._orders.popleft())
        side, now = self._wanted, self.clock()
        if side is None or (side != self.told and now - self._acted < self._lock):
            return
        if side != self.told:
            self._acted = now
            path = "open_gripper" if side == OPEN else "close_gripper_slow" if self.slow else "close_gripper"
            if self._send(path):
                self.told = side
        if self._wanted is side:
            self._wanted = None

    def _send(self, path: str, body: Any = None) -> bool:
        try:
            self._http.post(path, body)
        except FAILED as e:
            self.fault = f"{self._http.url}{path}: {text(e)}"
            return False
        return True


def stop_outside(options: Mapping[str, Any], reason: str) -> None:
    """Let the arms stay where they are: the driver's own stop, by another process than the loop's.

    Args:
        options: of the driver, as in the robot's file.

    Raises what FAILED names, once the stop was requested of each arm.
    """
    failed: Optional[BaseException] = None
    for url in options.get("urls", (DEFAULT_URL,)):
        http = Http(url, float(options.get("timeout", TIMEOUT)))
        try:
            http.post("pose", {"arr": json.loads(http.post("getstate"))["pose"]})
        except (*FAILED, ValueError, KeyError, TypeError) as e:
            failed = e
        finally:
            http.close()
    if failed is not None:
        raise failed


def text(error: BaseException) -> str:
    """What an error says."""
    return str(error) or type(error).__name__
