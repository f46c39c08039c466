"""The phases of a run."""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    """Where a run is; phases only go forward."""

    PRETRAIN = "pretrain"
    CRITIC_PRETRAIN = "critic pretrain"
    OFFLINE = "offline"
    WARMUP = "warm-up"
    CRITIC_WARMUP = "critic warm-up"
    TRAIN = "train"
    DONE = "done"
