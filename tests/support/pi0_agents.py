"""Clones with a tiny pi0, what they see, and states that need no compilation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from agent_tools import drawn, one_batch

from serl_chunk.agents.bc import Bc
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.agents.pi0 import ExpertConfig, Pi0Config, SiglipConfig, VlmConfig
from serl_chunk.models.pi0 import tree
from serl_chunk.types import PROMPT, PROMPT_MASK, CameraSpec, ChunkBatch

SIZE = (24, 24)
SMALL = Pi0Config(
    image_size=SIZE, action_dim=6, vocabulary=258, depth=2, heads=2, head_dim=8, feature_grid=1, steps=3,
    siglip=SiglipConfig(width=16, depth=2, mlp=32, heads=2, patch=12), vlm=VlmConfig(width=16, mlp=32),
    expert=ExpertConfig(width=16, mlp=32), dtype="float32", frozen_dtype="float32", remat=False,
)  # fmt: skip
SPEC = AgentSpec(4, 2, 3, 3, (CameraSpec("top", *SIZE), CameraSpec("wrist", *SIZE)), 0.9, bounded=False)
CONFIG = BcConfig(
    policy="pi0", pi0=SMALL, image_keys=("top", "wrist"), lr=3e-3, policy_ema=0.0, policy_updates=1,
    encoder=EncoderConfig(frame_size=SIZE, shift=0), language=LanguageConfig("bytes", 16),
)  # fmt: skip


def lora(rank: int = 2) -> dict[str, Any]:
    ranks = {"attention_rank": rank, "mlp_rank": rank}
    return {"vlm": VlmConfig(width=16, mlp=32, **ranks), "expert": ExpertConfig(width=16, mlp=32, **ranks)}


def pi0_agent(spec: AgentSpec = SPEC, **changes: Any) -> Bc:
    """One whose robot has the cameras of `spec`; `changes` of its Pi0Config."""
    cameras = tuple(camera.name for camera in spec.cameras)
    return Bc(dataclasses.replace(CONFIG, pi0=dataclasses.replace(SMALL, **changes), image_keys=cameras), spec)


def split(config: Pi0Config, params: Any) -> list[Any]:
    """The trees of trained leaves and of the base."""
    leaves = tree.flat(params).items()
    return [tree.nested({k: v for k, v in leaves if tree.trains(config, k) == trained}) for trained in (True, False)]


def started(agent: Bc) -> AgentState:
    """Its state with small random numbers."""
    state = drawn(agent)
    return state.replace(policy=jax.tree.map(lambda x: 0.3 * x, state.policy))


def shown(agent: Bc, rows: int = 8, prompt: int = 16) -> ChunkBatch:
    """Windows with texts of one to eight tokens."""
    rng, batch = np.random.default_rng(0), one_batch(agent)
    tokens = rng.integers(1, 258, (8, prompt)).astype(np.int32)
    texts = {PROMPT: tokens, PROMPT_MASK: np.arange(prompt) < rng.integers(1, 9, (8, 1))}
    batch = batch._replace(observations={**batch.observations, **texts}, next_observations={})
    return jax.device_put(jax.tree.map(lambda x: x[:rows], batch))
