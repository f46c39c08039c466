"""`--eval_checkpoint_step` with several checkpoints: what is printed when, and what is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from actor_helpers import LineEnv, NoisyAgent, identity, make_config
from errors import naming
from operator_script import Desk

from serl_chunk.cli import evaluation
from serl_chunk.cli.evaluation import EvaluationOptions, run_evaluation
from serl_chunk.cli.process import load
from serl_chunk.evaluation import rollouts
from serl_chunk.runs.evaluations import VALIDATION
from serl_chunk.runs.metrics import Counters
from serl_chunk.types import EVAL_SEED_BASE, ConfigError, Snapshot

STEPS = ("500", "1500", "2500")


class Solved(LineEnv):
    def step(self, action):
        self.success_at = self.tick if action[0] > 0.15 else None
        return super().step(action)


class Later(NoisyAgent):
    """Solves the task with the parameters of the later checkpoints."""

    def sample(self, params, *a, **k):
        chunk, record = super().sample(params, *a, **k)
        return chunk + np.float32([params / 2, 0]), record


@pytest.fixture
def lab(monkeypatch, tmp_path):
    """Evaluate three checkpoints on the line robot, on which an interruption comes in the given episode."""

    def run(steps=STEPS, *, n: int = 4, interrupted: int | None = None, **more):
        env = run.env = Solved(length=15)
        of_run = [
            evaluation.Checkpoint(
                Snapshot(int(s), {"bias": np.float32(int(s) > 1000)}), identity(8), Counters(int(s), 0, 0)
            )
            for s in steps
        ]
        monkeypatch.setattr(evaluation, "make_env", lambda *a, **k: env)
        monkeypatch.setattr(evaluation, "spec_of", lambda config: env.robot_spec)
        monkeypatch.setattr(evaluation, "make_agent", lambda *a: Later(8))
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
        options = EvaluationOptions(tuple(steps), n, **{"stochastic": True, **more})
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


class Film:
    """A stand-in for EpisodeVideo; `seen` is each path of the run as a film begins."""

    seen: ClassVar[list[str]] = []

    def __init__(self, path: Path, hz: float) -> None:
        self.path = path
        run = next(folder for folder in path.parents if folder.name == "run")
        self.seen += [str(file.relative_to(run)) for file in (path, *run.rglob("*"))]

    def add(self, images, *, human: bool = False) -> None:
        pass

    def discard(self) -> None:
        pass

    def finish(self, name: str) -> None:
        self.path.with_name(name).touch()


@pytest.mark.parametrize("operated", [False, True])
def test_nothing_names_the_checkpoint_that_runs_before_the_end(lab, capsys, caplog, monkeypatch, operated):
    caplog.set_level("DEBUG")
    monkeypatch.setattr(evaluation, "PROGRESS_EPISODES", 1)
    monkeypatch.setattr(rollouts, "EpisodeVideo", Film)
    monkeypatch.setattr(Film, "seen", [])
    before: list[str] = []
    desks: list[Desk] = []
    if operated:
        monkeypatch.setattr(evaluation, "console_of", Desk.opening([], desks))
    in_turns = rollouts.evaluate_in_turns

    def watched(*a, **k):
        results = in_turns(*a, **k)
        before.append(caplog.text + capsys.readouterr().out)
        return results

    monkeypatch.setattr(rollouts, "evaluate_in_turns", watched)
    lab(filmed=4)
    assert "24/24 episodes" in before[0]
    shown = {str(v) for desk in desks for state in desk.console.states for v in state if isinstance(v, str | int)}
    for step in STEPS:
        assert step not in before[0]
        assert [text for text in shown if step in text] == []
        assert [name for name in Film.seen if name.startswith("evaluations") or f"{step}_" in name] == []
    videos = lab.folder.parent / "videos"
    assert sorted(p.name for p in videos.iterdir()) == sorted(f"{s}_{m}" for s in STEPS for m in ("mean", "sampled"))
    assert {len(list(folder.iterdir())) for folder in videos.iterdir()} == {4}


def test_every_policy_has_the_same_starts_which_the_console_numbers(lab, monkeypatch):
    desks: list[Desk] = []
    seen: set[tuple[int, str]] = set()
    step = Solved.step

    def watched(self, action):
        seen.add((self.seeds[-1] - EVAL_SEED_BASE + 1, desks[0].console.states[-1].progress.partition(", ")[2]))
        return step(self, action)

    monkeypatch.setattr(Solved, "step", watched)
    monkeypatch.setattr(evaluation, "console_of", Desk.opening([], desks))
    lab(n=3)
    assert seen == {(k, f"start {k}") for k in (1, 2, 3)}
    assert lab.env.seeds[2:] == [EVAL_SEED_BASE + k // 6 for k in range(18)]


def test_a_comparison_ends_once_it_is_decided(lab, capsys):
    assert lab(("500", "1500"), n=20, stochastic=False, until_decided=True) == 0
    files = written(lab.folder)
    assert [(r["n"], "interrupted" in r) for data in files.values() for r in data["results"]] == [(8, False)] * 2
    [comparison] = {json.dumps(data["comparison"]) for data in files.values()}
    found = json.loads(comparison)
    assert found["low"] > 0
    expected = {"of": 1500, "against": 500, "pairs": 8, "second_alone": 8, "decided": True, "until_decided": True}
    assert found | expected == found
    assert ", decided" in " ".join(capsys.readouterr().out.split())
    assert lab(("1500", "2500"), n=10, stochastic=False, until_decided=True) == 0  # of the same parameters
    assert {r["n"] for name, data in written(lab.folder).items() if "2500" in name for r in data["results"]} == {10}
    assert "not decided" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match=naming("eval_until_decided", 4, 2)):
        lab(("500", "1500"), until_decided=True)


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
