"""From a configuration to its agent: by its class, by a preset's name, in our conventions and in the published ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import make_batches, named, seen_by

from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import IMPLEMENTATIONS, make_agent
from serl_chunk.config.agents.base import ActorCriticConfig, AgentConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.policy import PolicyConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.presets import NOT_OF_COMPAT, OF_GROUPS, PRESETS, configured
from serl_chunk.config.robots import RobotConfig
from serl_chunk.types import RobotSpec

ARM = RobotSpec("arm", 50.0, 4, (-1.0,) * 2, (1.0,) * 2, (-1,) * 2, (), (), 100)


def test_every_agent_configuration_is_registered():
    found = [AgentConfig]
    for cls in found:
        found += [c for c in cls.__subclasses__() if c.__module__.startswith("serl_chunk.")]
    ours = {c for c in IMPLEMENTATIONS if c.__module__.startswith("serl_chunk.")}
    assert ours == set(found) - {AgentConfig, ActorCriticConfig, PolicyConfig}


def small(preset: str, compat: str) -> tuple[ExperimentConfig, Agent]:
    """The preset's agent, with networks of one small layer and fewer Euler steps."""
    config = configured(ExperimentConfig("x", RobotConfig()), preset=preset, compat=compat or None)
    agent = config.agent
    if isinstance(agent, PublishedQcConfig):
        agent = dataclasses.replace(agent, value_hidden_dims=(8,), actor_hidden_dims=(8,), flow_steps=2)
    else:
        width: dict[str, Any] = {"hidden": (8,)} if hasattr(agent, "hidden") else {}
        if not isinstance(agent, BcConfig):
            width["critic"] = dataclasses.replace(agent.critic, hidden=(8,))
        agent = dataclasses.replace(agent, **width)
    if hasattr(agent, "flow"):
        agent = dataclasses.replace(agent, flow=dataclasses.replace(agent.flow, hidden=(8,), steps=2))
    config = dataclasses.replace(config, agent=agent)
    return config, make_agent(config, ARM)


def batches(config: ExperimentConfig, agent: Agent):
    """As the sampler feeds them: rewards of `return_steps`."""
    batch = make_batches(agent.spec)
    return named(agent, batch._replace(rewards=-np.ones((*batch.mask.shape, config.chunk.returned), np.float32)))


# Whose updates and decisions are traced: those of the others differ in numbers alone.
TRACED = {
    "": ("qc", "qc-fql", "bfn-n", "rlpd", "hil-serl", "qc-rlpd", "decoupled", "bc", "bc-gaussian"),
    "qc": ("rlpd-ac", "bc"),
}
OF_FLOWS = [preset for preset in PRESETS if preset != "acrlpd-pi0"]
PAIRS = [(preset, compat) for preset in OF_FLOWS for compat in ("", "qc") if not (compat and preset in NOT_OF_COMPAT)]


@pytest.mark.parametrize(("preset", "compat"), PAIRS)
def test_every_preset_can_be_compiled(preset, compat):
    config, agent = small(preset, compat)
    of_chunks = preset.startswith(("qc", "decoupled", "bc", "hg")) or preset in ("rlpd-ac", *OF_GROUPS)
    assert agent.spec.horizon == (5 if of_chunks else 1)
    assert (config.preset, config.compat) == (preset, compat)
    if preset not in TRACED[compat]:
        return
    state = jax.eval_shape(agent.init, jax.random.key(0))
    with jax.numpy_rank_promotion("raise"):
        after, metrics = jax.eval_shape(agent._update, state, {}, batches(config, agent))
        prefix = agent._committed(None, np.bool_(False))
        act = lambda s, k: agent._sample_chunk(agent.policy_params(s), seen_by(agent), k, prefix, explore=True)  # noqa: E731
        chunk, _ = jax.eval_shape(act, state, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert (chunk.shape, chunk.dtype) == ((agent.spec.horizon, 2), jnp.float32)
    assert ("critic/critic_loss" in metrics) == (not isinstance(agent.config, BcConfig))
