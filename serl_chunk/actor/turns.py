"""Two tasks that undo each other, on one robot: whose turn it is, and from where its episode begins."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

from serl_chunk.actor.service import ActorService, ActorSummary, Session
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.outcomes.judge import OPERATOR
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.robots.base import AS_IS
from serl_chunk.types import Outcome

logger = logging.getLogger(__name__)

Start = Literal["reset", "other", "again"]
"""How an episode begins: in a scene that was set up, where the other task's success left it, or where the task's own
attempt did."""


class Turns:
    """Whose turn it is of two tasks: the other's after a success, else the same task's, from where it left the scene.

    After `attempts` without a success in a row the scene is set up anew for the same task, and after an operator's
    stop, who may have touched it.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts, self._failed = attempts, 0
        self.side = 0  # whose turn it is
        self.start: Start = "reset"
        self.ticks = 0  # of the robot since the scene was set up
        self.resets = 0

    def begin(self) -> dict[str, Any]:
        """Return options of `EpisodeRunner.begin` for the next episode."""
        if self.start == "reset":
            self.ticks = 0
        begun = {"conditions": {"start": self.start, "since_reset": self.ticks}}
        return begun if self.start == "reset" else {"init_state": AS_IS, **begun}

    def ended(self, summary: EpisodeSummary) -> None:
        """Take the end of an episode; one that ended before its first tick changes nothing."""
        if summary.length == 0:
            return
        self.resets += self.start == "reset"
        self.ticks += summary.length
        self._failed = 0 if summary.success else self._failed + 1
        stopped = summary.outcome is Outcome.UNKNOWN and summary.ended_by == OPERATOR
        if summary.success:
            self.side, self.start = 1 - self.side, "other"
        elif stopped or self._failed >= self._attempts:
            self._failed, self.start = 0, "reset"
        else:
            self.start = "again"


def check_tasks(one: ExperimentConfig, other: ExperimentConfig) -> None:
    """Raise ConfigError where two experiments cannot have one robot in turns."""
    same = "both tasks have the robot of the first. Let both experiments have the same"
    for name in ("actor.clock", "actor.intervention", "outcome.observed", "robot.server"):
        ours, theirs = (operator.attrgetter(name)(config) for config in (one, other))
        require(ours == theirs, name, f"{ours!r} and {theirs!r}: {same}")
    require(spec_of(one) == spec_of(other), "robot", f"{one.name} and {other.name} have different ones: {same}")
    for wrong, what in (
        (one.name == other.name, f"both are {one.name!r}: give each experiment a name, which its run and spool have"),
        (one.robot.task == other.robot.task, f"both have the task {one.robot.task!r}: let each name its own"),
        (one.agent.iterates or other.agent.iterates, "agents that train in iterations choose their starts themselves"),
    ):
        require(not wrong, "undone_by", what)


def check_robot(sides: Sequence[ActorService]) -> None:
    """Raise ConfigError where the robot that two actors share cannot begin their tasks as the other's end left it."""
    env, wanted = sides[0].env, [side.config.robot.task for side in sides]
    name, doc = f"robot {env.robot_spec.name!r}", "see docs/new_task.md"
    require(AS_IS in env.init_states, "undone_by",
        f"{name} cannot leave its scene as it is. Add {AS_IS!r} to its init_states ({doc})")  # fmt: skip
    judged = bool(sides[0].config.robot.server) or set(wanted) <= set(env.tasks)
    require(judged, "undone_by",
        f"{name} has the tasks {', '.join(map(repr, env.tasks)) or 'of one experiment alone'}, expected "
        f"{' and '.join(map(repr, wanted))}: it judges both. Add them to its tasks ({doc})")  # fmt: skip


def take_turns(
    sides: Sequence[ActorService], sessions: Sequence[Session], turns: Turns,
    *, on_turn: Callable[[int], object] = lambda side: None,
) -> list[ActorSummary]:  # fmt: skip
    """Run the sessions of two actors that share a robot in turns; the end of one ends the other.

    A learner that is lost holds up its own side alone as it holds up any actor (docs/operations.md): in real time its
    last policy goes on. Raises what a session raises; the robot is stopped then.

    `on_turn` is called with the side whose episode begins.
    """
    ended: dict[int, ActorSummary] = {}

    def advance(side: int, options: dict[str, Any] | None = None) -> EpisodeSummary | None:
        try:
            return sessions[side].send(options)
        except StopIteration as end:
            ended[side] = end.value
            return None

    with contextlib.ExitStack() as stack:
        for side, session in zip(sides, sessions, strict=True):
            side.title = f"{side.config.name}: "
            stack.callback(session.close)
        for i in range(len(sides)):
            if not ended:
                advance(i)  # waits for its first policy, before the robot moves
        while not ended:
            i = turns.side
            if turns.start == "reset":
                logger.info(f"{sides[i].title}the scene is reset ({turns.resets} before it)")
            on_turn(i)
            if (summary := advance(i, turns.begin())) is None:
                continue
            turns.ended(summary)
            if turns.side != i:
                sides[i].operator.send_pending()  # while its session has the operator
        reason = next(iter(ended.values())).reason
        for i, side in enumerate(sides):
            side.stop_reason = f"the other task's session ended: {reason}"
            side.stop.set()
            while i not in ended:
                advance(i)
    return [ended[side] for side in range(len(sides))]
