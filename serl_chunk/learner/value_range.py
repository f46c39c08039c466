"""Whether returns lie in the range that a bounded critic can say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.learner.episode import effective_rewards, returns_to_go
from serl_chunk.types import Episode, Outcome

_DUST = 1e-6  # of sums of float32 rewards


class ValueRange:
    """Says once where a realised return lies outside of `agent.critic.value_low` .. `value_high`.

    Targets beyond the range are clipped: a critic of [0, 1] cannot tell a reward of 10 from one of 1. The configuration
    is checked against rewards of 0 and 1; what a user's environment gives shows in its episodes alone.
    """

    def __init__(self, config: ExperimentConfig, say: Callable[[str], None]) -> None:
        c = config.agent.critic
        self._low, self._high, self._loss = c.value_low, c.value_high, c.loss
        self._reward, self._discount, self._say = config.reward, config.discount, say
        self._silent = c.loss == "squared"

    def online(self, episode_id: str, least: float, most: float) -> None:
        """Look at the least and the greatest return of an online episode."""
        self._check(least, most, f"episode {episode_id}")

    def demonstrations(self, episodes: Sequence[Episode]) -> None:
        """Look at every episode of demonstrations, or of a part of a data set."""
        for begin, steps, end in episodes:
            if self._silent:
                return
            if not steps.n:
                continue
            rewards = np.array(steps.reward, np.float32)
            if end.reward is not None:
                rewards[-1] = end.reward
            failed = end.outcome == Outcome.FAILURE
            returns = returns_to_go(effective_rewards(rewards, self._reward, failed=failed), self._discount)
            self._check(float(returns.min()), float(returns.max()), f"demonstration {begin.episode_id}")

    def _check(self, least: float, most: float, what: str) -> None:
        if self._silent or (least >= self._low - _DUST and most <= self._high + _DUST):
            return
        self._silent = True
        self._say(
            f"WARNING: {what} has returns of {least:.4g} to {most:.4g}, and agent.critic.loss={self._loss} knows "
            f"{self._low:g} to {self._high:g}: what lies beyond is clipped, and looks alike to the critic. Set "
            "agent.critic.value_low and value_high to hold every return, or reward.scale, or agent.critic.loss=squared"
        )
