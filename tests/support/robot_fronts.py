"""A robot's front in a thread of the test, or stepped by it, instead of in a process of its own."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from serl_chunk_robot.server.admission import Address
from serl_chunk_robot.server.door import Door, Request
from serl_chunk_robot.server.front import Front, child
from serl_chunk_robot.server.processes import Processes
from serl_chunk_robot.wire.link import Link, make_pair

FOR_EVER = 1e9


class FrontedDoor(Door):
    """A door and its front. `patience`: of the front; tests whose passes are not in real time wait for ever."""

    def __init__(self, address: Address, *, stepped: bool = False, patience: float = FOR_EVER, **more: Any) -> None:
        own, theirs = make_pair()
        super().__init__(Link(own))
        self.front_port = address.port
        self._theirs, self._stepped, self._ends = theirs, stepped, threading.Event()
        try:
            self.front = Front(Link(theirs), address, patience=patience, **more)
        except BaseException:
            own.close()
            theirs.close()
            raise
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)
        if not stepped:
            self._thread.start()

    def step_until_request(self, seconds: float) -> bool:
        """Step the front until a request is there; returns whether there is one."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.front.step()
            if self._receive():
                return True
        return False

    def fault(self) -> str:
        """Silence counts where the front runs by itself alone, and time is real."""
        return "" if self._stepped or self.front.loop.patience == FOR_EVER else super().fault()

    def close(self) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(10)
            assert not self._thread.is_alive()
        self.front.close()
        self._theirs.close()
        super().close()

    def _run(self) -> None:
        while not self._ends.is_set():
            self.front.step()


class NoDoor:
    """A door without sockets: replies and states are kept, and requests are those that `requests` has."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.requests: list[Request] = []
        self.replies: list[bytes] = []
        self.states: list[bytes] = []

    def wait(self, seconds: float) -> bool:
        return bool(self.requests)

    def take(self) -> Request | None:
        return self.requests.pop(0) if self.requests else None

    def reply(self, request: Request, rank: int, body: bytes = b"") -> None:
        self.replies += [body] if body else []

    def publish(self, state: bytes) -> None:
        self.states = [state]

    def fault(self) -> str:
        return ""

    def close(self) -> None:
        pass


class FrontOfProcess(Door):
    """A door whose front is a process, of an address. It is patient: machines that run tests stand still for long."""

    def __init__(self, port: int, keys: Path | None = None, dt: float = 1.0) -> None:
        own, self._theirs = make_pair()
        super().__init__(Link(own))
        self.port = port
        self.processes = Processes(
            [child(Address("127.0.0.1", self.port, keys), self._theirs, dt, "", {}, self.front_ended)]
        )
        self.processes.__enter__()
        why = self.wait_for_front(60)
        assert not why, why

    @property
    def pid(self) -> int:
        return self.processes.pids()[0]

    def close(self) -> None:
        self.processes.__exit__()
        super().close()
        self._theirs.close()
