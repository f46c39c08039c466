"""Choice between policy and human on each tick, and account of the human ticks used."""

from __future__ import annotations

import numpy as np

from serl_chunk.robots.base import InterventionCommand, InterventionSource
from serl_chunk.types import DataError, Observation, RobotSpec


class Interventions:
    """Polls an intervention source on every tick and counts its ticks.

    A segment is a run of consecutive ticks under a human; all of them count, also idle ones (recorded as holds). After
    `max_human_ticks`, of which `used` were spent in earlier sessions of the run, the source is no longer polled, also
    within a segment; 0 sets no limit. An environment's own human ticks (`info["intervene_action"]`) are only counted.
    """

    def __init__(
        self, source: InterventionSource | None, spec: RobotSpec, max_human_ticks: int = 0, used: int = 0
    ) -> None:
        self._source, self._spec, self._limit, self._inside = source, spec, max_human_ticks, False
        self.total_ticks = used  # of the run
        self.ticks = self.segments = 0  # of the episode

    def reset(self, seed: int) -> None:
        self._inside, self.ticks, self.segments = False, 0, 0
        if self._source is not None:
            self._source.reset(seed)

    def restart(self) -> None:
        """Note that the robot did not follow for a while; the source ends its intervention, if it can."""
        restart = getattr(self._source, "restart", None)
        if restart is not None:
            restart()

    def poll(
        self, tick: int, observation: Observation, decision_tick: bool, last: np.ndarray
    ) -> InterventionCommand | None:
        """Return the human's command for this tick, or None; see `InterventionSource.poll`.

        Raises DataError for a command of another length, or one that is not finite.
        """
        if self._source is None or 0 < self._limit <= self.total_ticks:
            return None
        human = self._source.poll(tick, observation, decision_tick, last)
        if human is None:
            return None
        command = np.asarray(human.action, np.float32)
        if command.shape != (self._spec.action_dim,) or not np.isfinite(command).all():
            raise DataError(
                f"the source commanded {human.action} on tick {tick}, expected {self._spec.action_dim} finite numbers "
                f"for robot {self._spec.name!r}",
                parameter="actor.intervention",
            )
        if human.dims is not None and (np.shape(human.dims) != command.shape or not np.any(human.dims)):
            raise DataError(
                f"the source commanded dimensions {human.dims} on tick {tick}, expected {self._spec.action_dim} truth "
                f"values, one or more of them true, for robot {self._spec.name!r}",
                parameter="actor.intervention",
            )
        return human._replace(action=command)

    def count(self, human: bool) -> None:
        if human:
            self.total_ticks += 1
            self.ticks += 1
            self.segments += not self._inside
        self._inside = human
