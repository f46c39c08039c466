"""The simulated operator of the rehearsal (`lab.py`): hands on devices, the keys of a terminal, and eyes that are late.

It sees the joints that the robot's server publishes, and the terminal's screen. It presses what the screen asks for.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from serl_chunk_robot.client.client import RobotClient, RobotError
from support.lab_experiment import CLOSED, LabTask
from support.simulated_operator import CLOSE, RATE, Aim, Belief, Pose

MEET, MISS, WATCH, HELP = "meet", "miss", "watch", "help"
"""What to do in an episode: lead the arms to success, to a near miss, nothing, or to success after a look."""
HELPS_AFTER = 0.5  # s
THERE = 0.02  # m of a tip from its goal
SHUT = 0.5 * CLOSED  # of an opening
SHOWS = 0.5  # s for which the result is shown before it is judged: the classifier learns from these frames
MISSED = np.array([[0.08, 0.12], [-0.06, 0.06], [-0.06, 0.06]])  # m along x (outwards), y and z: from, to
OUTWARDS = (-1, 1)  # along x, of the first arm and the second
LOOKS = 0.25  # s between two looks at the screen
ENDS_WITHIN = 30.0  # s in which a process ends whose devices were closed
READS = 0.7  # s for which the screen asks before a key is pressed
UNDER_WAY = ("moves in", "moves to its arm", "at its arm")  # of the robot, and of a leader that is driven: no key helps


class Screen(Protocol):
    """A terminal as `support.lab_cell.Terminal`."""

    @property
    def running(self) -> bool: ...
    @property
    def screen(self) -> str: ...
    def type(self, data: bytes) -> None: ...


class Meeting:
    """What the operator wants: the tips go to their places, and the grippers close there.

    Args:
        choose: returns what to do in the episode that begins.
    """

    def __init__(self, task: LabTask, choose: Callable[[], str], rng: np.random.Generator) -> None:
        self._places, self._choose, self._rng = task.tips(task.goal), choose, rng
        self.plan, self.since, self._misses = WATCH, 0.0, 0
        self._goals, self._shut_at = self._places, 0.0
        self._by = [by for by in itertools.product((0, 1), repeat=len(self._places)) if any(by)]  # which arms miss
        self.done: str | None = None
        """The plan that was carried out, until the next episode."""

    def begin(self, belief: Belief) -> None:
        self.plan, self.since, self.done, self._shut_at = self._choose(), belief.now, None, 0.0
        self._goals, count = self._places, len(self._places)
        if self.plan == MISS:
            x, y, z = self._rng.uniform(*MISSED.T, (count, 3)).T
            aside = np.stack([x * OUTWARDS[:count], y, z], axis=1)
            self._goals = self._goals + aside * np.array(self._by[self._misses % len(self._by)])[:, None]
            self._misses += 1

    def decide(self, belief: Belief) -> tuple[Aim, ...] | None:
        waits = self.plan == HELP and belief.now - self.since < HELPS_AFTER
        if self.plan == WATCH or waits or self.done:
            return None
        there = all(
            np.linalg.norm(tip.place - goal) < THERE for tip, goal in zip(belief.tips, self._goals, strict=True)
        )
        self._shut_at = self._shut_at or (belief.now if there and max(belief.openings) < SHUT else 0.0)
        if self._shut_at and belief.now - self._shut_at > SHOWS:
            self.done = self.plan
        closes = CLOSE if there or self._shut_at else None
        return tuple(Aim(Pose(goal, tip.turned), closes) for tip, goal in zip(belief.tips, self._goals, strict=True))


class Hands(Protocol):
    """The operator's hands on the devices of one process. `close` ends what they hold on to."""

    meeting: Meeting

    def ready(self) -> bool:
        """Return whether the devices are there."""
        ...

    def see(self, now: float, joints: np.ndarray, ready: bool) -> None:
        """Look at the robot's measured joints, float[J]; `ready`: it follows."""
        ...

    def move(self, now: float, robot: RobotClient) -> None:
        """Move for 8 ms (`RATE`). The hands feel what `robot` publishes of their devices."""
        ...

    def let_go(self) -> None:
        """Touch the devices and let them go, as what the screen shows asks for."""
        ...

    def close(self) -> None: ...


class LabOperator:
    """Operates one process at its terminal, on a thread, until that ends or `close`. Args: address of the robot."""

    def __init__(self, robot: str, task: LabTask, terminal: Screen, hands: Hands) -> None:
        self._robot, self._task, self._terminal, self._hands = robot, task, terminal, hands
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
        self._hands.close()

    def _over(self) -> bool:
        return self._ended.is_set() or not self._terminal.running

    def _run(self) -> None:
        try:
            with RobotClient(self._robot, name="eyes") as eyes:
                while not self._over() and not self._hands.ready():
                    time.sleep(0.1)
                self._operate(eyes)
        except (OSError, RobotError) as error:
            ends = time.monotonic() + ENDS_WITHIN
            while not self._over() and time.monotonic() < ends:
                time.sleep(0.1)
            self.error = None if self._over() else error

    def _operate(self, eyes: RobotClient) -> None:
        due, last, looked = time.monotonic(), -1, 0.0
        while not self._over():
            state = eyes.newest_state()
            if state is not None and state["q"] is not None and state["pass"] != last:
                last, self.state, self.seen = state["pass"], state["state"], state["q"]
                self._hands.see(time.monotonic(), state["q"], state["state"] == "RUN")
            if self.state != "RUN":
                self._hands.meeting.done = None  # the next episode is another one
            self._hands.move(due, eyes)
            now = time.monotonic()
            if now - looked > LOOKS:
                looked = now
                if "is lost" in self._terminal.screen:
                    self._hands.let_go()
                self._look(now)
            due = max(due + 1 / RATE, time.monotonic() - 0.1)  # what a machine that stood still missed is left out
            time.sleep(max(0.0, due - time.monotonic()))

    def _look(self, now: float) -> None:
        """Judge an episode that is done, and answer the screen."""
        asks = asked(self._terminal.screen, self.seen, self._task) if self.answers else None
        done = self._hands.meeting.done
        if asks is None:
            self._asks = None
            if self.state == "RUN" and done in (MEET, MISS) and now - self._judged_at > 2.0:
                self._judged_at = now
                self.press("s" if done == MEET else "f")
            return
        if self._asks is None or self._asks[0] != asks:
            self._asks = (asks, now)
        elif now - self._asks[1] >= READS:
            self._asks = None
            for key in asks.split():
                self.press(key)
                time.sleep(0.1)


def asked(screen: str, joints: np.ndarray | None, task: LabTask) -> str | None:
    """Return the keys that a screen asks for, or None. Args: joints as they were seen, float[J]."""
    if "c, Enter clear" in screen:
        return "c Enter"
    if "the episode has no outcome" in screen:
        return "s" if joints is not None and task.meets(joints) else "f"
    if "a human intervened" in screen:
        return "f"
    return "Enter" if "Enter go" in screen and not any(text in screen for text in UNDER_WAY) else None


def kept(folder: Path) -> int:
    return len(list(folder.glob("*.hdf5")))
