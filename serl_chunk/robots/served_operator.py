"""Requests of an operator to a robot server, on a thread of their own: the control loop never waits for a reply."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from pathlib import Path
from typing import Any

from serl_chunk.config.robots import RobotConfig
from serl_chunk_robot.client import Keys, RobotClient, RobotError

logger = logging.getLogger(__name__)

LOOK = 0.02  # seconds between two looks at the robot's state
SILENT = 1.0  # seconds without a state after which the server counts as gone
FOLLOWS = 0.5  # seconds for a state after a reply
QUIET = ("proceed", "hold")  # requests whose refusal is no news: the robot did not move


class ServedOperator:
    """Sends requests as an operator, and follows the robot's state.

    Where this machine's keys are a controller's alone, it stops the robot and nothing more.

    Attributes:
        stopped: the robot is STOPPED.
        moving: the robot moves by itself (MOVE): a reset, parking.
        waiting: that motion waits for the operator.
        why: the server's words for the state.

    Raises:
        RobotError: no server answers.
    """

    def __init__(self, config: RobotConfig, name: str) -> None:
        keys = Keys.of_file(Path(config.server_keys).expanduser()) if config.server_keys else None
        self.may_clear = True
        self._client = RobotClient(config.server, name=name, role="operator", keys=keys)
        try:
            self._client.hello()
        except RobotError as e:
            self._client.close()
            logger.warning(f"{e}. The console stops the robot, and an operator's machine clears it")
            self.may_clear = False
            self._client = RobotClient(config.server, name=name, role="any", keys=keys)
            self._client.hello()
        self.stopped = self.moving = self.waiting = False
        self.why = ""
        self._heard, self._moment = time.monotonic(), -1.0  # when the newest state came, and the server's moment of it
        self._requests: queue.Queue[str] = queue.Queue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)
        self._thread.start()

    @property
    def silent(self) -> bool:
        """Whether the server has published nothing for `SILENT` seconds."""
        return time.monotonic() - self._heard > SILENT

    @property
    def idle(self) -> bool:
        """Whether every request was answered, and the state is of after that."""
        return self._requests.unfinished_tasks == 0

    def request(self, op: str) -> None:
        """Send a request soon; a refusal is logged. From any thread."""
        self._requests.put(op)

    def close(self) -> None:
        """Send what is still to be sent, and end."""
        self._ending.set()
        self._thread.join(5.0)
        self._client.close()

    def _run(self) -> None:
        while not self._ending.is_set() or not self._requests.empty():
            try:
                op = self._requests.get(timeout=LOOK)
            except queue.Empty:
                self._follow(self._client.newest_state())
                continue
            try:
                self._client.request(op)
            except RobotError as e:
                (logger.debug if op in QUIET else logger.warning)(f"{op}: {e}")
            with contextlib.suppress(RobotError):
                self._follow(self._client.next_state(FOLLOWS))
            self._requests.task_done()

    def _follow(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        if state["moment"] != self._moment:
            self._moment, self._heard = state["moment"], time.monotonic()
        self.stopped, self.moving = state["state"] == "STOPPED", state["state"] == "MOVE"
        self.waiting, self.why = bool(state["waiting"]), str(state["word"])
