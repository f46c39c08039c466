"""Requests of an operator to a robot server, on a thread of their own: the control loop never waits for a reply."""

from __future__ import annotations

import logging
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
AGAIN = 0.2  # seconds until a stop without an answer is sent again
QUIET = ("proceed", "hold")  # requests whose refusal is no news: the robot did not move
OVERTAKES = {"stop": ("clear", "proceed", "park"), "hold": ("proceed", "park")}
"""What stops the robot -> what is dropped for it, if it was not sent yet: the robot would move after its stop."""


class ServedOperator:
    """Sends requests as an operator, and follows the robot's state.

    Where this machine's keys are a controller's alone, it stops the robot and nothing more: a hold is a stop, too.

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
        self._requests: list[str] = []  # not sent yet
        self._sending = False
        self._changed = threading.Condition()  # of these two
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
        with self._changed:
            return not self._requests and not self._sending

    def request(self, op: str) -> None:
        """Send a request soon; a refusal is logged. A stop goes before all that was not sent yet. From any thread."""
        if op == "hold" and not self.may_clear:
            op = "stop"  # the server refuses this client a hold, and the robot must not go on
        with self._changed:
            self._requests = [each for each in self._requests if each not in OVERTAKES.get(op, ())]
            self._requests.insert(0 if op == "stop" else len(self._requests), op)
            self._changed.notify_all()

    def close(self) -> None:
        """Send what stops the robot and was not sent yet, and end."""
        with self._changed:
            self._requests = [each for each in self._requests if each in OVERTAKES]
            self._ending.set()
        self._thread.join(5.0)
        self._client.close()

    def _run(self) -> None:
        unread = ""  # why the newest state could not be read
        while True:
            with self._changed:
                self._sending = False
                if not self._requests:
                    self._changed.wait(LOOK)
                op = self._requests.pop(0) if self._requests else ""
                self._sending = bool(op)
            if not op and self._ending.is_set():
                return
            try:
                if op:
                    self._send(op)
                else:
                    self._follow(self._client.newest_state())
                    unread = ""
            except Exception as e:  # a stop has to be sent, whatever came; without a state the server is `silent`
                if unread != (unread := f"{type(e).__name__}: {e}"):
                    logger.exception("the robot's state cannot be read")
                self._ending.wait(LOOK)

    def _send(self, op: str) -> None:
        try:
            self._client.request(op)
        except Exception as e:  # whatever it is, a stop has to be sent
            refused = isinstance(e, RobotError)
            logger.log(
                logging.DEBUG if refused and op in QUIET else logging.WARNING, f"{op}: {e}", exc_info=not refused
            )
            if op == "stop" and not self._ending.wait(AGAIN):
                with self._changed:
                    self._requests.insert(0, op)  # what was requested after it follows it further on
                return
        ends = time.monotonic() + FOLLOWS
        while time.monotonic() < ends and "stop" not in self._requests:
            try:
                self._follow(self._client.next_state(LOOK))
                return
            except RobotError:
                continue

    def _follow(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        moment, word = state["moment"], state["state"]
        self.waiting, self.why = bool(state["waiting"]), str(state["word"])
        self.stopped, self.moving = word == "STOPPED", word == "MOVE"
        if moment != self._moment:
            self._moment, self._heard = moment, time.monotonic()
