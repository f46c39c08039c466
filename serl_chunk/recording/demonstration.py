"""A demonstration by hand on its way to where it is kept: from the human's first motion on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from serl_chunk.types import IMAGE_PREFIX, Begin, End, Observation, Outcome, RecordSink, Source, Step


class Demonstration(NamedTuple):
    """The figures of an episode by hand."""

    length: int  # ticks from the first human one on; 0: the human did not move the robot, and nothing is recorded
    human_ticks: int  # of them, those on which the human moved it
    idle_before: int  # ticks before them
    outcome: Outcome
    outcome_by: str


class DemonstrationSink:
    """A RecordSink that leaves out the ticks before the first one with source HUMAN, and counts from there.

    Tick 0 gets the newest frame of a camera that it only repeats. Idle ticks later on remain. No policy has the arm
    that the human lets go of: the human holds it, and so no `human_dims` are kept.
    """

    def __init__(self, sink: RecordSink) -> None:
        self._sink = sink
        self.clear()

    def clear(self) -> None:
        """Forget the last episode: the next one may end before its first step, and then leaves no record."""
        self._begin: Begin | None = None
        self._first: int | None = None  # tick that becomes tick 0
        self._length = self._human = self._idle = 0
        self._frames: dict[str, np.ndarray] = {}  # camera -> its newest frame before the first tick
        self._moved: dict[str, int] = {}  # camera -> the new tick that this frame was recorded with
        self.last = Demonstration(0, 0, 0, Outcome.UNKNOWN, "")

    def begin(self, record: Begin) -> None:
        self.clear()
        self._begin = record

    def step(self, record: Step) -> None:
        if self._first is None:
            if record.source is not Source.HUMAN:
                self._idle += 1
                for key, image in record.observation.items():
                    if key.startswith(IMAGE_PREFIX):
                        self._frames[key.removeprefix(IMAGE_PREFIX)] = image
                return
            assert self._begin is not None
            self._first = record.tick
            self._sink.begin(self._begin)
        first, tick = self._first, record.tick - self._first
        observation, repeats = self._since_first(tick, record.observation, record.repeats)
        decided = record.decision_tick - first if record.decision_tick >= first else -1
        self._length = tick + 1
        self._human += record.source is Source.HUMAN
        self._sink.step(
            record._replace(tick=tick, observation=observation, repeats=repeats, decision_tick=decided, human_dims=None)
        )

    def end(self, record: End) -> None:
        self.last = Demonstration(self._length, self._human, self._idle, record.outcome, record.outcome_by)
        if self._first is None:
            return
        final, repeats = record.final_observation, record.repeats
        if final is not None:
            final, repeats = self._since_first(self._length, final, repeats)
        self._sink.end(record._replace(length=self._length, final_observation=final, repeats=repeats))

    def _since_first(
        self, tick: int, observation: Observation, repeats: dict[str, int] | None
    ) -> tuple[Observation, dict[str, int] | None]:
        """Return an observation of the new `tick` whose repeats refer to new ticks alone."""
        assert self._first is not None
        frames, kept = {}, {}
        for camera, of in (repeats or {}).items():
            if of >= self._first:
                kept[camera] = of - self._first
            elif camera in self._moved:
                kept[camera] = self._moved[camera]
            else:
                frames[IMAGE_PREFIX + camera] = self._frames[camera]
                self._moved[camera] = tick
        return ({**observation, **frames} if frames else observation), kept or None
