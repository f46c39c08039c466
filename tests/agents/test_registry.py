"""From a configuration to its agent: by its class, by a preset's name, in our conventions and in the published ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import drawn, make_batches, named, seen_by

from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import IMPLEMENTATIONS, make_agent
from serl_chunk.agents.spec import agent_spec
from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.agents.base import ActorCriticConfig, AgentConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig
from serl_chunk.config.presets import NOT_OF_COMPAT, PRESETS, configured
from serl_chunk.config.robots import FakeAlohaConfig, RobotConfig
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import CameraSpec, RobotSpec

CONFIG = ExperimentConfig(name="x", robot=FakeAlohaConfig(), chunk=ChunkConfig(6, critic_horizon=4))
ROBOT = robot_spec(CONFIG.robot)
ARM = RobotSpec("arm", 50.0, 4, (-1.0,) * 2, (1.0,) * 2, (-1,) * 2, (), (), 100)


@pytest.mark.parametrize("cls", list(IMPLEMENTATIONS), ids=lambda c: c.kind)
def test_every_configuration_has_an_implementation_of_its_name(cls):
    chunk = ChunkConfig(6, critic_horizon=9 if cls().prefix_critic else 4)
    agent = make_agent(dataclasses.replace(CONFIG, agent=cls(), chunk=chunk), ROBOT)
    # Of the published two, the one of its default.
    name = {"published_qc": "publishedacfql", "decoupled": "acfql"}.get(cls.kind, cls.kind)
    assert (type(agent).__name__.lower(), agent.config) == (name, cls())


def test_every_agent_configuration_is_registered():
    found = [AgentConfig]
    for cls in found:
        found += [c for c in cls.__subclasses__() if c.__module__.startswith("serl_chunk.")]
    ours = {c for c in IMPLEMENTATIONS if c.__module__.startswith("serl_chunk.")}
    assert ours == set(found) - {AgentConfig, ActorCriticConfig}


def test_sizes_come_from_robot_and_experiment():
    name = ROBOT.cameras[1].name
    spec = agent_spec(dataclasses.replace(CONFIG, agent=AcfqlConfig(image_keys=(name,))), ROBOT)
    assert (spec.state_dim, spec.action_dim) == (ROBOT.state_dim, ROBOT.action_dim)
    assert (spec.horizon, spec.critic_steps, spec.prefix_steps, spec.discount) == (6, 4, 0, CONFIG.discount)
    assert spec.cameras == (ROBOT.cameras[1],)
    scaled = AcfqlConfig(image_keys=(name,), encoder=EncoderConfig(frame_size=(24, 32)))
    assert agent_spec(dataclasses.replace(CONFIG, agent=scaled), ROBOT).cameras == (CameraSpec(name, 24, 32),)
    chunk = ChunkConfig(6, critic_horizon=9, execute_steps=4)
    spec = agent_spec(dataclasses.replace(CONFIG, agent=DecoupledConfig(), chunk=chunk), ROBOT)
    assert (spec.horizon, spec.critic_steps, spec.prefix_steps) == (6, 9, 4)


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


PAIRS = [(preset, compat) for preset in PRESETS for compat in ("", "qc") if not (compat and preset in NOT_OF_COMPAT)]


@pytest.mark.parametrize(("preset", "compat"), PAIRS)
def test_every_preset_can_be_compiled(preset, compat):
    config, agent = small(preset, compat)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    with jax.numpy_rank_promotion("raise"):
        after, metrics = jax.eval_shape(agent._update, state, {}, batches(config, agent))
        prefix = (np.zeros((agent.spec.horizon, 2), np.float32), np.zeros(agent.spec.horizon, np.float32))
        act = lambda s, k: agent._sample_chunk(agent.policy_params(s), seen_by(agent), k, prefix, explore=True)  # noqa: E731
        chunk, _ = jax.eval_shape(act, state, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert (chunk.shape, chunk.dtype) == ((agent.spec.horizon, 2), jnp.float32)
    assert ("critic/critic_loss" in metrics) == (not isinstance(agent.config, BcConfig))
    assert agent.spec.horizon == (5 if preset.startswith(("qc", "decoupled", "bc", "hg")) or preset == "rlpd-ac" else 1)
    assert (config.preset, config.compat) == (preset, compat)


@pytest.mark.parametrize(
    ("preset", "compat"), [(*p, ) if p == ("qc", "qc") else pytest.param(*p, marks=pytest.mark.slow) for p in PAIRS]
)  # fmt: skip
def test_every_preset_updates_and_acts(preset, compat):
    config, agent = small(preset, compat)
    state = drawn(agent)
    before = np.array(jax.tree.leaves(state.policy)[-1])
    after, metrics = agent.update(state, {}, batches(config, agent))
    chunk, _ = agent.sample(agent.policy_params(after), seen_by(agent), jax.random.key(1), explore=True)
    assert all(np.isfinite(v) for v in metrics.values())
    assert not np.array_equal(before, jax.tree.leaves(after.policy)[-1])
    assert float(jnp.abs(chunk).max()) <= 1


@pytest.mark.parametrize("preset", ["qc", pytest.param("qc-fql", marks=pytest.mark.slow)])
def test_published_presets_learn_and_act_with_cameras_and_chosen_grippers(preset):
    seen = [("agent.image_keys", "top"), ("agent.encoder.features", "4"), ("agent.encoder.latent", "8")]
    sizes = [("agent.value_hidden_dims", "8"), ("agent.actor_hidden_dims", "8"), ("agent.flow_steps", "2")]
    chosen = [("agent.gripper.choices", "-1,1"), ("agent.encoder.shift", "2")]
    config = configured(ExperimentConfig("x", RobotConfig()), [*seen, *sizes, *chosen], preset=preset)
    robot = RobotSpec("arm", 50.0, 4, (-1.0,) * 3, (1.0,) * 3, (-1,) * 3, (2,), (CameraSpec("top", 32, 32),), 100)
    agent = make_agent(config, robot)
    state = drawn(agent)
    before = jax.tree.map(np.array, (state.policy, state.critic, state.grasp))
    state, metrics = agent.update(state, {}, named(agent, make_batches(agent.spec)))
    assert (int(state.critic_updates), int(state.policy_updates)) == (2, 2)  # both on every batch, as published
    assert all(np.isfinite(value) for value in metrics.values())
    after = state.policy, state.critic, state.grasp
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    assert all(jax.tree.leaves(changed)), changed
    chunk, record = agent.sample(agent.policy_params(state), seen_by(agent), jax.random.key(1), explore=False)
    assert chunk.shape == (5, 3)
    assert set(np.asarray(chunk)[:, 2]) <= {-1.0, 1.0}
    assert record["values"].shape == (agent.config.candidates,)
