"""`--eval_checkpoint_step` with several checkpoints: what is printed when, and what is written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from actor_helpers import LineEnv, NoisyAgent, identity, make_config
from errors import naming

from serl_chunk.cli import evaluation
from serl_chunk.cli.evaluation import EvaluationOptions, run_evaluation
from serl_chunk.cli.process import load
from serl_chunk.evaluation import rollouts
from serl_chunk.runs.evaluations import VALIDATION
from serl_chunk.runs.metrics import Counters
from serl_chunk.types import ConfigError, Snapshot

STEPS = ("500", "1500", "2500")


class Solved(LineEnv):
    def step(self, action):
        self.success_at = self.tick if action[0] > 0.15 else None
        return super().step(action)


@pytest.fixture
def lab(monkeypatch, tmp_path):
    """Evaluate three checkpoints on the line robot, on which an interruption comes in the given episode."""

    def run(steps=STEPS, *, n: int = 4, interrupted: int | None = None, validation: bool = False):
        env = Solved(length=15)
        of_run = [
            evaluation.Checkpoint(Snapshot(int(s), {"bias": np.float32(0)}), identity(8), Counters(int(s), 0, 0))
            for s in steps
        ]
        monkeypatch.setattr(evaluation, "make_env", lambda *a, **k: env)
        monkeypatch.setattr(evaluation, "spec_of", lambda config: env.robot_spec)
        monkeypatch.setattr(evaluation, "make_agent", lambda *a: NoisyAgent(8))
        monkeypatch.setattr(evaluation, "checkpoints_of_run", lambda *a: of_run)
        monkeypatch.setattr(evaluation, "build_report", lambda run: run / "report.html")
        signals = []
        monkeypatch.setattr(evaluation, "stop_on_signals", lambda stop, how: signals.append(stop))
        reset = env.reset

        def counted(**options):
            if interrupted is not None and len(env.seeds) == 2 + interrupted:  # two of them compare starts
                signals[0].set()
            return reset(**options)

        env.reset = counted
        (tmp_path / "run").mkdir(exist_ok=True)
        options = EvaluationOptions(tuple(steps), n, stochastic=True, validation=validation)
        return run_evaluation(make_config(), options, tmp_path / "run")

    run.folder = tmp_path / "run" / "evaluations"
    return run


def written(folder: Path) -> dict[str, dict]:
    return {file.name: json.loads(file.read_text()) for file in folder.glob("*.json")}


def test_each_checkpoint_has_its_file_its_row_and_its_line(lab, capsys, tmp_path):
    assert lab() == 0
    out = capsys.readouterr().out
    files = written(lab.folder)
    assert sorted(files) == [f"evaluation_{step}.json" for step in (1500, 2500, 500)]
    for name, data in files.items():
        step = int(re.findall(r"\d+", name)[0])
        assert (data["checkpoint"], data["in_turns_with"]) == (step, sorted({500, 1500, 2500} - {step}))
        assert [r["mode"] for r in data["results"]] == ["mean", "sampled"]
        assert all(r["n"] == len(r["turns"]) == len(r["episodes"]) == 4 for r in data["results"])
        assert f"(version {step})" in out
    turns = sorted(turn for data in files.values() for r in data["results"] for turn in r["turns"])
    assert turns == list(range(24))
    lines = [line for line in out.splitlines() if line.startswith("evaluation: ")]
    assert [line.rpartition(" ")[2] for line in lines] == [f"checkpoint={step}" for step in STEPS]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["kind"] == "eval" for row in rows) == 6


def test_nothing_names_the_checkpoint_that_runs_before_the_end(lab, capsys, caplog, monkeypatch):
    caplog.set_level("DEBUG")
    monkeypatch.setattr(evaluation, "PROGRESS_EPISODES", 1)
    before: list[str] = []
    in_turns = rollouts.evaluate_in_turns

    def watched(*a, **k):
        results = in_turns(*a, **k)
        before.append(caplog.text + capsys.readouterr().out)
        return results

    monkeypatch.setattr(rollouts, "evaluate_in_turns", watched)
    lab()
    assert "24/24 episodes" in before[0]
    for step in STEPS:
        assert step not in before[0]


def test_an_interruption_reports_and_writes_what_was_finished(lab, capsys, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        lab(interrupted=0)  # before the first end
    assert "evaluation: " not in capsys.readouterr().out
    assert not lab.folder.exists()
    with pytest.raises(KeyboardInterrupt):
        lab(interrupted=7)
    files = written(lab.folder)
    assert sum(r["n"] for data in files.values() for r in data["results"]) == 7
    assert all(r["interrupted"] for data in files.values() for r in data["results"])
    assert capsys.readouterr().out.count("evaluation: ") == len(files) == 3
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_interrupted_validation_chooses_no_checkpoint(lab, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        lab(interrupted=7, validation=True)
    assert all(name.startswith(VALIDATION) for name in written(lab.folder))
    store = type("Store", (), {"steps": lambda self: [500, 1500, 2500], "newest": lambda self: 2500})()
    with pytest.raises(evaluation.evaluations.CheckpointError, match="none is best"):
        evaluation.evaluations.resolve_step(lab.folder.parent, store, "best")


def test_a_checkpoint_that_is_named_twice_is_refused(lab):
    with pytest.raises(ConfigError, match=naming("eval_checkpoint_step", 500, "twice")):
        lab(("500", "1500", "500"))


def test_only_a_device_at_a_real_robot_may_intervene(monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(evaluation, "make_intervention", lambda source, *a: opened.append(source))
    for source in ("none", "scripted", "spacemouse"):
        for server in ("", "127.0.0.1"):
            config = load("fake_aloha", [("actor.intervention", source), ("robot.server", server)])
            evaluation._open_human(config, LineEnv())
    assert opened == ["spacemouse"]
