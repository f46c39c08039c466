"""Evaluation as a process: of a run folder, and of a checkpoint fetched from a learner."""

import importlib.util
import json
import re

import pytest
from commands import Command
from processes import LISTENING, PATIENCE

from serl_chunk.runs.metrics import read_metrics

pytestmark = pytest.mark.timeout(3 * PATIENCE)
LAST_LINE = re.compile(r"evaluation: success_rate=[01]\.\d\d n=(\d+) report=(.+)")
EVALUATE = ("--eval_checkpoint_step", "latest", "--eval_n_trajs")


def last_line(output: str) -> tuple[int, str]:
    """(n, report) of the line that tools read; no interventions, and nothing starved."""
    match = LAST_LINE.fullmatch(output.strip().splitlines()[-1])
    assert match, output
    return int(match[1]), match[2]


def test_a_run_is_evaluated_without_a_learner(processes, trained, tmp_path):
    run = trained.copy(tmp_path / "run")
    # Another number of candidates is the evaluation's own affair, and said; of what only trains nothing matters.
    changes = {"agent__candidates": 3, "agent__lr": 0.125, "learner__max_steps": 7}
    output = processes.actor(*EVALUATE, "3", "--eval_stochastic", "--checkpoint_path", str(run), **changes).ends()
    different = [line.partition("WARNING ")[2] for line in output.splitlines() if "with another setting" in line]
    assert different == ["evaluated with another setting than the run's (run -> here): agent.candidates: 2 -> 3"]
    assert last_line(output) == (3, str(run / "report.html"))
    assert "mean (version 40)" in output
    assert "sampled (version 40)" in output
    saved = json.loads((run / "evaluations" / "evaluation_40.json").read_text())
    assert saved["checkpoint"] == 40
    assert [(r["mode"], r["n"], len(r["episodes"])) for r in saved["results"]] == [("mean", 3, 3), ("sampled", 3, 3)]
    assert [e["seed"] for e in saved["results"][0]["episodes"]] == [1_000_000, 1_000_001, 1_000_002]  # held out
    rows = read_metrics(run)["eval"]
    assert [(row["mode"], row["n"], row["checkpoint"]) for row in rows] == [("mean", 3, 40), ("sampled", 3, 40)]


def test_a_missing_checkpoint_lists_those_that_exist(processes, trained):
    actor = processes.actor(
        "--eval_checkpoint_step", "33", "--eval_n_trajs", "1", "--checkpoint_path", str(trained.run), kind=Command
    )
    assert "has no checkpoint '33'; it has: 0, 20, 40 (or latest, best)" in actor.ends(1)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("imageio_ffmpeg"), reason="videos need pip install imageio[ffmpeg]")
def test_videos_of_the_evaluation(processes, trained, tmp_path):
    run = trained.copy(tmp_path / "run")
    processes.actor(*EVALUATE, "1", "--save_video", "--checkpoint_path", str(run)).ends()
    (video,) = (run / "videos" / "40_mean").iterdir()
    assert re.fullmatch(r"mean_000_(success|failure|unknown)\.mp4", video.name)
    assert video.read_bytes()[4:8] == b"ftyp"


def test_a_checkpoint_is_fetched_from_a_learner(listening):
    output = listening.cluster.actor(*EVALUATE, "2", "--ip", "127.0.0.1", **LISTENING).ends()
    n, report = last_line(output)
    assert n == 2
    assert report.startswith("none")
    assert "mean (version 20)" in output  # its newest: the one after is damaged
    assert listening.learner.running


def test_fetching_a_missing_checkpoint_lists_those_that_exist(listening):
    actor = listening.cluster.actor(
        "--ip", "127.0.0.1", "--eval_checkpoint_step", "33", "--eval_n_trajs", "1", kind=Command, **LISTENING
    )
    assert "has no checkpoint '33'; it has: 0, 20 (or latest, best)" in actor.ends(1)
