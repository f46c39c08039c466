"""A simulated operator of the served fake ALOHA: two virtual SpaceMice, keys of a terminal, and eyes that are late.

It sees the states that the robot's server publishes, 0.2 s late, and the actor's screen, and nothing else. When and
where it intervenes is the scripted human's decision on what it saw. Its hands move both mice: each tip is servoed
towards the place at which the scripted demonstrator wants it, with tremor, and a button is held for each gripper.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.config.robots import FakeAlohaConfig, ScriptedHumanConfig
from serl_chunk.robots.fake.env import FakeAlohaEnv
from serl_chunk.robots.fake.expert import ScriptedExpert
from serl_chunk.robots.fake.kinematics import grip_point
from serl_chunk.robots.fake.scripted_human import ScriptedHuman
from serl_chunk.robots.fake.spec import ARM_DIM
from serl_chunk_robot.client.client import RobotClient

LATE = 0.2  # s between what happens and what the operator knows of it
PERIOD = 0.02  # s between two decisions of the hands
ANSWERS = 0.05  # s until an arm follows a hand; the operator is used to it
GAIN = 9.0  # 1/s: speed of a tip per way that is left
SPEED = 0.6  # m/s at full deflection: `device.translation` of the actor
FULL = 350  # raw deflection
TREMOR, TREMOR_MEMORY = 0.03, 0.9  # of a deflection: standard deviation, and what is left of it after PERIOD
CLOSES, OPENS = 1, 2  # masks of a mouse's buttons
LOOKS = 0.25  # s between two looks at the screen
READS = 0.7  # s for which the screen asks before a key is pressed
COUNTDOWN = 2.5  # s after Enter, until the robot moves
PAUSES = (60.0, 120.0)  # s between two breaks, in which the robot holds
HUMAN = ScriptedHumanConfig(stall_ticks=40, reaction_ticks=(0, 10), correction_ticks=(80, 160))


class Seen(NamedTuple):
    """A published state, when it came, monotonic s."""

    came: float
    state: dict[str, Any]


class Mice:
    """The mice of a `mouse_actor` process."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(30)
        self._socket.connect(str(path))
        self._channel: Any = self._socket.makefile("rw")

    def __call__(self, do: str, **more: Any) -> None:
        self._channel.write(json.dumps({"do": do, "quiet": True, **more}) + "\n")
        self._channel.flush()


class SimulatedOperator:
    """Works from `run` until it ends.

    Args:
        robot: address of the robot's server.
        mice: path of the actor's socket.
        screen: returns the lines of the actor's terminal.
        type: types characters there.
    """

    def __init__(
        self, robot: str, mice: Path, screen: Callable[[], list[str]], type: Callable[[bytes], None], seed: int
    ) -> None:
        self._client = RobotClient(robot, name="eyes")
        self._mice, self._screen, self._type = Mice(mice), screen, type
        self._states: deque[Seen] = deque()
        self._env = FakeAlohaEnv(FakeAlohaConfig())
        self._mind, self._expert = ScriptedHuman(self._env, HUMAN), ScriptedExpert(self._env)
        self._rng = np.random.default_rng(seed)
        self._tremor = np.zeros((2, 3))
        self._moved: deque[tuple[float, np.ndarray]] = deque()  # what the hands did: m of each tip, float64[2, 3]
        self._speeds, self._held_at = np.zeros((2, 3)), 0.0  # m/s that the hands ask for, and since when
        self._buttons = [0, 0]
        self._watches = False  # an episode
        self._since: float | None = None  # since when both hands are on the mice
        self.interventions: list[tuple[float, float]] = []  # from and to, monotonic s
        self.keys: list[tuple[float, str]] = []  # when, and which
        self._asked: float | None = None  # since when the screen asks for a key
        self._looked = 0.0
        self._pause_at = monotonic() + self._rng.uniform(*PAUSES)
        self._rests_until = 0.0  # no hand is on a mouse in a break

    def run(self, ended: Callable[[], bool]) -> None:
        with contextlib.suppress(AttributeError, OSError):  # a human needs no processor
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        due, tick = monotonic(), 0
        while not ended():
            due = max(due + PERIOD, monotonic())
            while (left := due - monotonic()) > 0:  # every published state, for the newest alone is kept
                self._see()
                sleep(min(left, 0.004))
            try:
                self._act(self._seen(due - LATE), tick)
            except OSError:  # the actor ends
                break
            tick += 1
        self._let_go(monotonic(), hands=False)
        self._client.close()

    def _see(self) -> None:
        state = self._client.newest_state()
        if state is not None and (not self._states or state["pass"] != self._states[-1].state["pass"]):
            self._states.append(Seen(monotonic(), state))

    def _seen(self, until: float) -> dict[str, Any] | None:
        while len(self._states) > 1 and self._states[1].came <= until:
            self._states.popleft()
        return self._states[0].state if self._states and self._states[0].came <= until else None

    def _act(self, seen: dict[str, Any] | None, tick: int) -> None:
        now = monotonic()
        runs = seen is not None and seen["state"] == "RUN" and now >= self._rests_until
        if runs and seen is not None:
            q, cube, holder = seen["q"].tolist(), tuple(seen["extra"]["cube"].tolist()), int(seen["extra"]["holder"][0])
            offset = (0.0, 0.0, 0.0)
            if holder >= 0:
                offset = tuple(np.subtract(cube, grip_point(holder, q, holder * ARM_DIM)).tolist())
            self._env.place(q, cube, holder, offset)
        if not runs:
            self._watches = False
            self._let_go(now)
        else:
            if not self._watches:
                self._watches = True
                self._mice("prefer")  # the threads of its device and its policy are there by now
                self._mind.reset(int(self._rng.integers(2**31)))
            if self._mind.poll(tick, {}, True, np.zeros(0)) is None:
                self._let_go(now)
            else:
                self._hold(now)
        if now - self._looked >= LOOKS:
            self._looked = now
            self._read_screen(now, runs)

    def _hold(self, now: float) -> None:
        if self._since is None:
            self._since, self._speeds = now, np.zeros((2, 3))
        self._moved.append((now, self._speeds * (now - self._held_at)))
        self._held_at = now
        while self._moved and self._moved[0][0] < now - LATE - ANSWERS:
            self._moved.popleft()
        moved = sum((way for _, way in self._moved), np.zeros((2, 3)))
        self._expect(moved)
        noise = TREMOR * np.sqrt(1 - TREMOR_MEMORY**2) * self._rng.standard_normal((2, 3))
        self._tremor = TREMOR_MEMORY * self._tremor + noise
        for arm, (goal, opening) in enumerate(self._expert.goals()):
            left = np.subtract(goal, self._env.grips[arm])
            twist = np.clip(GAIN * left / SPEED, -1.0, 1.0) + self._tremor[arm]
            self._speeds[arm] = np.clip(twist, -1.0, 1.0) * SPEED
            x, y, z = (-FULL * twist).round().astype(int).tolist()  # forward is -y, left is -x, up is -z
            self._mice("push", mouse=arm, x=y, y=x, z=z)
            self._press(arm, OPENS if opening > 0.5 else CLOSES)

    def _expect(self, moved: np.ndarray) -> None:
        """Move the tips that were seen by what the hands did since then, m, float64[2, 3], and a cube that is held."""
        env = self._env
        for arm, way in enumerate(moved):
            x, y, z = (np.array(env.grips[arm]) + way).tolist()
            env.grips[arm] = x, y, z
            if env.holder == arm:
                x, y, z = (np.array(env.cube) + way).tolist()
                env.cube = x, y, z

    def _let_go(self, now: float, *, hands: bool = True) -> None:
        if self._since is None:
            return
        if hands:
            for arm in (0, 1):
                self._press(arm, 0)
                self._mice("rest", mouse=arm)
        self.interventions.append((self._since, now))
        self._since = None
        self._moved.clear()

    def _press(self, arm: int, buttons: int) -> None:
        if self._buttons[arm] != buttons:
            self._buttons[arm] = buttons
            self._mice("press", mouse=arm, buttons=buttons)

    def _read_screen(self, now: float, runs: bool) -> None:
        """Press what the screen asks for, and space where a break is due."""
        text = "\n".join(self._screen())
        asks = "c, Enter clear" in text or ("Enter go" in text and "moves in" not in text)
        self._asked = (self._asked or now) if asks else None
        if self._asked is not None and now - self._asked >= READS:
            self._asked = None
            if "c, Enter clear" in text:
                self._key("c", now)
                sleep(0.1)
            self._key("Enter", now)
            self._rests_until = now + COUNTDOWN if self._rests_until == np.inf else 0.0
            self._pause_at = max(self._pause_at, now + 10.0)
        elif runs and self._since is None and now >= self._pause_at:
            self._key("space", now)
            self._rests_until = np.inf
            self._pause_at = now + self._rng.uniform(*PAUSES)

    def _key(self, name: str, now: float) -> None:
        self._type({"Enter": b"\r", "space": b" "}.get(name, name.encode()))
        self.keys.append((now, name))
