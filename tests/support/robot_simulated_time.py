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
    """The server of a robot's file, with this driver, whose clock advances by one pass at a time.

    `each_pass` is called after each pass with the published state.
    """

    def __init__(self, file: RobotFile, driver: Driver) -> None:
        self._door = NoDoor()
        self.now, spec = 100.0, driver.spec()
        self.dt = 1.0 / (file.rate or spec.rate)
        driver.connect(lambda: self.now)
        gate = Gate(file.profiles[file.start].limits, self.dt, file.arms)
        low, high, velocity = (np.array(x, np.float64) for x in (spec.low, spec.high, spec.velocity))
        self.server = RobotServer(
            driver, gate, measured=Measured(low - HAIR, high + HAIR, velocity), profiles=file.profiles,
            profile=file.start, motions=Motions(file, driver), door=self._door,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )  # fmt: skip
        self.state: dict[str, Any] = {}
        self.each_pass: Callable[[dict[str, Any]], None] = lambda state: None
        self._names = itertools.count()
        for _ in range(6):  # it answers the stop of its start meanwhile
            self.advance()

    def advance(self) -> None:
        self.now += self.dt
        self.server.run_pass(self.now)
        self.state = arrays.unpack(self._door.states[-1], 1 << 20)
        self.each_pass(self.state)

    def take(self, connection: bytes, message: dict[str, Any]) -> dict[str, Any]:
        self._door.replies.clear()
        self.server._receive(Request(connection, arrays.pack(message)), self.now)
        return arrays.unpack(self._door.replies[-1], 1 << 20) if self._door.replies else {}

    def client(self, role: str, name: str = "check") -> SimulatedClient:
        return SimulatedClient(self, role, f"{name} {next(self._names)}")


class SimulatedClient:
    """As RobotClient."""

    def __init__(self, server: SimulatedServer, role: str, name: str) -> None:
        self._server, self.role, self.name = server, role, name
        self.generation, self._number, self._open = -1, 0, True

    def hello(self) -> dict[str, Any]:
        return self._taken({"op": "hello", "name": self.name, "role": self.role, "process": "1", "protocol": PROTOCOL})

    def request(self, op: str, **arguments: Any) -> dict[str, Any]:
        if self.generation < 0:
            self.generation = 0
            self.hello()
        if op in MOVING and "generation" not in arguments:
            arguments["generation"] = self._server.server.loop.machine.generation
        reply = self._taken({**arguments, "op": op, **self._age()})
        if op == "arm":
            self.generation, self._number = reply["generation"], 0
        return reply

    def send_command(self, target: np.ndarray, number: int | None = None) -> bool:
        self._number = self._number + 1 if number is None else number
        message = {"op": "command", "target": target, "number": self._number, "generation": self.generation}
        self._server.take(self.name.encode(), message | self._age())
        return True

    def next_state(self, seconds: float = 2.0) -> dict[str, Any]:
        self._server.advance()
        return self._server.state

    def close(self) -> None:
        if self._open:
            self._open = False
            self._server.take(self.name.encode(), {"op": "drop", "id": 0})

    def _age(self) -> dict[str, float]:
        return {"stamp": self._server.state["moment"], "held": self._server.now - self._server.state["moment"]}

    def _taken(self, message: dict[str, Any]) -> dict[str, Any]:
        reply = self._server.take(self.name.encode(), {"id": 1, **message})
        if not reply.get("ok"):
            raise RobotError(str(reply["error"]))
        return reply


@contextmanager
def simulated(file: RobotFile, driver: Driver) -> Iterator[SimulatedServer]:
    """A server that clients of this process alone reach."""
    made = SimulatedServer(file, driver)
    try:
        yield made
    finally:
        made.server.close()
