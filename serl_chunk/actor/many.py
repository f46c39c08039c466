"""Episodes of many simulated robots in one process: stepped in turn, and decided on at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from serl_chunk.actor.episode import EpisodeRunner, EpisodeState
from serl_chunk.actor.policy import Acting, LocalPolicy, PolicyError, Request
from serl_chunk.actor.recorder import NullSink
from serl_chunk.types import Begin, End, RecordSink, Step

Records = list[Begin | Step | End]  # of one episode, in their order


class RobotRecords:
    """A RecordSink of one robot: keeps the records of its open episode, unless they are handed on at once."""

    def __init__(self, turns: RecordsInTurn) -> None:
        self._turns = turns
        self.records: Records = []

    def begin(self, record: Begin) -> None:
        self._turns.take(self, record)

    def step(self, record: Step) -> None:
        self._turns.take(self, record)

    def end(self, record: End) -> None:
        self._turns.take(self, record)
        self._turns.ended(self)

    def hand_on(self) -> bool:
        """Pass the records at once from now on, until the episode ends; False where another's do, or there are none."""
        return self._turns.hand_on(self)

    def drop(self) -> bool:
        """Forget the open episode; False where some of its records were handed on."""
        return self._turns.drop(self)


class RecordsInTurn:
    """Hands the episodes of many robots to one sink, which has one open episode at a time.

    An episode is handed over whole once it has ended. `hand_on` lets one go on in the sink before that: its records
    then pass at once, and the others that end wait for its end.
    """

    def __init__(self, sink: RecordSink) -> None:
        self._sink = sink
        self._direct: RobotRecords | None = None  # whose records pass at once
        self._whole: list[Records] = []
        self.steps = 0  # held back

    def of_robot(self) -> RobotRecords:
        """Return the sink of one more robot."""
        return RobotRecords(self)

    def take(self, robot: RobotRecords, record: Begin | Step | End) -> None:
        if robot is self._direct:
            put_all(self._sink, [record])
        else:
            robot.records.append(record)
            self.steps += isinstance(record, Step)

    def ended(self, robot: RobotRecords) -> None:
        if robot is self._direct:
            self._direct = None
        else:
            self._whole.append(robot.records)
            robot.records = []
        while self._direct is None and self._whole:
            self._put_all(self._whole.pop(0))

    def hand_on(self, robot: RobotRecords) -> bool:
        """See `RobotRecords.hand_on`."""
        if self._direct is not None or not robot.records:
            return False
        self._direct = robot
        self._put_all(robot.records)
        robot.records = []
        return True

    def drop(self, robot: RobotRecords) -> bool:
        """See `RobotRecords.drop`."""
        self.steps -= sum(isinstance(record, Step) for record in robot.records)
        robot.records = []
        return robot is not self._direct

    def _put_all(self, records: Records) -> None:
        self.steps -= sum(isinstance(record, Step) for record in records)
        put_all(self._sink, records)


def put_all(sink: RecordSink, records: Records) -> None:
    """Hand records to a sink."""
    for record in records:
        if isinstance(record, Step):
            sink.step(record)
        elif isinstance(record, Begin):
            sink.begin(record)
        else:
            sink.end(record)


@dataclasses.dataclass(eq=False)
class OpenEpisode:
    """An episode under way on one of many robots."""

    runner: EpisodeRunner
    state: EpisodeState
    acting: Acting | None = None  # decides in the whole episode; None: the newest parameters
    request: Request | None = None  # the decision that its tick waits for
    random_steps: int = 0
    ticket: str = ""  # see `types.Ticket.id`

    @property
    def version(self) -> int:
        """Of the parameters that decide in the whole episode; -1: those may change within it."""
        return -1 if self.acting is None else self.acting.version


class ManyEpisodes:
    """Runs episodes of N robots in one process, in lockstep.

    Each robot is stepped until its decision is due or its episode ends; then one computation decides for all that are
    due. Its number of rows is always the same, so that it is compiled once. What an episode does depends on its start,
    the policy and, where it has a `decision_seed`, on nothing else.

    Args:
        runners: one for each robot, made with `policy` and without a `before_decision`; `close` is the caller's.
        records: whose `of_robot` are the runners' sinks, where steps are recorded.
        policy: decides for all; None: the runners' scripted demonstrators act.
        before_decision: called before each computation; may wait, or learn in the same process.
        allowed: steps that may be recorded beyond those that were handed on, held ones included, polled before each
            tick; None: no limit. With one the eldest episode's are handed on at once, and the others hold a quarter of
            the allowance at most: what no learner has, it allows no more for (`StepShares`).
        reserve: steps that the eldest may always hand on, so many as a learner may wait for.
    """

    def __init__(
        self, runners: Sequence[EpisodeRunner], policy: LocalPolicy | None,
        records: RecordsInTurn | None = None,
        *, before_decision: Callable[[], None] | None = None,
        allowed: Callable[[], int | None] = lambda: None, reserve: int = 0,
    ) -> None:  # fmt: skip
        self._policy, self._size = policy, len(runners)
        self._records, self._before_decision = records or RecordsInTurn(NullSink()), before_decision
        self._allowed, self._reserve = allowed, reserve
        self._free = [*reversed(runners)]
        self.open: list[OpenEpisode] = []  # the eldest first
        self._due: list[OpenEpisode] = []  # whose ticks wait for a decision
        self.starved = False  # the last `advance` was not allowed a single tick

    @property
    def free(self) -> int:
        """Robots without an episode."""
        return len(self._free)

    def begin(self, seed: int, **options: Any) -> OpenEpisode:
        """Begin an episode on a free robot; see `EpisodeRunner.begin`.

        Where the policy has a gate, or the agent trains in iterations, the parameters that it has now decide in the
        whole episode.
        """
        runner, policy = self._free[-1], self._policy
        state = runner.begin(seed, **options)
        ticket, random_steps = options.get("ticket", ""), options.get("random_steps", 0)
        episode = OpenEpisode(runner, state, random_steps=random_steps, ticket=ticket)
        if policy is not None and (policy.by_episode or policy.gate is not None):
            episode.acting = policy.acting
        self._free.pop()
        self.open.append(episode)
        return episode

    def advance(self) -> list[OpenEpisode]:
        """Step each robot until its decision is due, then decide; returns the episodes that have ended, closed.

        After an error, here or in `begin`, call `abort`.
        """
        self.starved, self._due = True, []
        if self._allowed() is not None:
            self._hand_on()
        for episode in self.open:
            try:
                self._step(episode)
            except BaseException as error:
                error.add_note(f"tick {episode.state.tick} of episode {episode.state.id}")
                raise
        if self._due:
            self._decide()
        ended = [each for each in self.open if each.state.end is not None]
        self._release(ended)
        return ended

    def abort(self) -> None:
        """Close all open episodes as truncated, where an error ends them."""
        for episode in self.open:
            episode.runner.abort(episode.state)
        self._release(self.open)

    def drop(self, episode: OpenEpisode) -> None:
        """End an episode without its records, or closed as truncated where some of them were handed on."""
        if isinstance(sink := episode.runner.sink, RobotRecords) and not sink.drop():
            episode.runner.abort(episode.state)
        self._release([episode])

    def _release(self, episodes: Sequence[OpenEpisode]) -> None:
        self._free += [each.runner for each in episodes]
        self.open = [each for each in self.open if each not in episodes]

    def _step(self, episode: OpenEpisode) -> None:
        runner, state = episode.runner, episode.state
        while state.end is None and self._may_step(episode):
            self.starved = False
            episode.request = runner.due(state)
            if episode.request is not None:
                self._due.append(episode)
                return
            runner.tick(state)

    def _may_step(self, episode: OpenEpisode) -> bool:
        if (allowed := self._allowed()) is None:
            return True
        held = self._records.steps + len(self._due)
        if episode is self.open[0]:
            return held < allowed
        return held < min(allowed // 4, allowed - self._reserve)

    def _hand_on(self) -> None:
        """Let the eldest episode that has records hand them on from now on, unless another does, and be the first."""
        for episode in self.open:
            if isinstance(sink := episode.runner.sink, RobotRecords) and sink.hand_on():
                self.open.remove(episode)
                self.open.insert(0, episode)
                return

    def _decide(self) -> None:
        policy = self._policy
        assert policy is not None
        if self._before_decision is not None:
            self._before_decision()
        alike: dict[Any, list[OpenEpisode]] = {}
        for episode in self._due:
            assert episode.request is not None
            how = episode.version, episode.request.explore, episode.request.key is None
            alike.setdefault(how, []).append(episode)
        for (_, explore, _), episodes in alike.items():
            rows = [policy.prepare(episode.request) for episode in episodes if episode.request is not None]
            acting = episodes[0].acting
            decisions = policy.decide_each(rows, explore=explore, size=self._size, acting=acting)
            for episode, decision in zip(episodes, decisions, strict=True):
                assert episode.request is not None
                if isinstance(decision, PolicyError):
                    decision.add_note(f"tick {episode.state.tick} of episode {episode.state.id}")
                    raise decision
                request, episode.request = episode.request, None
                decision = decision._replace(tick=request.tick, epoch=request.epoch)
                episode.runner.accept(episode.state, decision)
                episode.runner.tick(episode.state)
