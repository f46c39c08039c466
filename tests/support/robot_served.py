"""A robot's server in a thread, with simulated arms and real sockets on loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from robot_fronts import FOR_EVER, FrontedDoor
from robot_limits import HOME, limits
from robot_simulated_time import SimulatedClient, SimulatedServer
from robot_world import DT, MECHANISM, SPEC, FaultyArms, Way

from serl_chunk_robot.client.client import Keys, RobotClient
from serl_chunk_robot.robot_file.profiles import Profile
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.safety.measured import Measured
from serl_chunk_robot.safety.motion import Limits
from serl_chunk_robot.server.admission import Address
from serl_chunk_robot.server.door import Door
from serl_chunk_robot.server.front import Front
from serl_chunk_robot.server.server import MOVING, RobotServer
from serl_chunk_robot.wire.curve import Pair

HERE = "127.0.0.1"


def way(event: str, arguments: dict[str, Any], start: np.ndarray, of: Limits) -> Way:
    """The motions of the tests' robot: all joints but grippers by an angle."""
    return Way(start + arguments.pop("by", 0.0), lasts=bool(arguments.pop("lasts", False)))


class Reading(RobotClient):
    """A client that reads the robot's generation just before it requests what lets something move.

    With `go` it also reads whose lease it is: a stand-in for an operator at a terminal, who looks and presses Enter.
    """

    def request(self, op: str, **arguments: Any) -> dict[str, Any]:
        if op in MOVING and "generation" not in arguments:
            arguments["generation"] = super().request("ping")["generation"]
            if op == "go":
                state = self.next_state()
                arguments = {"controller": state["controller"], "process": state["process"], **arguments}
        return super().request(op, **arguments)

    sleep = staticmethod(time.sleep)


def free_port(count: int = 2) -> int:
    """The first of `count` consecutive ports that are free."""
    for _ in range(100):
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind((HERE, 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for k in range(1, count):
                    stack.enter_context(socket.socket()).bind((HERE, port + k))
                return port
    raise AssertionError(f"no {count} consecutive free ports")


def server(
    arms: FaultyArms, address: Address, clock: Callable[[], float] = time.monotonic, dt: float = DT,
    patience: float = FOR_EVER, stepped: bool = False, door: Door | None = None, **more: Any,
) -> RobotServer:  # fmt: skip
    """A server that does not run yet. `more`: its devices and what else it has."""
    door = door or FrontedDoor(address, stepped=stepped, patience=patience)
    arms.connect(clock)
    profiles = {name: Profile(name, limits(v), f"{v:g}") for name, v in (("slow", 0.5), ("fast", 3.2))}
    return RobotServer(
        arms, Gate(profiles["fast"].limits, dt), measured=Measured(*MECHANISM, np.array(SPEC.velocity)),
        profiles=profiles, profile="fast", motions=way, door=door, clock=clock, park=HOME, **more,
    )  # fmt: skip


class Served:
    """A served robot. `arms` may be given faults, `clients` are closed with it.

    Tests that are not about consent leave out `go`.
    """

    def __init__(
        self, keys: Path | None = None, port: int = 0, arms: FaultyArms | None = None, host: str = HERE,
        clock: Callable[[], float] = time.monotonic, **more: Any,
    ) -> None:  # fmt: skip
        self.port = port or free_port()
        self.arms = arms or FaultyArms()
        self.server = server(self.arms, Address(host, self.port, keys), clock, **{"needs_go": False, **more})
        self.front: Front | None = getattr(self.server._door, "front", None)  # in a thread of this process
        self._clients: list[RobotClient] = []
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def client(
        self, name: str = "left", role: str = "controller", keys: Keys | None = None, process: str = "here"
    ) -> Reading:
        self._clients.append(
            Reading(f"{HERE}:{self.port}", name=name, role=role, keys=keys, answer=5.0, process=process)
        )
        return self._clients[-1]

    def operator(self) -> RobotClient:
        return self.client("operator", "operator")

    def ready(self) -> RobotClient:
        operator = self.operator()
        wait(lambda: bool(operator.next_state()["answered"]))
        operator.request("clear")
        return operator

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.end("the test")
        self._thread.join(10)
        assert not self._thread.is_alive()


class Stepped(SimulatedServer):
    """The same in simulated time, without sockets."""

    def __init__(self, arms: FaultyArms | None = None, **more: Any) -> None:
        self.arms = arms or FaultyArms()
        super().__init__(
            lambda door, clock: server(self.arms, Address(HERE, 1), clock, door=door, **{"needs_go": False, **more})
        )


@contextlib.contextmanager
def served(**more: Any) -> Iterator[Served]:
    # Machines that run tests may stand still for longer than robot PCs may.
    with (
        patch("serl_chunk_robot.control.loop.GAP", 5.0),
        patch("serl_chunk_robot.safety.watchdog.LEAST_VALIDITY", 0.5),
        patch("serl_chunk_robot.server.server.LAY", 5.0),
        patch("serl_chunk_robot.server.door.SILENT", 5.0),
    ):
        robot = Served(**more)
        try:
            yield robot
        finally:
            robot.close()


def wait(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.005)


def until(client: RobotClient | SimulatedClient, state: str) -> dict[str, Any]:
    """Wait until the robot is in a state; returns what was published then."""
    ends = time.monotonic() + 10
    while (found := client.next_state())["state"] != state:
        assert time.monotonic() < ends, f"{found['state']}, not {state}: {found['word']}"
    return found


def drive(client: Reading | SimulatedClient, ticks: int, step: float = 0.0) -> None:
    """Stream commands around the set point, 50 a second."""
    target = client.next_state()["set_point"].copy()
    for _ in range(ticks):
        target += step
        client.newest_state()
        client.send_command(target)
        client.sleep(0.02)


def write_keys(folder: Path, **clients: str) -> dict[str, Keys]:
    """Make a folder of keys with clients of the given roles; returns theirs."""
    server, made = Pair.new(), {}
    (folder / "allowed").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    write(folder / "server.json", {"public": server.public, "secret": server.secret})
    for name, role in clients.items():
        made[name] = Keys(server.public, Pair.new())
        write(
            folder / "allowed" / f"{name}.json", {"public": made[name].pair.public, **({"role": role} if role else {})}
        )
    return made


def write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values))
    path.chmod(0o600)
