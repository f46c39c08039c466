"""The training loop: how much of what, in which order, and what is written of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from serl_chunk.config.validation import require, require_choices


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """The training loop. Names shared with HIL-SERL's train_rlpd mean the same."""

    batch_size: int = 256  # windows per critic update
    cta_ratio: int = 1  # critic updates in one compiled update, the last followed by the policy's
    utd_ratio: float = 0.25  # critic updates per inserted online step; may be below 1 (the rate limiter)
    max_lag_steps: int = 200  # online steps lockstep actors may together run ahead of the updates they entitle to
    max_steps: int = 20_000  # critic updates of the online phase, those of the offline phase not among them
    training_starts: int = 100  # online steps before training
    steps_per_update: int = 50  # critic updates between publications
    pretrain_steps: int = 0  # policy-only (BC) updates on demonstrations before the first snapshot
    critic_pretrain_steps: int = 0  # critic updates on demonstrations before the first snapshot
    offline_steps: int = 0  # updates of everything (critic and policy) on demonstrations before the first snapshot
    online_steps: int | None = None  # online steps after which training ends; none: max_steps alone; 0: offline only
    eval_interval: int = 0  # updates between evaluations by the learner's own process (simulators); 0: none
    eval_episodes: int = 50
    # What is evaluated, here and by --eval_checkpoint_step: the deterministic policy, or with its exploration noise.
    eval_mode: Literal["mean", "sampled"] = "mean"
    video_episodes: int = 0  # of each evaluation, how many are filmed
    warmup_episodes: int = 0  # episodes with the frozen pretrained policy
    critic_warmup_steps: int = 0  # critic-only updates after the warm-up
    random_steps: int = 0  # HIL-SERL: uniform random actions at first; refused on a real robot
    checkpoint_period: int = 5_000  # critic updates between checkpoints; 0: only the last
    keep_checkpoints: int = 20
    log_period: int = 100  # critic updates between metric rows
    actor_timeout: float = 30.0  # seconds of silence after which an actor's open episode is closed as truncated

    def __post_init__(self) -> None:
        require_choices(self, "learner.")
        for name in (
            "batch_size",
            "cta_ratio",
            "eval_episodes",
            "max_steps",
            "steps_per_update",
            "keep_checkpoints",
            "log_period",
        ):
            require(getattr(self, name) >= 1, f"learner.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("training_starts", "pretrain_steps", "critic_pretrain_steps", "warmup_episodes",
                     "critic_warmup_steps", "random_steps", "checkpoint_period", "offline_steps", "eval_interval",
                     "video_episodes"):  # fmt: skip
            require(getattr(self, name) >= 0, f"learner.{name} must be >= 0, got {getattr(self, name)}")
        require(
            self.online_steps is None or self.online_steps >= 0,
            f"learner.online_steps must be >= 0 (0: offline only) or none, got {self.online_steps}",
        )
        require(
            self.online_steps != 0 or self.offline_steps + self.pretrain_steps + self.critic_pretrain_steps > 0,
            "learner.online_steps=0 trains on demonstrations alone: set learner.offline_steps",
        )
        require(
            not self.online_steps or self.online_steps > self.training_starts,
            f"learner.online_steps={self.online_steps} is not above learner.training_starts={self.training_starts}: "
            "training would end before it begins. Raise the one or lower the other.",
        )
        require(
            self.video_episodes <= self.eval_episodes,
            f"learner.video_episodes={self.video_episodes} is above learner.eval_episodes={self.eval_episodes}",
        )
        require(self.batch_size % 2 == 0, f"learner.batch_size must be even, got {self.batch_size}")
        require(0 < self.utd_ratio < math.inf, f"learner.utd_ratio must be positive and finite, got {self.utd_ratio}")
        # A limiter that lets the actor run less ahead than one update needs would stop both sides for ever.
        need = self.cta_ratio / self.utd_ratio
        require(
            self.max_lag_steps >= need,
            f"learner.max_lag_steps={self.max_lag_steps} is below cta_ratio/utd_ratio={need:g}: the actor would wait "
            f"for an update that waits for the actor. Set max_lag_steps to at least {need:g}.",
        )
        require(self.actor_timeout > 0, f"learner.actor_timeout must be positive seconds, got {self.actor_timeout}")
