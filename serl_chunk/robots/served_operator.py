"""Requests of an operator to a robot server, on a thread of their own: the control loop never waits for a reply."""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path

from serl_chunk.config.robots import RobotConfig
from serl_chunk_robot.client import Keys, RobotClient, RobotError

logger = logging.getLogger(__name__)

LOOK = 0.02  # seconds between two looks at the robot's state
QUIET = ("proceed",)  # requests whose refusal is no news: no motion waits for the operator


class ServedOperator:
    """Sends requests as an operator, and follows the robot's state.

    Where this machine's keys are a controller's alone, it stops the robot and nothing more.

    Raises:
        RobotError: no server answers.
    """

    def __init__(self, config: RobotConfig, name: str) -> None:
        keys = Keys.of_file(Path(config.server_keys).expanduser()) if config.server_keys else None
        try:
            self._client = RobotClient(config.server, name=name, role="operator", keys=keys)
        except RobotError as e:
            logger.warning(f"{e}. The console stops the robot, and an operator's machine clears it")
            self._client = RobotClient(config.server, name=name, role="any", keys=keys)
        self.stopped = False
        self._requests: queue.Queue[str] = queue.Queue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)
        self._thread.start()

    def request(self, op: str) -> None:
        """Send a request soon; a refusal is logged."""
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
                op = ""
            try:
                if op:
                    self._client.request(op)
            except RobotError as e:
                if op not in QUIET:
                    logger.warning(f"{op}: {e}")
            if (state := self._client.newest_state()) is not None:
                self.stopped = state["state"] == "STOPPED"
