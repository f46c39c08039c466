"""`serl-chunk attention`: from a run's journal to a file, its figures on another run, and what is refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from coded_episodes import SPEC, make
from errors import naming
from journal_runs import Run

from serl_chunk.attention.alarm import Alarm
from serl_chunk.main import main
from serl_chunk.types import Source, SparseRows

RISES, FALLS = (0.25, 0.5, 0.75), (0.25, 0.75, 0.125)


def run_folder(path, run_id: str, *ends: tuple[str, tuple[float, ...]]):
    """A run of episodes of 12 ticks: how each ends, and Q at the ticks 0, 4 and 8."""
    run = Run(path)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"run_id": run_id}))
    with run.opened():
        for number, (end, q) in enumerate(ends):
            coded = make(np.random.default_rng(number), number, human=False, end=end)
            coded.length, coded.source = 12, np.full(12, Source.POLICY, np.uint8)
            coded.reads[:] = [set(), set()]
            begin, steps, ended = coded.episode()
            if end == "died":
                ended = ended._replace(outcome_by="restart")
            if q:
                rows = SparseRows(np.array([0, 4, 8], np.int32), np.array(q, np.float32))
                steps.sparse["decision/q"] = rows
            for record in (begin, steps, ended):
                run.put("a", record)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first = [("success", RISES)] * 3 + [("failure", FALLS)] * 2 + [("success", ()), ("died", FALLS)]
    second = [("success", RISES), ("success", FALLS), ("failure", FALLS), ("limit", FALLS), ("failure", RISES)]
    return run_folder(folder / "first", "1", *first), run_folder(folder / "second", "2", *second)


@pytest.fixture
def fitted(runs, tmp_path, capsys):
    file = tmp_path / "attention.json"
    words = ["attention", "fit", str(runs[0]), "--false_alarms", "0", "--out"]
    assert main([*words, str(tmp_path / "none" / "a.json")]) != 0
    assert re.match(naming(tmp_path / "none" / "a.json"), capsys.readouterr().err)
    assert main([*words, str(file)]) == 0
    assert "left out: 2 episodes" in capsys.readouterr().out
    assert Alarm.read(file).fall == 0
    return file


def test_test_prints_the_figures_of_another_run(runs, fitted, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    assert main(["attention", "test", str(fitted), str(runs[1]), "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert "recall 66.7%: an alarm in 2 of 3 failures" in out
    assert "precision 66.7%: 2 of 3 alarms true" in out
    assert "false alarms in 50.0% of 2 successes" in out
    after = (12 - 8) / SPEC.control_hz
    assert f"{after:.1f} s before the end" in out
    written = json.loads(figures.read_text())
    assert written["all"] == written["runs"][str(runs[1])]
    assert written["all"]["recall"] == pytest.approx(2 / 3)
    assert written["alarm"]["runs"] == [{"path": str(runs[0]), "run_id": "1"}]


def test_a_run_that_it_was_fitted_on_has_to_be_wanted(runs, fitted, capsys):
    words = ["attention", "test", str(fitted), str(runs[1]), str(runs[0])]
    assert main(words) == 2
    assert re.match(naming(runs[0], "--fitted"), capsys.readouterr().err)
    assert main([*words, "--fitted"]) == 0
    out = capsys.readouterr().out
    assert out.index(f"{runs[1]}:\n") < out.index(f"{runs[0]}:\n") < out.index("all runs:\n")
