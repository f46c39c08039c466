"""A page of an operator whose robot is a word that a test sets; and the real operator, polled by a thread."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from http_requests import Answer, Requests

from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.console.feed import LiveFeed
from serl_chunk.console.view import ConsoleState
from serl_chunk.live.server import LivePage
from serl_chunk.operator.operator import Operator
from serl_chunk.types import Amend, Begin, CameraSpec, RobotSpec, ShownRobot, Source, Step

SPEC = RobotSpec(
    name="two", control_hz=50.0, state_dim=3, action_low=(-1.0,) * 3, action_high=(1.0,) * 3,
    joint_of_action=(1, 0, -1), grippers=(2,), cameras=(CameraSpec("front", 12, 16),),
    max_episode_steps=100, arms=((0, 3),),
)  # fmt: skip
NAMES = [c * 24 for c in "abcd"]  # of viewers


def step(tick: int, source: Source = Source.POLICY, *, image: np.ndarray | None = None, decided: int = 0) -> Step:
    frames = {} if image is None else {"images/front": image}
    state = np.array([tick, -tick, 5], np.float32)
    action = np.array([tick, 0.5, 0], np.float32)
    return Step(tick, {"state": state, **frames}, action, 0.0, source, decided, 3, time.monotonic())


class Recorded:
    """An operator that notes requests."""

    def __init__(self) -> None:
        self.view = ConsoleState(ActorState.POLICY)
        self.requested: list[Action] = []
        self.robots: list[ShownRobot | None] = []  # as they were shown

    def request(self, action: Action, source: str, seen: float | None = None, robot: ShownRobot | None = None) -> None:
        self.requested.append(action)
        self.robots.append(robot)

    def taken(self) -> list[Action]:
        taken, self.requested = self.requested, []
        return taken


class Silent:
    """A console without keys."""

    shown = None

    def actions(self) -> Iterator[Action]:
        yield from ()

    def empty(self) -> None: ...

    def show(self, state: ConsoleState) -> None: ...


class Robot:
    """A robot server that follows requests: what lets the robot move has to be of its generation."""

    process = "p"

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.stopped = self.moving = self.waiting = self.silent = self.held = self.stalled = self.unconfirmed = False
        self.may_clear = self.idle = True
        self.why = self.refused = ""
        self.generation = 0

    @property
    def shown(self) -> ShownRobot:
        return ShownRobot(self.generation, "actor", self.process, "desk" if self.held else "")

    def hold(self) -> None:
        self.held, self.moving, self.why, self.generation = True, False, "held by desk", self.generation + 1

    def request(self, op: str, shown: ShownRobot | None = None) -> None:
        self.requests.append(op)
        late = op not in ("stop", "hold") and (shown is None or shown.generation != self.generation)
        self.refused = f"{op}: another generation" if late else ""
        if late:
            return
        self.generation += 1
        self.stopped = (self.stopped or op == "stop") and op != "clear"
        self.held = (self.held or op == "clear" or (op == "hold" and self.moving)) and op not in ("stop", "go")


class Desk:
    """The real operator, polled 50 times a second in the state `word`."""

    def __init__(self, word: ActorState = ActorState.POLICY, **more: Any) -> None:
        self.robot, self.amends, self.word = Robot(), list[Amend](), word
        self.operator = Operator(
            Silent(), self.robot, amend=self.amends.append, end=lambda: None, now=time.monotonic, **more
        )

    @property
    def view(self) -> ConsoleState:
        return self.operator.view

    @contextlib.contextmanager
    def polled(self) -> Iterator[Desk]:
        ending = threading.Event()

        def poll() -> None:
            while not ending.wait(0.02):
                self.operator.poll(self.word)

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            yield self
        finally:
            ending.set()
            thread.join()


class Viewer(Requests):
    """One viewer of a page."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url)
        self.name = name

    def post(self, what: str, **body: Any) -> Answer:
        headers = {"Content-Type": "application/json"}
        return self.request(f"{what}/{self.name}", body=json.dumps(body).encode(), headers=headers)

    def press(self, key: str, word: str = "POLICY", seen: float | None = None, robot: Any = None) -> Answer:
        """Press a key. Args: robot: of the state that was shown, as its events have it."""
        return self.post("press", key=key, word=word, seen=time.monotonic() if seen is None else seen, robot=robot)

    @contextlib.contextmanager
    def stream(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            head = f"GET {self.prefix}events/{self.name} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n\r\n"
            connection.sendall(head.encode())
            yield connection

    def events(self) -> Iterator[dict[str, Any]]:
        """The events from now on; the last one is empty where the actor ends."""
        with self.stream() as connection, connection.makefile("rb") as lines:
            for line in lines:
                if line.startswith(b"data:"):
                    yield json.loads(line[5:].strip() or "{}")


@contextlib.contextmanager
def serving(operator: Any, **options: Any) -> Iterator[tuple[LivePage, LiveFeed]]:
    """A page that is served."""
    feed = LiveFeed()
    feed.begin(Begin("episode-1"))
    page = LivePage(0)
    try:
        page.begin(operator, feed, SPEC, title="two: actor", **options)
        yield page, feed
    finally:
        page.close()
