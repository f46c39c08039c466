"""A robot as an operator has it, and the control loop without an operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Union

from serl_chunk.actor.planner import RealtimePlanner
from serl_chunk.console.bindings import ActorState
from serl_chunk.console.feed import LiveFeed
from serl_chunk.console.view import Obstacle
from serl_chunk.robots.base import InterventionSource, RobotEnv
from serl_chunk.types import End, Observation, Outcome, ShownRobot

if TYPE_CHECKING:
    from serl_chunk.robots.served.operator import ServedOperator


class RobotInProcess:
    """A robot of this process as its operator has it: no server stops or holds it, or takes requests."""

    stopped = moving = waiting = held = stalled = silent = unconfirmed = False
    idle = may_clear = True
    why = process = refused = ""
    shown = ShownRobot(-1)

    def request(self, op: str, shown: ShownRobot | None = None) -> None:
        """Do nothing: there is no server."""


RobotRequests = Union["ServedOperator", RobotInProcess]
"""What an operator requests of a robot, see `ServedOperator`."""


@dataclasses.dataclass
class ActorReports:
    """Reports of an actor process to its operator."""

    describe: Callable[[], Mapping[str, Any]] = dict  # more fields of ConsoleState, for each view
    learner_lost: Callable[[], bool] = bool
    without_human: ActorState = ActorState.POLICY  # what an episode shows while no human moves the robot
    stop: Callable[[], str | None] = lambda: None  # why it ends the control loop


class LoopOperator:
    """No one requests anything of the control loop; base of `operator.operator.Operator`. No call waits but `reset`."""

    feed: LiveFeed | None = None  # of a page that shows the episodes
    quits = False  # the session ends after this episode
    _env: RobotEnv | None = None

    def __init__(self) -> None:
        self.actor = ActorReports()

    @property
    def planner(self) -> Callable[..., RealtimePlanner]:
        """Of a control loop in real time."""
        return RealtimePlanner

    @property
    def holding(self) -> bool:
        """Whether the robot is to hold, and devices command nothing."""
        return False

    def attach(self, env: RobotEnv, intervention: InterventionSource | None) -> None:
        """Let resets of a robot wait for the operator, and watch the devices that may move it."""
        self._env = env

    def waits(self, *obstacles: Obstacle) -> None:
        """Poll while the loop waits for something."""
        if self._env is not None:
            self._env.idle()

    def tick(self, *, by_human: bool, late: float | None = None) -> bool:
        """Poll on a tick, `late` seconds after its deadline; return whether the robot holds in it."""
        return False

    def decided(self, record: Mapping[str, Any]) -> None:
        """Take in what a decision recorded."""

    def stopping(self, others: Callable[[], str | None]) -> Callable[[], str | None]:
        """Return `others` and what the operator stops."""
        return others

    def outcome(self) -> Outcome | None:
        """Return the label of the episode under way, once given."""
        return None

    def reset(self, env: RobotEnv, seed: int, options: Mapping[str, str]) -> Observation | None:
        """Reset as often as the operator wants, with `options` (see `RobotEnv`); None where that is given up."""
        return env.reset(seed=seed, options=dict(options) or None)[0]

    def episode_ended(self, end: End) -> None:
        """Note an episode's end."""

    def send_pending(self) -> None:
        """Send corrections that were held back for their episode's end. What has ended cannot be corrected any more."""

    def park(self) -> None:
        """Ask whether to park the robot, and park it."""
