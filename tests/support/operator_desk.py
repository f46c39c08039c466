"""An operator at a pseudo terminal, with a pedal, on a simulated clock, of a robot that a server resets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import live_desk
import numpy as np
from actor_helpers import HumanOnTicks, LineEnv, ListSink, make_config
from ptys import Pty, wait_until

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.console.console import OperatorConsole
from serl_chunk.console.view import ConsoleState
from serl_chunk.operator.devices import OperatorDevices
from serl_chunk.operator.operator import Operator
from serl_chunk.robots.base import DeviceActivity
from serl_chunk.types import Amend, ShownRobot

DT = 0.02
COUNTDOWN = 1.0
LONGEST, AFTER = 20.0, 2.5  # simulated seconds without a key, and after the last one


class Robot(live_desk.Robot):
    """A robot server whose motions follow requests."""

    def request(self, op: str, shown: ShownRobot | None = None) -> None:
        super().request(op, shown)
        self.moving = (self.moving or (op == "park" and not self.refused)) and op not in ("hold", "stop")


class ServedLine(LineEnv):
    """A line robot whose resets take time at a server, as ServedRobot's do."""

    observes_again = True

    def __init__(self, robot: Robot, **more: Any) -> None:
        super().__init__(**more)
        self.robot, self.options, self.lost = robot, [], ()
        self.rested: list[int] = []  # ticks

    def reset(self, *, seed=None, options=None):
        while True:
            while self.stop() is None and not self.may_move():
                pass
            if self.stop() is not None:
                return super().reset(seed=seed)
            self.options.append(options)
            self.robot.moving = True
            ticks = 0
            while (self.robot.waiting or ticks < 20) and self.stop() is None and self.robot.moving:
                ticks += 1
            done, self.robot.moving = self.robot.moving, False
            if done:
                return super().reset(seed=seed)

    def rest(self):
        self.rested.append(self.tick)

    def observe_again(self):
        return {"state": self._buffer}

    def hindrances(self):
        return self.lost


class Constant:
    """A demonstrator, whose ticks are cheap."""

    def reset(self, seed: int) -> None: ...

    def act(self) -> np.ndarray:
        return np.zeros(2, np.float32)


class Press(NamedTuple):
    """A key, pedal event or request."""

    when: Callable[[], bool] | float  # a condition, or seconds after the press before
    what: bytes | Action | tuple[str, bool]  # typed, requested by a page, or pedal and whether it is pressed


class PedalEvent(NamedTuple):
    name: str
    pressed: bool
    stamp: float


class Pedal:
    name = "pedal"
    alive = True

    def __init__(self) -> None:
        self.events: list[PedalEvent] = []

    def read(self) -> Pedal:
        return self

    def keys(self) -> list[PedalEvent]:
        events, self.events = self.events, []
        return events

    def close(self) -> None: ...


class Hand:
    """A device of a human who does not move it."""

    def __init__(self) -> None:
        self.hands_now, self.resumed = DeviceActivity(), 0

    def reset(self, seed: int) -> None: ...

    def poll(self, *_: Any) -> None: ...

    def close(self) -> None: ...

    def hands(self) -> DeviceActivity:
        return self.hands_now

    def resume(self) -> None:
        self.resumed += 1


class Desk:
    """One operator; `script` is what is pressed, in order."""

    def __init__(
        self, pty: Pty, *, ready: str = "", intervention: Any = None, length: int = 400, acts: Any = None, **more: Any
    ) -> None:
        self.time = 0.0
        self.robot, self.pedal, self.sink = Robot(), Pedal(), ListSink()
        self.env = ServedLine(self.robot, length=length)
        self.amends: list[Amend] = []
        self.ended = False
        self.states: list[ConsoleState] = []
        self.script: list[Press] = []
        self._pty = pty
        self.pressed_at: float | None = None
        self.console = OperatorConsole(source=pty.slave, target=pty.slave)
        terminal = self.console.terminal
        assert terminal is not None
        self._typed = self._taken = 0  # bytes
        self._take_bytes, terminal._take = terminal._take, self._take
        self.operator = Operator(
            self, self.robot, amend=self.amends.append, end=self._end, now=lambda: self.time, ready=ready,
            devices=OperatorDevices(pedal=self.pedal, clock=lambda: self.time), countdown=COUNTDOWN, pause=self._pause,
            **more,
        )  # fmt: skip
        self.runner = EpisodeRunner(
            self.env, acts or Constant(), self.sink, config=make_config(), intervention=intervention, stop=self._over,
            operator=self.operator,
        )  # fmt: skip

    # The console, as the operator has it.

    def actions(self) -> Iterator[Action]:
        self.time += DT
        while self.script and self._due(self.script[0].when):
            self._do(self.script.pop(0).what)
        yield from self.console.actions()

    @property
    def shown(self) -> ShownRobot | None:
        return self.states[-1].robot

    def empty(self) -> None:
        self.console.empty()

    def show(self, state: ConsoleState) -> None:
        self.states.append(state)
        self.console.show(state)

    # What tests use.

    @property
    def word(self) -> ActorState:
        return self.operator.view.word

    def at(self, word: ActorState, tick: int = 0) -> Callable[[], bool]:
        return lambda: self.word is word and self.env.tick >= tick

    def close(self) -> None:
        self.console.close()

    def _due(self, when: Callable[[], bool] | float) -> bool:
        return when() if callable(when) else self.pressed_at is not None and self.time - self.pressed_at >= when

    def _do(self, what: Any) -> None:
        self.pressed_at = self.time
        if isinstance(what, bytes):
            self._type(what)
        elif isinstance(what, Action):
            self.operator.request(what, "page", robot=self.shown)
        else:
            self.pedal.events.append(PedalEvent(*what, self.time))

    def _type(self, what: bytes) -> None:
        """Type, and wait until the console has decoded it: a pseudo terminal delivers a moment later."""
        terminal = self.console.terminal
        assert terminal is not None
        self._typed += len(what)
        self._pty.type(what)
        assert wait_until(lambda: self._taken == self._typed), what
        assert what != b"\x1b" or wait_until(lambda: terminal._keys)

    def _take(self, now: float) -> bytes | None:
        data = self._take_bytes(now)
        self._taken += len(data or b"")
        return data

    def _over(self) -> str | None:
        since = LONGEST if self.pressed_at is None else self.pressed_at + AFTER
        return "test" if self.time > since else None

    def _pause(self, seconds: float) -> None:
        self.time += seconds

    def _end(self) -> None:
        self.ended = True


def human_from(tick: int) -> HumanOnTicks:
    return HumanOnTicks(frozenset(range(tick, 1000)))
