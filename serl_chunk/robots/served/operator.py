"""Requests of an operator to a robot server, on a thread of their own: the control loop never waits for a reply."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from serl_chunk.config.robots import RobotConfig
from serl_chunk.robots.served import connect
from serl_chunk.types import ShownRobot
from serl_chunk_robot.client.client import PROCESS, UNCONFIRMED, RobotError

logger = logging.getLogger(__name__)

LOOK = 0.02  # seconds between two looks at the robot's state
SILENT = 1.0  # seconds without a state after which the server counts as gone
FOLLOWS = 0.5  # seconds for a state after a reply
AGAIN = 0.2  # seconds until a stop or hold without an answer is sent again
CONFIRMS = 0.5  # seconds for the robot to confirm one of them
QUIET = ("proceed", "hold")  # requests whose refusal is no news: the robot did not move
OVERTAKES = {"stop": ("clear", "go", "proceed", "park", "hold"), "hold": ("go", "proceed", "park")}
"""What stops the robot -> what is dropped for it, if it was not sent yet: the robot would move after its stop."""
CONFIRMED = {"stop": ("STOPPED", "BRAKE"), "hold": ("STOPPED", "BRAKE", "HELD", "HOLD")}
"""What stops the robot -> states of a reply that confirm it."""


class ServedOperator:
    """Sends requests as an operator, and follows the robot's state.

    Where this machine's keys are a controller's alone, it stops the robot and nothing more: a hold is a stop, too.

    Attributes:
        stopped: the robot is STOPPED.
        moving: the robot moves by itself (MOVE): a reset, parking.
        waiting: that motion waits for the operator.
        held: the robot is HELD: no controller moves it before `go`.
        stalled: the server's loop is silent, as its watchdog publishes. All else is of before.
        why: the server's words for the state.
        process: of this actor's lease.

    Raises RobotError: no server answers.
    """

    def __init__(self, config: RobotConfig, name: str) -> None:
        self.may_clear = True
        self._client = connect(config, name, "operator")
        try:
            self._client.hello()
        except RobotError as e:
            self._client.close()
            logger.warning(f"{e}. The console stops the robot, and an operator's machine clears it")
            self.may_clear = False
            self._client = connect(config, name)
            self._client.hello()
        self.stopped = self.moving = self.waiting = self.held = self.stalled = False
        self.why, self.process = "", PROCESS
        self._shown, self._refused = ShownRobot(-1), ("", -1)  # the second: why, and the generation then
        self._asked_at: float | None = None  # a stop or hold that was not confirmed yet
        self._heard, self._moment = time.monotonic(), -1.0  # when the newest state came, and the server's moment of it
        self._requests: list[tuple[str, ShownRobot | None]] = []  # not sent yet
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

    @property
    def shown(self) -> ShownRobot:
        shown = self._shown
        return shown._replace(held_s=shown.held_s + time.monotonic() - self._heard) if shown.held_by else shown

    @property
    def refused(self) -> str:
        """Why the server refused the last request that would have let the robot move; empty once its state changed."""
        why, generation = self._refused
        return why if generation == self._shown.generation else ""

    @property
    def unconfirmed(self) -> bool:
        """Whether a stop or hold was not confirmed within `CONFIRMS` seconds."""
        asked = self._asked_at
        return asked is not None and time.monotonic() - asked > CONFIRMS

    def request(self, op: str, shown: ShownRobot | None = None) -> None:
        """Send a request soon; a refusal is logged. A stop goes before all that was not sent yet. From any thread.

        `shown`: the state for which the operator requests what lets the robot move: the server refuses it in others.
        """
        if op == "hold" and not self.may_clear:
            op = "stop"  # the server refuses this client a hold, and the robot must not go on
        with self._changed:
            if op in OVERTAKES:
                self._asked_at = self._asked_at or time.monotonic()
            self._requests = [each for each in self._requests if each[0] not in OVERTAKES.get(op, ())]
            self._requests.insert(0 if op == "stop" else len(self._requests), (op, shown))
            self._changed.notify_all()

    def close(self) -> None:
        """Send what stops the robot and was not sent yet, and end."""
        with self._changed:
            self._requests = [each for each in self._requests if each[0] in OVERTAKES]
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
                op, shown = self._requests.pop(0) if self._requests else ("", None)
                self._sending = bool(op)
            if not op and self._ending.is_set():
                return
            try:
                if op:
                    self._send(op, shown)
                else:
                    self._follow(self._client.newest_state())
                    unread = ""
            except Exception as e:  # a stop has to be sent, whatever came; without a state the server is `silent`
                if unread != (unread := f"{type(e).__name__}: {e}"):
                    logger.exception("the robot's state cannot be read")
                self._ending.wait(LOOK)

    def _send(self, op: str, shown: ShownRobot | None) -> None:
        why = ""
        try:
            carries = {}
            if shown is not None and op not in OVERTAKES:  # of the state that was shown to the operator
                lease = {"controller": shown.controller, "process": shown.process} if op == "go" else {}
                carries = {"generation": shown.generation, **lease}
            state = self._client.request(op, **carries).get("state", "")
            if op in OVERTAKES:
                if state not in CONFIRMED[op]:
                    raise RobotError(f"the robot is in {state or 'no state'} after it")
                with self._changed:
                    more = any(each in OVERTAKES for each, _ in self._requests)
                    self._asked_at = time.monotonic() if more else None
        except Exception as e:  # whatever it is, a stop has to be sent
            refused, why = isinstance(e, RobotError), str(e) if str(e).startswith(op) else f"{op}: {e}"
            if op in OVERTAKES:
                logger.error(f"{UNCONFIRMED} ({why})", exc_info=not refused)
                if not self._ending.wait(AGAIN):
                    with self._changed:  # it goes first again; what was requested after it follows it further on
                        if op == "stop" or ("stop", None) not in self._requests:
                            self._requests.insert(0, (op, None))
                    return
            else:
                level = logging.DEBUG if refused and op in QUIET else logging.WARNING
                logger.log(level, why, exc_info=not refused)
        ends = time.monotonic() + FOLLOWS
        while time.monotonic() < ends and ("stop", None) not in self._requests:
            try:
                self._follow(self._client.next_state(LOOK))
                break
            except RobotError:
                continue
        if op not in OVERTAKES:
            self._refused = why, self._shown.generation

    def _follow(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        moment, word = state["moment"], state["state"]
        self.stalled, self.why = word == "STALLED", str(state["word"])
        if not self.stalled:
            self.waiting, held = bool(state["waiting"]), state["held"]
            self.stopped, self.moving, self.held = word == "STOPPED", word == "MOVE", word == "HELD"
            by, seconds = (str(held["by"]), moment - held["since"]) if held else ("", 0.0)
            self._shown = ShownRobot(state["generation"], state["controller"], state["process"], by, seconds)
        if moment != self._moment:
            self._moment, self._heard = moment, time.monotonic()
