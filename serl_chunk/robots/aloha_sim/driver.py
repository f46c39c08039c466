"""gym-aloha's tasks as a driver of the robot server; MuJoCo runs in real time in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import numpy as np

from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots.aloha_sim.env import HOME, JOINTS, aloha_sim_spec
from serl_chunk.types import ConfigError
from serl_chunk_robot.drivers.base import Driver, DriverError, DriverSpec, Event, Reading, sendable
from serl_chunk_robot.wire import arrays
from serl_chunk_robot.wire.codec import WireError

HERE = "127.0.0.1"
PROCESS = "serl_chunk.robots.aloha_sim.process"
# rad/s, squared, cubed; openings of a gripper. A policy that was trained in lockstep changes its targets as hard as it
# likes: under a real arm's limits (3.2, 40, 4000) it comes too late to grasp. The scripted expert moves at 2.9 and 15.
VELOCITY, ACCELERATION, JERK = 8.0, 1e3, 4e5
GRIPPER_VELOCITY, GRIPPER_ACCELERATION, GRIPPER_JERK = 20.0, 1e4, 1e7
FASTEST = 40.0  # rad/s, or openings: stiff simulated joints that are driven against something spring back
GIVES, FINGERS_GIVE = 0.15, 0.5  # rad, of an opening: so far contacts push simulated joints past their ends
RATE = 200.0  # Hz
STARTS_WITHIN = 60.0  # s, of the process
LARGEST = 65536  # bytes of a state
SILENT = 0.5  # s after which the process is sent something, as it ends without messages


class AlohaSimDriver(Driver):
    """Two simulated ViperX arms and their objects. A killed server leaves arms that keep their last target.

    `connect` attaches to the process at `port`, or starts it, detached from this one. `extra` has the objects' poses
    ("objects", float64[7] or float64[14]).

    Args:
        env_name, cube_in_state: as in AlohaSimConfig.
        port: of the process, on loopback.
        ends: seconds after which a process ends that no server sends anything to.
    """

    def __init__(
        self, *, env_name: str = AlohaSimConfig.env_name, cube_in_state: bool = AlohaSimConfig.cube_in_state,
        port: int = 5610, ends: float = 60.0,
    ) -> None:  # fmt: skip
        if env_name not in AlohaSimConfig.TASKS:
            what = f"unknown task (got {env_name!r}, expected one of {', '.join(AlohaSimConfig.TASKS)})"
            raise ConfigError(what, parameter="driver.env_name")
        self._config = AlohaSimConfig(env_name=env_name, cube_in_state=cube_in_state)  # type: ignore[arg-type]
        self._robot = aloha_sim_spec(self._config)
        self._port, self._ends = port, ends
        self._socket: socket.socket | None = None
        self._state: dict[str, Any] = {}
        self._sent_at = 0.0
        self._seen = 0  # events
        self._scene: tuple[int, int] | None = None  # number and seed that the process is to have put in place

    def spec(self) -> DriverSpec:
        robot = self._robot
        objects = robot.state_dim - JOINTS

        def of(joint: float, gripper: float) -> tuple[float, ...]:
            return tuple(gripper if i in robot.grippers else joint for i in range(JOINTS))

        gives = np.array(of(GIVES, FINGERS_GIVE))
        return DriverSpec(
            robot.name, tuple(robot.action_low - gives), tuple(robot.action_high + gives),
            of(VELOCITY, GRIPPER_VELOCITY), robot.grippers, robot.arms,
            (("q", JOINTS), *((("objects", objects),) if objects else ())), rate=RATE, tick=robot.dt,
            fastest=of(FASTEST, FASTEST), acceleration=of(ACCELERATION, GRIPPER_ACCELERATION),
            jerk=of(JERK, GRIPPER_JERK), home=HOME, simulated=True,
        )  # fmt: skip

    def connect(self, clock: Callable[[], float]) -> None:
        """Attach to the process, or start it. Raises DriverError where none answers, or one of another task.

        Its stamps are of the machine's monotonic clock, which `clock` has to be.
        """
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.connect((HERE, self._port))
        self._socket.setblocking(False)
        if not self._answers(0.3):
            self._start()
        if self._state["task"] != self._robot.name:
            raise DriverError(
                f"port {self._port} has a process of {self._state['task']!r}, not of "
                f"{self._robot.name!r}. Set another port"
            )
        self._seen = 1 + max((index for index, *_ in self._state["events"]), default=-1)

    def read(self) -> Reading:
        if monotonic() - self._sent_at > SILENT:
            self._send("ping")
        self._receive()
        state = self._state
        if self._scene is not None and state["scene"] != self._scene[0]:  # a datagram may be lost
            self._send("scene", number=self._scene[0], seed=self._scene[1])
        new = [e for e in state["events"] if e[0] >= self._seen]
        self._seen += len(new)
        return Reading(
            state["q"], state["dq"], state["effort"], state["stamp"], tuple(state["faults"]),
            {"objects": state["objects"]}, tuple(Event(e[1], e[2]) for e in new), state["torque"],
        )  # fmt: skip

    def command(self, target: np.ndarray, dt: float) -> None:
        self._send("target", target=sendable(target, JOINTS))

    def set(self, name: str, value: Any) -> None:
        if name != "torque":
            raise DriverError(f"{name}: unknown. Valid: torque.")
        self._send("torque", on=bool(value))

    def clear_faults(self) -> None:
        self._send("clear")

    def stop(self, reason: str, level: int = 0) -> bool:
        if level:
            self._send("target", target=self._state["q"])
        return True

    def close(self) -> None:
        """Leave the process, which keeps the arms' target until it ends by itself."""
        if self._socket is not None:
            self._socket.close()

    def reset_scene(self, seed: int) -> None:
        """Put the scene as the environment's reset with this seed does; it stands still until the arms are to move.

        The arms are at home but for the some mrad that they hang below it.
        """
        self._scene = self._state["scene"] + 1, seed
        self._send("scene", number=self._scene[0], seed=seed)

    def _start(self) -> None:
        for package in ("mujoco", "gym_aloha"):
            if importlib.util.find_spec(package) is None:
                raise DriverError(f"{package} is not installed. Run pip install 'serl-chunk[aloha-sim]'")
        command = [sys.executable, "-m", PROCESS, "--port", str(self._port), "--ends", str(self._ends)]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [*command, "--env_name", self._config.env_name], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=log, start_new_session=True,
            )  # fmt: skip
            gives_up = monotonic() + STARTS_WITHIN
            while not self._answers(0.1):
                if process.poll() is not None or monotonic() > gives_up:
                    log.seek(0)
                    why = (log.read().decode(errors="replace").strip().splitlines() or ["no answer"])[-1]
                    raise DriverError(f"the simulation's process does not run at port {self._port} ({why})")

    def _answers(self, within: float) -> bool:
        """Whether the process sends a state within so many seconds."""
        ends = monotonic() + within
        while not self._state and monotonic() < ends:
            with contextlib.suppress(DriverError):  # no process there yet
                self._send("hello")
                self._receive()
            sleep(0.01)
        return bool(self._state)

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            while True:
                self._state = arrays.unpack(self._socket.recv(LARGEST), LARGEST)
        except BlockingIOError:
            return
        except (OSError, WireError) as e:
            raise self._gone(e) from e

    def _send(self, op: str, **values: Any) -> None:
        assert self._socket is not None
        self._sent_at = monotonic()
        try:
            self._socket.send(arrays.pack({"op": op, **values}))
        except OSError as e:
            raise self._gone(e) from e

    def _gone(self, error: Exception) -> DriverError:
        return DriverError(f"the simulation's process at port {self._port} is gone ({error}). Start the server again")


def inject(port: int, **faults: Any) -> None:
    """Let the process at `port` have faults, for tests and rehearsals: see `process.Simulation.inject`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.sendto(arrays.pack({"op": "inject", **faults}), (HERE, port))
