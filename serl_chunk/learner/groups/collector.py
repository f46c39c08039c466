"""Episodes with tickets on their way from the journal to the trainer: rollouts, each a row for every decision."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from serl_chunk.data.preprocess import Preprocess
from serl_chunk.learner.assembly import EpisodeAssembler
from serl_chunk.learner.groups.scheduler import ClosedGroup, GroupScheduler, Result
from serl_chunk.types import (
    DECISION_PREFIX,
    IMAGE_PREFIX,
    Amend,
    Begin,
    DataError,
    Episode,
    Grant,
    Outcome,
    Record,
    Source,
    StepBlock,
)

logger = logging.getLogger(__name__)

_PARTS = {Source.HUMAN: "a human acted", Source.HOLD: "the robot was held", Source.RANDOM: "commands were random",
          Source.SCRIPTED: "a script acted"}  # fmt: skip


class Rollout(NamedTuple):
    """A ticketed episode with n decisions, as it is trained on."""

    ticket: str  # id
    session: str
    episode_id: str
    length: int  # steps, T
    result: Result
    versions: tuple[int, ...]  # of the policies that decided
    observations: dict[str, np.ndarray]  # of the decisions, as the agent reads them, [n, ...]
    record: dict[str, np.ndarray]  # what the decisions recorded, [n, ...]
    executed: np.ndarray  # float32[n, H], 1 for each tick of a chunk that the robot executed


class Collected(NamedTuple):
    """An iteration that has ended."""

    iteration: int
    reason: str  # why it ended
    groups: list[ClosedGroup]  # to train on, in the order of their numbers
    rollouts: list[list[Rollout]]  # of each of these groups K, in the order of its slots
    no_update: str  # why there is none, and what to do; empty otherwise
    over: str  # why the run ends with it; empty where it goes on
    counters: dict[str, float]


def result_of(episode: Episode, versions: range) -> Result:
    """Judge a ticketed episode: whether it is a sample of the policy, its success and its reward.

    A sample was executed by its policy alone, and ended by a judgement or by the environment: a time limit is a
    failure. Its reward R is 1 for a success, else the sum of its rewards within [0, 1].

    Args:
        versions: valid ones of the policy, all of the same parameters; one of them is to have decided throughout.
    """
    _, steps, end = episode
    success, judged = end.outcome is Outcome.SUCCESS, end.outcome is not Outcome.UNKNOWN
    rewards = steps.reward.astype(np.float64)
    if end.reward is not None:
        rewards[-1] = end.reward
    reward = 1.0 if success else float(np.clip(rewards.sum(), 0.0, 1.0))
    found = np.unique(steps.policy_version)
    if others := sorted({*np.unique(steps.source).tolist()} - {Source.POLICY}):
        why = _PARTS[Source(others[0])]
    elif steps.lost_ticks.any() or (end.final_observation is None and not end.terminated):
        why = "it has a gap, or lacks its end"
    elif not judged and end.outcome_by != "environment":
        why = f"it was ended by {end.outcome_by}"
    elif len(found) != 1 or found[0] not in versions:
        why = f"version {', '.join(map(str, found))} decided, not {versions[0]}"
    else:
        return Result(success, reward, sample=True)
    return Result(success if judged else None, reward, sample=False, why=why)


def rollout_of(session: str, episode: Episode, result: Result, preprocess: Preprocess, horizon: int) -> Rollout:
    """Return the decisions of a session's episode, whose chunks have `horizon` actions.

    Raises DataError where a decision lacks an entry that others have, or a frame of the agent's cameras, and where a
    tick follows none.
    """
    begin, steps, end = episode
    decided = {k.removeprefix(DECISION_PREFIX): v for k, v in steps.sparse.items() if k.startswith(DECISION_PREFIX)}
    ticks = next((rows.index for rows in decided.values()), np.empty(0, np.int32))
    for name, rows in decided.items():
        if not np.array_equal(rows.index, ticks):
            raise DataError(f"episode {begin.episode_id}: some decisions recorded {name!r}, others did not")
    if not len(ticks):
        raise DataError(f"episode {begin.episode_id}: its ticket's policy recorded no decision")
    observed = [_observation(episode, preprocess, int(tick)) for tick in ticks]
    executed = np.zeros((len(ticks), horizon), np.float32)
    offset = np.arange(steps.n) - steps.decision_tick
    if lost := np.flatnonzero(~np.isin(steps.decision_tick, ticks) | (offset >= horizon)).tolist():
        raise DataError(
            f"episode {begin.episode_id}: tick {lost[0]} follows a decision on tick {steps.decision_tick[lost[0]]}, "
            f"of which no chunk of {horizon} actions is recorded for it"
        )
    executed[np.searchsorted(ticks, steps.decision_tick), offset] = 1.0
    return Rollout(
        begin.ticket, session, begin.episode_id, end.length, result, tuple(np.unique(steps.policy_version).tolist()),
        preprocess.stacked(observed), {name: np.array(rows.values) for name, rows in decided.items()}, executed,
    )  # fmt: skip


def _observation(episode: Episode, preprocess: Preprocess, tick: int) -> dict[str, np.ndarray]:
    observation = episode.steps.observation_at(tick)
    if missing := [c.name for c in preprocess.cameras if IMAGE_PREFIX + c.name not in observation]:
        raise DataError(
            f"episode {episode.begin.episode_id}: the decision on tick {tick} has no frame of camera {missing[0]!r}"
        )
    return preprocess.observe(observation, episode.begin.task)


class Collector:
    """The scheduler of an iteration and the rollouts that settled its slots, behind one lock.

    The control thread requests tickets, the data thread inserts records and closes sessions, the training thread
    begins iterations and takes what they collected. The journal's records, inserted again after a restart and after
    `begin`, rebuild the iteration that was under way.

    Args:
        horizon: H, actions of a chunk.
        keeps_successes: whether they stay in the replay, one of each slot.
        clock: seconds.
    """

    def __init__(
        self, scheduler: GroupScheduler, preprocess: Preprocess, horizon: int,
        *, keeps_successes: bool = False, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self._preprocess, self._horizon, self._clock = preprocess, horizon, clock
        self._assembler = EpisodeAssembler("episode")
        self._rollouts: dict[str, Rollout] = {}  # by ticket
        self._keeps_successes, self._kept = keeps_successes, dict[str, tuple[str, str]]()  # by slot, of all iterations
        self._lock = threading.Lock()

    def begin(self, iteration: int, version: int, *, since: int | None = None) -> None:
        """Begin the next iteration; see `GroupScheduler.begin`. What the last one collected is dropped."""
        with self._lock:
            self._rollouts.clear()
            self.scheduler.begin(iteration, version, since=since)

    def poll(self) -> Collected | None:
        """Return what the iteration collected, once it has ended; the same until the next one begins."""
        with self._lock:
            scheduler = self.scheduler
            scheduler.tick(self._clock())
            if scheduler.iteration < 0 or not scheduler.ended:
                return None
            groups = scheduler.usable
            rollouts = [[self._rollouts[ticket] for ticket in group.tickets] for group in groups]
            return Collected(
                scheduler.iteration, scheduler.ended, groups, rollouts, scheduler.no_update, scheduler.over,
                scheduler.figures(),
            )  # fmt: skip

    def figures(self) -> dict[str, float]:
        """Return the figures of the iteration up to now; see `GroupScheduler.figures`."""
        with self._lock:
            return self.scheduler.figures()

    def tickets(self, session: str, version: int, held: Sequence[str], capacity: int) -> Grant:
        """Return the tickets that a session shall hold; see `GroupScheduler.request`."""
        with self._lock:
            return self.scheduler.request(session, version, held, capacity, self._clock())

    def refilled(self) -> None:
        """Note that the journal has been read: what it holds of iterations before this one did not come late."""
        with self._lock:
            self.scheduler.counters["dropped"] = 0

    def lost(self, session: str) -> None:
        """Note that the session which requested tickets is silent or gone: they are free again."""
        with self._lock:
            self.scheduler.lost(session)

    def insert(self, session: str, record: Record) -> str:
        """Take the next record of a session, which the replay has taken.

        Returns the id of an episode that ended with it and leaves the replay: a ticketed one in which no human had a
        part, and that is no success to be kept. Empty: none does. Raises as `rollout_of`.
        """
        if isinstance(record, Begin):
            left = self.close_session(session)  # the end of the one before will never come
            if record.ticket:
                self._assembler.insert(session, record)
            return left
        if isinstance(record, Amend):
            self._correct(session, record)
            return ""
        if (episode := self._assembler.insert(session, record)) is None:
            return ""
        self._settle(session, episode)
        return "" if _by_human(episode.steps) or self._keeps(session, episode) else episode.begin.episode_id

    def _keeps(self, session: str, episode: Episode) -> bool:
        """Whether the success of an episode stays. Of its records alone: those of the journal have ended iterations."""
        if not self._keeps_successes:
            return False
        slot, _, _ = episode.begin.ticket.rpartition(".")
        version = int(episode.steps.policy_version[0])
        result = result_of(episode, range(version, version + 1))
        if not (result.sample and result.success) or slot in self._kept:
            return False
        self._kept[slot] = session, episode.begin.episode_id
        return True

    def close_session(self, session: str) -> str:
        """Note that the end of a session's open episode will never come; returns its id as `insert` does."""
        if (opened := self._assembler.close(session)) is None:
            return ""
        with self._lock:
            result = Result(None, 0.0, sample=False, why="its end never came")
            self.scheduler.settle(opened.begin.ticket, result)
        return "" if any(map(_by_human, opened.blocks)) else opened.begin.episode_id

    def _correct(self, session: str, amend: Amend) -> None:
        """Apply an operator's label, or drop what the operator discards, while the iteration collects."""
        if amend.outcome is None and not amend.discard:
            return
        name, success = (session, amend.episode_id), amend.outcome is Outcome.SUCCESS
        if not success or amend.discard:  # the slot may have another one
            self._kept = {slot: kept for slot, kept in self._kept.items() if kept != name}
        result = Result(success, float(success), sample=not amend.discard)
        with self._lock:
            rollout = next((r for r in self._rollouts.values() if (r.session, r.episode_id) == name), None)
            if rollout is not None and self.scheduler.correct(rollout.ticket, result):
                self._rollouts[rollout.ticket] = rollout._replace(result=result)

    def _settle(self, session: str, episode: Episode) -> None:
        ticket = episode.begin.ticket
        with self._lock:
            wanted, rollout = self.scheduler.wants(ticket), None
            result = result_of(episode, range(self.scheduler.since, self.scheduler.version + 1))
        # Without the lock: frames may have to be decoded. No other thread settles a slot.
        if wanted and not result.sample:
            logger.info("episode %s is no sample: %s; its slot is run again", episode.begin.episode_id, result.why)
        elif wanted:
            rollout = rollout_of(session, episode, result, self._preprocess, self._horizon)
        with self._lock:
            if not wanted:  # not even where its iteration has begun since: it was judged by the one before
                self.scheduler.counters["dropped"] += 1
            elif self.scheduler.settle(ticket, result) and rollout is not None:
                self._rollouts[ticket] = rollout


def _by_human(steps: StepBlock) -> bool:
    return bool((steps.source == Source.HUMAN).any())
