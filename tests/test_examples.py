"""The examples run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from serl_chunk.cli.record import run_record
from serl_chunk.config.loader import load_experiment

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.compiles
def test_a_policy_is_trained_in_one_process_by_the_public_names(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("loop", EXAMPLES / "loop.py")
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    source = (EXAMPLES / "loop.py").read_text()
    assert "serl_chunk." not in source.replace("serl_chunk` alone", ""), "the public names are of serl_chunk itself"
    assert len(source.splitlines()) <= 80
    run_record(load_experiment("fake_aloha"), 2, str(tmp_path), policy="scripted", noise=None, cameras=())
    monkeypatch.setattr(loop, "PRETRAIN", 3)
    monkeypatch.setattr(loop, "WARMUP", 1)
    assert 0 <= loop.train(str(tmp_path), 2, held_out=2) <= 1
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("episode"))
    assert first.endswith(" 0 updates")
    assert second.startswith("episode 1: success=")
