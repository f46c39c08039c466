"""A served robot, a learner and an actor with a virtual SpaceMouse: processes, and what its motion brings at the robot.

All moments are of this machine's monotonic clock, s. The mouse has the first arm.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.config.robots import AlohaConfig
from serl_chunk.data.formats.hdf5 import write_episode
from serl_chunk.robots.aloha import aloha_spec
from serl_chunk.types import STATE, Begin, End, Episode, Outcome, Source, Step, StepBlock
from serl_chunk_robot.drivers.fake import HOME

try:
    from support.robot_moments import PATIENCE, SERVER, Cell, press_on
except ImportError:  # a test, whose path this folder itself is in
    from robot_moments import PATIENCE, SERVER, Cell, press_on

HANDS = Path(__file__).with_name("mouse_actor.py")
FAKE_HID = Path(__file__).resolve().parents[2] / "tests" / "support"
ARM = slice(0, 6)  # joints of the mouse's arm
RATE = 200.0  # passes of the server's loop a second
FULL = 350  # raw deflection
CHANGED = 1e-3  # rad, of a command; the first one of a full deflection is 8 mrad away
DEMONSTRATED = 60  # ticks
MOVES = 0.005  # rad/s, from a pass to the next, of an arm that stood
STILL = 1e-3  # rad/s, of a set point that changes no more


class Answer(NamedTuple):
    """The first command that follows a report. Seconds are from the report."""

    tick: float  # until the next tick read the device
    late: int  # ticks that read it without a change of the command
    sent: float  # until the actor sent the changed command
    driver: float  # until the driver got the first changed set point
    received: float = math.nan  # until the server received the first command that is made of it
    ages: tuple[float, ...] = ()  # of the newest report that a command is made of, when the server received it
    on_its_way: tuple[float, ...] = ()  # from the look at the device until then


class Braking(NamedTuple):
    """An arm whose mouse was unplugged in motion, by the set points of its fastest joint. Seconds are from that."""

    speed: float  # rad/s before
    began: float  # until the driver got a set point that is slower
    stopped: float  # until the velocity was zero
    returned: float  # rad that the joint went back, from the furthest set point to the last one
    settled: float  # until no joint of the arm moved


class MouseCell(Cell):
    """A Cell whose actor has a virtual SpaceMouse. See `Cell`."""

    def __init__(
        self, folder: Path, ports: tuple[int, int], environment: Mapping[str, str], settings: Sequence[str] = (),
        server: Sequence[str] = SERVER,
    ) -> None:  # fmt: skip
        paths = [str(FAKE_HID), environment.get("PYTHONPATH", "")]
        mouse = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        more = ["--config.actor.intervention=spacemouse", "--config.normaliser.actions=relative", *settings]
        demonstration(folder / "demonstration.hdf5")
        super().__init__(
            folder, ports, 1, mouse, (str(HANDS), str(folder), "1"), more, folder / "demonstration.hdf5", server
        )
        self._mouse = folder / "mouse.sock"
        self._channel: Any = None
        self._socket: socket.socket | None = None
        self._came: list[tuple[int, float]] = []  # number of a command, and when the server received it

    def begin(self) -> None:
        """Start all processes, and wait for the actor's first episode."""
        self.start()
        self.learn()
        self.act()
        self.running()

    def running(self) -> None:
        """Clear the robot until an episode runs."""
        ends = time.monotonic() + PATIENCE
        self.watch(0.1)
        while self.state.get("state") != "RUN":
            self.watch(0.05)
            press_on(self.operator, self.state)
            self._check(ends, f"no episode runs: {self.state.get('state')}, {self.state.get('word')}")

    def next_episode(self) -> None:
        """Stop the robot, which ends the episode, and wait for the next one."""
        self.operator.request("stop")
        self.until("STOPPED")
        self.watch(0.3)  # the actor sees it
        self.running()

    def hand(self, do: str, **more: Any) -> dict[str, Any]:
        """Move the mouse (`mouse_actor`); returns the answer, with the moment `at`."""
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(30)
            self._socket.connect(str(self._mouse))
            self._channel = self._socket.makefile("rw")
        self._channel.write(json.dumps({"do": do, **more}) + "\n")
        self._channel.flush()
        return json.loads(self._channel.readline())  # type: ignore[no-any-return]

    def opened(self) -> list[str]:
        """Paths of mice that `pyspacemouse.open_by_path` opened."""
        return self.hand("sent", since=time.monotonic())["opened"]  # type: ignore[no-any-return]

    def prefer(self) -> bool:
        """Give the actor real-time priority; returns whether the system permits it."""
        return bool(self.hand("prefer")["permitted"])

    def watch(self, seconds: float) -> list[dict[str, Any]]:
        found = super().watch(seconds)
        self._came += [(int(state["came"][0]), float(state["came"][1])) for state in found if state.get("came")]
        return found

    def answer(self, at: float, held: float = 0.0) -> Answer:
        """What followed the report of the moment `at`, which changed the deflection of a mouse whose arm stood.

        Args:
            held: seconds for which the mouse went on reporting.
        """
        commands = self.hand("sent", since=at - 0.1)["commands"]
        answer = answer_of(at, commands, *self.set_points())
        received = {number: came for number, came in self._came if at - 0.1 < came < at + 1.0}
        return answer._replace(**ways_of(at, commands, received, held))

    def braking(self, at: float) -> Braking:
        """What followed the unplugged mouse at the moment `at`. Reads the second after it."""
        return braking_of(at, *self.set_points())

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        super().close()


def demonstration(path: Path) -> None:
    """Write a demonstration of small motions, after which an untrained policy makes small motions too."""
    home, spec = np.array(HOME * 2, np.float32), aloha_spec(AlohaConfig(server="none", cameras=()))
    action = home + 0.005 * np.sin(0.3 * np.arange(DEMONSTRATED))[:, None].astype(np.float32)
    steps = [
        Step(k, {STATE: action[max(k - 1, 0)]}, row, 0.0, Source.SCRIPTED, -1, -1, k * spec.dt)
        for k, row in enumerate(action)
    ]
    end = End("0", len(steps), {STATE: action[-1]}, False, True, Outcome.UNKNOWN)
    write_episode(path, Episode(Begin("0", robot=spec.name), StepBlock.from_steps("0", steps), end), spec)


def _speed(points: np.ndarray) -> np.ndarray:
    """Speed of the fastest joint of the mouse's arm, rad/s."""
    return np.asarray(np.abs(np.diff(points[:, ARM], axis=0)).max(axis=1) * RATE)


def _apart(points: np.ndarray, start: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(points - start).max(axis=1))


def answer_of(at: float, commands: Sequence[Any], moments: np.ndarray, points: np.ndarray) -> Answer:
    """What followed a report of the moment `at`.

    Args:
        commands: when the actor's tick read the device, when it sent its command, and that command, from a tick before
            `at` on.
        moments, points: when the driver got set points, float64[N], and these, float64[N, J].
    """
    began, sent = np.array([(c[1], c[3]) for c in commands]).T
    targets = np.array([c[4] for c in commands])[:, ARM]
    first = int(np.searchsorted(began, at))
    changed = first + int(np.argmax(_apart(targets[first:], targets[first - 1]) > CHANGED))
    index = int(np.searchsorted(moments, sent[changed]))  # none can move the arm before it is sent
    speed = _speed(points[index - 2 : index + 60])
    moved = index + int(np.argmax(speed[1:] > speed[0] + MOVES))
    return Answer(began[first] - at, changed - first, sent[changed] - at, float(moments[moved] - at))


def ways_of(at: float, commands: Sequence[Any], received: Mapping[int, float], held: float) -> dict[str, Any]:
    """When the server received the commands that are made of reports from the moment `at` on: fields of Answer.

    Args:
        commands: see `mouse_actor.Hands.sent`.
        received: when it received each, by its number.
        held: seconds for which the mouse reported 125 times a second.
    """
    made = [(began, reported, received[n]) for n, began, reported, *_ in commands if n in received and reported >= at]
    then = [way for way in made if way[0] < at + held]
    return {
        "received": min((came for _, _, came in made), default=math.nan) - at,
        "ages": tuple(came - reported for _, reported, came in then),
        "on_its_way": tuple(came - began for began, _, came in then),
    }


def braking_of(at: float, moments: np.ndarray, points: np.ndarray) -> Braking:
    """What followed an unplugged mouse at the moment `at`; see `answer_of`. Reads the second after it."""
    index = int(np.searchsorted(moments, at))
    end = int(np.searchsorted(moments, at + 1.0))
    velocity = np.diff(points[index - 20 : end, ARM], axis=0) * RATE
    before = np.median(velocity[:19], axis=0)
    joint = int(np.abs(before).argmax())
    speed = velocity[19:, joint] * np.sign(before[joint])  # the first one is of the pass before `at`
    most = float(np.abs(before[joint]))
    began, stopped = int(np.argmax(speed < 0.9 * most)), int(np.argmax(speed <= STILL))
    moving = np.flatnonzero(np.abs(velocity[19:]).max(axis=1) > STILL)
    settled = int(moving[-1]) + 1 if len(moving) else 0
    way = np.cumsum(speed) / RATE
    after = moments[index - 1 :] - at
    return Braking(most, float(after[began]), float(after[stopped]), float(way.max() - way[-1]),
                   float(after[min(settled, len(after) - 1)]))  # fmt: skip
