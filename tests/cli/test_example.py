"""The small run that the package ships: this version reads it, acts with it, and it is small."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from serl_chunk.cli.example import PACKED
from serl_chunk.main import main
from serl_chunk.runs.episodes import RunSource
from serl_chunk.runs.report.tables import recorded_episodes
from serl_chunk.types import Outcome
from serl_chunk.viewer.run_page import content

EVALUATION = ["--exp_name", "fake_aloha", "--actor", "--eval_checkpoint_step", "latest", "--eval_n_trajs", "4"]


@pytest.mark.compiles
def test_the_shipped_run_is_viewed_and_acts(tmp_path, capsys):
    """A change of formats, settings or networks that fails here needs a new one: benchmarks/example_run.py."""
    packed, run = resources.files("serl_chunk.runs") / PACKED, tmp_path / "new" / "run"
    assert len(packed.read_bytes()) < 2_000_000
    assert main(["example", str(run)]) == 0
    assert f"serl-chunk view {run}" in capsys.readouterr().out
    assert [path.name for path in run.parent.iterdir()] == ["run"]
    source = RunSource(run)
    about = [source.about(key) for key in source.keys()]
    assert len(about) == len(recorded_episodes(run, source)) == 20
    assert all(source.read(entry.key).steps.n == entry.length for entry in about)
    assert any(entry.human_steps for entry in about)
    assert {entry.outcome for entry in about} >= {Outcome.SUCCESS}
    assert content(run)["title"] == "fake_aloha: run"
    assert main([*EVALUATION, "--checkpoint_path", str(run), "--n_envs", "4"]) == 0
    (result,) = (run / "evaluations").iterdir()
    assert json.loads(result.read_text())["results"][0]["success_rate"] >= 0.5
