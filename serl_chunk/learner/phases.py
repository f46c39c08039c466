"""The phases of a run, and the progress that a checkpoint records for a resume."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from serl_chunk.config.learner import LearnerConfig


class Phase(enum.StrEnum):
    """Where a run is; phases only go forward."""

    PRETRAIN = "pretrain"
    CRITIC_PRETRAIN = "critic pretrain"
    OFFLINE = "offline"
    WARMUP = "warm-up"
    CRITIC_WARMUP = "critic warm-up"
    TRAIN = "train"
    DONE = "done"


PRETRAINING = (Phase.PRETRAIN, Phase.CRITIC_PRETRAIN)


@dataclasses.dataclass(frozen=True)
class TrainingProgress:
    """What a checkpoint notes beside the agent's state; plain values."""

    env_steps: int
    human_ticks: int
    episodes: int
    sampler_rng: Mapping[str, Any]
    # Runs of before these were noted do not have them.
    journal_position: int = 0
    human_steps_held: int = 0
    phase: str = ""
    phase_updates: int = 0
    offline_updates: int = 0
    updates_owed: float | None = None

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> TrainingProgress:
        """From a checkpoint's notes, among which others may be."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in meta.items() if name in names})

    def notes(self) -> dict[str, Any]:
        """What `of` takes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def resumed_phase(
    config: LearnerConfig, saved: str, *, offline_updates: int, online_updates: int, over: bool, missed: bool
) -> Phase:
    """Where a run goes on whose checkpoint was written in phase `saved`.

    `over`: no online update is to follow. `missed`: a stop cut short the evaluation that a phase ends with.
    """
    if saved in PRETRAINING:  # of step 0: nothing else has begun
        return Phase(saved)
    if not online_updates:
        more = offline_updates < config.offline_steps  # also where it was over, and more of it is wanted now
        if more or (missed and saved == Phase.OFFLINE):
            return Phase.OFFLINE
    if over:
        return Phase.TRAIN if missed and saved == Phase.TRAIN else Phase.DONE
    return Phase.WARMUP


def resume_hint(config: LearnerConfig, *, online_updates: int, steps_over: bool) -> str:
    """What to change so that a finished run goes on."""
    if config.online_steps == 0 and online_updates:
        return "after online updates the offline phase is over; leave --online_steps 0 out to go on online"
    if config.online_steps == 0:
        return "raise --offline_steps to go on, or leave --online_steps 0 out to go on online"
    if steps_over:
        return "raise --online_steps to go on"
    return "raise --config.learner.max_steps to go on"
