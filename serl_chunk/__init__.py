"""Reinforcement learning for real robots in action chunks, with a human in the loop.

The names below are imported on first use, so that `import serl_chunk` loads neither numpy nor JAX, and a robot PC needs
no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serl_chunk.actor.evaluate import evaluate
    from serl_chunk.actor.service import ActorService
    from serl_chunk.agents.registry import make_agent
    from serl_chunk.config.experiment import ExperimentConfig
    from serl_chunk.config.loader import load_experiment
    from serl_chunk.replay.replay import Replay
    from serl_chunk.robots.registry import make_env
    from serl_chunk.transport.client.link import LearnerLink
    from serl_chunk.transport.server.server import LearnerServer

_MODULES = {
    "ActorService": "actor.service",
    "ExperimentConfig": "config.experiment",
    "LearnerLink": "transport.client.link",
    "LearnerServer": "transport.server.server",
    "Replay": "replay.replay",
    "evaluate": "actor.evaluate",
    "load_experiment": "config.loader",
    "make_agent": "agents.registry",
    "make_env": "robots.registry",
}
__all__ = [
    "ActorService",
    "ExperimentConfig",
    "LearnerLink",
    "LearnerServer",
    "Replay",
    "evaluate",
    "load_experiment",
    "make_agent",
    "make_env",
]


def __getattr__(name: str) -> Any:
    """Import an exported name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
