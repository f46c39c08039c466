"""Policy servers for tests, with policies that need no network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from actor_helpers import SPEC

from serl_chunk.serving.observations import ObservationReader
from serl_chunk.serving.server import Answer, Policy, PolicyServer
from serl_chunk.types import IMAGE_PREFIX, STATE, Observation, RobotSpec, SerlChunkError

SIZES = {c.name: ((c.height, c.width),) for c in SPEC.cameras}
HORIZON = 8
MAX_BYTES = 100_000


class StatePolicy:
    """Its chunk repeats the state's first numbers, plus the mean of the cameras; a state of `fails` has an error.

    `seconds`: that each batch takes. `batches`: rows of each.
    """

    def __init__(self, spec: RobotSpec = SPEC, *, horizon: int = HORIZON, seconds: float = 0.0) -> None:
        self.reader = ObservationReader(
            spec, {c.name: ((c.height, c.width),) for c in spec.cameras}, task="the experiment's"
        )
        self.spec, self.horizon, self.seconds, self.version = spec, horizon, seconds, 3
        self.batches: list[int] = []
        self.tasks: list[str] = []

    def prepare(self, values: dict[str, Any]) -> Observation:
        observation, task = self.reader.read(values)
        self.tasks.append(task)
        return observation

    def decide(self, rows: Sequence[Observation]) -> list[Answer | SerlChunkError]:
        self.batches.append(len(rows))
        time.sleep(self.seconds)
        return [self.answer(row) for row in rows]

    def answer(self, row: Observation) -> Answer | SerlChunkError:
        if row[STATE][0] == -9:
            return SerlChunkError("this state has no answer")
        if row[STATE][0] == -99:
            raise ZeroDivisionError
        seen = sum(float(row[IMAGE_PREFIX + c.name].mean()) for c in self.spec.cameras) / 1000
        actions = np.tile(row[STATE][: self.spec.action_dim] + np.float32(seen), (self.horizon, 1))
        return Answer(actions.astype(np.float32), self.seconds, {"q": 0.5, "policy_version": self.version})


def server_of(
    policy: StatePolicy, *, port: int = 0, metadata: dict[str, Any] | None = None, **options: Any
) -> PolicyServer[Observation]:
    """A server on this machine, not started."""
    served = Policy(policy.prepare, policy.decide, {"robot": policy.spec.name} if metadata is None else metadata)
    return PolicyServer(served, host="127.0.0.1", port=port, **{"max_bytes": MAX_BYTES, **options})


def request(first: float = 0.25, *, value: int = 0, **changes: Any) -> dict[str, Any]:
    """ALOHA's form of an observation of the line robot."""
    images = {c.name: np.full((3, c.height, c.width), value, np.uint8) for c in SPEC.cameras}
    return {"state": np.array([first, 0.5, 0]), "images": images, "prompt": "a task", **changes}
