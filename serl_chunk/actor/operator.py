"""What a human operator requests of an actor by keys, and what the console shows of it.

The control loop polls an operator on every tick, and wherever it waits; nothing here waits.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from serl_chunk.console.bindings import EFFECTIVE, Action, Word
from serl_chunk.console.inlet import Inlet
from serl_chunk.console.view import ConsoleState, Obstacle
from serl_chunk.outcomes.judge import OPERATOR
from serl_chunk.types import Amend, End, Outcome

logger = logging.getLogger(__name__)

SHOW_SECONDS = 0.1  # between two views of an unchanged state
COUNTDOWN = 2.0  # seconds from "go on" to motion


class Console(Protocol):
    """Keys and view, as serl_chunk.console.console.OperatorConsole."""

    def actions(self) -> Iterator[Action]: ...

    def empty(self) -> None: ...

    def show(self, state: ConsoleState) -> None: ...


class RobotRequests(Protocol):
    """Requests to a robot server, each of which returns at once; a refusal is logged."""

    @property
    def stopped(self) -> bool:
        """Whether the robot is STOPPED."""
        ...

    def request(self, op: str) -> None:
        """Send stop, clear or proceed."""
        ...


class NoOperator:
    """No one requests anything."""

    def tick(self, *, by_human: bool) -> bool:
        return False

    def stopping(self, others: Callable[[], str | None]) -> Callable[[], str | None]:
        return others

    def outcome(self) -> Outcome | None:
        return None

    def episode_begins(self) -> None: ...

    def episode_ended(self, end: End) -> None: ...


class Operator:
    """The operator of one actor.

    A hold lasts until "go on", and the robot moves after a countdown. A label ends the episode under way. What follows
    an episode's end, a label's undoing or a discard, is sent as an `Amend`; a discard only when the next episode ends,
    so that it can be undone.

    Args:
        console: keys and view.
        robot: of a robot server; None: the robot is in this process.
        amend: sends a correction.
        end: ends the actor.
        now: monotonic seconds.
    """

    def __init__(
        self, console: Console, robot: RobotRequests | None, *, amend: Callable[[Amend], None],
        end: Callable[[], None], now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._console, self._robot, self._amend, self._end, self._now = console, robot, amend, end, now
        self.quits = False  # after this episode
        self.describe: Callable[[], Mapping[str, Any]] = dict
        """Returns more fields of ConsoleState, whenever the state is shown."""
        self.view = ConsoleState(Word.WAITING)
        """What was shown last. It may be read from any thread."""
        self._state = self.view
        self._inlet = Inlet()
        self._held = False
        self._moves_at: float | None = None  # the end of a countdown
        self._outcome: Outcome | None = None  # of the episode under way
        self._stopped = False  # it is to end
        self._discard = False  # it, once it has ended
        self._resets = False  # the robot is being reset
        self._episode = ""  # the last one that ended ...
        self._labelled = False  # ... by a label
        self._to_discard: str | None = None
        self._shown_at = -1.0

    @property
    def holding(self) -> bool:
        """Whether the robot is to hold, and devices command nothing."""
        return self._held or self._moves_at is not None

    def request(self, action: Action, source: str) -> None:
        """Request an action from any thread, as by a button of a page; the control loop takes it as it takes a key.

        What stops is also sent to the robot's server at once. Two actions need a second request, as their keys do
        (`bindings.second_key`); each `source` counts for itself.
        """
        if action in (Action.STOP, Action.END):
            self._request("stop")
        self._inlet.put(action, source, self._now())

    def poll(self, word: Word, **view: Any) -> None:
        """Take in keys, and show the state.

        Args:
            word: what the actor does; a hold or a stop of the operator's goes before it.
            view: fields of ConsoleState that have changed.
        """
        now = self._now()
        if self._moves_at is not None and now >= self._moves_at:
            self._moves_at = None
        self._enter(word, now, view)
        for action in itertools.chain(self._console.actions(), self._inlet.actions()):
            if action in EFFECTIVE[self._state.word]:
                self._act(action, now)
                self._enter(word, now, view)
            else:
                logger.debug(f"key ignored: action={action} state={self._state.word}")

    def tick(self, *, by_human: bool) -> bool:
        """Poll within an episode; returns whether the robot is to hold, and devices command nothing."""
        self._resets = False
        self.poll(Word.HUMAN if by_human else Word.POLICY, obstacles=())
        return self.holding

    def waits(self, why: str) -> None:
        """Poll between episodes. `why`: what the actor waits for."""
        self._resets = False
        self.poll(Word.WAITING, obstacles=(Obstacle(why, "the actor waits for it"),))

    def stopping(self, others: Callable[[], str | None]) -> Callable[[], str | None]:
        """Return a `stop` of the control loop: `others`, or this operator, who is polled while the robot is reset."""

        def stop() -> str | None:
            if self._resets:
                self.poll(Word.RESET)
            return OPERATOR if self._stopped else others()

        return stop

    def outcome(self) -> Outcome | None:
        """Return the label that ends the episode, or None."""
        return self._outcome

    def episode_begins(self) -> None:
        """Forget requests of the episode before."""
        self._outcome, self._stopped, self._discard = None, False, False
        self._resets = True

    def episode_ended(self, end: End) -> None:
        """Send what was requested of the episode before this one, and keep what can still be undone of this one."""
        self.send_pending()
        self._episode, self._labelled = end.episode_id, self._outcome is not None
        if self._discard:
            self._to_discard = end.episode_id
        self._state = self._state._replace(outcome=f"{end.outcome.value}{', discarded' if self._discard else ''}")

    def send_pending(self) -> None:
        """Send a discard that was not undone."""
        if self._to_discard is not None:
            self._amend(Amend(self._to_discard, discard=True))
            self._to_discard = None

    def _act(self, action: Action, now: float) -> None:
        match action:
            case Action.HOLD:
                self._held, self._moves_at = True, None
            case Action.GO:
                self._held, self._moves_at = False, now + COUNTDOWN
                self._request("proceed")
            case Action.STOP:
                self._held = self._stopped = True
                self._moves_at = None
                self._request("stop")
            case Action.CLEAR:
                self._request("clear")
                self._held = False
            case Action.SUCCESS | Action.FAILURE:
                self._outcome = Outcome.SUCCESS if action is Action.SUCCESS else Outcome.FAILURE
            case Action.DISCARD:
                self._stopped = self._discard = True
            case Action.UNDO:
                self._undo()
            case Action.QUIT:
                self.quits = True
                logger.info("the actor ends after this episode")
            case Action.END:
                self._held = self._stopped = True
                self._request("stop")
                self._end()
            case _:
                logger.info(f"{action.value}: the robot has no such request here")

    def _undo(self) -> None:
        if self._to_discard is not None:
            logger.info(f"episode {self._to_discard} is kept")
            self._to_discard = None
        elif self._labelled:
            self._amend(Amend(self._episode, Outcome.UNKNOWN, OPERATOR, terminated=False, reward=0.0))
            logger.info(f"the label of episode {self._episode} is undone")
            self._labelled = False

    def _request(self, op: str) -> None:
        if self._robot is not None:
            self._robot.request(op)

    def _enter(self, word: Word, now: float, view: dict[str, Any]) -> None:
        if self._robot is not None and self._robot.stopped:
            word = Word.STOPPED
        elif self.holding and word in (Word.POLICY, Word.HUMAN, Word.HOLD):
            word = Word.HOLD
        countdown = None if self._moves_at is None else max(0.0, self._moves_at - now)
        changed = word is not self._state.word
        if changed:
            self._console.empty()  # nothing moves by a key that was typed ahead
            self._inlet.empty()
        self._state = self._state._replace(word=word, countdown=countdown, **view)
        if changed or now - self._shown_at >= SHOW_SECONDS:
            self._shown_at = now
            question = self._state.question or self._inlet.question(now)
            self.view = self._state._replace(question=question, **self.describe())
            self._console.show(self.view)
