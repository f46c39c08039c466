"""Episodes from reset to end record, under either clock."""

from __future__ import annotations

import array
import contextlib
import math
from collections.abc import Callable

import numpy as np

from serl_chunk.actor.chunk_queue import ChunkQueue
from serl_chunk.actor.clock import Clock, Deadlines, Lateness, MonotonicClock, responsive_interpreter
from serl_chunk.actor.episode import ActorContext, EpisodeRun, LazyObservation
from serl_chunk.actor.garbage import GarbageSchedule
from serl_chunk.actor.hold import HoldPolicy, hold_warning
from serl_chunk.actor.inference import DelayEstimate, Inference, InferenceThread, measure_inference
from serl_chunk.actor.intervention import Interventions
from serl_chunk.actor.planner import LockstepPlanner, Planner, RealtimePlanner, choose_inference, slow_step_warning
from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.actor.recorder import EpisodeRecorder, EpisodeSummary, NullSink, commanded_jerk
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.robots.base import InterventionSource, RobotEnv
from serl_chunk.types import IMAGE_PREFIX, STATE, Begin, ConfigError, Observation, Outcome, RecordSink

RATE_TICKS = 10  # what steps of the environment take is judged after an episode with so many


def no_stop() -> str | None:
    """A `stop` that never stops."""
    return None


def _frames_every_tick(env: RobotEnv, frames: str) -> bool:
    """Whether `actor.frames` asks for the cameras of `env` on every tick."""
    if frames == "auto":
        return env.frames_with_observation or env.images == "always"
    return frames == "every_tick"


class EpisodeRunner:
    """Runs episodes of `env` with `policy` and hands their records to `sink` (docs/architecture.md, section 7).

    Args:
        config: its `chunk`, `actor`, `reward.failure_reward` and `robot.task` are read.
        cameras: recorded beside those the policy looks at: on every tick, or (`actor.frames`) at every decision, under
            intervention and in the end record, of an image agent also where the windows end that begin there
            (`chunk.returned` ticks later).
        intervention: source of human commands; None: no interventions.
        human_ticks_before: of the run's earlier sessions, which count for `actor.max_human_ticks`.
        actor_id: the beginning of episode ids that are not given.
        clock: of the realtime loop and of `wall_seconds`.
        inference: of the realtime loop; a thread of its own by default.
        before_decision: lockstep only, called before every decision; may wait (rate limiter) or work (learning in
            the same process).
        stop: asked on every tick; a word (who stops it) truncates the episode there.
        observer: called on every tick with its number, for video; what it does delays the robot.
        say: told at once where a hold is a guess (`hold_warning`); in realtime also once where the environment's steps
            fill the tick, and after each episode with gaps.

    Raises ConfigError for a delay the policy's agent cannot take.
    """

    def __init__(
        self,
        env: RobotEnv,
        policy: ChunkPolicy,
        sink: RecordSink,
        *,
        config: ExperimentConfig,
        cameras: tuple[str, ...] = (),
        intervention: InterventionSource | None = None,
        human_ticks_before: int = 0,
        actor_id: str = "actor",
        clock: Clock | None = None,
        inference: Inference | None = None,
        before_decision: Callable[[], None] | None = None,
        stop: Callable[[], str | None] = no_stop,
        observer: Callable[[int], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        actor, spec = config.actor, env.robot_spec
        if actor.delay_ticks > 0 and not policy.agent.supports_prefix:
            raise ConfigError(
                f"actor.delay_ticks={actor.delay_ticks}, but this agent cannot plan with a delay: use 0, or an agent "
                "that takes a prefix"
            )
        recorded = tuple(dict.fromkeys((*policy.image_keys, *cameras)))
        for name in recorded:
            spec.camera(name)
        self.interventions = Interventions(intervention, actor.max_human_ticks, human_ticks_before)
        self.spec = spec
        self._config, self._sink, self._actor_id = config, sink, actor_id
        self._inference = inference
        clock, hold = clock or MonotonicClock(), HoldPolicy(spec)
        self._garbage = GarbageSchedule(clock) if actor.clock == "realtime" else None
        # In lockstep without a delay every tick has an action.
        may_hold = actor.clock == "realtime" or actor.delay_ticks > 0
        if say is not None and may_hold and (warning := hold_warning(config.robot, spec)):
            say(warning)
        self._queue = ChunkQueue(config.chunk.executed, hold.next, adaptive=actor.adaptive_execution)
        self._planner: Planner | None = None
        if actor.clock == "lockstep":
            self._planner = LockstepPlanner(self._queue, policy, actor.delay_ticks, before_decision)
        self._setup = ActorContext(
            env=env,
            spec=spec,
            cameras=recorded,
            policy=policy,
            queue=self._queue,
            hold=hold,
            interventions=self.interventions,
            clock=clock,
            failure_reward=config.reward.failure_reward,
            stop=stop,
            observer=observer,
            kept=spec.grippers if config.agent.gripper.kept else (),
            not_random=spec.grippers if config.agent.gripper.composition == "fixed" else (),
            garbage=self._garbage,
            window=config.chunk.returned if policy.image_keys else None,
            frames_every_tick=not isinstance(sink, NullSink) and _frames_every_tick(env, actor.frames),
        )
        self._episodes = 0
        self._ticks = 0  # executed so far; lockstep stamps count them, so that two runs record the same
        self._late = array.array("d")  # seconds, every realtime tick of the session
        self._missed_periods = 0
        self._say = say
        self._rate_judged = False  # of the environment

    def close(self) -> None:
        """End the inference thread, if there is one."""
        if self._garbage is not None:
            self._garbage.close()
        if self._inference is not None:
            self._inference.close()

    def lateness(self) -> Lateness:
        """Of every tick of the session; zero under the lockstep clock."""
        return Lateness.of(self._late, self._missed_periods)

    def run_episode(
        self, seed: int, *, explore: bool, record: bool = True, random_steps: int = 0, episode_id: str | None = None
    ) -> EpisodeSummary:
        """One episode from `reset(seed)`; its first `random_steps` ticks execute uniformly random commands.

        An error of the environment, the policy or the inference thread closes the episode as truncated and is
        raised. In real time the first one is preceded by the warm-up of inference: between a reset and its first tick
        nothing commands the robot.
        """
        planner = self._planner or self._warm_up(explore)
        with contextlib.nullcontext() if self._garbage is None else self._garbage.episode():
            return self._run(planner, seed, explore, record, random_steps, episode_id)

    def _run(
        self, planner: Planner, seed: int, explore: bool, record: bool, random_steps: int, episode_id: str | None
    ) -> EpisodeSummary:
        setup = self._setup
        began = setup.clock.now()
        episode_id = episode_id or f"{self._actor_id}-{self._episodes:06d}"
        begin = Begin(
            episode_id, self._config.robot.task, self.spec.name, self.spec.digest(), init_state=f"seed-{seed}"
        )
        recorder = EpisodeRecorder(self._sink if record else NullSink(), begin)
        first = LazyObservation(setup.env, setup.env.reset(seed=seed)[0], setup.cameras)
        planner.begin(recorder, explore)
        self.interventions.reset(seed)
        values, clipped = setup.policy.values, setup.policy.clipped
        deadlines = None
        with responsive_interpreter() if isinstance(planner, RealtimePlanner) else contextlib.nullcontext():
            if isinstance(planner, RealtimePlanner):
                deadlines = Deadlines(setup.clock, self.spec.dt)
                planner.start(deadlines)
            run = EpisodeRun(
                setup,
                planner,
                recorder,
                episode_id,
                first,
                np.random.default_rng([seed, self._episodes]),
                deadlines=deadlines,
                first_stamp=self._ticks * self.spec.dt,
            )
            self._episodes += 1
            try:
                end = run.run(random_steps)
            finally:
                self._ticks += recorder.length
                if deadlines is not None:
                    self._late.extend(deadlines.lateness)
                    self._missed_periods += deadlines.missed_periods
        tally = run.tally
        self._judge_rate(tally.step_seconds)
        if tally.gaps and deadlines is not None and self._say is not None:
            self._say(
                f"WARNING: the control loop stalled in episode {episode_id} (gaps={tally.gaps}, longest "
                f"{max(deadlines.lateness):.2f} s): the plan was dropped, and training sees no window across a gap"
            )
        return EpisodeSummary(
            seed=seed,
            length=end.length,
            total_reward=tally.total_reward,
            success=end.outcome is Outcome.SUCCESS,
            outcome=end.outcome,
            ended_by=end.outcome_by,
            human_ticks=self.interventions.ticks,
            segments=self.interventions.segments,
            hold_ticks=tally.hold_ticks,
            starved_ticks=tally.starved_ticks,
            clipped_share=(setup.policy.clipped - clipped) / max(1, setup.policy.values - values),
            gated_share=tally.gated_ticks / max(1, end.length),
            jerk=commanded_jerk(tally.actions, self.spec.control_hz),
            decisions=len(planner.delays),
            mean_delay=float(np.mean(planner.delays)) if planner.delays else 0.0,
            wall_seconds=setup.clock.now() - began,
            lateness=Lateness.of(deadlines.lateness, deadlines.missed_periods) if deadlines else Lateness(),
            gaps=tally.gaps,
        )

    def _judge_rate(self, step_seconds: list[float]) -> None:
        """Warn the operator, once, where the environment keeps a rate of its own or is too slow for its tick."""
        if self._say is not None and not self._rate_judged and len(step_seconds) >= RATE_TICKS:
            self._rate_judged = True
            if warning := slow_step_warning(step_seconds, self.spec.dt):
                self._say(warning)

    def _warm_up(self, explore: bool) -> Planner:
        """Compile and measure inference, then build the realtime planner; once, before the first reset."""
        setup, chunk = self._setup, self._config.chunk
        observation: Observation = {STATE: np.zeros(self.spec.state_dim, np.float32)}
        for camera in map(self.spec.camera, setup.cameras):
            observation[IMAGE_PREFIX + camera.name] = np.zeros((camera.height, camera.width, 3), np.uint8)
        policy, dt = setup.policy, self.spec.dt
        policy.refresh()
        seconds = measure_inference(lambda: policy.decide(observation, explore=explore), setup.clock)
        supports = policy.agent.supports_prefix
        mode = choose_inference(self._config.actor.inference, seconds, dt, chunk.executed, supports)
        if self._inference is None:
            self._inference = InferenceThread(policy, setup.clock)
        delay = DelayEstimate((math.ceil(s / dt) for s in seconds), longest=chunk.executed - 1)
        self._planner = RealtimePlanner(self._queue, self._inference, mode, delay)
        if self._garbage is not None:
            self._garbage.freeze()
        return self._planner
