"""Updates of the policy or the critic on demonstrations alone, before what a trainer does next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from serl_chunk.agents.spec import BatchSpec
from serl_chunk.learner.offline_data import InitialData, OfflineData
from serl_chunk.learner.schedule import PRETRAINING, Phase
from serl_chunk.learner.trainers.base import Trainer
from serl_chunk.replay.replay import BatchLoader, Half, Request
from serl_chunk.types import CameraSpec, ChunkBatch

if TYPE_CHECKING:
    from serl_chunk.learner.learner import Learner

logger = logging.getLogger(__name__)

ON_DATA = (*PRETRAINING, Phase.OFFLINE)  # phases of the demonstrations alone
SCAN = 20  # updates in one compiled call of a phase before training: amortises the dispatch
PIECE_BYTES = 256 << 20  # of their images; several such pieces are in memory at a time


def updates_at_once(batch_size: int, cameras: Sequence[CameraSpec]) -> int:
    """Return how many batches go to the device as one piece in the phases before training; 1 at least."""
    pixels = sum(c.height * c.width * 3 for c in cameras)  # of an observation; a window has two
    return max(1, min(SCAN, PIECE_BYTES // max(1, 2 * batch_size * pixels)))


class PretrainingTrainer(Trainer):
    """Base of trainers whose first phases train on demonstrations alone."""

    phase: Phase
    phases: Sequence[Phase]  # that this run has

    def __init__(self, learner: Learner, data: InitialData, *, threaded: bool, step: int | None) -> None:
        super().__init__(learner, data, threaded=threaded, step=step)
        self._agent, self._config = learner.agent, learner.config.learner
        c, replay = self._config, learner.replay
        self._data = OfflineData(replay, data, seek=step, seen=learner.value_range.demonstrations)
        self._rng = np.random.default_rng(learner.config.seed)
        prefetch = learner.config.replay.prefetch if threaded else 0
        self._batches = BatchLoader(replay, self._rng, put=learner.devices.put, prefetch=prefetch)
        self._updates_at_once = updates_at_once(c.batch_size, learner.preprocess.cameras)
        self._lengths = {  # updates of the phases that train the policy or the critic alone
            Phase.PRETRAIN: c.pretrain_steps,
            Phase.CRITIC_PRETRAIN: c.critic_pretrain_steps if self._agent.has_critic else 0,
        }
        self.phase, self.phase_updates = Phase.PRETRAIN, 0

    @property
    def done(self) -> bool:
        return self.phase is Phase.DONE

    def _enter(self, phase: Phase) -> None:
        self._batches.close()
        self.phase, self.phase_updates = phase, 0
        self._learner.metrics.event(f"phase: {phase}", self._learner.counters())
        if phase in self.phases:
            logger.info("phase: %s", self._phase_title)

    @property
    def _phase_title(self) -> str:
        """`3/5 warm-up`: the phase among those that this run has; the name alone where it is none of them."""
        number = f"{self.phases.index(self.phase) + 1}/{len(self.phases)} " if self.phase in self.phases else ""
        return f"{number}{self.phase}"

    def _requests(self, wanted: Mapping[str, BatchSpec], updates: int) -> list[Request]:
        size = self._config.batch_size
        return [
            Request(name, updates if s.each else 1, s.size or size, s.next_observations, s.frames, s.imitated)
            for name, s in wanted.items()
        ]

    @property
    def _half(self) -> Half | None:
        return "demo" if self.phase in ON_DATA else None

    def _next_batches(self, wanted: Mapping[str, BatchSpec], updates: int) -> dict[str, ChunkBatch]:
        with self._learner.stats.timed("sampling"):
            return self._batches.next(*self._requests(wanted, updates), half=self._half)

    def _pretrain(self, update: Callable[..., Any], name: str) -> bool:
        """Do some updates of the phase's `_lengths`, if any are left; returns whether it is over."""
        learner, n, total = self._learner, self._updates_at_once, self._lengths[self.phase]
        if self.phase_updates < total:
            wanted = self._agent.batch_spec(name)._replace(each=True)
            batch = self._next_batches({name: wanted}, n)[name]
            with learner.stats.first_call(f"updates of the {name}"):
                learner.state, metrics = update(learner.state, learner.base, batch)
            self.phase_updates += n
            learner.updated(n, metrics)
        return self.phase_updates >= total

    def close(self) -> None:
        self._batches.close()
        self._data.close()
