"""A completed run: its files, evaluations of it, another start, and a learner that goes on with it."""

import json
import re

import pytest
from commands import Command
from ports import free_port
from processes import LISTENING, PATIENCE, actor_totals, checkpoints, learner_totals, resumed_at, sentence

from serl_chunk.runs.metrics import read_metrics

pytestmark = pytest.mark.timeout(3 * PATIENCE)
WRONG_USAGE, FAILED = 2, 1
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


def test_a_checkpoint_is_fetched_from_a_learner(listening):
    output = listening.cluster.actor(*EVALUATE, "2", "--ip", "127.0.0.1", **LISTENING).ends()
    n, report = last_line(output)
    assert n == 2
    assert report.startswith("none")
    assert "mean (version 20)" in output  # its newest: the one after is damaged
    assert listening.learner.running


def test_a_run_leaves_its_files_and_counts_every_step(trained):
    run, output = trained
    [own] = [line for line in output.splitlines() if not line.startswith(("learner |", "actor |"))]
    assert "keys of this learner" in own  # the launcher made them: no line is to be pasted
    assert (run.parent / "keys" / "server.json").exists()
    assert re.search(r"(?m)^learner \| .*INFO .*listening on 0\.0\.0\.0", output)
    assert re.search(r"(?m)^actor \| .*actor ended", output)
    episodes, steps = actor_totals(output)
    assert learner_totals(output) == (40, steps)
    for name in ("config.json", "metrics.jsonl", "report.html", "report.png"):
        assert (run / name).stat().st_size > 0, name
    assert checkpoints(run) == [0, 20, 40]
    rows = read_metrics(run)["episode"]
    assert len(rows) == episodes
    assert sum(row["episode/l"] for row in rows) == steps


def test_a_damaged_newest_checkpoint_falls_back_loudly(listening):
    output = listening.learner.output
    assert re.search(r"WARNING .*checkpoint.* 40\b.*Falling back", output.replace("\n", " "))
    assert "Falling back to the checkpoint before it" in output
    assert resumed_at(output)[0] == 20
    assert checkpoints(listening.run) == [0, 20]


def test_actor_and_learner_of_two_experiments(listening):
    file = listening.cluster.folder / "other_name.py"
    file.write_text(
        "import dataclasses\n"
        "from serl_chunk.config.loader import load_experiment\n"
        "def experiment():\n"
        "    return dataclasses.replace(load_experiment('fake_aloha'), name='other_name')\n"
    )
    longer = listening.cluster.actor(kind=Command, chunk__horizon=7)
    renamed = listening.cluster.actor(kind=Command, exp_name=str(file))
    said = sentence(longer.ends(FAILED))
    assert "chunk.horizon is '5' at the learner and '7' at the actor" in said
    assert "--config.chunk.horizon=5" in said
    assert "kernel" not in said
    said = sentence(renamed.ends(FAILED))
    assert "experiment is 'fake_aloha' at the learner and 'other_name' at the actor" in said
    assert listening.learner.running


def test_a_second_learner_takes_neither_port_nor_folder(listening):
    port = listening.cluster.learner(listening.cluster.folder / "second", kind=Command, **LISTENING)
    folder = listening.cluster.start(
        "--exp_name", "fake_aloha", "--port", str(free_port()), "--learner", "--debug",
        "--checkpoint_path", str(listening.run), kind=Command,
    )  # fmt: skip
    said = sentence(port.ends(WRONG_USAGE))
    assert f"port {listening.cluster.port} of 127.0.0.1 is in use" in said
    said = sentence(folder.ends(WRONG_USAGE))
    assert f"{listening.run} is in use by another learner" in said
    assert listening.learner.running


def test_keys_that_are_asked_for_are_binding_through_a_tunnel(listening, joined):
    """A learner on loopback without keys may be anything at the other end: an actor with `--keys` sends it nothing."""
    keys = ("--keys", joined[1], "--spool_path", joined[1])
    said = sentence(listening.cluster.actor(*keys, kind=Command, **LISTENING).ends(FAILED))
    assert f"the learner at 127.0.0.1:{listening.cluster.port} runs without keys" in said
    assert "actor left connected" not in listening.learner.output
