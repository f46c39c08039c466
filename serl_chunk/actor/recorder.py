"""Records of an episode: its executed steps in order with their decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serl_chunk.console.feed import LiveFeed
from serl_chunk.robots.base import RobotEnv
from serl_chunk.types import IMAGE_PREFIX, STATE, Begin, End, Observation, RecordSink, Step

if TYPE_CHECKING:
    from serl_chunk.actor.policy import Decision


class RecordedFrame(NamedTuple):
    """The newest frame of a camera that an episode recorded whole."""

    tick: int
    number: int | None  # the robot's, see RobotEnv.frame_numbers
    image: np.ndarray  # uint8[H, W, 3]

    def is_still(self, image: np.ndarray, number: int | None) -> bool:
        """Return whether a later read of the camera, uint8[H, W, 3], gave this frame again."""
        if None not in (number, self.number) and number != self.number:
            return False
        before, row = self.image, len(image) // 2
        if before is image:
            return True
        # One row tells most frames apart: two of a live camera differ by their noise alone.
        return before.shape == image.shape and bool((before[row] == image[row]).all() and (before == image).all())


class RepeatedFrames:
    """Takes the frames out of one episode's observations that were recorded already."""

    def __init__(self) -> None:
        self._newest: dict[str, RecordedFrame] = {}

    def take_out(
        self, tick: int, observation: Observation, numbers: Mapping[str, int]
    ) -> tuple[Observation, dict[str, int] | None]:
        """Return the observation of `tick` without repeated frames, and their cameras with the ticks they are of."""
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


class RecordedCameras(NamedTuple):
    """Cameras whose frames an episode records, and when."""

    names: tuple[str, ...]
    every_tick: bool  # else where something looks
    window: int | None  # ticks after a look at whose end frames are recorded as well


class LazyObservation:
    """One tick's observation; its cameras are read when they are needed, and once."""

    def __init__(self, env: RobotEnv, raw: Observation, cameras: tuple[str, ...]) -> None:
        self._env, self._raw, self._cameras = env, raw, cameras
        self._keys = [IMAGE_PREFIX + c for c in cameras]
        # The driver may reuse its buffer; the record must not change afterwards.
        self.observation: Observation = {STATE: np.array(raw[STATE], np.float32)}
        self.frame_numbers: Mapping[str, int] = {}  # of the frames in `observation`, where the robot numbers them

    def with_frames(self) -> Observation:
        if any(k not in self.observation for k in self._keys):
            there = all(k in self._raw for k in self._keys)
            frames = self._raw if there else self._env.read_images(self._cameras)
            self.observation = {**self.observation, **{k: frames[k] for k in self._keys}}
            self.frame_numbers = dict(self._env.frame_numbers())
        return self.observation

    def look(self, cameras: Sequence[str]) -> Observation:
        """Return the observation with frames of `cameras`, of which those that are read now are not recorded."""
        keys = [IMAGE_PREFIX + c for c in cameras]
        known = self._raw if all(k in self._raw for k in keys) else self.observation
        missing = [c for c, k in zip(cameras, keys, strict=True) if k not in known]
        frames = self._env.read_images(missing) if missing else {}
        return {STATE: self.observation[STATE], **{k: frames[k] if k in frames else known[k] for k in keys}}

    def closing(self, cameras: Sequence[str]) -> Observation:
        """Return the observation with its frames, as `with_frames`, and with those of `cameras`."""
        frames = self.with_frames()  # first: what it reads is not read twice
        return {**self.look(cameras), **frames}

    def take(self, frames: Observation) -> bool:
        """Add frames that were kept for this tick; True where all recorded cameras have theirs."""
        self.observation = {**{k: frames[k] for k in self._keys if k in frames}, **self.observation}
        return all(k in self.observation for k in self._keys)


class EpisodeRecorder:
    """Hands one episode's records to a sink.

    A step whose observation is being decided on waits for that decision, and later steps wait behind it, so that the
    sink sees consecutive ticks. The caller of `expect` bounds the wait by `release`. An episode without a single step
    leaves no record.

    Args:
        on_decision: called with the record of each decision, once it is to be executed.
        feed: also shows the episode, at once.
    """

    def __init__(
        self, sink: RecordSink, begin: Begin, on_decision: Callable[[dict[str, np.ndarray]], None] | None = None,
        feed: LiveFeed | None = None,
    ) -> None:  # fmt: skip
        self._sink, self._on_decision, self._feed = sink, on_decision, feed
        self._begin: Begin | None = begin
        self.task = begin.task
        self._decisions: dict[int, dict[str, np.ndarray]] = {}
        self._awaited: int | None = None
        self._waiting: list[Step] = []
        self._frames = RepeatedFrames()
        self.length = 0  # steps handed over or waiting
        self.values = self.clipped = 0  # of the decisions' actions, and how many of them were beyond the limits
        if feed is not None:
            feed.begin(begin)

    def expect(self, tick: int) -> None:
        """Wait for the decision on the observation of `tick`, the current one."""
        self._awaited = tick

    def decided(self, decision: Decision) -> None:
        """Record what a decision computed."""
        self._decisions[decision.tick] = decision.record
        self.values += decision.actions.size
        self.clipped += decision.clipped
        if self._on_decision is not None:
            self._on_decision(decision.record)
        if self._feed is not None:
            self._feed.decided(decision.tick, decision.actions, decision.record)
        if self._awaited == decision.tick:
            self.release()

    def release(self) -> None:
        self._awaited = None
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            self._hand_over(step)

    def step(self, step: Step, frame_numbers: Mapping[str, int] = MappingProxyType({})) -> None:
        """Record an executed tick. `frame_numbers`: by camera, where the robot numbers the observation's frames."""
        if self._feed is not None:
            self._feed.step(step, frame_numbers)
        observation, repeats = self._frames.take_out(step.tick, step.observation, frame_numbers)
        step = step._replace(observation=observation, repeats=repeats)
        self.length += 1
        if self._awaited is None:
            self._hand_over(step)
        else:
            self._waiting.append(step)

    def end(self, end: End, frame_numbers: Mapping[str, int] = MappingProxyType({})) -> None:
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
    """A RecordSink that keeps nothing: evaluation."""

    def begin(self, record: Any) -> None: ...

    def step(self, record: Step) -> None: ...

    end = begin
