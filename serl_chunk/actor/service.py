"""An actor: its robot, intervention device, agent and link to a learner, and the training sessions that it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from serl_chunk.actor.canary import Canary, correct_episode, count_episode
from serl_chunk.actor.clock import Clock, Lateness
from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.interfaces import LoopOperator
from serl_chunk.actor.link import ActorLink, RunProgress, preprocess_of, replacement
from serl_chunk.actor.many import ManyEpisodes, RecordsInTurn
from serl_chunk.actor.policy import NO_SERVER, LocalPolicy, Policy, no_stop
from serl_chunk.actor.remote_policy import RemotePolicy, remote_policy
from serl_chunk.actor.stats import EpisodeSummary, RolloutStats
from serl_chunk.actor.tickets import Tickets
from serl_chunk.agents.base import Agent
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.console.view import Obstacle
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.devices.recorded import ReplayedIntervention
from serl_chunk.devices.registry import make_intervention
from serl_chunk.io import Waiting, plural
from serl_chunk.outcomes.robot import observing
from serl_chunk.robots.base import InterventionSource, RobotEnv, check_apart
from serl_chunk.robots.registry import make_env
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.wire.handshake import Welcome
from serl_chunk.types import TRAINING_SEED_BASE, Amend, Outcome, Ticket

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.002  # between looks at an allowance; a control tick is ten times as long
WELCOME_PERIOD = 0.05  # seconds between looks at a stop and at keys while the learner of another run is waited for
LOG_SECONDS = 5.0  # between lines while waiting
STATUS_SECONDS = 10.0  # between status lines
RECENT = 20  # episodes of each robot in the success rates of a status line
LOST_SECONDS = 1.0  # without the learner, after which it counts as lost
NO_ROOM = "see the learner's log, and the disk of the spool"
FLUSH_TIMEOUT = 30.0  # seconds for the learner to acknowledge what is recorded
_NEW_RUN = RunProgress()
Session = Generator[EpisodeSummary | None, Mapping[str, Any] | None, "ActorSummary"]
"""A session that is advanced an episode at a time. The first `next` waits for a policy; then each `send`, of options of
`EpisodeRunner.begin` or None, runs an episode, and gives its summary."""


@dataclasses.dataclass(kw_only=True)
class ActorSummary(RolloutStats):
    """The episodes of a session."""

    reason: str = ""  # why it ended
    waited_seconds: float = 0.0  # for the learner: snapshot, allowance, room for records
    delivered: bool = False  # whether the learner acknowledged every record
    lateness: Lateness = dataclasses.field(default_factory=Lateness)
    replaced: bool = False  # whether the learner is of another run now, for which another session may begin


def training_seed(seed: int, actor_id: str, episode: int) -> int:
    """Return a start state that differs by run, actor and episode, and from every held-out one."""
    (word,) = np.random.SeedSequence([seed, zlib.crc32(actor_id.encode()), episode]).generate_state(1)
    return TRAINING_SEED_BASE + int(word) % (2**31 - TRAINING_SEED_BASE)


@dataclasses.dataclass
class _Session:
    replaced: Callable[[], str | None] = no_stop
    backlog_lines: Waiting = dataclasses.field(default_factory=lambda: Waiting(logger))
    status_lines: Waiting = dataclasses.field(default_factory=lambda: Waiting(logger))
    policy: Policy | None = None
    waited: float = 0.0  # seconds
    total: ActorSummary = dataclasses.field(default_factory=ActorSummary)
    recent: dict[str, EpisodeSummary] = dataclasses.field(default_factory=dict)  # the last RECENT of each robot
    held_back: bool = False  # the newest status line came too soon
    records: RecordsInTurn | None = None  # of several robots
    tickets: Tickets | None = None  # of an agent that trains in iterations


def deliver(link: ActorLink, drain: threading.Event) -> bool:
    """Wait until the learner has all records, at most FLUSH_TIMEOUT without `drain`; returns whether it has."""
    lines = Waiting(logger, late=FLUSH_TIMEOUT)
    delivered = link.flush(FLUSH_TIMEOUT)
    while not delivered and drain.is_set():
        lines.log(f"draining: the learner lacks {plural(link.unacknowledged, 'record')}. SIGTERM leaves them here")
        delivered = link.flush(1.0)
    return delivered


def finished(session: Session) -> ActorSummary:
    """Run a session to its end."""
    while True:
        try:
            next(session)
        except StopIteration as end:
            return end.value


class ActorService:
    """An actor and what it owns: robot, intervention device, agent, link and the event that stops it.

    `close`, also at the end of a with-block, stops the robot first: a hand may be in its cell.

    Args:
        env, intervention: by default those that `config` names are opened.
        n_envs: robots, simulated ones, whose episodes run at once; `cli.process.check_many` names what that excludes.
        shares: whose robot and device this one has as well, in turns (`actor.turns`).
        agent, link: must be set before `run`.
        stop: ends a session; the episode under way is truncated.
        drain: once it is set, the end waits for as long as the learner lacks records.
        before_decision: lockstep only, called before every decision (learning in the same process).
        report_every: episodes of each robot between status lines, which are also `STATUS_SECONDS` apart.

    Raises ConfigError for random steps on a real robot, and what `make_env` and `make_intervention` raise.
    """

    env: RobotEnv
    _robot: contextlib.ExitStack  # closes robots and devices

    def __init__(
        self, config: ExperimentConfig,
        *, actor_id: str = "actor", env: RobotEnv | None = None, intervention: InterventionSource | None = None,
        n_envs: int = 1, shares: ActorService | None = None, drain: threading.Event | None = None,
        agent: Agent | None = None, link: ActorLink | None = None, stop: threading.Event | None = None,
        clock: Clock | None = None, before_decision: Callable[[], None] | None = None,
        on_episode: Callable[[EpisodeSummary], None] | None = None, report_every: int = 10,
    ) -> None:  # fmt: skip
        require(config.learner.random_steps == 0 or not config.robot.real, "learner.random_steps",
            f"uniformly random commands can break a real robot (got {config.learner.random_steps}, expected 0). "
            "Start from demonstrations (learner.pretrain_steps)")  # fmt: skip
        self.config, self.actor_id, self.agent, self.link = config, actor_id, agent, link
        self.stop, self._clock = stop or threading.Event(), clock or Clock()
        self._drain = drain or threading.Event()
        self.before_decision, self.on_episode, self._report_every = before_decision, on_episode, report_every
        self.operator = LoopOperator()  # another is set before `run` where keys are read
        self.episodes = 0  # of all sessions, which count for `actor.max_episodes`
        self.title = ""  # of its log lines
        self.stop_reason = "stopped by the operator"  # where `stop` is set
        self._session = _Session()
        self._remote: RemotePolicy | None = None  # of all sessions
        self._opened = contextlib.ExitStack()
        self._robots: list[tuple[RobotEnv, InterventionSource | None]] = []
        if shares is not None:
            self._robots, self._robot, self.env = shares._robots, shares._robot, shares.env
            return
        with contextlib.ExitStack() as closing:  # each robot, then its device
            for _ in range(n_envs):
                robot = observing(env or make_env(config.robot, name=actor_id), config)
                with contextlib.ExitStack() as opened:
                    opened.callback(robot.close)
                    human = intervention or make_intervention(config.actor.intervention, robot, config)
                    opened.pop_all()
                if human is not None:
                    closing.callback(human.close)
                closing.callback(robot.close)
                self._robots.append((robot, human))
                env = None
            check_apart([robot for robot, _ in self._robots])
            self._robot = closing.pop_all()
        self.env = self._robots[0][0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop_robot(self) -> None:
        self._robot.close()

    def _leave(self) -> None:
        self.stop_robot()
        if self.operator.quits and not self.stop.is_set():
            self.operator.park()

    def close(self) -> None:
        """Close the robot, the intervention device, a policy server's client and the link, in this order."""
        try:
            self.stop_robot()
        finally:
            self._opened.close()
            if self.link is not None:
                self.link.close()

    def serve(self, link: LearnerLink, welcome: Welcome) -> ActorSummary:
        """Run a session for the learner of `welcome`, and more for learners of other runs that take its place."""
        return finished(self.sessions(link, welcome))

    def sessions(self, link: LearnerLink, welcome: Welcome) -> Session:
        """Do what `serve` does, an episode at a time."""
        self.link = link
        while True:
            link.act_for(welcome.run)
            replaced = functools.partial(replacement, link, welcome.origin)
            preprocess = preprocess_of(welcome, self.config, self.env.robot_spec)
            progress = RunProgress.of(welcome, self.actor_id)
            summary = yield from self.session(preprocess, progress, replaced=replaced)
            if not summary.replaced:
                return summary
            logger.info(
                f"{summary.reason}: {summary.episodes} episodes, {summary.steps} steps are of the former. Records that "
                f"its learner lacks stay in the spool of run {welcome.run}"
            )
            if not self._episodes_left() or (following := self._next_welcome(link)) is None:
                self._leave()
                return summary
            welcome = following

    def run(
        self, preprocess: Preprocess, begun: RunProgress = _NEW_RUN, *, replaced: Callable[[], str | None] = no_stop
    ) -> ActorSummary:
        """Run training episodes until the learner is done, `stop` is set or `actor.max_episodes` is reached.

        Under the lockstep clock the actor waits for the learner's allowance before each step; in real time it never
        waits inside an episode. At the end, and after an error, which is then raised, the episode under way is
        truncated, the robot is stopped, and the records are delivered. Where `replaced`, polled on every tick, returns
        a string, the session ends, but the robot stays open, and records that the run's learner lacks stay with the
        link. Raises the link's error where it broke permanently.
        """
        return finished(self.session(preprocess, begun, replaced=replaced))

    def session(
        self, preprocess: Preprocess, begun: RunProgress = _NEW_RUN, *, replaced: Callable[[], str | None] = no_stop
    ) -> Session:
        """Do what `run` does, an episode at a time; of several robots all at once."""
        config, link, agent = self.config, self.link, self.agent
        assert link is not None
        assert agent is not None
        seed = training_seed(config.seed, self.actor_id, begun.episodes)
        policy: Policy = LocalPolicy(
            agent, preprocess, self.env.robot_spec, seed=seed, source=link, run=begun.run,
            gate=Canary() if config.actor.gate == "canary" else None,
        )  # fmt: skip
        if config.actor.policy:
            if self._remote is None:
                self._remote = self._opened.enter_context(remote_policy(config, self.env.robot_spec, self._over))
            policy = self._remote
        lines = self._waiting(LOG_SECONDS), self._waiting(STATUS_SECONDS)
        self._session = session = _Session(replaced, *lines, policy)
        runners, total = self._runners(policy, link, begun), session.total
        session.tickets = Tickets(link, len(runners)) if config.agent.iterates else None
        self._report_to_operator(policy, link)
        try:
            if self._wait(lambda: self.operator.quits or policy.refresh(), self._absent):
                if len(runners) == 1:
                    yield from self._run_in_turn(runners[0], policy, link, begun)
                else:
                    self._run_at_once(runners, policy, link, begun)
        except BaseException as error:
            self.stop_robot()
            if isinstance(error, Exception) and link.error is None:  # its last steps help to find the cause
                logger.error(f"{type(error).__name__}: {error}: delivering what is recorded")
                link.flush(FLUSH_TIMEOUT)
            raise
        finally:
            for runner in runners:
                runner.close()
        if link.error is not None:
            raise link.error
        self.operator.send_pending()
        total.waited_seconds, total.lateness = session.waited, runners[0].lateness()
        reason = None if self.stop.is_set() else replaced()
        if reason is None:
            self._leave()
        if session.held_back:
            self._log_status(total, policy, link)
        if reason is not None:
            total.reason, total.replaced = reason, True
            return total
        quits = self.stop.is_set() or self.operator.quits
        stopped = self.stop_reason if quits else f"{config.actor.max_episodes} episodes done"
        total.reason, total.delivered = link.finished or stopped, deliver(link, self._drain)
        if not total.delivered:
            logger.warning(f"the learner did not acknowledge every record within {FLUSH_TIMEOUT:g} s")
        return total

    def _runners(self, policy: Policy, link: ActorLink, begun: RunProgress) -> list[EpisodeRunner]:
        config, alone = self.config, len(self._robots) == 1
        lockstep = config.actor.clock == "lockstep"
        self._session.records = records = None if alone else RecordsInTurn(link)
        runners = []
        for robot, human in self._robots:
            if isinstance(human, ReplayedIntervention):
                human.begin_at(begun.episodes)
            runners.append(EpisodeRunner(
                robot, policy, link if records is None else records.of_robot(), config=config,
                cameras=config.agent.image_keys, clock=self._clock, intervention=human,
                human_ticks_before=begun.human_ticks, before_decision=self._pace if lockstep and alone else None,
                stop=self._over_or_allowed if lockstep and alone else self._over,
                operator=self.operator if alone else None,
            ))  # fmt: skip
        return runners

    def _report_to_operator(self, policy: Policy, link: ActorLink) -> None:
        self.operator.actor.describe = functools.partial(self._described, policy, link)
        self.operator.actor.learner_lost = lambda: link.away > LOST_SECONDS

    def _run_in_turn(
        self, runner: EpisodeRunner, policy: Policy, link: ActorLink, begun: RunProgress
    ) -> Generator[EpisodeSummary | None, Mapping[str, Any] | None, None]:
        episode, summary = begun.episodes, None
        while self._episodes_left():
            start = yield summary
            self._report_to_operator(policy, link)  # another session may have had the robot
            if not self._await_begin(policy, link) or (options := self._options(policy, begun, episode)) is None:
                return
            summary = runner.run_episode(**options | dict(start or {}))
            episode += 1
            self._count(options["episode_id"], summary, policy.version, random=bool(options.get("random_steps")))

    def _run_at_once(
        self, runners: Sequence[EpisodeRunner], policy: Policy, link: ActorLink, begun: RunProgress
    ) -> None:
        assert isinstance(policy, LocalPolicy)
        learner, records = self.config.learner, self._session.records
        reserve = math.ceil(learner.cta_ratio / learner.utd_ratio) if learner.utd_ratio else 0
        many = ManyEpisodes(
            runners, policy, records, before_decision=self.before_decision, allowed=self._steps_left, reserve=reserve
        )
        try:
            self._fill_and_advance(many, policy, link, begun)
        except BaseException:
            many.abort()
            raise

    def _fill_and_advance(self, many: ManyEpisodes, policy: Policy, link: ActorLink, begun: RunProgress) -> None:
        episode = begun.episodes
        while True:
            self._drop_withdrawn(many, policy)
            begins = bool(many.free) and self._over() is None and self._episodes_left(len(many.open))
            # Where others are under way they go on meanwhile.
            if begins and (link.can_begin()[0] if many.open else self._await_begin(policy, link)):
                options = self._options(policy, begun, episode, len(many.open))
                if options is not None:
                    many.begin(**options)
                    episode += 1
                    continue
            if not many.open:
                return
            for ended in many.advance():
                version, random = ended.version, ended.random_steps > 0
                self._count(ended.state.id, ended.runner.summary(ended.state), version, random=random)
            if many.starved:
                self._await_allowance()

    def _absent(self) -> Obstacle:
        policy, link = self._session.policy, self.link
        assert policy is not None
        assert link is not None
        if policy.waiting:
            return Obstacle(policy.waiting, NO_SERVER)
        text = _joined("waiting for the learner's first policy", link.busy)
        return Obstacle(text, "see the learner's log: it may load or pretrain")

    def _await_begin(self, policy: Policy, link: ActorLink) -> bool:
        """Wait until an episode may begin; False where the session ends before that."""
        if self._over() is not None or not self._wait(lambda: self.operator.quits or policy.available(), self._absent):
            return False
        room = lambda: self.operator.quits or link.can_begin()[0]  # noqa: E731
        if not self._wait(room, lambda: Obstacle(link.can_begin()[1], NO_ROOM)):
            return False
        backlog = link.backlog(begun=True)
        if backlog and self._session.backlog_lines.due():
            logger.info(backlog)
        return True

    def _drop_withdrawn(self, many: ManyEpisodes, policy: Policy) -> None:
        if (tickets := self._session.tickets) is None:
            return
        withdrawn = tickets.update([episode.ticket for episode in many.open], policy.version)
        for episode in [each for each in many.open if each.ticket in withdrawn]:
            many.drop(episode)

    def _ticket(self, tickets: Tickets, policy: Policy, under_way: int) -> Ticket | None:
        """Return the ticket of the next episode, for which it waits where none is under way; None: there is none."""
        ticket: Ticket | None = None

        def there() -> bool:
            nonlocal ticket
            policy.refresh()
            if not under_way:  # else it is up to date
                tickets.update((), policy.version)
            ticket = tickets.begin(policy.version)
            return ticket is not None or self.operator.quits

        def why() -> Obstacle:
            reason = tickets.waiting or "the learner does not have the last episode yet"
            backlog = "" if self.link is None else self.link.backlog(begun=False)
            return Obstacle(_joined(f"waiting for a ticket: {reason}", backlog), "see the learner's log")

        if not there() and not under_way:
            self._wait(there, why, log_at_once=False)
        return ticket

    def _options(self, policy: Policy, begun: RunProgress, episode: int, under_way: int = 0) -> dict[str, Any] | None:
        """Return what `EpisodeRunner.begin` takes for an episode of the run; None where there is no ticket for it.

        `under_way`: others at once.
        """
        name = f"{begun.episode_prefix or self.actor_id}-{episode:06d}"
        if (tickets := self._session.tickets) is not None:
            if (ticket := self._ticket(tickets, policy, under_way)) is None:
                return None
            of = {"init_state": ticket.init_state, "task": ticket.task, "ticket": ticket.id}
            seeds = {"seed": ticket.seed, "decision_seed": ticket.seed}
            return {"explore": True, "episode_id": name, **of, **seeds}
        steps = begun.env_steps + self._session.total.steps + under_way * self.env.robot_spec.max_episode_steps
        policy.choose_snapshot()
        return {
            "seed": training_seed(self.config.seed, self.actor_id, episode),
            "explore": True,
            "random_steps": max(0, self.config.learner.random_steps - steps),
            "episode_id": name,
        }

    def _count(self, episode_id: str, summary: EpisodeSummary, version: int, *, random: bool) -> None:
        if summary.length == 0:  # the session ended while its first decision waited: nothing is recorded
            return
        session, link = self._session, self.link
        total, policy = session.total, session.policy
        assert policy is not None
        assert link is not None
        if not random:
            count_episode(policy, version, episode_id, summary)
        self.episodes += 1
        total.merge(summary)
        recent = session.recent
        recent[episode_id] = summary
        # Of episodes at once the short ones end first, successes mostly: no count is of a few of them.
        robots = len(self._robots)
        if len(recent) > RECENT * robots:
            del recent[next(iter(recent))]
        if self.on_episode is not None:
            self.on_episode(summary)
        if total.episodes % (self._report_every * robots) == 0:
            session.held_back = not session.status_lines.due()
            if not session.held_back:
                self._log_status(total, policy, link)

    def _described(self, policy: Policy, link: ActorLink) -> dict[str, Any]:
        age = policy.age(policy.version, self._clock.now())
        return {
            "rate_target": self.env.robot_spec.control_hz,
            "policy_version": policy.version if policy.version >= 0 else None,
            "policy_age": age if age >= 0 else None,
            "unacknowledged": link.unacknowledged,
        }

    def amend(self, record: Amend) -> None:
        """Send an operator's correction of an episode, and count the episode as corrected."""
        assert self.link is not None
        session = self._session
        if session.policy is not None:
            correct_episode(session.policy, record)
        if (before := session.recent.get(record.episode_id)) is not None:
            after = before.judged(record.outcome or Outcome.UNKNOWN, record.outcome_by)
            session.recent[record.episode_id] = after
            session.total.replace(before, after)
        self.link.amend(record)

    def _log_status(self, total: ActorSummary, policy: Policy, link: ActorLink) -> None:
        line = f"{_in_words([*self._session.recent.values()])}, policy {policy.version}"
        line = f"{self.title}episode {total.episodes}: {line}, waited {self._session.waited:.0f} s"
        logger.info(_joined(line, link.backlog(begun=False)))

    def _episodes_left(self, under_way: int = 0) -> bool:
        limit = self.config.actor.max_episodes
        return not self.operator.quits and (limit == 0 or self.episodes + under_way < limit)

    def _over(self) -> str | None:
        if self.stop.is_set():
            return "operator"
        link = self.link
        assert link is not None
        gone = link.finished is not None or link.error is not None or self._session.replaced() is not None
        return "learner" if gone else None

    def _over_or_allowed(self) -> str | None:
        self._await_allowance()  # it may end within a chunk
        return self._over()

    def _pace(self) -> None:
        if self.before_decision is not None:
            self.before_decision()
        self._await_allowance()  # so that the decision is the newest policy's

    def _steps_left(self) -> int | None:
        """Steps that may be recorded now, held ones included; None: no limit, or the session is over."""
        link = self.link
        assert link is not None
        if (allowance := link.allowance) is None or self._over() is not None:
            return None
        return allowance - link.steps_recorded

    def _await_allowance(self) -> None:
        link, records = self.link, self._session.records
        assert link is not None

        def permitted() -> bool:
            return (left := self._steps_left()) is None or left > (0 if records is None else records.steps)

        def why() -> Obstacle:
            counts = f"{link.steps_recorded} steps recorded, {link.allowance} allowed"
            text = (
                f"waiting for the learner: {link.busy}" if link.busy else f"waiting for the learner's updates: {counts}"
            )
            return Obstacle(_joined(text, link.backlog(begun=True)), "see its log")

        self._wait(permitted, why, log_at_once=bool(link.busy))

    def _wait(self, ready: Callable[[], bool], why: Callable[[], Obstacle], *, log_at_once: bool = True) -> bool:
        began, wait = self._clock.now(), self._waiting(LOG_SECONDS, late=0.0 if log_at_once else LOG_SECONDS)

        def poll() -> None:
            reason = why()
            wait.log(f"{reason.what} ({self._clock.now() - began:.0f} s)", reason.remedy)
            self.operator.waits(reason)

        try:
            return wait.until(ready, lambda: self._over() is not None, poll, self.stop.wait, POLL_SECONDS)
        finally:
            self._session.waited += self._clock.now() - began

    def _waiting(self, seconds: float, *, late: float = 0.0) -> Waiting:
        return Waiting(logger, seconds, clock=self._clock.now, late=late)

    def _next_welcome(self, link: LearnerLink) -> Welcome | None:
        """Wait for the welcome of the current learner; None for a stop before it. Raises the link's error."""
        logger.info("the robot waits for that learner's welcome: policy, normaliser and counters will be its run's")
        wait = self._waiting(LOG_SECONDS, late=LOG_SECONDS)

        def poll() -> None:
            self.operator.waits(Obstacle(link.waiting, "see the learner's log"))
            wait.log(link.waiting)

        def welcomed() -> bool:
            return link.wait_until(lambda: link.welcome is not None, WELCOME_PERIOD)

        there = wait.until(welcomed, lambda: self.stop.is_set() or self.operator.quits, poll, every=0.0)
        return link.welcome if there and not self.stop.is_set() else None


def _in_words(recent: Sequence[EpisodeSummary]) -> str:
    total = RolloutStats.over(recent)
    alone = sum(s.success and s.segments == 0 for s in recent) / len(recent)
    parts = [
        f"success {100 * total.success_rate:.0f} % of the last {len(recent)}",
        f"{100 * alone:.0f} % without intervention",
        f"length {total.mean_length:.0f}",
        f"human {100 * total.human_ticks / max(1, total.steps):.0f} %",
        f"clipped {100 * np.mean([s.clipped_share for s in recent]):.1f} %",
        f"gated {100 * np.mean([s.gated_share for s in recent]):.1f} %",
    ]
    late = recent[-1].lateness
    if late.max_ms > 0:
        parts.append(f"lateness p50/p99/max {late.p50_ms:.2f}/{late.p99_ms:.2f}/{late.max_ms:.2f} ms")
        parts.append(f"starved {total.starved_ticks} ticks")
    return ", ".join(parts)


def _joined(line: str, more: str) -> str:
    return f"{line}; {more}" if more else line
