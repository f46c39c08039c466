"""Frozen backbones that compile at once, files of their weights, and small experiments that have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from serl_chunk.agents import vision
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, LearnerConfig, ReplayConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.models.encoder import Impala

FROZEN = EncoderConfig(kind="resnet10", pooling="mean", latent=4, shift=0, frozen_backbone=True)


def use_small_backbones(monkeypatch: pytest.MonkeyPatch, width: int = 2) -> None:
    """Take an IMPALA stack for ResNet-10; its place and its treatment stay."""
    monkeypatch.setattr(vision, "make_backbone", lambda kind, features: Impala((width,), parent=None))
    shapes = {name: leaf.shape for name, leaf in _weights(width, 0).items()}
    monkeypatch.setattr(vision, "resnet10_leaves", lambda: shapes)


def write_weights(file: Path, width: int = 2, seed: int = 0) -> str:
    """Write a file for `agent.encoder.weights`; returns its path."""
    np.savez(file, **_weights(width, seed))
    return str(file)


def _weights(width: int, seed: int) -> dict[str, np.ndarray]:
    rng, net = np.random.default_rng(seed), Impala((width,), parent=None)
    shapes = jax.eval_shape(net.init, jax.random.key(0), np.zeros((1, 32, 32, 3), np.uint8))["params"]
    scale = lambda shape: max(9, np.prod(shape[:-1])) ** -0.5  # noqa: E731
    leaves = flatten_dict(shapes, sep="/").items()
    return {name: (rng.normal(size=x.shape) * scale(x.shape)).astype(np.float32) for name, x in leaves}


def experiment(encoder: EncoderConfig | None = None, *, max_steps: int = 8, **changes: Any) -> ExperimentConfig:
    """A run that begins without demonstrations, with one camera where there is an encoder for it."""
    seen: dict[str, Any] = {} if encoder is None else {"image_keys": ("top",), "encoder": encoder}
    return ExperimentConfig(
        name="small_bases",
        robot=FakeAlohaConfig(image_size=8, max_episode_steps=12),
        agent=AcfqlConfig(
            critic=CriticConfig(hidden=(4,), ensemble=2),
            flow=FlowConfig(hidden=(4,), steps=2),
            candidates=2, policy_updates=1, **{**seen, **changes},
        ),
        chunk=ChunkConfig(5),
        replay=ReplayConfig(capacity=500, demo_capacity=200, human_capacity=200, image_capacity=200),
        learner=LearnerConfig(
            batch_size=8, utd_ratio=0.5, max_lag_steps=20, training_starts=4, max_steps=max_steps, steps_per_update=4,
            checkpoint_period=0, log_period=4,
        ),
        seed=5,
    )  # fmt: skip
