"""An actor of `benchmarks/robot_processes.py`: `process_actor.py HOST:PORT LOG KIND`, until its parent ends.

It waits for go, and then moves the robot by commands along sines ("commands") or by resets ("resets"). A greedy one
("greedy_commands", "greedy_resets") requests all that moves a robot without a pause, of the newest generation, whatever
the robot's state is. The moments of commands, s of the monotonic clock, are appended to LOG as float64.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
from typing import Any, BinaryIO

import numpy as np

from serl_chunk_robot.client.client import RobotClient, RobotError

TICK = 0.02  # s
PINGS = 0.5  # s
SWING, TURNS = 0.15, np.pi  # rad and rad/s of a joint
GRIPPERS = (6, 13)


class Actor:
    """Moves one robot. `log`: gets the moments of commands."""

    def __init__(self, client: RobotClient, log: BinaryIO, kind: str) -> None:
        self._client, self._log = client, log
        self._op = "reset" if kind.endswith("resets") else "arm"
        self._step = self._be_greedy if kind.startswith("greedy") else self._act
        self._start: np.ndarray | None = None  # the set point at which the robot was armed
        self._began = self._pinged = self._sent_at = 0.0

    def run(self) -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            state = self._client.newest_state()
            if state is None or state["state"] == "STALLED":
                time.sleep(TICK)
            else:
                self._step(state)

    def _mine(self, state: dict[str, Any]) -> bool:
        return bool((state["controller"], state["process"]) == (self._client.name, self._client.process))

    def _act(self, state: dict[str, Any]) -> None:
        now = time.monotonic()
        if not self._mine(state):
            self._request("lease")
        elif state["state"] == "HOLD":
            self._request(self._op, state["generation"])
        elif now > self._pinged + PINGS:
            self._pinged = now
            self._request("ping")
        self._command(state)
        time.sleep(max(0.0, self._sent_at + TICK - time.monotonic()) if state["state"] == "RUN" else TICK)

    def _be_greedy(self, state: dict[str, Any]) -> None:
        """Request everything, and send commands of whatever generation the robot is in."""
        for op in ("lease", self._op, "go", "clear", "proceed", "drive", "jog", "park"):
            self._request(op, state["generation"])
            newest = self._client.newest_state() or state
            if time.monotonic() >= self._sent_at + TICK:
                self._client.generation = newest["generation"]
                self._command({**newest, "state": "RUN"})

    def _request(self, op: str, generation: int | None = None) -> None:
        more = {} if generation is None else {"generation": generation}
        if op == "go":
            more.update(controller=self._client.name, process=self._client.process)
        with contextlib.suppress(RobotError):
            self._client.request(op, **more)
            if op == "arm":
                self._start, self._began = np.array(self._client.next_state()["set_point"]), time.monotonic()

    def _command(self, state: dict[str, Any]) -> None:
        if state["state"] != "RUN" or self._start is None:
            return
        t, phase = time.monotonic() - self._began, np.arange(len(self._start)) * 0.9
        wave = SWING * (np.sin(TURNS * t + phase) - np.sin(phase)) * min(t, 1.0)
        wave[list(GRIPPERS)] = 0.0
        self._sent_at = time.monotonic()
        self._log.write(struct.pack("<d", self._sent_at))
        self._client.send_command(self._start + wave)


if __name__ == "__main__":
    robot, path, kind = sys.argv[1:]
    with open(path, "ab", buffering=0) as log, RobotClient(robot, name="actor", role="controller") as client:
        Actor(client, log, kind).run()
