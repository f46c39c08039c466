"""Reinforcement learning for real robots in action chunks, with a human in the loop.

The names below are imported on first use, so that `import serl_chunk` loads neither numpy nor JAX, and a robot PC needs
no JAX.
"""

# ruff: noqa: F401 - names for type checkers
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serl_chunk.actor.evaluate import evaluate
    from serl_chunk.actor.service import ActorService
    from serl_chunk.agents.registry import make_agent
    from serl_chunk.config.agents import AcfqlConfig, AcrlpdConfig, BcConfig, FlowConfig, ImproveConfig
    from serl_chunk.config.critics import CriticConfig
    from serl_chunk.config.encoders import EncoderConfig
    from serl_chunk.config.experiment import (
        ActorConfig,
        ChunkConfig,
        ExperimentConfig,
        LearnerConfig,
        NormaliserConfig,
        ReplayConfig,
        RewardConfig,
        TransportConfig,
    )
    from serl_chunk.config.gripper import GripperConfig
    from serl_chunk.config.loader import load_experiment
    from serl_chunk.config.robots import (
        AlohaSimConfig,
        FakeAlohaConfig,
        FakeSingleArmConfig,
        GymConfig,
        OgbenchConfig,
        RobomimicConfig,
    )
    from serl_chunk.replay.replay import Replay
    from serl_chunk.robots.registry import make_env
    from serl_chunk.transport.client.link import LearnerLink
    from serl_chunk.transport.server.server import LearnerServer

_EXPORTS = {
    "config.agents": "AcfqlConfig AcrlpdConfig BcConfig FlowConfig ImproveConfig",
    "config.critics": "CriticConfig",
    "config.encoders": "EncoderConfig",
    "config.experiment": "ActorConfig ChunkConfig ExperimentConfig LearnerConfig NormaliserConfig ReplayConfig "
    "RewardConfig TransportConfig",
    "config.gripper": "GripperConfig",
    "config.robots": "AlohaSimConfig FakeAlohaConfig FakeSingleArmConfig GymConfig OgbenchConfig RobomimicConfig",
    "config.loader": "load_experiment",
    "robots.registry": "make_env",
    "agents.registry": "make_agent",
    "actor.service": "ActorService",
    "actor.evaluate": "evaluate",
    "replay.replay": "Replay",
    "transport.client.link": "LearnerLink",
    "transport.server.server": "LearnerServer",
}
"""Module -> the names that it gives to the package."""
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import an exported name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
