"""`serl-chunk pi0` as a user calls it: from a checkpoint of openpi to a run and back."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from fold_box import write_episodes
from learner_tools import learner_of, let_go
from pi0_agents import split

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli import learner
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.learner.memory import LearnerMemory
from serl_chunk.main import main
from serl_chunk.models.pi0 import tree
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.openpi_checkpoints import Checkpoint, export
from serl_chunk.types import ConfigError

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
    run = learner_of(config, str(tmp_path / "demos"), tmp_path / "run")
    for path, leaf in tree.flat(run.base["pi0"]).items():
        np.testing.assert_array_equal(leaf, whole[path])
    while run.work() and not run.trainer.done:
        pass
    assert run.updates == 20
    run.checkpoint()
    params = run.agent.published(run.state, run.base) | {"base": run.base}
    rng = np.random.default_rng(0)
    observation = {
        "state": rng.normal(size=spec.state_dim).astype(np.float32),
        "images/top": rng.integers(0, 256, (24, 24, 3), dtype=np.uint8),
    }
    acted, _ = run.agent.sample(params, observation, jax.random.key(0), explore=False)
    let_go(run)

    arguments = ["pi0", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--exp_name", mine]
    assert main([*arguments, f"--config.agent.pi0.weights={file}"]) == 0
    back = Checkpoint(tmp_path / "out").load(config.agent.pi0)
    changed = [p for p, leaf in tree.flat(back).items() if p in whole and not np.array_equal(leaf, whole[p])]
    assert {tree.group_of(path) for path in changed} == {"projections"}
    trained, base = split(config.agent.pi0, back)
    again, _ = make_agent(config, spec).sample(
        {"policy": {"pi0": trained}, "base": {"pi0": base}}, observation, jax.random.key(0), explore=False
    )
    np.testing.assert_allclose(again, acted, atol=1e-6)

    arguments[3] = str(tmp_path / "merged")
    assert main([*arguments, "--merge_lora", f"--config.agent.pi0.weights={file}"]) == 0
    assert "folded into 10 arrays" in capsys.readouterr().out
    merged = Checkpoint(tmp_path / "merged").load(tree.without_lora(config.agent.pi0))
    jax.tree.map(np.testing.assert_array_equal, merged, tree.folded(config.agent.pi0, back)[0])


def test_a_dry_run_of_the_released_sizes_shows_their_memory_and_checks_what_there_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learner, "memory_limit", lambda replay: 80 * 10**9)
    raw, flags = str(write_episodes(tmp_path / "raw")), ["--exp_name", "pi0_fold_box"]
    tokens = Path(__file__).parents[1] / "data" / "pi0_transforms" / "tiny_spm.model"
    more = [
        f"--config.agent.language.model={tokens}", "--config.agent.pi0.weights=", "--config.robot.image_size=48",
        "--config.replay.image_capacity=1600", "--config.replay.demo_capacity=600", "--config.replay.capacity=1600",
        "--demo_path", raw, "--demo_color", "rgb", "--demo_hz", "50", "--checkpoint_path", "run",
    ]  # fmt: skip
    stats = ["--actions", "delta", "--mask", "6,-1,6,-1", "--horizon", "20", "--robot", "aloha"]
    assert main(["data", "stats", raw, *stats, "--out", "aloha_fold_box"]) == 0
    capsys.readouterr()
    assert main([*flags, "--learner", "--dry_run", *more]) == 0
    shown = capsys.readouterr().out
    table = {line[:20].strip(): line[20:].split() for line in shown.splitlines()}
    assert (table["MB of each device"], table["fits into 80 GB"]) == (["expert*", "none"], ["yes", "yes"])
    assert table["parameters"] == ["1,258.9", "0.0"]  # of 314.7 million numbers
    for line in ("weights: random", "data: 12 episodes, 36 windows, digest", "run: a new one", "can be started"):
        assert line in shown
    assert not Path("run").exists()

    def refused(config, spec, memory, limit, devices):
        raise ConfigError(f"{memory} of {limit}", parameter="agent.pi0.trainable")

    monkeypatch.setattr(learner, "learner_memory", lambda *_: LearnerMemory("too much", 0, 0, 0))
    monkeypatch.setattr(learner, "check_fits", refused)
    for offline in ([], ["--online_steps", "0"]):
        assert main([*flags, "--learner", *more, *offline]) == 2
        assert "too much" in capsys.readouterr().err
    assert not Path("run").exists()
