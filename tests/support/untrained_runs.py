"""Run folders with the checkpoint of an agent that nothing has trained."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from serl_chunk.agents.registry import make_agent
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.preprocess import fit_preprocess
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.folder import open_run


def untrained_run(config: ExperimentConfig, folder: Path, step: int = 5) -> Path:
    """Write the folder; its checkpoint's state holds nothing."""
    spec = spec_of(config)
    agent, preprocess = make_agent(config, spec), fit_preprocess(config, spec, [])

    def made(key: jax.Array) -> dict:
        return agent.published(agent.init(key), agent.perception.vision.random(key))

    params = jax.jit(made)(jax.random.key(0))
    run = open_run(config, spec, str(folder))
    with run.locked():
        run.write_config()
    store = CheckpointStore(folder)
    meta = {"env_steps": 0, "human_ticks": 0, "base_digest": agent.base_digest, **preprocess.normaliser.fields()}
    arrays = preprocess.normaliser.to_arrays()
    store.save(step, {"empty": jnp.zeros(1)}, agent.flatten_params(params), arrays, meta)
    assert store.wait()
    store.close()
    return folder
