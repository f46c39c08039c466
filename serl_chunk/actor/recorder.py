"""From executed ticks to records: an episode's steps in order, each with its decision where it has one."""

from __future__ import annotations

import numpy as np

from serl_chunk.types import Begin, End, RecordSink, Step


class EpisodeRecorder:
    """Hands one episode's records to a sink.

    A step whose observation is being decided on waits for that decision, and later steps wait behind it, so
    that the sink sees consecutive ticks. The wait is bounded by whoever calls `expect`: a decision that comes
    too late to be executed is given up. An episode without a single step leaves no record.
    """

    def __init__(self, sink: RecordSink, begin: Begin) -> None:
        self._sink = sink
        self._begin: Begin | None = begin
        self._decisions: dict[int, dict[str, np.ndarray]] = {}
        self._awaited: int | None = None
        self._waiting: list[Step] = []
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

    def step(self, step: Step) -> None:
        """One executed tick."""
        self.length += 1
        if self._awaited is None:
            self._hand_over(step)
        else:
            self._waiting.append(step)

    def end(self, end: End) -> None:
        """Close the episode."""
        self.release()
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
