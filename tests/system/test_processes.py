"""Learners and actors as processes: trained runs, two actors, kills, signals."""

import json
import re
import signal

import pytest
from processes import PATIENCE, actor_totals, checkpoints, learner_totals, resumed_at

from serl_chunk.learner.metrics import read_metrics

pytestmark = pytest.mark.timeout(4 * PATIENCE)
ENDLESS = {"learner__max_steps": 1_000_000}
TICKS = 40  # of the longest episode


def test_a_run_leaves_its_files_and_counts_every_step(trained):
    run, output = trained
    assert all(line.startswith(("learner |", "actor |")) for line in output.splitlines()), output
    episodes, steps = actor_totals(output)
    assert learner_totals(output) == (40, steps)
    for name in ("config.json", "metrics.jsonl", "report.html", "report.png"):
        assert (run / name).stat().st_size > 0, name
    assert checkpoints(run) == [0, 20, 40]
    rows = read_metrics(run)["episode"]
    assert len(rows) == episodes
    assert sum(row["episode/l"] for row in rows) == steps


def test_a_completed_run_that_is_started_again_ends(processes, trained, tmp_path):
    """Its learner is gone before its actor is there."""
    run = trained.copy(tmp_path / "run")
    output = processes.both(run).ends()
    assert "learner | resumed at step 40: training is complete" in output
    assert checkpoints(run) == [0, 20, 40]


def test_two_actors_wait_for_their_learner_and_feed_it_until_it_is_told_to_stop(processes, tmp_path):
    run = tmp_path / "run"
    actors = {name: processes.actor("--actor_id", name, **ENDLESS) for name in ("left", "right")}
    for process in actors.values():
        process.says(f"no learner answers at 127.0.0.1:{processes.port}; waiting")
    learner = processes.learner(run, **ENDLESS)

    def both_recorded():
        rows = read_metrics(run)["episode"] if (run / "metrics.jsonl").exists() else []
        return {row["actor_id"] for row in rows} == set(actors) and max(checkpoints(run), default=0) >= 20

    learner.until(both_recorded, "no training with episodes of both actors")
    learner.signal(signal.SIGTERM)
    updates, steps = learner_totals(learner.ends())
    totals = {name: actor_totals(process.ends()) for name, process in actors.items()}
    assert all("the learner was stopped" in process.output for process in actors.values())
    assert checkpoints(run)[-1] == updates
    assert steps == sum(own for _, own in totals.values())
    rows = read_metrics(run)["episode"]
    for name, (episodes, own) in totals.items():
        mine = [row["episode/l"] for row in rows if row["actor_id"] == name]
        assert (len(mine), sum(mine)) == (episodes, own)


def test_training_survives_a_killed_actor_and_a_killed_learner(processes, tmp_path):
    run = tmp_path / "run"
    learner = processes.learner(run, **ENDLESS)
    first = processes.actor(**ENDLESS)
    learner.until(lambda: max(checkpoints(run), default=0) >= 20, "no checkpoint of the training appeared")
    second = processes.actor(**ENDLESS)
    second.says("another live session has the actor id 'actor'")
    first.kill()
    learner.says("actor actor is silent")
    of_first = len(read_metrics(run)["episode"])
    before = max(checkpoints(run))
    learner.until(lambda: max(checkpoints(run)) >= before + 60, "training did not go on with the second actor")
    learner.kill()
    kept, version = checkpoints(run)[-1], _version(run)

    last = kept + 200
    learner = processes.learner(run, learner__max_steps=last)
    output = learner.ends()
    said = second.ends()

    step, base = resumed_at(output)
    updates, env_steps = learner_totals(output)
    assert step == kept
    assert updates == last == checkpoints(run)[-1]
    assert "The online replay is empty" in output
    # Everything of the second life is counted once.
    rows, resumed = _rows_and_resume(run)
    lengths = [row["episode/l"] for row in rows]
    assert env_steps - base == sum(lengths[resumed:])
    # An episode open at the kill is sent again from its beginning: the second actor's episodes of both lives add up
    # to what it recorded. Of the first life one may be missing, acknowledged an instant before its row was written.
    assert 0 <= actor_totals(said)[1] - sum(lengths[of_first:]) <= TICKS
    versions = [int(v) for v in re.findall(r"policy (\d+)", said)]
    assert versions == sorted(versions)
    assert version < versions[-1] <= _version(run)


@pytest.mark.slow
def test_ctrl_c_ends_both_processes_with_a_checkpoint(processes, tmp_path):
    run = tmp_path / "run"
    launcher = processes.both(run, **ENDLESS)
    launcher.until(lambda: max(checkpoints(run), default=0) >= 20, "no checkpoint of the training appeared")
    launcher.signal(signal.SIGINT)
    output = launcher.ends()
    updates, steps = learner_totals(output)
    assert actor_totals(output)[1] == steps
    assert checkpoints(run)[-1] == updates


@pytest.mark.slow
def test_one_process_runs_twice_alike(processes, tmp_path):
    runs = []
    for name in ("one", "two"):
        run = tmp_path / name
        where = ("--demo_path", str(processes.demos), "--checkpoint_path", str(run))
        processes.start(*processes.flags(), "--local", "--debug", *where, "--seed", "7").ends()
        runs.append([_without_times(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    assert runs[0] == runs[1]
    assert {row["kind"] for row in runs[0]} == {"train", "episode", "event"}


def _version(run):
    return int((run / "snapshot_version").read_text())


def _rows_and_resume(run):
    """All episode rows in file order, and how many of them an earlier life wrote."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    marks = [i for i, row in enumerate(rows) if row["kind"] == "event" and row["text"].startswith("resumed at step")]
    assert len(marks) == 1
    earlier = sum(row["kind"] == "episode" for row in rows[: marks[0]])
    return [row for row in rows if row["kind"] == "episode"], earlier


def _without_times(line):
    row = json.loads(line)
    return {k: v for k, v in row.items() if k != "wall" and not k.startswith(("rates/", "timer/", "wait/"))}
