"""An operator whose keys come in given states, and a robot whose resets wait as those of a robot's server do."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from actor_helpers import LineEnv
from live_desk import Robot

from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.console.view import ConsoleState
from serl_chunk.operator.operator import Operator
from serl_chunk.types import ShownRobot

DT = 0.02


class Press(NamedTuple):
    """A key, at the `after`-th poll in which one of `words` is shown since the last press, from 0; -1: in the same."""

    action: Action
    words: Sequence[ActorState] = (ActorState.POLICY, ActorState.HUMAN)  # of `USUAL`: its key
    after: int = 3


ACTING = (ActorState.POLICY, ActorState.HUMAN)
USUAL: Mapping[ActorState, Press] = {
    ActorState.STOPPED: Press(Action.CLEAR),
    ActorState.HOLD: Press(Action.GO),
    ActorState.WAITING: Press(Action.GO),
    ActorState.POLICY: Press(Action.SUCCESS, after=6),
    ActorState.HUMAN: Press(Action.SUCCESS, after=7),
}
"""What an operator does in each state who wants successes."""


class Console:
    """Keys of a script, then those of `usual`, where several of one state take turns; `states` is what was shown."""

    def __init__(self, script: Sequence[Press], usual: Mapping[ActorState, Press | Sequence[Press]] = USUAL) -> None:
        self.script, self.states = list(script), []  # type: list[Press], list[ConsoleState]
        self._usual = {w: itertools.cycle([p] if isinstance(p, Press) else p) for w, p in usual.items()}
        self._next: Press | None = None  # of the usual ones
        self._polls, self._word = 0, ActorState.RESET
        self.time = 0.0

    def actions(self) -> Iterator[Action]:
        self.time += DT
        assert self.time < 600, f"stuck in {self.states[-1]}, with {self.script} to press"
        word = self.states[-1].word
        if self.script and word not in self.script[0].words:
            return
        if not self.script and word is not self._word:
            self._polls, self._next = 0, None
        if not self.script and self._next is None:
            self._next = next(self._usual.get(word, iter(())), None)
        press = self.script[0] if self.script else self._next
        self._word, self._polls = word, self._polls + 1
        if press is not None and self._polls > press.after:
            self._polls, self._next = 0, None
            if self.script:
                self.script.pop(0)
            yield press.action
            while self.script and self.script[0].after < 0:
                yield self.script.pop(0).action

    @property
    def shown(self) -> ShownRobot | None:
        return self.states[-1].robot

    def empty(self) -> None:
        pass

    def show(self, state: ConsoleState) -> None:
        self.states.append(state)


class Desk:
    """An operator of `amend` and `end`, with the script that it follows and the requests that the robot got."""

    def __init__(self, script: Sequence[Press], *, amend, end, usual=USUAL, ready: str = "") -> None:
        self.console, self.robot = Console(script, usual), Robot()
        self.operator = Operator(
            self.console, self.robot, amend=amend, end=end, now=lambda: self.console.time, ready=ready,
            pause=lambda seconds: None,
        )  # fmt: skip

    @classmethod
    def opening(cls, script: Sequence[Press], opened: list[Desk], **options):
        """A stand-in for `console_of`; the desk is put in `opened`."""

        @contextlib.contextmanager
        def console_of(config, name, *, amend, end, **more):
            opened.append(cls(script, amend=amend, end=end, **options))
            yield opened[-1].operator

        return console_of

    @property
    def sent(self) -> tuple[str, ...]:
        return tuple(self.robot.requests)

    def words(self) -> list[ActorState]:
        shown = [state.word for state in self.console.states]
        return [word for k, word in enumerate(shown) if k == 0 or shown[k - 1] is not word]


class Waiting(LineEnv):
    """Its reset takes ten looks at `stop`, within which a key counts as one in a reset."""

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        for _ in range(10):
            if self.stop() is not None:
                break
        return result
