"""The phases of a run, and the progress that a checkpoint records for a resume."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from serl_chunk.config.learner import LearnerConfig


class Phase(enum.StrEnum):
    """A phase of training; phases only go forward."""

    PRETRAIN = "pretrain"
    CRITIC_PRETRAIN = "critic pretrain"
    OFFLINE = "offline"
    WARMUP = "warm-up"
    CRITIC_WARMUP = "critic warm-up"
    TRAIN = "train"
    DONE = "done"


PRETRAINING = (Phase.PRETRAIN, Phase.CRITIC_PRETRAIN)


def phases_of(config: LearnerConfig, *, has_critic: bool) -> list[Phase]:
    """Return the phases that a run has, in their order."""
    online = config.online_steps != 0
    wanted = {
        Phase.PRETRAIN: config.pretrain_steps,
        Phase.CRITIC_PRETRAIN: has_critic and config.critic_pretrain_steps,
        Phase.OFFLINE: config.offline_steps,
        Phase.WARMUP: online,
        Phase.CRITIC_WARMUP: online and has_critic and config.critic_warmup_steps,
        Phase.TRAIN: online,
    }
    return [phase for phase, steps in wanted.items() if steps]


@dataclasses.dataclass(frozen=True)
class TrainingProgress:
    """The plain values that a checkpoint records in addition to the agent's state."""

    env_steps: int
    human_ticks: int
    episodes: int
    sampler_rng: Mapping[str, Any]
    # Absent in runs of before these were recorded.
    journal_position: int = 0
    human_steps_held: int = 0
    phase: str = ""
    phase_updates: int = 0
    offline_updates: int = 0
    updates_owed: float | None = None

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> TrainingProgress:
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in meta.items() if name in names})


def resumed_phase(
    config: LearnerConfig, saved: str, *, offline_updates: int, online_updates: int, over: bool, missed: bool
) -> Phase:
    """Return the phase in which a run goes on whose checkpoint was written in phase `saved`.

    `over`: no online update is to follow. `missed`: a stop cut short the evaluation that a phase ends with.
    """
    if saved in PRETRAINING:  # of step 0: nothing else has begun
        return Phase(saved)
    if not online_updates:
        more = offline_updates < config.offline_steps  # also where it was over, and `offline_steps` was raised
        if more or (missed and saved == Phase.OFFLINE):
            return Phase.OFFLINE
    if over:
        return Phase.TRAIN if missed and saved == Phase.TRAIN else Phase.DONE
    return Phase.WARMUP


def resume_hint(config: LearnerConfig, *, online_updates: int, steps_over: bool) -> str:
    """Return what to change so that a finished run goes on."""
    if config.online_steps == 0:
        if online_updates:
            return "after online updates the offline phase is over; do not set learner.online_steps=0 to go on online"
        return "raise learner.offline_steps to go on, or do not set learner.online_steps=0 to go on online"
    return f"raise learner.{'online_steps' if steps_over else 'max_steps'} to go on"
