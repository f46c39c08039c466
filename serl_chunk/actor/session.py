"""The training actor: episode after episode with the learner's newest policy, until the learner is done."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from serl_chunk.actor.clock import Clock, Lateness, MonotonicClock
from serl_chunk.actor.episode import EpisodeRunner, no_stop
from serl_chunk.actor.evaluate import TRAINING_SEED_BASE
from serl_chunk.actor.inference import Inference
from serl_chunk.actor.policy import ActingAgent, ChunkPolicy
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.devices.recorded import ReplayedIntervention
from serl_chunk.robots.base import InterventionSource, RobotEnv
from serl_chunk.types import ConfigError, RecordSink, SerlChunkError, SnapshotSource

POLL_SECONDS = 0.002  # between looks at an allowance; a control tick is ten times as long
SAY_EVERY_SECONDS = 5.0  # while waiting
RECENT = 20  # episodes in the success rates of a status line


class ActorLink(RecordSink, SnapshotSource, Protocol):
    """The actor's end of a learner: over a network, or in the same process. Nothing here blocks."""

    @property
    def allowance(self) -> int | None:
        """Steps this session may have recorded in all; None: no limit."""

    @property
    def steps_recorded(self) -> int:
        """Steps this session has recorded."""

    @property
    def finished(self) -> str | None:
        """Why training is over; None while it is not."""

    @property
    def error(self) -> SerlChunkError | None:
        """What broke the link for good."""

    def can_begin(self) -> tuple[bool, str]:
        """Whether an episode may begin, and the reason where not."""

    def backlog(self, *, begun: bool) -> str:
        """What waits for the learner, in words; empty where it keeps up. `begun`: an episode is about to begin."""

    def flush(self, timeout: float) -> bool:
        """Wait until the learner has every record; False where it has not after `timeout` seconds."""


class ActorSummary(NamedTuple):
    """What a session of an actor came to."""

    reason: str  # why it ended
    episodes: int
    steps: int
    successes: int
    human_ticks: int
    segments: int
    hold_ticks: int
    starved_ticks: int
    waited_seconds: float  # for the learner: snapshot, allowance, room for records
    delivered: bool  # whether the learner acknowledged every record
    lateness: Lateness
    replaced: bool = False  # whether the learner is of another run now, for which another session may begin


def training_seed(seed: int, actor_id: str, episode: int) -> int:
    """The start state of a training episode: differs by run, actor and episode, and from every held-out one."""
    words = np.random.SeedSequence([seed, zlib.crc32(actor_id.encode()), episode]).generate_state(1)
    return TRAINING_SEED_BASE + int(words[0]) % (2**31 - TRAINING_SEED_BASE)


class _LearnerWait:
    """Waits for the learner, says so, and stops waiting when the session ends."""

    def __init__(self, over: Callable[[], str | None], stop: threading.Event, clock: Clock, say: Callable[[str], None]):
        self._over, self._stop, self._clock, self._say = over, stop, clock, say
        self.seconds = 0.0

    def until(self, ready: Callable[[], bool], why: Callable[[], str], *, say_at_once: bool) -> bool:
        """True once `ready`, False when the session is over."""
        began = self._clock.now()
        said = began - (SAY_EVERY_SECONDS if say_at_once else 0.0)
        try:
            while not ready():
                if self._over() is not None:
                    return False
                now = self._clock.now()
                if now - said >= SAY_EVERY_SECONDS:
                    self._say(f"{why()} ({now - began:.0f} s)")
                    said = now
                self._stop.wait(POLL_SECONDS)
            return True
        finally:
            self.seconds += self._clock.now() - began


def run_actor(
    config: ExperimentConfig,
    link: ActorLink,
    env: RobotEnv,
    agent: ActingAgent,
    normaliser: Normaliser,
    *,
    actor_id: str = "actor",
    run: str = "",
    replaced: Callable[[], str | None] = no_stop,
    episode_prefix: str | None = None,
    first_episode: int = 0,
    steps_before: int = 0,
    human_ticks_before: int = 0,
    cameras: tuple[str, ...] = (),
    intervention: InterventionSource | None = None,
    stop: threading.Event | None = None,
    before_decision: Callable[[], None] | None = None,
    on_episode: Callable[[EpisodeSummary], None] | None = None,
    say: Callable[[str], None] = print,
    report_every: int = 10,
    clock: Clock | None = None,
    inference: Inference | None = None,
    flush_timeout: float = 30.0,
) -> ActorSummary:
    """Run training episodes until the learner is done, `stop` is set or `actor.max_episodes` is reached.

    The first snapshot is waited for. Under the lockstep clock the actor also waits, before each step, for the
    learner's allowance; in real time it never waits inside an episode. An episode under way when the session
    ends is truncated cleanly, and its records are delivered before this returns. A session is of one run: where
    `replaced` returns a reason it ends in the same way, but what the run's learner lacks stays with the link.

    Args:
        link: takes the records, gives snapshots and allowances; stays open.
        normaliser: the learner's (its welcome carries it).
        run: id of the run that `normaliser` is of; only its snapshots act. Empty: those of any run.
        replaced: polled on every tick; a sentence once the learner is of another run, or has another normaliser.
        episode_prefix: the beginning of this session's episode ids, which must differ from every other
            session's of the run; `actor_id` by default.
        first_episode: number of the first episode: those of the run so far, so that no start state, no exploration and
            no recorded intervention of an earlier session comes again.
        steps_before: the run's steps so far, which count for `learner.random_steps`.
        human_ticks_before: the run's human ticks so far, which count for `actor.max_human_ticks`.
        cameras: recorded beside those the agent looks at.
        before_decision: lockstep only, called before every decision (learning in the same process).
        on_episode: called after each episode.
        report_every: episodes between status lines.

    Raises ConfigError for random steps on a real robot, and the link's error where it broke for good. An error of the
    environment, the policy or a hook ends the session; what was recorded is delivered before it is raised.
    """
    clock = clock or MonotonicClock()
    stop = stop or threading.Event()
    _refuse_random_on_real(config)
    lockstep = config.actor.clock == "lockstep"
    policy = ChunkPolicy(
        agent,
        normaliser,
        env.robot_spec,
        image_keys=config.agent.image_keys,
        seed=training_seed(config.seed, actor_id, first_episode),
        source=link,
        run=run,
    )

    def over() -> str | None:
        if stop.is_set():
            return "operator"
        gone = link.finished is not None or link.error is not None or replaced() is not None
        return "learner" if gone else None

    if isinstance(intervention, ReplayedIntervention):
        intervention.begin_at(first_episode)
    waiting = _LearnerWait(over, stop, clock, say)

    def permitted() -> bool:
        allowance = link.allowance
        return allowance is None or link.steps_recorded < allowance

    def await_allowance() -> None:
        waiting.until(
            permitted,
            lambda: _joined(
                f"waiting for the learner's updates: {link.steps_recorded} steps recorded, {link.allowance} allowed",
                link.backlog(begun=True),
            ),
            say_at_once=False,
        )

    def pace() -> None:
        if before_decision is not None:
            before_decision()
        await_allowance()  # so that the decision is the newest policy's

    def over_or_allowed() -> str | None:
        await_allowance()  # an allowance may end within a chunk
        return over()

    runner = EpisodeRunner(
        env,
        policy,
        link,
        config=config,
        cameras=cameras,
        intervention=intervention,
        human_ticks_before=human_ticks_before,
        actor_id=actor_id,
        clock=clock,
        inference=inference,
        before_decision=pace if lockstep else None,
        stop=over_or_allowed if lockstep else over,
    )
    board = _SessionStats()
    backlog_said = clock.now() - SAY_EVERY_SECONDS
    episode = first_episode
    limit = config.actor.max_episodes
    try:
        begun = waiting.until(policy.refresh, lambda: "waiting for the learner's first policy", say_at_once=True)
        while begun and over() is None and (limit == 0 or board.episodes < limit):
            if not waiting.until(lambda: link.can_begin()[0], lambda: link.can_begin()[1], say_at_once=True):
                break
            backlog = link.backlog(begun=True)
            if backlog and clock.now() - backlog_said >= SAY_EVERY_SECONDS:
                backlog_said = clock.now()
                say(backlog)
            summary = runner.run_episode(
                training_seed(config.seed, actor_id, episode),
                explore=True,
                random_steps=max(0, config.learner.random_steps - steps_before - board.steps),
                episode_id=f"{episode_prefix or actor_id}-{episode:06d}",
            )
            episode += 1
            if summary.length == 0:  # the session ended while its first decision waited: nothing is recorded
                continue
            board.add(summary)
            if on_episode is not None:
                on_episode(summary)
            if board.episodes % report_every == 0:
                say(_joined(board.line(policy.version, waiting.seconds), link.backlog(begun=False)))
    except Exception as error:
        if link.error is None:  # the episode was closed; its last steps help to find the cause
            say(f"{type(error).__name__}: {error}: delivering what is recorded")
            link.flush(flush_timeout)
        raise
    finally:
        runner.close()
    if link.error is not None:
        raise link.error
    if not stop.is_set() and (reason := replaced()) is not None:
        return board.summary(reason, waiting.seconds, False, runner.lateness())._replace(replaced=True)
    reason = link.finished or ("stopped by the operator" if stop.is_set() else f"{limit} episodes done")
    delivered = link.flush(flush_timeout)
    if not delivered:
        say(f"the learner did not acknowledge every record within {flush_timeout:g} s")
    return board.summary(reason, waiting.seconds, delivered, runner.lateness())


def _refuse_random_on_real(config: ExperimentConfig) -> None:
    if config.learner.random_steps > 0 and config.robot.real:
        raise ConfigError(
            f"learner.random_steps={config.learner.random_steps} on a real robot: uniformly random commands can break "
            "it. Set learner.random_steps=0 and start from demonstrations (learner.pretrain_steps)"
        )


class _SessionStats:
    """Totals of a session and its status line."""

    def __init__(self) -> None:
        self.episodes = self.steps = self.successes = 0
        self.human_ticks = self.segments = self.hold_ticks = self.starved_ticks = 0
        self._recent: deque[EpisodeSummary] = deque(maxlen=RECENT)

    def add(self, s: EpisodeSummary) -> None:
        """Account for one episode."""
        self.episodes += 1
        self.steps += s.length
        self.successes += s.success
        self.human_ticks += s.human_ticks
        self.segments += s.segments
        self.hold_ticks += s.hold_ticks
        self.starved_ticks += s.starved_ticks
        self._recent.append(s)

    def line(self, version: int, waited: float) -> str:
        """One line about the last episodes."""
        recent = self._recent
        steps = max(1, sum(s.length for s in recent))
        alone = [s.success and s.segments == 0 for s in recent]
        parts = [
            f"episode {self.episodes}: success {_percent([s.success for s in recent])} of the last {len(recent)}",
            f"{_percent(alone)} without intervention",
            f"length {steps / len(recent):.0f}",
            f"human {100 * sum(s.human_ticks for s in recent) / steps:.0f} %",
            f"clipped {100 * np.mean([s.clipped_share for s in recent]):.1f} %",
            f"gated {100 * np.mean([s.gated_share for s in recent]):.1f} %",
            f"policy {version}",
            f"waited {waited:.0f} s",
        ]
        late = recent[-1].lateness
        if late.max_ms > 0:
            starved = sum(s.starved_ticks for s in recent)
            parts.append(f"lateness p50/p99/max {late.p50_ms:.2f}/{late.p99_ms:.2f}/{late.max_ms:.2f} ms")
            parts.append(f"starved {starved} ticks")
        return ", ".join(parts)

    def summary(self, reason: str, waited: float, delivered: bool, lateness: Lateness) -> ActorSummary:
        """The totals."""
        return ActorSummary(
            reason=reason,
            episodes=self.episodes,
            steps=self.steps,
            successes=self.successes,
            human_ticks=self.human_ticks,
            segments=self.segments,
            hold_ticks=self.hold_ticks,
            starved_ticks=self.starved_ticks,
            waited_seconds=waited,
            delivered=delivered,
            lateness=lateness,
        )


def _joined(line: str, more: str) -> str:
    return f"{line}; {more}" if more else line


def _percent(values: list[bool]) -> str:
    return f"{100 * np.mean(values):.0f} %" if values else "-"
