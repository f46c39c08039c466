"""The ticks of one episode: choose an action, execute it, record what happened."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping

import numpy as np

from serl_chunk.actor.chunk_queue import ChunkQueue
from serl_chunk.actor.clock import Clock, Deadlines
from serl_chunk.actor.garbage import GarbageSchedule
from serl_chunk.actor.hold import HoldPolicy
from serl_chunk.actor.intervention import Interventions
from serl_chunk.actor.planner import Planner
from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.actor.recorder import EpisodeCounters, EpisodeRecorder
from serl_chunk.robots.base import RobotEnv
from serl_chunk.types import IMAGE_PREFIX, STATE, DataError, End, Observation, Outcome, RobotSpec, Source, Step


@dataclasses.dataclass(frozen=True)
class ActorContext:
    """What an actor's episodes share; see `EpisodeRunner` for the meaning."""

    env: RobotEnv
    spec: RobotSpec
    cameras: tuple[str, ...]
    policy: ChunkPolicy
    queue: ChunkQueue
    hold: HoldPolicy
    interventions: Interventions
    clock: Clock
    failure_reward: float
    stop: Callable[[], str | None]
    observer: Callable[[int], None] | None
    kept: tuple[int, ...]  # action dimensions that keep what they have: measured at reset, then as last executed
    not_random: tuple[int, ...]  # those that do so while random actions are executed
    garbage: GarbageSchedule | None = None  # of the realtime clock
    window: int | None = None  # steps of a return, whose end an agent with cameras looks at as well; None: it has none
    frames_every_tick: bool = False  # cameras are read on every tick


class LazyObservation:
    """One tick's observation; its cameras are read when they are needed, and once."""

    def __init__(self, env: RobotEnv, raw: Observation, cameras: tuple[str, ...]) -> None:
        self._env, self._raw, self._cameras = env, raw, cameras
        # The driver may reuse its buffer; the record must not change afterwards.
        self.observation: Observation = {STATE: np.array(raw[STATE], np.float32)}
        self.frame_numbers: Mapping[str, int] = {}  # of the frames in `observation`, where the robot numbers them

    def with_frames(self) -> Observation:
        """The observation with the frames of every recorded camera."""
        keys = [IMAGE_PREFIX + c for c in self._cameras]
        if any(k not in self.observation for k in keys):
            frames = self._raw if all(k in self._raw for k in keys) else self._env.read_images(self._cameras)
            self.observation = {**self.observation, **{k: frames[k] for k in keys}}
            self.frame_numbers = dict(self._env.frame_numbers())
        return self.observation

    def take(self, frames: Observation) -> bool:
        """Frames that were kept for this tick, the next one having begun; whether all recorded cameras have theirs."""
        keys = [IMAGE_PREFIX + c for c in self._cameras]
        self.observation = {**{k: frames[k] for k in keys if k in frames}, **self.observation}
        return all(k in self.observation for k in keys)


@dataclasses.dataclass(frozen=True)
class TickAction:
    """Who acts on a tick, and how."""

    command: np.ndarray  # float32[A], robot units, before the limits
    source: Source
    decision_tick: int = -1
    version: int = -1
    by_human: bool = False


class EpisodeRun:
    """One episode after its reset.

    Args:
        setup: devices and settings.
        planner: lockstep or realtime.
        recorder: of this episode.
        first: the observation of tick 0.
        rng: of random commands.
        deadlines: of the realtime clock; None: lockstep.
        first_stamp: lockstep, seconds of tick 0.
    """

    def __init__(
        self,
        setup: ActorContext,
        planner: Planner,
        recorder: EpisodeRecorder,
        episode_id: str,
        first: LazyObservation,
        rng: np.random.Generator,
        *,
        deadlines: Deadlines | None,
        first_stamp: float,
    ) -> None:
        self._setup, self._planner, self._recorder = setup, planner, recorder
        self._episode_id, self._moment, self._rng = episode_id, first, rng
        self._deadlines, self._first_stamp = deadlines, first_stamp
        self._hold = setup.hold.initial(first.observation[STATE])
        self._low = np.array(setup.spec.action_low, np.float32)
        self._high = np.array(setup.spec.action_high, np.float32)
        self._by_human = False  # whether a human had the previous tick
        self._decided_at = 0  # decision tick of the last executed chunk
        self._window_ends: set[int] = set()  # ticks ahead whose frames are recorded although no action depends on them
        self._end: End | None = None
        self._lost_ticks = 0  # before this tick, where it comes after a gap: its observation may be from before it
        self.tally = EpisodeCounters()
        if setup.frames_every_tick:
            first.with_frames()

    def run(self, random_steps: int) -> End:
        """Every tick up to the end record. An error closes the episode as truncated, and is raised."""
        try:
            for tick in itertools.count():
                self._run_tick(tick, random_steps)
                if self._end is not None:
                    return self._end
        except BaseException:
            if self._end is None:
                self._close(self._moment.observation, outcome_by="crash")
            raise
        raise AssertionError("itertools.count() does not end")

    def _run_tick(self, tick: int, random_steps: int) -> None:
        setup, moment = self._setup, self._moment
        if self._deadlines is None:
            stamp = self._first_stamp + tick * setup.spec.dt
        else:
            self._lost_ticks = self._deadlines.wait(tick)
            if self._lost_ticks:
                self.tally.gaps += 1
                self._planner.flush()
            stamp = setup.clock.now()
        if setup.observer is not None:
            setup.observer(tick)
        if tick in self._window_ends:
            self._window_ends.discard(tick)
            moment.with_frames()
        choice = self._choose(tick, random_steps)
        stopped_by = setup.stop()
        if stopped_by is not None:
            self._close(moment.with_frames(), outcome_by=stopped_by)
            return
        if self._deadlines is not None and self._deadlines.stalled(self._deadlines.began):
            # What was chosen is of a moment that is long past, a human's command too. The next tick finds the gap.
            self._planner.flush()
            choice = TickAction(self._hold, Source.HOLD, version=choice.version, by_human=choice.by_human)
        command = np.clip(choice.command, self._low, self._high).astype(np.float32)
        before = 0.0 if self._deadlines is None else setup.clock.now()
        raw, env_reward, terminated, truncated, info = setup.env.step(command)
        if self._deadlines is not None:
            self.tally.step_seconds.append(setup.clock.now() - before)
        executed = np.array(info.get("executed_action", command), np.float32)
        gated = not np.array_equal(executed, command)
        if "intervene_action" in info:  # the environment replaced our action by a human's, as HIL-SERL's do
            choice = TickAction(command, Source.HUMAN, version=choice.version, by_human=True)
            # A driver that reports what it executed reports what it made of the human's command.
            executed = np.array(info.get("executed_action", info["intervene_action"]), np.float32)
            gated = not np.array_equal(executed, np.asarray(info["intervene_action"], np.float32))
            self._planner.flush()
            if moment.take(info.get("intervene_images", {})):
                self._note_window(tick)
        setup.interventions.count(choice.by_human)
        success, failure = bool(info.get("success")), bool(info.get("failure"))
        reward = setup.failure_reward if failure and not success else float(env_reward)
        starved = self._deadlines is not None and choice.source is Source.HOLD and not choice.by_human
        self.tally.count(choice.source, executed, reward, starved=starved, gated=gated)
        self._recorder.step(
            Step(
                tick=tick,
                observation=moment.observation,
                action=executed,
                reward=reward,
                source=choice.source,
                decision_tick=choice.decision_tick,
                policy_version=choice.version,
                policy_age=setup.policy.age(choice.version, time.monotonic()),
                stamp=stamp,
                lost_ticks=self._lost_ticks,
            ),
            moment.frame_numbers,
        )
        self._hold = setup.hold.next(executed)
        self._moment = LazyObservation(setup.env, raw, setup.cameras)
        self._lost_ticks = 0
        if setup.frames_every_tick:  # now, when the state was measured, and in the time that the step leaves
            self._moment.with_frames()
        if success or failure or terminated or truncated:
            if self._deadlines is not None and self._deadlines.stalled(before):
                self._lost_ticks = 1  # no tick follows that could find the gap
            outcome = Outcome.SUCCESS if success else Outcome.FAILURE if failure else Outcome.UNKNOWN
            self._close(self._moment.with_frames(), terminated=success or failure or bool(terminated), outcome=outcome)
        elif choice.source is Source.HOLD and setup.garbage is not None:
            setup.garbage.holding()

    def _choose(self, tick: int, random_steps: int) -> TickAction:
        """Choice of who acts on `tick`: a human first, then random exploration, then the policy."""
        setup, moment = self._setup, self._moment
        present = setup.policy.version
        human = setup.interventions.poll(tick, moment.observation, self._would_decide(tick))
        self._by_human = human is not None
        if human is not None:
            self._planner.flush()
            self._look(tick)
            asked = np.asarray(human.action, np.float32)
            if asked.shape != self._low.shape or not np.isfinite(asked).all():
                raise DataError(
                    f"the intervention source (actor.intervention) commanded {human.action} on tick {tick}; a command "
                    f"of robot {setup.spec.name!r} is {len(self._low)} finite numbers"
                )
            return TickAction(asked, Source.HOLD if human.idle else Source.HUMAN, version=present, by_human=True)
        if tick < random_steps:
            if tick % setup.queue.execute_steps == 0:  # frames as often as a policy would decide
                self._look(tick)
            command = self._kept(self._rng.uniform(self._low, self._high), setup.not_random)
            return TickAction(command, Source.RANDOM, version=present)
        if self._lost_ticks:  # the next observation is the first to decide on
            return TickAction(self._hold, Source.HOLD, version=present)
        self._planner.plan(tick, lambda: self._look(tick), self._hold)
        queued = setup.queue.pop(tick)
        if queued is None:
            return TickAction(self._hold, Source.HOLD, version=setup.policy.version)
        self._decided_at = queued.decision_tick
        return TickAction(self._kept(queued.action, setup.kept), Source.POLICY, queued.decision_tick, queued.version)

    def _look(self, tick: int) -> Observation:
        """The observation of `tick` with frames: it is acted on, and a window begins there if its end has some."""
        self._note_window(tick)
        return self._moment.with_frames()

    def _note_window(self, tick: int) -> None:
        if self._setup.window is not None:
            self._window_ends.add(tick + self._setup.window)

    def _kept(self, command: np.ndarray, dimensions: tuple[int, ...]) -> np.ndarray:
        """`command` with `dimensions`, which none but a human changes (`agent.gripper.mode=fixed`), as they are."""
        if not dimensions:
            return command
        command, kept = np.array(command), list(dimensions)
        command[kept] = self._hold[kept]
        return command

    def _would_decide(self, tick: int) -> bool:
        """Whether the policy would decide at `tick`, had an intervention not emptied its queue."""
        if self._by_human:
            return (tick - self._decided_at) % self._setup.queue.execute_steps == 0
        return self._setup.queue.remaining(tick) == 0

    def _close(
        self,
        final: Observation,
        *,
        terminated: bool = False,
        outcome: Outcome = Outcome.UNKNOWN,
        outcome_by: str = "environment",
    ) -> None:
        # A value after a gap is no bootstrap of the step before it; what a termination gives, it gives all the same.
        last = None if self._lost_ticks and not terminated else final
        end = End(
            self._episode_id, self._recorder.length, last, terminated, not terminated, outcome, outcome_by=outcome_by
        )
        self._end = end
        self._recorder.end(end, self._moment.frame_numbers)
