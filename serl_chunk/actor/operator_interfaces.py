"""What an operator acts on, a console and a robot's server, and the control loop without an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from serl_chunk.actor.planner import RealtimePlanner
from serl_chunk.console.bindings import Action
from serl_chunk.console.feed import LiveFeed
from serl_chunk.console.view import ConsoleState, Obstacle
from serl_chunk.robots.base import InterventionSource, RobotEnv
from serl_chunk.types import End, Observation, Outcome


class Console(Protocol):
    """Keys and view, as serl_chunk.console.console.OperatorConsole."""

    def actions(self) -> Iterator[Action]: ...

    def empty(self) -> None: ...

    def show(self, state: ConsoleState) -> None: ...


class RobotRequests(Protocol):
    """A robot server as its operator has it (robots.served_operator). Requests return at once; a refusal is logged."""

    stopped: bool  # the robot is STOPPED
    moving: bool  # it moves by itself
    waiting: bool  # that motion waits for the operator
    why: str  # the server's words for the state
    may_clear: bool

    @property
    def silent(self) -> bool:
        """Whether the server publishes nothing."""

    @property
    def idle(self) -> bool:
        """Whether every request was answered, and the state is of after that."""

    def request(self, op: str) -> None:
        """Send stop, hold, clear, proceed or park. From any thread."""


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
