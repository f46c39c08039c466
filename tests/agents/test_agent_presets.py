"""Every named algorithm builds, updates and acts, in our conventions and in the published ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import make_batches, named

from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import make_agent
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.presets import NOT_OF_COMPAT, PRESETS, configured
from serl_chunk.config.robots import RobotConfig
from serl_chunk.types import CameraSpec, RobotSpec

ROBOT = RobotSpec("arm", 50.0, 4, (-1.0,) * 2, (1.0,) * 2, (-1,) * 2, (), (), 100)
BOTH = pytest.mark.parametrize(
    ("preset", "compat"), [(p, c) for p in PRESETS for c in ("", "qc") if not (c and p in NOT_OF_COMPAT)]
)


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
    return config, make_agent(config, ROBOT)


def batches(config: ExperimentConfig, agent: Agent):
    """As the sampler feeds them: rewards of `return_steps`."""
    batch = make_batches(agent.spec)
    rewards = np.ones((*batch.mask.shape, config.chunk.returned), np.float32)
    return jax.device_put(batch._replace(rewards=-rewards))


def check(agent: Agent, before, after, metrics, chunk) -> None:
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), before)
    assert (chunk.shape, chunk.dtype) == ((agent.spec.horizon, 2), jnp.float32)
    assert ("critic/critic_loss" in metrics) == (not isinstance(agent.config, BcConfig))


@BOTH
def test_every_preset_can_be_compiled(preset, compat):
    config, agent = small(preset, compat)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    with jax.numpy_rank_promotion("raise"):
        after, metrics = jax.eval_shape(agent._update, state, {}, named(agent, batches(config, agent)))
        prefix = (np.zeros((agent.spec.horizon, 2), np.float32), np.zeros(agent.spec.horizon, np.float32))
        chunk, _ = jax.eval_shape(
            lambda s, k: agent._sample_chunk(agent.policy_params(s), {"state": jnp.zeros(4)}, k, prefix, explore=True),
            state,
            jax.random.key(0),
        )
    check(agent, state, after, metrics, chunk)
    assert agent.spec.horizon == (5 if preset.startswith(("qc", "decoupled", "bc", "hg")) or preset == "rlpd-ac" else 1)
    assert (config.preset, config.compat) == (preset, compat)


def run(preset: str, compat: str) -> None:
    config, agent = small(preset, compat)
    state = agent.init(jax.random.key(0))
    shapes = jax.eval_shape(lambda: state)
    before = np.asarray(jax.tree.leaves(state.policy)[-1])
    after, metrics = agent.update(state, {}, named(agent, batches(config, agent)))
    chunk, _ = agent.sample(
        agent.policy_params(after), {"state": np.ones(4, np.float32)}, jax.random.key(1), explore=True
    )
    check(agent, shapes, after, metrics, chunk)
    assert all(np.isfinite(v) for v in metrics.values())
    assert not np.array_equal(before, jax.tree.leaves(after.policy)[-1])
    assert float(jnp.abs(chunk).max()) <= 1


@pytest.mark.parametrize(
    "preset", ["qc", *(pytest.param(p, marks=pytest.mark.slow) for p in ("fql-n", "qc-rlpd")), "bc"]
)
def test_published_conventions_update_and_act(preset):
    run(preset, "qc")


@pytest.mark.slow
@BOTH
def test_every_preset_updates_and_acts(preset, compat):
    run(preset, compat)


@pytest.mark.parametrize("preset", ["qc", pytest.param("qc-fql", marks=pytest.mark.slow)])
def test_published_presets_learn_and_act_with_cameras_and_chosen_grippers(preset):
    seen = [("agent.image_keys", "top"), ("agent.encoder.features", "4"), ("agent.encoder.latent", "8")]
    sizes = [("agent.value_hidden_dims", "8"), ("agent.actor_hidden_dims", "8"), ("agent.flow_steps", "2")]
    chosen = [("agent.gripper.choices", "-1,1"), ("agent.encoder.shift", "2")]
    config = configured(ExperimentConfig("x", RobotConfig()), [*seen, *sizes, *chosen], preset=preset)
    robot = RobotSpec(
        "arm", 50.0, 4, (-1.0,) * 3, (1.0,) * 3, (-1,) * 3, (2,), (CameraSpec("top", 32, 32),), 100
    )  # fmt: skip
    agent = make_agent(config, robot)
    state = agent.init(jax.random.key(0))
    before = jax.tree.map(np.array, (state.policy, state.critic, state.grasp))
    batches = make_batches(agent.spec)
    batches = jax.device_put(batches._replace(prev_action=batches.actions[:, :, 0]))
    state, metrics = agent.update(state, {}, named(agent, batches))
    assert (int(state.critic_updates), int(state.policy_updates)) == (2, 2)  # both on every batch, as published
    assert all(np.isfinite(value) for value in metrics.values())
    after = jax.tree.map(np.array, (state.policy, state.critic, state.grasp))
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    assert all(jax.tree.leaves(changed)), changed
    observation = {name: value[0, 0] for name, value in batches.observations.items()}
    chunk, record = agent.sample(agent.policy_params(state), observation, jax.random.key(1), explore=False)
    assert chunk.shape == (5, 3)
    assert set(np.asarray(chunk)[:, 2]) <= {-1.0, 1.0}
    assert record["values"].shape == (agent.config.candidates,)
