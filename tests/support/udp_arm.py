"""The robot's side of the sample driver: an arm that speaks JSON over UDP."""

from __future__ import annotations

import json
import socket

import numpy as np

POSE = np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.5])


class StandIn:
    """The arm's side. It reaches each target at once, and sends its replies when `turn` is called."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.settimeout(5.0)
        self.port = self.socket.getsockname()[1]
        self.q, self.mode, self.faults, self.heard, self.torque = POSE.copy(), "position", [], 0, True
        self.messages: list[dict] = []
        self.peer: object = None

    def take(self) -> dict:
        """Receive one message and obey it."""
        datagram, self.peer = self.socket.recvfrom(65536)
        message = json.loads(datagram)
        self.messages.append(message)
        if "target" in message and not self.faults:
            self.q = np.array(message["target"])
        self.heard = message.get("number", self.heard)
        if message.get("stop", 0) > 0:
            self.faults = ["stopped by its own means"]
        if "clear" in message:
            self.faults, self.torque = [], True
        return message

    def send(self, datagram: bytes | None = None) -> None:
        state = {"mode": self.mode, "q": self.q.tolist(), "dq": [0.0] * 7, "effort": [0.1] * 7, "faults": self.faults,
                 "torque": self.torque, "heard": self.heard}  # fmt: skip
        self.socket.sendto(json.dumps(state).encode() if datagram is None else datagram, self.peer)
