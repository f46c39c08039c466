"""A learner's end that a test steers."""

from __future__ import annotations

import time

import numpy as np
from actor_helpers import ListSink

from serl_chunk.types import End, PolicyOrigin, SerlChunkError, Snapshot


class FakeLink(ListSink):
    """A learner's end that the test steers. `looks` counts how often the actor asked for each thing."""

    def __init__(self, *, snapshot_after=0, room_after=0):
        super().__init__()
        self.snapshot_after, self.room_after = snapshot_after, room_after
        self.looks = {"latest": 0, "can_begin": 0, "allowance": 0}
        self.finished: str | None = None
        self.busy = ""
        self.error: SerlChunkError | None = None
        self.allowed_steps = None  # called on every look at the allowance
        self.flushed = []
        self.delivers = True
        self.waiting = lambda begun: ""
        self.origin = PolicyOrigin()

    def latest(self):
        self.looks["latest"] += 1
        if self.looks["latest"] <= self.snapshot_after:
            return None
        version = len([r for r in self.records if isinstance(r, End)]) + 1
        arrived = time.monotonic() - 100 * version
        return Snapshot(version, {"bias": np.float32(version)}, arrived, self.origin)

    @property
    def allowance(self):
        self.looks["allowance"] += 1
        return self.allowed_steps() if self.allowed_steps else None

    @property
    def steps_recorded(self):
        return len(self.steps)

    def can_begin(self):
        self.looks["can_begin"] += 1
        return self.looks["can_begin"] > self.room_after, "the spool is full"

    def backlog(self, *, begun):
        return self.waiting(begun)

    def flush(self, timeout):
        self.flushed.append(timeout)
        return self.delivers

    def close(self):
        pass
