"""Records of an episode: its executed steps in order with their decisions, and per-episode statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from serl_chunk.actor.clock import Lateness
from serl_chunk.types import IMAGE_PREFIX, Begin, End, Observation, Outcome, RecordSink, Source, Step


class RecordedFrame(NamedTuple):
    """The newest frame of a camera that an episode recorded whole."""

    tick: int
    number: int | None  # the robot's, see RobotEnv.frame_numbers
    image: np.ndarray  # uint8[H, W, 3]

    def is_still(self, image: np.ndarray, number: int | None) -> bool:
        """Whether a later read of the camera, uint8[H, W, 3], gave this frame again."""
        if None not in (number, self.number) and number != self.number:
            return False
        before, row = self.image, len(image) // 2
        if before is image:
            return True
        # One row tells most frames apart: two of a live camera differ by their noise alone.
        return before.shape == image.shape and bool((before[row] == image[row]).all() and (before == image).all())


class RepeatedFrames:
    """Takes the frames out of one episode's observations that it has recorded already."""

    def __init__(self) -> None:
        self._newest: dict[str, RecordedFrame] = {}

    def take_out(
        self, tick: int, observation: Observation, numbers: Mapping[str, int]
    ) -> tuple[Observation, dict[str, int] | None]:
        """The observation of `tick` without repeated frames, and their cameras with the ticks that recorded them."""
        repeats: dict[str, int] = {}
        for key, image in observation.items():
            if not key.startswith(IMAGE_PREFIX):
                continue
            camera = key.removeprefix(IMAGE_PREFIX)
            newest, number = self._newest.get(camera), numbers.get(camera)
            if newest is not None and newest.is_still(image, number):
                repeats[camera] = newest.tick
            else:
                self._newest[camera] = RecordedFrame(tick, number, image)
        if not repeats:
            return observation, None
        return {k: v for k, v in observation.items() if k.removeprefix(IMAGE_PREFIX) not in repeats}, repeats


class EpisodeRecorder:
    """Hands one episode's records to a sink.

    A step whose observation is being decided on waits for that decision, and later steps wait behind it, so
    that the sink sees consecutive ticks. The wait is bounded by the caller of `expect`: a decision that comes
    too late to be executed is given up. An episode without a single step leaves no record.
    """

    def __init__(self, sink: RecordSink, begin: Begin) -> None:
        self._sink = sink
        self._begin: Begin | None = begin
        self._decisions: dict[int, dict[str, np.ndarray]] = {}
        self._awaited: int | None = None
        self._waiting: list[Step] = []
        self._frames = RepeatedFrames()
        self.length = 0  # steps handed over or waiting

    def expect(self, tick: int) -> None:
        """The decision on the observation of `tick` is under way; `tick` is the present one."""
        self._awaited = tick

    def decided(self, tick: int, record: dict[str, np.ndarray]) -> None:
        """The decision on the observation of `tick` is there."""
        self._decisions[tick] = record
        if self._awaited == tick:
            self.release()

    def release(self) -> None:
        """Wait for no decision any longer."""
        self._awaited = None
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            self._hand_over(step)

    def step(self, step: Step, frame_numbers: Mapping[str, int] = MappingProxyType({})) -> None:
        """One executed tick. `frame_numbers`: by camera, where the robot numbers the frames of the observation."""
        observation, repeats = self._frames.take_out(step.tick, step.observation, frame_numbers)
        step = step._replace(observation=observation, repeats=repeats)
        self.length += 1
        if self._awaited is None:
            self._hand_over(step)
        else:
            self._waiting.append(step)

    def end(self, end: End, frame_numbers: Mapping[str, int] = MappingProxyType({})) -> None:
        """Close the episode. `frame_numbers`: as of `step`."""
        self.release()
        if end.final_observation is not None:
            final, repeats = self._frames.take_out(end.length, end.final_observation, frame_numbers)
            end = end._replace(final_observation=final, repeats=repeats)
        if self.length:
            self._sink.end(end)

    def _hand_over(self, step: Step) -> None:
        if self._begin is not None:
            self._sink.begin(self._begin)
            self._begin = None
        self._sink.step(step._replace(decision=self._decisions.pop(step.tick, None)))


class NullSink:
    """A RecordSink that keeps nothing: evaluation, warm-up."""

    def begin(self, record: Begin) -> None:
        """Ignore it."""

    def step(self, record: Step) -> None:
        """Ignore it."""

    def end(self, record: End) -> None:
        """Ignore it."""

    def amend(self, record: object) -> None:
        """Ignore it."""


class EpisodeSummary(NamedTuple):
    """One episode in figures. Ticks are counts; `*_share` are 0..1."""

    seed: int
    length: int  # recorded steps
    total_reward: float  # undiscounted sum of what was recorded, before scale and offset
    success: bool
    outcome: Outcome
    ended_by: str  # who ended it: environment, operator, learner, ...
    human_ticks: int  # under a human, idle ones included
    segments: int  # interventions
    hold_ticks: int  # recorded as holds: nothing planned, or a human who did not move the robot
    starved_ticks: int  # real time: the policy's turn and nothing planned, also before an episode's first chunk
    clipped_share: float  # of decided action values beyond the robot's limits
    gated_share: float  # of ticks on which the driver executed something else than it was commanded
    jerk: float  # root mean square third difference of executed actions, robot units / s^3
    decisions: int  # chunks that joined
    mean_delay: float  # ticks between a chunk's observation and its first executed action
    wall_seconds: float  # reset included
    lateness: Lateness
    gaps: int = 0  # stalls after which the plan was dropped and no window of training goes on


@dataclasses.dataclass
class EpisodeCounters:
    """Counts an episode while it runs."""

    total_reward: float = 0.0
    hold_ticks: int = 0
    starved_ticks: int = 0
    gated_ticks: int = 0
    gaps: int = 0
    actions: list[np.ndarray] = dataclasses.field(default_factory=list)
    step_seconds: list[float] = dataclasses.field(default_factory=list)  # real time: what the environment's steps took

    def count(self, source: Source, executed: np.ndarray, reward: float, *, starved: bool, gated: bool) -> None:
        """Account for one executed tick."""
        self.total_reward += reward
        self.hold_ticks += source == Source.HOLD
        self.starved_ticks += starved
        self.gated_ticks += gated
        self.actions.append(executed)


def commanded_jerk(actions: list[np.ndarray], hz: float) -> float:
    """Root mean square of the third difference of T actions float32[A], times hz^3; 0 for fewer than 4."""
    if len(actions) < 4:
        return 0.0
    third = np.diff(np.asarray(actions, np.float64), n=3, axis=0)
    return float(np.sqrt(np.mean(third**2)) * hz**3)
