"""Learners and actors as processes: trained runs, two actors, kills, signals."""

import json
import signal
from collections import defaultdict

import pytest
from processes import PATIENCE, actor_totals, checkpoints, learner_totals
from system_accounts import journal_rows

from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import StepBlock

pytestmark = pytest.mark.timeout(4 * PATIENCE)
ENDLESS = {"learner__max_steps": 1_000_000}


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_second_actor_with_the_same_name_is_refused_and_may_take_over(processes, tmp_path):
    run = tmp_path / "run"
    learner = processes.learner(run, **ENDLESS)
    first = processes.actor("--spool_path", str(tmp_path / "one"), **ENDLESS)
    learner.until(lambda: max(checkpoints(run), default=0) >= 20, "no checkpoint of the training appeared")
    here = processes.actor("--spool_path", str(tmp_path / "one"), **ENDLESS)
    assert "is in use by another process" in here.ends(2)
    elsewhere = processes.actor("--spool_path", str(tmp_path / "two"), **ENDLESS)
    elsewhere.says("another live session has the actor id 'actor'")
    first.kill()
    learner.says("actor actor is silent")
    before = len(read_metrics(run)["episode"])
    learner.until(lambda: len(read_metrics(run)["episode"]) >= before + 3, "the second actor's episodes did not come")
    learner.signal(signal.SIGTERM)
    learner.ends()
    elsewhere.ends()
    acted = defaultdict(list)
    for row in journal_rows(run):
        if isinstance(row.record, StepBlock):
            acted[row.session] += [v for v in row.record.policy_version.tolist() if v >= 0]
    assert len(acted) == 2
    for versions in acted.values():
        assert len(versions) > 20
        assert versions == sorted(versions)


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
    flags = list(processes.flags())
    at = flags.index("--port")
    del flags[at : at + 2]  # nothing to --local
    for name in ("one", "two"):
        run = tmp_path / name
        where = ("--demo_path", str(processes.demos), "--checkpoint_path", str(run))
        processes.start(*flags, "--local", "--debug", *where, "--seed", "7").ends()
        runs.append([_without_times(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    assert runs[0] == runs[1]
    assert {row["kind"] for row in runs[0]} == {"train", "episode", "event"}


def _without_times(line):
    row = json.loads(line)
    return {k: v for k, v in row.items() if k != "wall" and not k.startswith(("rates/", "timer/", "wait/"))}
