"""The training loop: how much of what, in which order, and what is written of it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.fields import CRITIC, Group, Requirement, acting, require, setting

_OF_CRITIC = {"requires": CRITIC, "off": 0}
_LIMITED = Requirement(
    "a number in learner.utd_ratio (none: neither side waits)", lambda c: c.learner.utd_ratio is not None
)


@dataclasses.dataclass(frozen=True)
class LearnerConfig(Group, path="learner."):
    """The training loop. Names shared with HIL-SERL's train_rlpd mean the same."""

    batch_size: int = setting(256, "windows per critic update, an even number", least=1)
    policy_batch_size: int | None = setting(
        None, "windows of a policy's update; none: those of the last critic update before it", least=1
    )
    accumulate: int = setting(1, "micro-batches that an update's gradients are summed over", least=1)
    cta_ratio: int = setting(1, "critic updates in one compiled update, the last followed by the policy's", least=1)
    utd_ratio: float | None = setting(0.25, "critic updates per inserted online step; none: no side waits", above=0)
    max_lag_steps: int = setting(200, "lockstep steps ahead of the updates they allow", unit="steps", requires=_LIMITED)
    max_steps: int = setting(20_000, "critic updates of the online phase", unit="updates", least=1)
    training_starts: int = setting(100, "online steps before training", unit="steps", least=0)
    steps_per_update: int = setting(50, "critic updates between publications", unit="updates", least=1)
    pretrain_steps: int = setting(0, "policy-only (BC) updates before the first snapshot", unit="updates", least=0)
    critic_pretrain_steps: int = setting(0, "critic updates before the first snapshot", least=0, **_OF_CRITIC)
    offline_steps: int = setting(0, "updates of all before the first snapshot", unit="updates", least=0)
    online_steps: int | None = setting(None, "end of training; none: max_steps; 0: offline only", unit="steps", least=0)
    eval_interval: int = setting(0, "between the learner's evaluations (simulators); 0: none", unit="updates", least=0)
    eval_episodes: int = setting(50, "episodes of each of these evaluations", unit="episodes", least=1)
    eval_mode: Literal["mean", "sampled"] = setting("mean", "evaluate without or with exploration noise")
    video_episodes: int = setting(0, "episodes of each evaluation that are filmed", unit="episodes", least=0)
    warmup_episodes: int = setting(0, "episodes with the frozen pretrained policy", unit="episodes", least=0)
    random_steps: int = acting(0, "uniform random actions at first; not on a real robot", unit="steps", least=0)
    checkpoint_period: int = setting(5_000, "updates between checkpoints; 0: only the last", unit="updates", least=0)
    keep_checkpoints: int = setting(20, "checkpoints that are kept", least=1)
    log_period: int = setting(100, "critic updates between metric rows", unit="updates", least=1)

    def _check(self) -> None:
        # fmt: off
        require(self.online_steps != 0 or self.offline_steps + self.pretrain_steps + self.critic_pretrain_steps > 0,
            "learner.online_steps",
            "0 trains on demonstrations alone. Set learner.offline_steps.")
        require(not self.online_steps or self.online_steps > self.training_starts, "learner.online_steps",
            f"{self.online_steps} is not above learner.training_starts={self.training_starts}: training would end "
            "before it begins. Raise the one or lower the other.")
        require(self.video_episodes <= self.eval_episodes, "learner.video_episodes",
            f"must be at most learner.eval_episodes={self.eval_episodes}, got {self.video_episodes}")
        for name, size in (("batch_size", self.batch_size), ("policy_batch_size", self.policy_batch_size)):
            require(size is None or size % 2 == 0, f"learner.{name}", f"must be even, got {size}")
            require(size is None or size % self.accumulate == 0, "learner.accumulate",
                f"must divide learner.{name}={size}, got {self.accumulate}")
        # A limiter that gives the actor fewer steps than one update needs would stop both sides permanently.
        need = 0 if self.utd_ratio is None else self.cta_ratio / self.utd_ratio
        require(self.max_lag_steps >= need, "learner.max_lag_steps",
            f"must be at least cta_ratio/utd_ratio={need:g}, got {self.max_lag_steps}: the actor would wait for an "
            "update that waits for the actor")
