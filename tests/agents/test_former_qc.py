"""Run folders of `--compat qc` that commit 514fce5 wrote go on as those of the published agents."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
from agent_tools import make_batches

from serl_chunk.cli.demos import RunOptions
from serl_chunk.cli.learner import build_learner
from serl_chunk.config.agents import AcfqlConfig, AcrlpdConfig, AgentConfig, FlowConfig
from serl_chunk.config.critics import CriticConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig
from serl_chunk.config.learner import LearnerConfig
from serl_chunk.config.presets import configured
from serl_chunk.config.replay import ReplayConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.folder import open_run

FILES = Path(__file__).parents[1] / "data" / "514fce5"
CRITIC = CriticConfig(hidden=(4,), ensemble=2, target_subset=2, target_aggregate="mean")
AGENTS: dict[str, AgentConfig] = {
    "acfql": AcfqlConfig(
        critic=CRITIC, flow=FlowConfig(hidden=(4,), steps=2), actor_type="distill-ddpg", candidates=1, alpha=3.0
    ),
    "acrlpd": AcrlpdConfig(critic=CRITIC, hidden=(4,), bc_alpha=0.5),
}


def experiment(agent: AgentConfig) -> ExperimentConfig:
    """The experiment of the folders, with more updates to make."""
    ours = ExperimentConfig(
        name="former", robot=FakeAlohaConfig(image_size=8, max_episode_steps=12), agent=agent, chunk=ChunkConfig(5),
        replay=ReplayConfig(capacity=500, demo_capacity=200, human_capacity=200, image_capacity=200),
        learner=LearnerConfig(
            batch_size=8, utd_ratio=0.5, max_lag_steps=20, training_starts=4, max_steps=16, steps_per_update=4,
            checkpoint_period=0, log_period=4,
        ),
        seed=5,
    )  # fmt: skip
    return configured(ours, compat="qc")


@pytest.mark.parametrize("name", [pytest.param("acfql", marks=pytest.mark.slow), "acrlpd"])
def test_a_run_of_the_former_agents_goes_on_where_it_ended(tmp_path, name):
    with tarfile.open(FILES / f"{name}.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    expected = json.loads((tmp_path / "expected.json").read_text())
    config = experiment(AGENTS[name])
    spec = robot_spec(config.robot)
    learner = build_learner(
        config, RunOptions([]), open_run(config, spec, str(tmp_path)), spec,
        publish=lambda snapshot, info: None, threaded=False,
    )  # fmt: skip
    agent, state = learner.agent, learner.state
    assert (learner.updates, int(state.critic_updates), int(state.policy_updates)) == (8, 8, 8)
    observation = {"state": np.linspace(-1, 1, agent.spec.state_dim, dtype=np.float32)}
    saved = CheckpointStore(tmp_path).restore_policy(8)
    for params in (agent.published(state, learner.base), agent.load_params(saved.params)):
        chunk, record = agent.sample(params, observation, jax.random.key(0), explore=False)
        np.testing.assert_allclose(chunk, expected["chunk"], atol=1e-4)
        np.testing.assert_allclose(record["values"], expected["values"], atol=1e-4)

    batches = jax.device_put(make_batches(agent.spec))
    learner.state, metrics = agent.update(state, learner.base, {"critic": batches})
    assert np.asarray(jax.random.key_data(learner.state.rng)).tolist() == expected["rng"]
    assert float(metrics["critic/critic_loss"]) == pytest.approx(expected["critic_loss"], rel=1e-4)
    assert float(metrics["actor/actor_loss"]) == pytest.approx(expected["actor_loss"], rel=1e-4)
    after = agent.published(learner.state, learner.base)
    chunk, _ = agent.sample(after, observation, jax.random.key(0), explore=False)
    np.testing.assert_allclose(chunk, expected["after_update"], atol=1e-4)
    learner.close()
    learner.metrics.close()
