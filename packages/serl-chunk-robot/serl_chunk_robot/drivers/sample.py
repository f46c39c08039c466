"""A driver to copy: one imaginary arm that speaks JSON over UDP. `driver = "sample.py:UdpArm"` in robot.toml.

The arm sends its state 200 times a second to the latest sender, and holds its last target by itself:
{"mode": "position", "q": [...], "dq": [...], "effort": [...], "faults": [], "torque": true, "heard": 0}
It takes {"hello": 1}, {"target": [...], "dt": 0.005}, {"set": "compliance", "value": 0.5}, {"clear": 1} and
{"stop": 0, "number": 1}, whose number `heard` repeats. From a stop above 0 on it stands, with a fault, until "clear".
"""

from __future__ import annotations

import json
import socket
from typing import Any, Callable, Dict, Optional

import numpy as np

from serl_chunk_robot.drivers.base import DriverError, DriverSpec, Reading, sendable


class UdpArm:
    """An arm with six joints and a gripper, at a UDP port of `host`."""

    def __init__(self, host: str = "127.0.0.1", port: int = 7000) -> None:
        self._address = host, port
        self._socket: Any = None
        self._clock: Callable[[], float] = lambda: 0.0
        self._reading: Any = None  # the newest
        self._heard = self._stops = 0
        self._stop: Optional[Dict[str, Any]] = None  # the message of a stop that the arm has not answered

    def spec(self) -> DriverSpec:
        low, high = (-3.1, -1.8, -1.7, -3.1, -1.8, -3.1, 0.0), (3.1, 1.2, 1.6, 3.1, 2.2, 3.1, 1.0)
        return DriverSpec("udp arm", low, high, (3.0,) * 6 + (10.0,), (6,), ((0, 7),), (("q", 7),), rate=200.0)

    def connect(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.connect(self._address)
            self._socket.settimeout(1.0)
            self._socket.send(b'{"hello": 1}')
            self._reading = self._parse(self._socket.recv(65536))
            self._socket.setblocking(False)
        except OSError as e:
            self.close()
            raise DriverError("{}:{}: no arm answers ({}). Check its power.".format(*self._address, e)) from e
        self._stops = self._heard  # an earlier program may have stopped the arm

    def read(self) -> Reading:
        try:
            while True:  # the last datagram is the newest
                self._reading = self._parse(self._socket.recv(65536))
        except BlockingIOError:
            return self._reading  # with its old stamp where no newer one came: the loop judges that
        except OSError as e:
            raise DriverError(f"the arm is gone ({e})") from e

    def command(self, target: np.ndarray, dt: float) -> None:
        self._send({"target": sendable(target, 7).tolist(), "dt": dt})

    def hold(self) -> None:
        """Send nothing: the arm holds its last target."""

    def set(self, name: str, value: Any) -> None:
        if name not in ("compliance", "load", "torque"):
            raise DriverError(f"{name}: unknown. Valid: compliance, load, torque.")
        self._send({"set": name, "value": value})

    def clear_faults(self) -> None:
        self._send({"clear": 1})

    def stop(self, reason: str, level: int = 0) -> bool:
        if self._stop is None or self._stop["stop"] != level:
            self._stops += 1
            self._stop = {"stop": level, "number": self._stops}
        self._send(self._stop)
        if self._heard == self._stops:  # as of the last read: the loop repeats a stop until it is answered
            self._stop = None
        return self._stop is None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _send(self, message: Dict[str, Any]) -> None:
        try:
            self._socket.send(json.dumps(message).encode())
        except OSError as e:
            raise DriverError(f"the arm is gone ({e})") from e

    def _parse(self, datagram: bytes) -> Reading:
        try:
            got = json.loads(datagram)
            q, dq, effort = (np.array(got[key], np.float64) for key in ("q", "dq", "effort"))
            mode = [] if got["mode"] == "position" else ["the arm is in mode " + got["mode"]]
            self._heard = int(got["heard"])
            return Reading(q, dq, effort, self._clock(), (*got["faults"], *mode), torque=bool(got["torque"]))
        except (ValueError, KeyError, TypeError) as e:
            raise DriverError(f"the arm sent what is no state ({type(e).__name__}: {e})") from e
