"""`serl-chunk pi0` as a user calls it: from a checkpoint of openpi to a run and back."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest
from learner_tools import learner_of, let_go

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.main import main
from serl_chunk.models.pi0 import tree
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.openpi_checkpoints import Checkpoint, export

EXPERIMENT = """
from dataclasses import replace

from serl_chunk import BcConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig
from serl_chunk.config.experiment import LearnerConfig
from serl_chunk.config.agents.pi0 import ExpertConfig, Pi0Config, SiglipConfig, VlmConfig
from serl_chunk.config.experiment import ReplayConfig
from serl_chunk.config.robots import FakeAlohaConfig


def experiment() -> ExperimentConfig:
    model = Pi0Config(
        image_size=(24, 24), vocabulary=258, depth=2, heads=2, head_dim=8, feature_grid=1, steps=2,
        siglip=SiglipConfig(width=16, depth=2, mlp=32, heads=2, patch=12),
        vlm=VlmConfig(width=16, mlp=32, attention_rank=2, mlp_rank=2),
        expert=ExpertConfig(width=16, mlp=32, attention_rank=2, mlp_rank=2),
        dtype="float32", frozen_dtype="float32", trainable="lora", lora_init="openpi",
    )
    return ExperimentConfig(
        name="mine",
        robot=FakeAlohaConfig(image_size=24, max_episode_steps=240),
        agent=BcConfig(
            policy="pi0", pi0=model, image_keys=("top",), policy_ema=0.0, policy_updates=1, lr=1e-2,
            encoder=EncoderConfig(frame_size=(24, 24), shift=0),
        ),
        chunk=ChunkConfig(5),
        replay=ReplayConfig(capacity=500, demo_capacity=500, human_capacity=300, image_capacity=500),
        learner=LearnerConfig(batch_size=8, offline_steps=20, online_steps=0, pretrain_steps=0, eval_interval=0),
    )
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mine.py"
    file.write_text(EXPERIMENT)
    return str(file)


def released(folder, config):
    """Write a checkpoint of random numbers in openpi's layout; it has no LoRA."""
    plain = tree.without_lora(config)
    params = tree.initial(plain, jax.random.key(3))
    export(folder, plain, params, {})
    return tree.flat(params)


@pytest.mark.slow
def test_import_fine_tune_export_and_reload_act_alike(mine, tmp_path, capsys):
    spec = spec_of(load(mine, []))
    whole = released(tmp_path / "openpi", load(mine, []).agent.pi0)
    assert main(["pi0", "inspect", str(tmp_path / "openpi")]) == 0
    assert f"{len(whole)} arrays" in capsys.readouterr().out
    file = tmp_path / "weights.npz"
    assert main(["pi0", "import", str(tmp_path / "openpi"), str(file), "--exp_name", mine]) == 0
    config = load(mine, [("agent.pi0.weights", str(file))])
    run_record(config, 2, str(tmp_path / "demos"), policy="scripted", noise=None, cameras=("top",))
    learner = learner_of(config, str(tmp_path / "demos"), tmp_path / "run")
    for path, leaf in tree.flat(learner.base["pi0"]).items():
        np.testing.assert_array_equal(leaf, whole[path])
    while learner.work() and not learner.trainer.done:
        pass
    assert learner.updates == 20
    learner.checkpoint()
    params = learner.agent.published(learner.state, learner.base) | {"base": learner.base}
    rng = np.random.default_rng(0)
    observation = {
        "state": rng.normal(size=spec.state_dim).astype(np.float32),
        "images/top": rng.integers(0, 256, (24, 24, 3), dtype=np.uint8),
    }
    acted, _ = learner.agent.sample(params, observation, jax.random.key(0), explore=False)
    let_go(learner)

    arguments = ["pi0", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--exp_name", mine]
    assert main([*arguments, f"--config.agent.pi0.weights={file}"]) == 0
    back = Checkpoint(tmp_path / "out").load(config.agent.pi0)
    changed = [p for p, leaf in tree.flat(back).items() if p in whole and not np.array_equal(leaf, whole[p])]
    assert {tree.group_of(path) for path in changed} == {"projections"}
    trained, base = tree.partition(config.agent.pi0).split(back)
    again, _ = make_agent(config, spec).sample(
        {"policy": {"pi0": trained}, "base": {"pi0": base}}, observation, jax.random.key(0), explore=False
    )
    np.testing.assert_allclose(again, acted, atol=1e-6)

    arguments[3] = str(tmp_path / "merged")
    assert main([*arguments, "--merge_lora", f"--config.agent.pi0.weights={file}"]) == 0
    assert "folded into 10 arrays" in capsys.readouterr().out
    merged = Checkpoint(tmp_path / "merged").load(tree.without_lora(config.agent.pi0))
    jax.tree.map(np.testing.assert_array_equal, merged, tree.folded(config.agent.pi0, back)[0])
