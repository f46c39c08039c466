"""The simulated operator of the rehearsal (`lab.py`): two SpaceMice, the keys of a terminal, and eyes that are late.

It sees the joints that the robot's server publishes, and the terminal's screen. It presses what the screen asks for.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from serl_chunk.robots.arms import aloha_arms
from serl_chunk_robot.client.client import RobotClient, RobotError
from support.lab_experiment import CLOSED, MEETING, meets, tips
from support.simulated_operator import CLOSE, RATE, Aim, Belief, Pose, SimulatedOperator
from support.virtual_mice import SOCKET, MouseReports, fake_hid, frame, frames

TRANSLATION, ROTATION = 0.3, 1.5  # m/s and rad/s at full deflection: `device.translation` and `device.rotation`
MEET, MISS, WATCH, HELP = "meet", "miss", "watch", "help"
"""What to do in an episode: lead both arms to success, to a near miss, nothing, or to success after a look."""
HELPS_AFTER = 1.0  # s
THERE = 0.02  # m of a tip from its goal
SHUT = 0.5 * CLOSED  # of an opening
SHOWS = 0.5  # s for which the result is shown before it is judged: the classifier learns from these frames
MISSED = np.array([[0.08, 0.12], [-0.06, 0.06], [-0.06, 0.06]])  # m along x (outwards), y and z: from, to
BY = ((1, 0), (0, 1), (1, 1))  # which arms miss, in turns
LOOKS = 0.25  # s between two looks at the screen
ENDS_WITHIN = 30.0  # s in which a process ends whose mice were closed
READS = 0.7  # s for which the screen asks before a key is pressed
TOUCHED = (fake_hid.translation(), fake_hid.rotation(), fake_hid.buttons(0))  # a mouse that is touched and let go
NO_CUBE = np.zeros(7)


class Screen(Protocol):
    """A terminal as `support.lab_cell.Terminal`."""

    @property
    def running(self) -> bool: ...
    @property
    def screen(self) -> str: ...
    def type(self, data: bytes) -> None: ...


class Meeting:
    """A task of `SimulatedOperator`: both tips go to a place, and the grippers close there.

    Args:
        choose: returns what to do in the episode that begins.
    """

    def __init__(self, choose: Callable[[], str], rng: np.random.Generator) -> None:
        self._choose, self._rng = choose, rng
        self.plan, self.since, self._misses = WATCH, 0.0, 0
        self._goals, self._shut_at = tips(MEETING), 0.0
        self.done: str | None = None
        """The plan that was carried out, until the next episode."""

    def begin(self, belief: Belief) -> None:
        self.plan, self.since, self.done, self._shut_at = self._choose(), belief.now, None, 0.0
        self._goals = tips(MEETING)
        if self.plan == MISS:
            x, y, z = self._rng.uniform(*MISSED.T, (2, 3)).T
            aside = np.stack([x * (-1, 1), y, z], axis=1)
            self._goals = self._goals + aside * np.array(BY[self._misses % len(BY)])[:, None]
            self._misses += 1

    def decide(self, belief: Belief) -> tuple[Aim, Aim] | None:
        waits = self.plan == HELP and belief.now - self.since < HELPS_AFTER
        if self.plan == WATCH or waits or self.done:
            return None
        there = all(
            np.linalg.norm(tip.place - goal) < THERE for tip, goal in zip(belief.tips, self._goals, strict=True)
        )
        self._shut_at = self._shut_at or (belief.now if there and max(belief.openings) < SHUT else 0.0)
        if self._shut_at and belief.now - self._shut_at > SHOWS:
            self.done = self.plan
        left, right = (
            Aim(Pose(goal, tip.turned), CLOSE if there or self._shut_at else None)
            for tip, goal in zip(belief.tips, self._goals, strict=True)
        )
        return left, right


class LabOperator:
    """Operates one process at its terminal, on a thread, until that ends or `close`.

    Args:
        robot: address of the robot's server.
        mice: folder of the virtual mice (`support.virtual_mice`).
        choose: see `Meeting`.
    """

    def __init__(self, robot: str, mice: Path, terminal: Screen, choose: Callable[[], str], seed: int) -> None:
        self._robot, self._mice, self._terminal = robot, mice, terminal
        self.task = Meeting(choose, np.random.default_rng(seed))
        self._human = SimulatedOperator(aloha_arms(), self.task, translation=TRANSLATION, rotation=ROTATION, seed=seed)
        self.answers = True
        """Whether it presses what the screen asks for."""
        self.keys: list[str] = []
        self.state = ""  # of the robot
        self.seen: np.ndarray | None = None  # its joints
        self.error: Exception | None = None
        self._asks: tuple[str, float] | None = None  # what the screen asks for, and since when
        self._judged_at = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def press(self, key: str) -> None:
        self.keys.append(key)
        self._terminal.type({"Enter": b"\r", "space": b" "}.get(key, key.encode()))

    def close(self) -> None:
        self._ended.set()
        self._thread.join(10)

    def _over(self) -> bool:
        return self._ended.is_set() or not self._terminal.running

    def _run(self) -> None:
        try:
            with RobotClient(self._robot, name="eyes") as eyes, socket.socket(socket.AF_UNIX) as mice:
                while not self._over() and mice.connect_ex(str(self._mice / SOCKET)):
                    time.sleep(0.1)
                self._operate(eyes, mice)
        except (OSError, RobotError) as error:
            ends = time.monotonic() + ENDS_WITHIN
            while not self._over() and time.monotonic() < ends:
                time.sleep(0.1)
            self.error = None if self._over() else error

    def _operate(self, eyes: RobotClient, mice: socket.socket) -> None:
        reports, due, last, looked = [MouseReports(), MouseReports()], time.monotonic(), -1, 0.0
        while not self._over():
            state = eyes.newest_state()
            if state is not None and state["q"] is not None and state["pass"] != last:
                last, self.state, self.seen = state["pass"], state["state"], state["q"]
                self._human.see(time.monotonic(), state["q"], NO_CUBE, state["state"] == "RUN")
            if self.state != "RUN":
                self.task.done = None  # the next episode is another one
            hands = self._human.hands(due)
            mice.sendall(frames(reports, hands))
            now = time.monotonic()
            if now - looked > LOOKS:
                looked = now
                if "is lost" in self._terminal.screen:  # a stalled actor drops reports, also the last one of a rest
                    mice.sendall(b"".join(frame(k, report) for k in (0, 1) for report in TOUCHED))
                self._look(now)
            due = max(due + 1 / RATE, time.monotonic() - 0.1)  # what a machine that stood still missed is left out
            time.sleep(max(0.0, due - time.monotonic()))

    def _look(self, now: float) -> None:
        """Judge an episode that is done, and answer the screen."""
        asks = asked(self._terminal.screen, self.seen) if self.answers else None
        if asks is None:
            self._asks = None
            if self.state == "RUN" and self.task.done in (MEET, MISS) and now - self._judged_at > 2.0:
                self._judged_at = now
                self.press("s" if self.task.done == MEET else "f")
            return
        if self._asks is None or self._asks[0] != asks:
            self._asks = (asks, now)
        elif now - self._asks[1] >= READS:
            self._asks = None
            for key in asks.split():
                self.press(key)
                time.sleep(0.1)


def asked(screen: str, joints: np.ndarray | None) -> str | None:
    """Return the keys that a screen asks for, or None. Args: joints as they were seen, float[14]."""
    if "c, Enter clear" in screen:
        return "c Enter"
    if "the episode has no outcome" in screen:
        return "s" if joints is not None and meets(joints) else "f"
    if "a human intervened" in screen:
        return "f"
    return "Enter" if "Enter go" in screen and "moves in" not in screen else None


def kept(folder: Path) -> int:
    return len(list(folder.glob("*.hdf5")))
