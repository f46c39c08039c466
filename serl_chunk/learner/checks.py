"""Warnings and refusals that need both a run's settings and its data or weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from serl_chunk.agents.base import Agent
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.replay.episode import realised_returns
from serl_chunk.replay.memory import available_bytes, check_memory
from serl_chunk.types import ConfigError, Episode, RobotSpec

logger = logging.getLogger(__name__)

_DUST = 1e-6  # of sums of float32 rewards


class ValueRange:
    """Warns once where a realised return lies outside of `agent.critic.value_low` .. `value_high`: it is clipped."""

    def __init__(self, config: ExperimentConfig) -> None:
        self._critic, self._reward, self._discount = config.agent.critic, config.reward, config.discount
        self._silent = self._critic.loss == "squared"

    def demonstrations(self, episodes: Sequence[Episode]) -> None:
        for e in episodes:
            if self._silent:
                return
            returns = realised_returns(e, self._reward, self._discount)
            self.check(f"demonstration {e.begin.episode_id}", float(returns.min()), float(returns.max()))

    def check(self, what: str, least: float, most: float) -> None:
        """Warn, the first time, where the returns of `what` are not within the range."""
        c = self._critic
        if self._silent or (least >= c.value_low - _DUST and most <= c.value_high + _DUST):
            return
        self._silent = True
        logger.warning(
            f"{what} has returns of {least:.4g} to {most:.4g}, outside of the range of agent.critic.loss={c.loss}, "
            f"{c.value_low:g} to {c.value_high:g}: they are clipped, and look alike to the critic. Set "
            "agent.critic.value_low and value_high to hold every return, or reward.scale, or agent.critic.loss=squared"
        )


def check_replay_memory(config: ExperimentConfig, spec: RobotSpec, agent: Agent) -> int:
    """Return the bytes of a full replay; raises ConfigError where memory has fewer, or a camera is unknown.

    The replay's own check comes after the compilation of the networks, which this one does not need.
    """
    cameras = [spec.camera(key) for key in config.agent.image_keys]
    features = [2 * math.prod(shape) for shape in agent.cached_shapes()]  # float16
    return check_memory(spec, config.replay, cameras, available_bytes(), features)


def restored_normaliser(saved: Normaliser, fresh: Normaliser, *, same_data: bool) -> Normaliser:
    """Return `saved`, the checkpoint's; raises ConfigError where it transforms actions in another way than `fresh`.

    `same_data`: whether `fresh` was fitted to all data; of a data set it is another part, as a rule.
    """
    if saved.mode != fresh.mode:
        raise ConfigError(
            f"{fresh.mode} is not what this run's networks were trained with ({saved.mode}). Leave it as it was, or "
            "start afresh with another checkpoint_path",
            parameter="normaliser.actions",
        )
    if same_data and saved.digest() != fresh.digest():
        # Statistics of other demonstrations under an old network would shift every input.
        logger.info("the demonstrations or normaliser settings changed since the checkpoint: its normaliser is kept")
    return saved
