"""The control loop: episodes of one robot, from reset to end record, under either clock."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import numpy as np

from serl_chunk.actor.chunk_queue import ChunkQueue, SentTick, TickAction
from serl_chunk.actor.clock import Clock, Deadlines, GarbageSchedule, Lateness, MonotonicClock
from serl_chunk.actor.handover import Handover
from serl_chunk.actor.hold import HoldPolicy, hold_warning, with_kept
from serl_chunk.actor.inference import InferenceThread
from serl_chunk.actor.interfaces import LoopOperator, NoOperator
from serl_chunk.actor.intervention import Interventions, human_limit
from serl_chunk.actor.planner import ExpertPlanner, LockstepPlanner, Planner, realtime_planner
from serl_chunk.actor.policy import Decision, Policy, Request, blank_request
from serl_chunk.actor.policy_wait import PolicyWait, no_stop
from serl_chunk.actor.recorder import EpisodeRecorder, LazyObservation, NullSink
from serl_chunk.actor.stats import EpisodeMeter, EpisodeSummary, Pacing
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.outcomes.judge import OPERATOR, Judge
from serl_chunk.robots.base import Expert, InterventionCommand, InterventionSource, RobotEnv
from serl_chunk.types import STATE, Begin, End, Observation, Outcome, RecordSink, Source, Step

logger = logging.getLogger(__name__)


class EpisodeRunner:
    """Runs episodes of one robot and hands their records to a sink (docs/architecture.md, section 7).

    `run_episode` drives it. It may also be stepped from outside, so that one process drives many robots: after `begin`
    and until `end` is set, call `due`, then `accept` with the decision on what it returned, if anything, then `tick`.

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

    Raises ConfigError where the policy's agent cannot plan with the delay, or a camera is unknown.
    """

    def __init__(
        self, env: RobotEnv, policy: Policy | Expert | None, sink: RecordSink,
        *, config: ExperimentConfig, cameras: tuple[str, ...] = (), intervention: InterventionSource | None = None,
        human_ticks_before: int = 0, clock: Clock | None = None,
        inference: InferenceThread | None = None, before_decision: Callable[[], None] | None = None,
        stop: Callable[[], str | None] = no_stop, observer: Callable[[int], None] | None = None,
        operator: LoopOperator | None = None,
    ) -> None:  # fmt: skip
        actor, spec = config.actor, env.robot_spec
        self._policy = policy if isinstance(policy, Policy) else None
        image_keys = self._policy.image_keys if self._policy is not None else ()
        self._cameras = tuple(dict.fromkeys((*image_keys, *cameras)))
        self._judge = Judge(config, spec, goes_on=env.goes_on)
        watched = tuple(dict.fromkeys((*self._cameras, *self._judge.cameras)))
        for name in watched:
            spec.camera(name)
        env.watch(watched)
        self.spec = spec
        self.interventions = Interventions(intervention, spec, human_limit(actor, spec), human_ticks_before)
        self._env, self._config, self._sink = env, config, sink
        self._operator: LoopOperator = operator or NoOperator()
        self._wait = PolicyWait(self._policy, self._operator, stop)
        env.stop = stop = self._operator.stopping(stop)
        self._operator.attach(env, intervention)
        self._clock, self._inference, self._stop, self._observer = clock or MonotonicClock(), inference, stop, observer
        self._hold_policy, self._handover = HoldPolicy(spec), Handover(config, spec)
        self._low, self._high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
        self._kept = spec.grippers if config.agent.gripper.kept else ()
        self._not_random = spec.grippers if config.agent.gripper.composition == "fixed" else ()
        # Steps of a return, whose end an agent with cameras looks at as well.
        self._window = config.chunk.returned if self._policy and (image_keys or config.agent.image_keys) else None
        self._planner, self._warm = Planner(), True  # in real time until inference is measured
        if isinstance(policy, Policy):
            self._realtime = actor.clock == "realtime"
            auto = actor.frames == "auto" and (env.frames_with_observation or env.images == "always")
            self._every_tick = not isinstance(sink, NullSink) and (auto or actor.frames == "every_tick")
            self._queue = ChunkQueue(config.chunk.executed, self._hold_policy.next, adaptive=actor.adaptive_execution)
            self._warm = not self._realtime
            if self._warm:
                self._planner = LockstepPlanner(self._queue, policy, actor.delay_ticks, before_decision)
        else:
            self._realtime, self._every_tick = config.robot.real, True
            if policy is not None:
                self._planner = ExpertPlanner(policy)
        env.paced = self._realtime
        # In lockstep without a delay every tick has an action.
        may_hold = self._realtime or policy is None or (self._policy is not None and actor.delay_ticks > 0)
        if may_hold and (warning := hold_warning(config.robot, spec)):
            logger.warning(warning)
        self._garbage = GarbageSchedule(self._clock) if self._realtime else None
        self._episodes = 0
        self._ticks = 0  # executed by the policy so far; lockstep stamps count them, so that two runs record the same
        self._pacing = Pacing(spec.dt)
        self.end: End | None = None  # of the episode, once it is over

    def close(self) -> None:
        if self._garbage is not None:
            self._garbage.close()
        self._planner.close()

    def lateness(self) -> Lateness:
        return self._pacing.lateness()

    def run_episode(
        self, seed: int,
        *, explore: bool = False, random_steps: int = 0, episode_id: str | None = None, arm: str = "",
    ) -> EpisodeSummary:  # fmt: skip
        """Run one episode; see `begin`.

        An error closes the episode as truncated and is raised. In real time the first one is preceded by the warm-up of
        inference: between a reset and its first tick nothing commands the robot.
        """
        if self._policy is not None:
            self._policy.await_available(self._wait.over, self._wait.poll)
        self._warm_up(explore)
        with self._garbage.episode() if self._garbage is not None else contextlib.nullcontext():
            self.begin(seed, explore=explore, random_steps=random_steps, episode_id=episode_id, arm=arm)
            try:
                while self.end is None:
                    request = self.due()
                    if self.end is not None:
                        break
                    if request is not None and self._policy is not None:
                        decision = self._policy.decide_patiently(request, self._stop, self._wait.poll)
                        if decision is not None and not self._operator.holding:  # else stopped or held meanwhile
                            self.accept(decision)
                    self.tick()
            except BaseException:
                self.abort()
                raise
            return self.summary()

    def begin(
        self, seed: int,
        *, explore: bool = False, random_steps: int = 0, episode_id: str | None = None, arm: str = "",
    ) -> None:  # fmt: skip
        """Reset the robot with `seed`; the episode's first `random_steps` ticks execute uniformly random commands.

        `arm`: who decides, see `policy.Request`.

        Where the session ends before the first tick, or the operator stops the robot, `end` is set, and nothing is
        recorded. A session that has ended resets nothing.
        """
        self._warm_up(explore)
        spec, planner = self.spec, self._planner
        self._deadlines: Deadlines | None = None
        self._meter = EpisodeMeter(seed, self._clock.now(), self._decided)
        self._episode_id = episode_id or f"actor-{self._episodes:06d}"
        over, task = self._wait.over() is not None, self._config.robot.task  # stopped while the policy was waited for
        raw = None if over else self._operator.reset(self._env, seed)
        if raw is None:
            self.interventions.reset(seed)
            self.end = End(self._episode_id, 0, None, False, True, Outcome.UNKNOWN, self._stop() or OPERATOR)
            return
        conditions = self._env.conditions
        begin = Begin(self._episode_id, task, spec.name, spec.digest(), f"seed-{seed}", "", conditions, arm=arm)
        self._meter.conditions = conditions
        self._recorder = EpisodeRecorder(self._sink, begin, self._operator.decided, self._operator.feed)
        self._observed = LazyObservation(self._env, raw, self._cameras)
        planner.begin(self._recorder, seed, explore=explore)
        self.interventions.reset(seed)
        self._handover.begin()
        if self._realtime:
            self._deadlines = Deadlines(self._clock, spec.dt)
            planner.start(self._deadlines)
        self._sent: SentTick | None = None
        self._executed = self._hold = self._hold_policy.initial(self._observed.observation[STATE])
        self._part: InterventionCommand | None = None  # of this tick, of a human who has a part of the robot
        self._rng, self._random_steps = np.random.default_rng([seed, self._episodes]), random_steps
        self._tick = 0
        self._choice: TickAction | None = None  # of this tick; None: the planner's
        self._by_human = False  # whether a human had the previous tick
        self._window_ends: set[int] = set()  # ticks ahead whose frames are recorded although no action depends on them
        self._lost_ticks = 0  # before this tick, where it comes after a gap: its observation may be from before it
        self.end, self._stale_frame = None, False  # stale, on this tick: a camera's frame is not one to decide on
        self._episodes += 1
        if self._every_tick:
            self._observed.with_frames()

    def due(self) -> Request | None:
        """Begin the next tick, in real time at its deadline, and choose who acts: a human, chance or the policy.

        First receives the result of the tick before where it comes late; that may set `end`. Returns the request whose
        decision the tick waits for; in real time none does.
        """
        tick, waited = self._tick, 0
        if self._deadlines is None:
            self._stamp = self._ticks * self.spec.dt + tick * self.spec.dt
        else:
            waited = self._deadlines.wait(tick)
            self._lost_ticks += waited
            if waited:
                self._meter.gaps += 1
                self._planner.flush()
            self._stamp = self._deadlines.began
        if self._sent is not None:
            self._receive(self._sent)
            if self.end is not None:
                return None
        observed = self._observed
        late = self._deadlines.lateness[-1] if self._deadlines is not None else None
        holds = self._operator.tick(by_human=self._by_human, late=late)
        if self._observer is not None:
            self._observer(tick)
        if tick in self._window_ends:
            self._window_ends.discard(tick)
            observed.with_frames()
        version = self._version
        would_decide = self._planner.would_decide(tick, by_human=self._by_human)
        human = self.interventions.poll(tick, observed.observation, would_decide, self._executed)
        if holds:
            self.interventions.restart()
            self._planner.rest(tick, self._look, self._hold)
            human = None
        self._by_human, self._choice, self._part = human is not None, None, None
        if human is not None and human.dims is not None and not self._stale_frame:
            self._part = human  # the policy goes on with the rest
            return self._planner.plan(tick, self._look, self._hold)
        if human is not None:
            self._planner.flush()
            self._look()
            source = Source.HOLD if human.idle else Source.HUMAN
            self._choice = TickAction(human.action, source, version=version, by_human=True)
        elif self._stale_frame or holds:
            self._choice = TickAction(self._hold, Source.HOLD, version=version)
        elif tick < self._random_steps:
            if tick % self._planner.execute_steps == 0:  # frames as often as a policy would decide
                self._look()
            command = with_kept(self._rng.uniform(self._low, self._high), self._hold, self._not_random)
            self._choice = TickAction(command, Source.RANDOM, version=version)
        elif waited:  # the next observation is the first to decide on
            self._choice = TickAction(self._hold, Source.HOLD, version=version)
        else:
            return self._planner.plan(tick, self._look, self._hold)
        return None

    def accept(self, decision: Decision) -> None:
        self._planner.accept(decision, self._tick)

    def tick(self) -> None:
        """Command the robot, and record the step once its result is there. `end` is set where that ends the episode."""
        if self.end is not None:
            return
        choice = self._choice or self._planner.action(self._tick)
        if choice is None:
            choice = TickAction(self._hold, Source.HOLD, version=self._version)
        elif choice.source is Source.POLICY:
            choice = choice._replace(command=with_kept(choice.command, self._hold, self._kept))
        if (part := self._part) is not None and part.dims is not None:
            command = np.where(part.dims, part.action, choice.command)
            choice = TickAction(command, Source.HUMAN, version=choice.version, by_human=True, human_dims=part.dims)
        observed, deadlines, before = self._observed, self._deadlines, 0.0
        if (stopped_by := self._stop()) is not None:
            self._close(observed.with_frames(), outcome_by=stopped_by)
            return
        if deadlines is not None:
            if deadlines.stalled(deadlines.began):
                # What was chosen is of a moment that is long past, a human's command too. The next tick finds the gap.
                self._planner.flush()
                choice = TickAction(self._hold, Source.HOLD, version=choice.version, by_human=choice.by_human)
            before = self._clock.now()
        command = np.clip(choice.command, self._low, self._high).astype(np.float32)
        command = self._handover.bounded(command, choice, self._executed)
        sent = SentTick(self._tick, choice, command, self._stamp, self._lost_ticks, before)
        self._env.send(command)
        if deadlines is not None:
            self._meter.step_seconds.append(self._clock.now() - before)
        self._lost_ticks, self._tick, self._sent = 0, self._tick + 1, sent
        if not self._env.answers_late:
            self._receive(sent)

    def _receive(self, sent: SentTick) -> None:
        """Record the step of what was sent. Sets `end` where that ends the episode."""
        choice, command, observed = sent.choice, sent.command, self._observed
        deadlines, self._sent = self._deadlines, None
        raw, env_reward, terminated, truncated, info = self._env.receive()
        executed, wanted = np.array(info.get("executed_action", command), np.float32), command
        if "intervene_action" in info:  # the environment replaced our action by a human's, as HIL-SERL's do
            choice = TickAction(command, Source.HUMAN, version=choice.version, by_human=True)
            # A driver that reports what it executed reports what it made of the human's command.
            wanted = np.asarray(info["intervene_action"], np.float32)
            executed = np.array(info.get("executed_action", wanted), np.float32)
            self._planner.flush()
            if observed.take(info.get("intervene_images", {})):
                self._note_window(sent.tick)
        self.interventions.count(choice.by_human)
        after = LazyObservation(self._env, raw, self._cameras)
        label = self._operator.outcome()
        verdict = self._judge.verdict(sent.tick, after.look, env_reward, bool(terminated), info, label)
        reward, terminated, truncated = verdict.reward, verdict.terminated, truncated or verdict.truncated
        holds = choice.source is Source.HOLD
        gated, starved = not np.array_equal(executed, wanted), holds and deadlines is not None and not choice.by_human
        self._meter.count(executed, reward, gated=gated, holds=holds, starved=starved)
        self._recorder.step(
            Step(
                sent.tick, observed.observation, executed, reward, choice.source, choice.decision_tick, choice.version,
                sent.stamp, lost_ticks=sent.lost_ticks, human_dims=choice.human_dims,
                policy_age=-1.0 if self._policy is None else self._policy.age(choice.version, time.monotonic()),
            ),
            observed.frame_numbers,
        )  # fmt: skip
        self._executed, self._hold = executed, self._hold_policy.next(executed)
        self._observed = after
        if lost := int(info.get("lost_ticks", 0)):
            self._lost_ticks += lost
            self._meter.gaps += 1
            self._planner.flush()
            self.interventions.restart()  # it was stopped or held: a device counts once it was neutral again
        self._stale_frame = bool(info.get("unseen"))
        if self._stale_frame:  # windows end here, and none begins before the cameras are back
            self._lost_ticks += 1
            self._planner.flush()
        if self._every_tick:  # now, when the state was measured, and in the time that the step leaves
            self._observed.with_frames()
        if terminated or truncated:
            if deadlines is not None and not self._env.answers_late and deadlines.stalled(sent.began):
                self._lost_ticks = 1  # no tick follows that could find the gap
            self._meter.fault = fault = "" if terminated else str(info.get("fault", ""))
            by = "fault" if fault else verdict.by
            self._close(after.closing(self._judge.shown), terminated=terminated, outcome=verdict.outcome, outcome_by=by)
        elif holds and self._garbage is not None:
            self._garbage.holding()

    def abort(self) -> None:
        """Close an open episode as truncated, where an error ends it. Also for a caller that steps the episode."""
        if self.end is None:
            self._close(self._observed.observation, outcome_by="crash")

    def summary(self) -> EpisodeSummary:
        """The finished episode in figures. Warns of stalls, and once of an environment whose steps fill the tick."""
        assert self.end is not None
        deadlines, meter = self._deadlines, self._meter
        late = None if deadlines is None else Lateness.of(deadlines.lateness, deadlines.missed_periods)
        stats = meter.summary(
            self.end, self.spec.control_hz, now=self._clock.now(), decided=self._decided, lateness=late
        )
        stats.human_ticks, stats.segments = self.interventions.ticks, self.interventions.segments
        if stats.fault:
            logger.warning(f"the robot ended episode {self._episode_id}: {stats.fault}")
        if deadlines is not None:
            self._pacing.warn(self._episode_id, stats, deadlines, meter.step_seconds)
        return stats

    @property
    def _decided(self) -> tuple[int, int]:
        """Values that the policy decided so far, and how many of them were clipped."""
        return (0, 0) if self._policy is None else (self._policy.values, self._policy.clipped)

    @property
    def _version(self) -> int:
        return -1 if self._policy is None else self._policy.version

    def _look(self) -> Observation:
        self._note_window(self._tick)
        return self._observed.with_frames()

    def _note_window(self, tick: int) -> None:
        if self._window is not None:
            self._window_ends.add(tick + self._window)

    def _close(
        self, final: Observation, *, terminated: bool = False, outcome: Outcome = Outcome.UNKNOWN,
        outcome_by: str = "environment",
    ) -> None:  # fmt: skip
        # A value after a gap is no bootstrap of the step before it; what a termination gives, it gives all the same.
        last = None if self._lost_ticks and not terminated else final
        length = self._recorder.length
        self.end = End(self._episode_id, length, last, terminated, not terminated, outcome, outcome_by,
                       environment=self._judge.environment)  # fmt: skip
        self._ticks += length if self._policy is not None else 0  # each demonstration counts from 0
        if self._deadlines is not None:
            self._pacing.add(self._deadlines)
        self._recorder.end(self.end, self._observed.frame_numbers)
        self._env.rest()
        self._operator.episode_ended(self.end)

    def _warm_up(self, explore: bool) -> None:
        """In real time, once: compile and measure inference, then build its planner."""
        if self._warm or (policy := self._policy) is None or self._wait.over() is not None:
            return
        wanted, task = self._config.actor.inference, self._config.robot.task  # lengths of prompts follow the text
        request = blank_request(self.spec, self._cameras, explore=explore, task=task)
        planner = realtime_planner(
            self._queue, policy, self._inference, self._clock, self.spec.dt, wanted, request, self._operator.planner,
            self._wait.over, self._wait.poll,
        )  # fmt: skip
        if planner is None:
            return
        self._planner, self._warm = planner, True
        if self._garbage is not None:
            self._garbage.freeze()
