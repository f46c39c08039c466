"""A robot's server and its clients in simulated time: passes run when a client waits for a state, without sockets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from robot_fronts import NoDoor

from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.drivers.base import Driver
from serl_chunk_robot.robot_file.config import HAIR, RobotFile
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.safety.measured import Measured
from serl_chunk_robot.server.door import Request
from serl_chunk_robot.server.serve import Motions
from serl_chunk_robot.server.server import MOVING, RobotServer
from serl_chunk_robot.wire import arrays
from serl_chunk_robot.wire.protocol import PROTOCOL


class SimulatedServer:
    """A server whose clock advances by one pass at a time.

    `make` makes it, of a door and a clock. `each_pass` is called after each pass with the published state.
    """

    def __init__(self, make: Callable[[NoDoor, Callable[[], float]], RobotServer]) -> None:
        self.now, self.door = 100.0, NoDoor()
        self.server = make(self.door, lambda: self.now)
        self.dt = self.server._gate.dt
        self.state: dict[str, Any] = {}
        self.each_pass: Callable[[dict[str, Any]], None] = lambda state: None
        self._names = itertools.count()
        for _ in range(6):  # it answers the stop of its start meanwhile
            self.advance()

    def advance(self, passes: int = 1) -> None:
        for _ in range(passes):
            self.now += self.dt
            self.server.run_pass(self.now)
            self.state = arrays.unpack(self.door.states[-1], 1 << 20)
            self.each_pass(self.state)

    def take(self, connection: bytes, message: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Take a message between two passes; returns the reply. `more`: further fields of the request."""
        self.door.replies.clear()
        self.server._receive(Request(connection, arrays.pack(message), address="127.0.0.1", **more), self.now)
        return arrays.unpack(self.door.replies[-1], 1 << 20) if self.door.replies else {}

    def client(self, role: str, name: str = "", process: str = "1") -> SimulatedClient:
        return SimulatedClient(self, role, name or f"check {next(self._names)}", process)

    def ready(self) -> SimulatedClient:
        """Clear the robot; returns the operator that did."""
        operator = self.client("operator", "operator")
        self.advance(2)
        operator.request("clear")
        self.advance()
        return operator


class SimulatedClient:
    """As `robot_served.Reading`."""

    def __init__(self, server: SimulatedServer, role: str, name: str, process: str) -> None:
        self._server, self.role, self.name, self.process = server, role, name, process
        self.connection = f"{name} {process} {next(server._names)}".encode()
        self.generation, self._number, self._open = -1, 0, True

    def hello(self) -> dict[str, Any]:
        self.generation = max(self.generation, 0)
        hello = {"name": self.name, "role": self.role, "process": self.process, "protocol": PROTOCOL}
        return self._taken({"op": "hello", **hello})

    def request(self, op: str, **arguments: Any) -> dict[str, Any]:
        if self.generation < 0:
            self.hello()
        if op in MOVING and "generation" not in arguments:
            arguments["generation"] = self._server.server.loop.machine.generation
            if op == "go":
                lease = self._server.server._lease
                arguments = {"controller": lease.holder, "process": lease.process, **arguments}
        return self.send(op, **arguments)

    def send(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Request, with these arguments alone; `stamp` may be another one."""
        reply = self._taken({"op": op, **self._age(), **arguments})
        if op == "arm":
            self.generation, self._number = reply["generation"], 0
        return reply

    def send_command(self, target: np.ndarray, number: int | None = None) -> bool:
        self._number = self._number + 1 if number is None else number
        message = {"op": "command", "target": target, "number": self._number, "generation": self.generation}
        self._server.take(self.connection, message | self._age())
        return True

    def sleep(self, seconds: float) -> None:
        self._server.advance(round(seconds / self._server.dt))

    def newest_state(self) -> dict[str, Any]:
        return self._server.state

    def next_state(self, seconds: float = 2.0) -> dict[str, Any]:
        self._server.advance()
        return self._server.state

    def close(self) -> None:
        if self._open:
            self._open = False
            self._server.take(self.connection, {"op": "drop", "id": 0})

    def _age(self) -> dict[str, float]:
        return {"stamp": self._server.state["moment"], "held": self._server.now - self._server.state["moment"]}

    def _taken(self, message: dict[str, Any]) -> dict[str, Any]:
        reply = self._server.take(self.connection, {"id": 1, **message})
        if not reply.get("ok"):
            raise RobotError(str(reply["error"]))
        return reply


@contextmanager
def simulated(file: RobotFile, driver: Driver) -> Iterator[SimulatedServer]:
    """The server of a robot's file, with this driver, which clients of this process alone reach."""

    def make(door: NoDoor, clock: Callable[[], float]) -> RobotServer:
        spec = driver.spec()
        driver.connect(clock)
        gate = Gate(file.profiles[file.start].limits, 1.0 / (file.rate or spec.rate), file.arms)
        low, high, velocity = (np.array(x, np.float64) for x in (spec.low, spec.high, spec.velocity))
        return RobotServer(
            driver, gate, measured=Measured(low - HAIR, high + HAIR, velocity), profiles=file.profiles,
            profile=file.start, motions=Motions(file, driver), door=door,  # type: ignore[arg-type]
            clock=clock,
        )  # fmt: skip

    made = SimulatedServer(make)
    try:
        yield made
    finally:
        made.server.close()
