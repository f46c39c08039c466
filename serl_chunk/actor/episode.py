"""The control loop: episodes of one robot, from reset to end record, under either clock."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from serl_chunk.actor.chunk_queue import ChunkQueue, SentTick, TickAction
from serl_chunk.actor.clock import Clock, Deadlines, Lateness
from serl_chunk.actor.handover import Commands, hold_warning
from serl_chunk.actor.inference import InferenceThread
from serl_chunk.actor.interfaces import LoopOperator
from serl_chunk.actor.planner import ExpertPlanner, LockstepPlanner, Planner, realtime_planner
from serl_chunk.actor.policy import AWAY_POLL_SECONDS, NO_SERVER, Decision, Policy, Request, blank_request, no_stop
from serl_chunk.actor.recorder import EpisodeRecorder, LazyObservation, NullSink, RecordedCameras
from serl_chunk.actor.stats import EpisodeMeter, EpisodeSummary, Pacing
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.console.view import Obstacle
from serl_chunk.io import Waiting
from serl_chunk.outcomes.judge import OPERATOR, Judge
from serl_chunk.robots.base import Expert, InterventionCommand, InterventionSource, RobotEnv, seed_of
from serl_chunk.types import STATE, Begin, DataError, End, Observation, Outcome, RecordSink, RobotSpec, Source, Step

logger = logging.getLogger(__name__)


class Interventions:
    """Polls an intervention source on every tick and counts its ticks.

    A segment is a run of consecutive ticks under a human; all of them count, also idle ones (recorded as holds). After
    `max_human_ticks`, of which `used` were spent in earlier sessions of the run, the source is no longer polled, also
    within a segment; 0 sets no limit. An environment's own human ticks (`info["intervene_action"]`) are only counted.
    """

    def __init__(
        self, source: InterventionSource | None, spec: RobotSpec, max_human_ticks: int = 0, used: int = 0
    ) -> None:
        self._source, self._spec, self._limit, self._inside = source, spec, max_human_ticks, False
        self.total_ticks = used  # of the run
        self.ticks = self.segments = 0  # of the episode
        self._began = self.released = False  # `released`: a human who had the robot in this episode let it go

    def reset(self, seed: int) -> None:
        self._inside, self.ticks, self.segments = False, 0, 0
        self._began = self.released = False
        if self._source is not None:
            self._source.reset(seed)

    def restart(self) -> None:
        """Note that the robot did not follow for a while; the source ends its intervention, if it can."""
        if (restart := getattr(self._source, "restart", None)) is not None:
            restart()

    def poll(
        self, tick: int, observation: Observation, decision_tick: Callable[[], bool], last: np.ndarray
    ) -> InterventionCommand | None:
        """Return the human's command for this tick, or None; see `InterventionSource.poll`.

        Raises DataError for a command of another length, or one that is not finite.
        """
        if self._source is None or 0 < self._limit <= self.total_ticks:
            return None
        human = self._source.poll(tick, observation, decision_tick(), last)
        self.released |= self._began and human is None
        self._began |= human is not None
        if human is None:
            return None
        command = np.asarray(human.action, np.float32)
        if command.shape != (self._spec.action_dim,) or not np.isfinite(command).all():
            raise DataError(
                f"the source commanded {human.action} on tick {tick}, expected {self._spec.action_dim} finite numbers "
                f"for robot {self._spec.name!r}",
                parameter="actor.intervention",
            )
        if human.dims is not None and (np.shape(human.dims) != command.shape or not np.any(human.dims)):
            raise DataError(
                f"the source commanded dimensions {human.dims} on tick {tick}, expected {self._spec.action_dim} truth "
                f"values, one or more of them true, for robot {self._spec.name!r}",
                parameter="actor.intervention",
            )
        return human._replace(action=command)

    def count(self, human: bool) -> None:
        if human:
            self.total_ticks += 1
            self.ticks += 1
            self.segments += not self._inside
        self._inside = human


@dataclasses.dataclass
class EpisodeState:
    """One episode, from its reset to its end record. `EpisodeRunner.begin` makes it.

    An episode that never began has no recorder and no observation; its `end` is set.
    """

    id: str
    meter: EpisodeMeter
    recorder: EpisodeRecorder = dataclasses.field(default=cast(EpisodeRecorder, None))
    observed: LazyObservation = dataclasses.field(default=cast(LazyObservation, None))  # of this tick
    deadlines: Deadlines | None = None  # in real time
    rng: np.random.Generator = dataclasses.field(default_factory=np.random.default_rng, kw_only=True)
    random_steps: int = 0  # ticks of random commands at its beginning
    executed: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))  # last, float32[A]
    hold: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))  # keeps the robot still
    tick: int = 0
    stamp: float = 0.0  # of this tick, s
    sent: SentTick | None = None  # whose result was not received yet
    choice: TickAction | None = None  # of this tick; None: the planner's
    part: InterventionCommand | None = None  # of this tick, of a human who has a part of the robot
    by_human: bool = False  # whether a human had the previous tick
    stale_frame: bool = False  # a camera's frame on this tick is not one to decide on
    lost_ticks: int = 0  # before this tick, where it comes after a gap: its observation may be from before it
    window_ends: set[int] = dataclasses.field(default_factory=set)  # ticks ahead whose frames are recorded all the same
    waits: bool = False  # for the human's first motion
    first: int = 0  # tick from which the time limit counts: that of this motion
    end: End | None = None  # once it is over


class EpisodeRunner:
    """Runs episodes of one robot and hands their records to a sink (docs/architecture.md, section 7).

    `run_episode` drives it. An episode may also be stepped from outside, so that one process drives many robots: with
    what `begin` returns, until its `end` is set, call `due`, then `accept` with the decision on what that returned, if
    anything, then `tick`.

    Args:
        policy: a policy whose chunks are executed, a scripted demonstrator, or None: the robot holds unless a human
            acts.
        cameras: recorded in addition to those the policy looks at. Of a demonstration, on every tick. Of a policy, on
            every tick or (`actor.frames`) at every decision, under intervention and in the end record, of an image
            agent also where the windows end that begin there (`chunk.returned` ticks later).
        human_ticks_before: of the run's earlier sessions, which count for the actor's `human_limit`.
        clock: of the realtime loop and of `wall_seconds`. Without a policy a real robot is paced, a simulator is not.
        inference: of the realtime loop; a thread of its own by default.
        before_decision: lockstep only, called before every decision; may wait, or learn in the same process.
        stop: polled on every tick. A string truncates the episode there and is recorded as `outcome_by`.
        observer: called on every tick with its number, for video; it delays the robot.
        operator: polled on every tick and while the robot is reset.
        from_motion: the time limit counts from the first tick on which a human's command moves the robot. The episode
            waits as long for that, and ends without it. Ticks on which a human moves nothing are holds until then.

    Raises ConfigError where the policy's agent cannot plan with the delay, or a camera is unknown.
    """

    def __init__(
        self, env: RobotEnv, policy: Policy | Expert | None, sink: RecordSink,
        *, config: ExperimentConfig, cameras: tuple[str, ...] = (), intervention: InterventionSource | None = None,
        human_ticks_before: int = 0, clock: Clock | None = None,
        inference: InferenceThread | None = None, before_decision: Callable[[], None] | None = None,
        stop: Callable[[], str | None] = no_stop, observer: Callable[[int], None] | None = None,
        operator: LoopOperator | None = None, from_motion: bool = False,
    ) -> None:  # fmt: skip
        actor, spec = config.actor, env.robot_spec
        self._from_motion = from_motion
        self._policy = policy if isinstance(policy, Policy) else None
        image_keys = self._policy.image_keys if self._policy is not None else ()
        recorded = tuple(dict.fromkeys((*image_keys, *cameras)))
        self._judge = Judge(config, spec, goes_on=env.goes_on)
        watched = tuple(dict.fromkeys((*recorded, *self._judge.cameras)))
        for name in watched:
            spec.camera(name)
        env.watch(watched)
        self.interventions = Interventions(intervention, spec, actor.max_human_ticks, human_ticks_before)
        self._env, self._config, self.sink = env, config, sink
        self._operator = operator or LoopOperator()
        # Without the operator's own: a stop before an episode is latched, and its reset waits for a clear.
        self._session_stop = stop
        env.stop = stop = self._operator.stopping(stop)
        self._operator.attach(env, intervention)
        self._stop, self._observer, self._commands = stop, observer, Commands(config, spec)
        clock = clock or Clock()
        realtime = config.robot.real if self._policy is None else actor.clock == "realtime"
        every_tick, self._planner = True, Planner()
        self._realtime_planner: Callable[[bool], Planner | None] | None = None  # until inference is measured
        if isinstance(policy, Policy):
            policy.by_episode = config.agent.iterates
            auto = actor.frames == "auto" and (env.frames_with_observation or env.images == "always")
            every_tick = not isinstance(sink, NullSink) and (auto or actor.frames == "every_tick")
            queue = ChunkQueue(config.chunk.executed, self._commands.hold_after, adaptive=actor.adaptive_execution)
            if realtime:
                self._realtime_planner = functools.partial(self._measured_planner, queue, policy, inference)
            else:
                self._planner = LockstepPlanner(queue, policy, actor.delay_ticks, before_decision)
        elif policy is not None:
            self._planner = ExpertPlanner(policy)
        # Steps of a return, whose end an agent with cameras looks at as well.
        window = config.chunk.returned if self._policy and (image_keys or config.agent.image_keys) else None
        self._frames = RecordedCameras(recorded, every_tick, window)
        env.paced = realtime
        # In lockstep without a delay every tick has an action.
        may_hold = realtime or policy is None or (self._policy is not None and actor.delay_ticks > 0)
        if may_hold and (warning := hold_warning(config.robot, spec)):
            logger.warning(warning)
        self._pacing = Pacing(clock, spec.dt, realtime=realtime)
        self._begun = 0  # episodes
        self._ticks = 0  # executed by the policy so far; lockstep stamps count them, so that two runs record the same

    @property
    def spec(self) -> RobotSpec:
        return self._env.robot_spec

    def close(self) -> None:
        self._pacing.close()
        self._planner.close()

    def lateness(self) -> Lateness:
        return self._pacing.lateness()

    def run_episode(self, seed: int, *, explore: bool = False, **options: Any) -> EpisodeSummary:
        """Run one episode; `options` are those of `begin`.

        An error closes the episode as truncated and is raised. In real time the first one is preceded by the warm-up of
        inference: between a reset and its first tick nothing commands the robot.
        """
        if self._policy is not None:
            Waiting(logger).until(self._policy.available, self._over, self._poll, every=AWAY_POLL_SECONDS)
        self._warm_up(explore)
        with self._pacing.episode():
            episode = self.begin(seed, explore=explore, **options)
            try:
                while episode.end is None:
                    request = self.due(episode)
                    if episode.end is not None:
                        break
                    if request is not None and self._policy is not None:
                        decision = self._policy.decide_patiently(request, self._stop, self._poll)
                        if decision is not None and not self._operator.holding:  # else stopped or held meanwhile
                            self.accept(episode, decision)
                    self.tick(episode)
            except BaseException as error:
                error.add_note(f"tick {episode.tick} of episode {episode.id}")
                self.abort(episode)
                raise
            return self.summary(episode)

    def begin(
        self, seed: int,
        *, explore: bool = False, random_steps: int = 0, episode_id: str | None = None, arm: str = "",
        init_state: str = "", task: str = "", ticket: str = "", decision_seed: int | None = None,
        conditions: Mapping[str, Any] | None = None,
    ) -> EpisodeState:  # fmt: skip
        """Reset the robot; an agent that trains in iterations takes its newest policy, for the whole episode.

        Where the session ends before the first tick, or the operator stops the robot, `end` is set, and nothing is
        recorded. A session that has ended resets nothing.

        Args:
            seed: of the reset.
            random_steps: the episode's first ticks, which execute uniformly random commands.
            arm: who decides, see `policy.Request`.
            init_state: id of the saved state to begin in, or `seed-N`, which is a reset with N instead of `seed`;
                empty: as `seed` gives it.
            task: text of the robot's task, where it has several; empty: the experiment's (`robot.task`) where it is one
                of them, else as `seed` gives it.
            ticket: recorded, see `types.Ticket.id`.
            decision_seed: of the keys of decisions, see `policy.Request.key`; None: the policy counts.
            conditions: recorded in addition to the robot's own.

        Raises ConfigError for a state that the robot cannot restore, and for a task that is none of its own.
        """
        if (number := seed_of(init_state)) is not None:
            seed, init_state = number, ""
        options = {"init_state": init_state} if init_state else {}
        if not self._env.tasks:  # its one task has the actor's own text, which need not be the learner's
            task = ""
        elif not task and self._config.robot.task in self._env.tasks:
            task = self._config.robot.task
        if task:
            self._env.check_task(task)
            options["task"] = task
        if init_state:
            self._env.check_init_state(init_state, task)
        self._warm_up(explore)
        if self._policy is not None and self._policy.by_episode:
            self._policy.refresh()
        spec, planner, name = self.spec, self._planner, episode_id or f"actor-{self._begun:06d}"
        meter = EpisodeMeter(seed, self._pacing.clock.now())
        self._env.stop, self._operator.actor.stop = self._stop, self._session_stop  # another runner may share the robot
        over = self._over() is not None  # stopped while the policy was waited for
        try:
            raw = None if over else self._operator.reset(self._env, seed, options)
        except BaseException as error:
            error.add_note(f"before tick 0 of episode {name}")
            raise
        if raw is None:
            self.interventions.reset(seed)
            end = End(name, 0, None, False, True, Outcome.UNKNOWN, self._stop() or OPERATOR)
            return EpisodeState(name, meter, end=end)
        meter.conditions, meter.task = self._env.conditions, self._env.task
        if conditions:
            meter.conditions = json.dumps(json.loads(meter.conditions or "{}") | dict(conditions))
        task = meter.task or self._config.robot.task
        begin = Begin(name, task, spec.name, spec.digest(), init_state or f"seed-{seed}", ticket, meter.conditions)
        recorder = EpisodeRecorder(self.sink, begin, self._operator.decided, self._operator.feed)
        observed = LazyObservation(self._env, raw, self._frames.names)
        planner.begin(recorder, seed, explore=explore, arm=arm, decision_seed=decision_seed)
        self.interventions.reset(seed)
        if (deadlines := self._pacing.deadlines()) is not None:
            planner.start(deadlines)
        hold = self._commands.begin(observed.observation[STATE])
        rng = np.random.default_rng([seed, self._begun if decision_seed is None else decision_seed])
        episode = EpisodeState(
            name, meter, recorder, observed, deadlines,
            rng=rng, random_steps=random_steps, executed=hold, hold=hold, waits=self._from_motion,
        )  # fmt: skip
        self._begun += 1
        if self._frames.every_tick:
            observed.with_frames()
        return episode

    def due(self, episode: EpisodeState) -> Request | None:
        """Begin the next tick, in real time at its deadline, and choose who acts: a human, chance or the policy.

        First receives the result of the tick before where it comes late; that may set `end`. Returns the request whose
        decision the tick waits for; in real time none does.
        """
        tick, deadlines, waited = episode.tick, episode.deadlines, 0
        if deadlines is None:
            episode.stamp = self._ticks * self.spec.dt + tick * self.spec.dt
        else:
            waited = deadlines.wait(tick)
            episode.lost_ticks += waited
            if waited:
                episode.meter.gaps += 1
                self._planner.flush()
            episode.stamp = deadlines.began
        if episode.sent is not None:
            self._receive(episode, episode.sent)
            if episode.end is not None:
                return None
        observed, look = episode.observed, functools.partial(self._look, episode)
        late = deadlines.lateness[-1] if deadlines is not None else None
        holds = self._operator.tick(by_human=episode.by_human, late=late)
        if self._observer is not None:
            self._observer(tick)
        if tick in episode.window_ends:
            episode.window_ends.discard(tick)
            observed.with_frames()
        version = self._version
        would_decide = functools.partial(self._planner.would_decide, tick, by_human=episode.by_human)
        human = self.interventions.poll(tick, observed.observation, would_decide, episode.executed)
        if holds:
            self.interventions.restart()
            self._planner.rest(tick, look, episode.hold)
            human = None
        episode.by_human, episode.choice, episode.part = human is not None, None, None
        if human is not None and human.dims is not None and not episode.stale_frame:
            episode.part = human  # the policy goes on with the rest
            return self._planner.plan(tick, look, episode.hold)
        if human is not None:
            self._planner.flush()
            look()
            source = Source.HOLD if human.idle else Source.HUMAN
            episode.choice = TickAction(human.action, source, version=version, by_human=True)
        elif episode.stale_frame or holds:
            episode.choice = TickAction(episode.hold, Source.HOLD, version=version)
        elif tick < episode.random_steps:
            if tick % self._planner.execute_steps == 0:  # frames as often as a policy would decide
                look()
            command = self._commands.random(episode.rng, episode.hold)
            episode.choice = TickAction(command, Source.RANDOM, version=version)
        elif waited:  # the next observation is the first to decide on
            episode.choice = TickAction(episode.hold, Source.HOLD, version=version)
        else:
            return self._planner.plan(tick, look, episode.hold)
        return None

    def accept(self, episode: EpisodeState, decision: Decision) -> None:
        self._planner.accept(decision, episode.tick)

    def tick(self, episode: EpisodeState) -> None:
        """Command the robot, and record the step once its result is there. `end` is set where that ends the episode."""
        if episode.end is not None:
            return
        hold = episode.hold
        choice = episode.choice or self._planner.action(episode.tick)
        if choice is None:
            choice = TickAction(hold, Source.HOLD, version=self._version)
        elif choice.source is Source.POLICY:
            choice = choice._replace(command=self._commands.of_policy(choice.command, hold))
        if (part := episode.part) is not None and part.dims is not None:
            command = np.where(part.dims, part.action, choice.command)
            choice = TickAction(command, Source.HUMAN, version=choice.version, by_human=True, human_dims=part.dims)
        deadlines, clock, before = episode.deadlines, self._pacing.clock, 0.0
        if (stopped_by := self._stop()) is not None:
            self._close(episode, episode.observed.with_frames(), outcome_by=stopped_by)
            return
        if deadlines is not None:
            if deadlines.stalled(deadlines.began):
                # What was chosen is of a moment that is long past, a human's command too. The next tick finds the gap.
                self._planner.flush()
                choice = TickAction(hold, Source.HOLD, version=choice.version, by_human=choice.by_human)
            before = clock.now()
        command = self._commands.bounded(choice, episode.executed)
        sent = SentTick(episode.tick, choice, command, episode.stamp, episode.lost_ticks, before)
        self._env.send(command)
        if deadlines is not None:
            episode.meter.step_seconds.append(clock.now() - before)
        episode.lost_ticks, episode.tick, episode.sent = 0, episode.tick + 1, sent
        if not self._env.answers_late:
            self._receive(episode, sent)

    def _receive(self, episode: EpisodeState, sent: SentTick) -> None:
        """Record the step of what was sent. Sets `end` where that ends the episode."""
        choice, command, observed = sent.choice, sent.command, episode.observed
        deadlines, episode.sent = episode.deadlines, None
        raw, env_reward, terminated, truncated, info = self._env.receive()
        executed, wanted = np.array(info.get("executed_action", command), np.float32), command
        if "intervene_action" in info:  # the environment replaced our action by a human's, as HIL-SERL's do
            choice = TickAction(command, Source.HUMAN, version=choice.version, by_human=True)
            # A driver that reports what it executed reports what it made of the human's command.
            wanted = np.asarray(info["intervene_action"], np.float32)
            executed = np.array(info.get("executed_action", wanted), np.float32)
            self._planner.flush()
            if observed.take(info.get("intervene_images", {})):
                self._note_window(episode, sent.tick)
        if episode.waits and choice.source is Source.HUMAN:
            episode.waits = np.array_equal(executed, episode.hold)
            choice = choice._replace(source=Source.HOLD if episode.waits else Source.HUMAN)
        self.interventions.count(choice.by_human)
        after = LazyObservation(self._env, raw, self._frames.names)
        label = self._operator.outcome()
        verdict = self._judge.verdict(sent.tick - episode.first, after.look, env_reward, bool(terminated), info, label)
        reward, terminated, truncated = verdict.reward, verdict.terminated, truncated or verdict.truncated
        if episode.waits:
            episode.first = sent.tick + 1
            truncated = truncated or (episode.first >= self.spec.max_episode_steps and not terminated)
            self._env.restart_limit()
        holds = choice.source is Source.HOLD
        gated, starved = not np.array_equal(executed, wanted), holds and deadlines is not None and not choice.by_human
        episode.meter.count(executed, reward, gated=gated, holds=holds, starved=starved)
        episode.recorder.step(
            Step(
                sent.tick, observed.observation, executed, reward, choice.source, choice.decision_tick, choice.version,
                sent.stamp, lost_ticks=sent.lost_ticks, human_dims=choice.human_dims,
                policy_age=-1.0 if self._policy is None else self._policy.age(choice.version, time.monotonic()),
            ),
            observed.frame_numbers,
        )  # fmt: skip
        episode.executed, episode.hold = executed, self._commands.hold_after(executed)
        episode.observed = after
        if lost := int(info.get("lost_ticks", 0)):
            episode.lost_ticks += lost
            episode.meter.gaps += 1
            self._planner.flush()
            self.interventions.restart()  # it was stopped or held: a device counts once it was neutral again
        episode.stale_frame = bool(info.get("unseen"))
        if episode.stale_frame:  # windows end here, and none begins before the cameras are back
            episode.lost_ticks += 1
            self._planner.flush()
        if self._frames.every_tick:  # now, when the state was measured, and in the time that the step leaves
            after.with_frames()
        if terminated or truncated:
            if deadlines is not None and not self._env.answers_late and deadlines.stalled(sent.began):
                episode.lost_ticks = 1  # no tick follows that could find the gap
            episode.meter.fault = fault = "" if terminated else str(info.get("fault", ""))
            by, final = "fault" if fault else verdict.by, after.closing(self._judge.shown)
            self._close(episode, final, terminated=terminated, outcome=verdict.outcome, outcome_by=by)
        elif holds:
            self._pacing.holding()

    def abort(self, episode: EpisodeState) -> None:
        """Close an open episode as truncated, where an error ends it. Also for a caller that steps the episode."""
        if episode.end is None:
            self._close(episode, episode.observed.observation, outcome_by="crash")

    def summary(self, episode: EpisodeState) -> EpisodeSummary:
        """The finished episode in figures. Warns of stalls, and once of an environment whose steps fill the tick."""
        assert episode.end is not None
        deadlines, meter = episode.deadlines, episode.meter
        late = None if deadlines is None else Lateness.of(deadlines.lateness, deadlines.missed_periods)
        now, recorder = self._pacing.clock.now(), episode.recorder
        clipped = recorder.clipped / max(1, recorder.values) if recorder is not None else 0.0
        stats = meter.summary(episode.end, self.spec.control_hz, now=now, clipped_share=clipped, lateness=late)
        stats.human_ticks, stats.segments = self.interventions.ticks, self.interventions.segments
        if stats.fault:
            logger.warning(f"the robot ended episode {episode.id}: {stats.fault}")
        if deadlines is not None:
            self._pacing.warn(episode.id, stats, deadlines, meter.step_seconds)
        return stats

    @property
    def _version(self) -> int:
        return -1 if self._policy is None else self._policy.version

    def _over(self) -> str | None:
        """Return what ends the session before the next episode: nothing moves the robot any more."""
        return OPERATOR if self._operator.quits else self._session_stop()

    def _poll(self) -> None:
        """Poll the operator while the policy is away, or decides elsewhere."""
        waiting = "" if self._policy is None else self._policy.waiting
        self._operator.waits(*([Obstacle(waiting, NO_SERVER)] if waiting else []))

    def _look(self, episode: EpisodeState) -> Observation:
        self._note_window(episode, episode.tick)
        return episode.observed.with_frames()

    def _note_window(self, episode: EpisodeState, tick: int) -> None:
        if self._frames.window is not None:
            episode.window_ends.add(tick + self._frames.window)

    def _close(
        self, episode: EpisodeState, final: Observation,
        *, terminated: bool = False, outcome: Outcome = Outcome.UNKNOWN, outcome_by: str = "environment",
    ) -> None:  # fmt: skip
        # A value after a gap is no bootstrap of the step before it; what a termination gives, it gives all the same.
        last = None if episode.lost_ticks and not terminated else final
        length = episode.recorder.length
        episode.end = End(episode.id, length, last, terminated, not terminated, outcome, outcome_by,
                          environment=self._judge.environment)  # fmt: skip
        self._ticks += length if self._policy is not None else 0  # each demonstration counts from 0
        if episode.deadlines is not None:
            self._pacing.add(episode.deadlines)
        episode.recorder.end(episode.end, episode.observed.frame_numbers)
        self._env.rest()
        self._operator.episode_ended(episode.end)

    def _warm_up(self, explore: bool) -> None:
        """In real time, once: compile and measure inference, then build its planner."""
        if self._realtime_planner is None or self._over() is not None:
            return
        planner = self._realtime_planner(explore)
        if planner is not None:
            self._planner, self._realtime_planner = planner, None
            self._pacing.freeze()

    def _measured_planner(
        self, queue: ChunkQueue, policy: Policy, inference: InferenceThread | None, explore: bool
    ) -> Planner | None:
        wanted = self._config.actor.inference
        task = max((*self._env.tasks, self._config.robot.task), key=len)  # lengths of prompts follow the text
        request = blank_request(self.spec, self._frames.names, explore=explore, task=task)
        return realtime_planner(
            queue, policy, inference, self._pacing.clock, self.spec.dt, wanted, request, self._operator.planner,
            self._over, self._poll,
        )  # fmt: skip
