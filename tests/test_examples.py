"""The examples run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.learner.building import RunOptions
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.metrics import read_metrics

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SMALL = {
    "agent.critic.hidden": "8", "agent.critic.ensemble": "2", "agent.flow.hidden": "8", "agent.flow.steps": "1",
    "agent.candidates": "2", "agent.policy_updates": "1", "learner.batch_size": "16", "robot.max_episode_steps": "40",
}  # fmt: skip


@pytest.mark.compiles
def test_a_policy_is_trained_in_one_process_by_the_public_names(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("loop", EXAMPLES / "loop.py")
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    source = (EXAMPLES / "loop.py").read_text()
    assert "serl_chunk." not in source.replace("serl_chunk` alone", ""), "the public names are of serl_chunk itself"
    assert len(source.splitlines()) <= 80
    config = load_experiment("fake_aloha")
    run_record(config, 2, str(tmp_path), policy="scripted", noise=None, cameras=())
    small = apply_overrides(config, list(SMALL.items()))
    monkeypatch.setattr(loop.sc, "load_experiment", lambda name: small)
    monkeypatch.setattr(loop, "PRETRAIN", 3)
    monkeypatch.setattr(loop, "WARMUP", 1)
    assert 0 <= loop.train(str(tmp_path), 2, held_out=2) <= 1
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("episode"))
    assert first.endswith(" 0 updates")
    assert second.startswith("episode 1: success=")


@pytest.mark.compiles
@pytest.mark.parametrize(("variant", "trains"), [("", True), (":counted", False)])
def test_an_agent_and_a_trainer_from_outside_train_and_act(variant, trains, tmp_path):
    name = f"{EXAMPLES / 'own_agent.py'}{variant}"
    settings = {
        "agent.width": "8", "learner.online_steps": "150", "learner.pretrain_steps": "2", "learner.utd_ratio": "0.02",
        "learner.warmup_episodes": "1", "learner.training_starts": "1", "robot.max_episode_steps": "40",
    }  # fmt: skip
    config = apply_overrides(load_experiment(name), list(settings.items()))
    run_record(load_experiment("fake_aloha"), 2, str(tmp_path / "demos"), policy="scripted", noise=None, cameras=())
    train_local(config, RunOptions([str(tmp_path / "demos")], str(tmp_path / "run")))
    rows = read_metrics(tmp_path / "run")["episode"]
    assert rows[-1]["env_steps"] >= 150
    assert bool(CheckpointStore(tmp_path / "run").newest()) is trains
    longer = apply_overrides(config, [("learner.online_steps", "190")])
    train_local(longer, RunOptions([str(tmp_path / "demos")], str(tmp_path / "run")))
    assert len(read_metrics(tmp_path / "run")["episode"]) > len(rows), "the run goes on"
