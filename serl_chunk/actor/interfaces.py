"""What an operator acts on, a console and a robot's server, and the control loop without an operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from serl_chunk.actor.planner import RealtimePlanner
from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.console.feed import LiveFeed
from serl_chunk.console.view import ConsoleState, Obstacle
from serl_chunk.robots.base import InterventionSource, RobotEnv
from serl_chunk.types import End, Observation, Outcome, ShownRobot


class Console(Protocol):
    """Keys and view, as serl_chunk.console.console.OperatorConsole."""

    @property
    def shown(self) -> ShownRobot | None:
        """The robot that stood on the screen at the key of the newest action."""

    def actions(self) -> Iterator[Action]: ...

    def empty(self) -> None: ...

    def show(self, state: ConsoleState) -> None: ...


class RobotRequests(Protocol):
    """A robot server as its operator has it (robots.served_operator). Requests return at once; a refusal is logged."""

    stopped: bool  # the robot is STOPPED
    moving: bool  # it moves by itself
    waiting: bool  # that motion waits for the operator
    held: bool  # it is HELD: no controller moves it before `go`
    stalled: bool  # the server's loop is silent, as its watchdog publishes
    why: str  # the server's words for the state
    may_clear: bool
    process: str  # of this actor's lease

    @property
    def refused(self) -> str:
        """Why the server refused the last request that would have let the robot move; empty once its state changed."""

    @property
    def shown(self) -> ShownRobot:
        """The newest state, to be shown."""

    @property
    def unconfirmed(self) -> bool:
        """Whether a stop or hold that was requested was not confirmed in time."""

    @property
    def silent(self) -> bool:
        """Whether the server publishes nothing."""

    @property
    def idle(self) -> bool:
        """Whether every request was answered, and the state is of after that."""

    def request(self, op: str, shown: ShownRobot | None = None) -> None:
        """Send stop, hold, clear, go, proceed or park; the last four for the state `shown`. From any thread."""


@dataclasses.dataclass
class ActorReports:
    """Reports of an actor process to its operator."""

    describe: Callable[[], Mapping[str, Any]] = dict  # more fields of ConsoleState, for each view
    learner_lost: Callable[[], bool] = bool
    without_human: ActorState = ActorState.POLICY  # what an episode shows while no human moves the robot
    stop: Callable[[], str | None] = lambda: None  # why it ends the control loop


class LoopOperator(Protocol):
    """What the control loop asks: an `operator.operator.Operator`, or `NoOperator`. No call waits but `reset`."""

    feed: LiveFeed | None  # of a page that shows the episodes

    @property
    def planner(self) -> Callable[..., RealtimePlanner]:
        """Of a control loop in real time."""

    @property
    def quits(self) -> bool:
        """Whether the session ends after this episode."""

    @property
    def holding(self) -> bool:
        """Whether the robot is to hold, and devices command nothing."""

    def attach(self, env: RobotEnv, intervention: InterventionSource | None) -> None:
        """Let resets of a robot wait for the operator, and watch the devices that may move it."""

    def waits(self, *obstacles: Obstacle) -> None:
        """Poll while the loop waits for something."""

    def tick(self, *, by_human: bool, late: float | None = None) -> bool:
        """Poll on a tick; return whether the robot holds in it."""

    def decided(self, record: Mapping[str, Any]) -> None:
        """Take in what a decision recorded."""

    def stopping(self, others: Callable[[], str | None]) -> Callable[[], str | None]:
        """Return `others` and what the operator stops."""

    def outcome(self) -> Outcome | None:
        """Return the label of the episode under way, once given."""

    def reset(self, env: RobotEnv, seed: int) -> Observation | None:
        """Reset as often as the operator wants; None where that is given up."""

    def episode_ended(self, end: End) -> None:
        """Note an episode's end."""


class SessionOperator(LoopOperator, Protocol):
    """What an actor's session asks besides."""

    actor: ActorReports

    def send_pending(self) -> None:
        """Send corrections that were held back for their episode's end."""

    def park(self) -> None:
        """Ask whether to park the robot, and park it."""


class NoOperator:
    """No one requests anything."""

    feed: LiveFeed | None = None
    planner: Callable[..., RealtimePlanner] = RealtimePlanner
    quits = holding = False
    _env: RobotEnv | None = None

    def attach(self, env: RobotEnv, intervention: InterventionSource | None) -> None:
        self._env = env

    def waits(self, *obstacles: Obstacle) -> None:
        if self._env is not None:
            self._env.idle()

    def tick(self, *, by_human: bool, late: float | None = None) -> bool:
        return False

    def decided(self, record: Mapping[str, Any]) -> None: ...

    def stopping(self, others: Callable[[], str | None]) -> Callable[[], str | None]:
        return others

    def outcome(self) -> Outcome | None:
        return None

    def reset(self, env: RobotEnv, seed: int) -> Observation | None:
        return env.reset(seed=seed)[0]

    def episode_ended(self, end: End) -> None: ...
