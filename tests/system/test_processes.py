"""Learners and actors as processes: two actors, kills, signals, keys, and a phase on data alone."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from collections import defaultdict

import pytest
from commands import Command
from processes import PATIENCE, actor_totals, checkpoints, learner_totals, settings
from system_accounts import journal_rows

from serl_chunk.runs.metrics import read_metrics
from serl_chunk.transport.security.client import mechanism_at
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk.types import StepBlock
from serl_chunk_robot.wire.curve import Pair

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


HERE = "127.0.0.1"
FAILED = 1
WRONG_USAGE = 2


def on(folder) -> tuple[str, ...]:
    """A machine of its own, as far as keys go."""
    return ("env", f"XDG_CONFIG_HOME={folder}")


@pytest.mark.slow
def test_one_pasted_line_lets_one_robot_in(processes, tmp_path):
    gpu, robot, stranger = (on(tmp_path / name) for name in ("gpu", "robot", "stranger"))
    learner = processes.start(
        *processes.flags(), "--learner", "--debug", "--demo_path", str(processes.demos), "--checkpoint_path",
        str(tmp_path / "run"), "--bind", "0.0.0.0", prefix=gpu,
    )  # fmt: skip
    learner.says("serl-chunk keys join '")
    learner.says("listening on 0.0.0.0")
    [line] = re.findall(r"serl-chunk keys join '(\S+)'", learner.output)

    # No machine without a key, or with one of its own.
    said = processes.actor("--ip", HERE, prefix=stranger).ends(FAILED)
    assert f"the learner at {HERE}:{processes.port} requires a key, and this machine has none" in said
    assert "Traceback" not in said

    said = processes.start("keys", "join", line, "--ip", HERE, prefix=robot).ends()
    assert "as 'robot'; key in " in said
    said = processes.start("keys", "join", line, "--ip", HERE, prefix=stranger).ends(FAILED)
    assert "its line was used by another machine or is older than ten minutes" in said
    known = ClientKeys.find(tmp_path / "robot" / "serl-chunk" / "keys", HERE)
    assert known is not None
    forged = dataclasses.replace(known, folder=tmp_path / "stranger" / "serl-chunk" / "keys", pair=Pair.new())
    forged.save()
    evaluation = ("--eval_checkpoint_step", "latest", "--eval_n_trajs", "1")
    said = processes.actor("--ip", HERE, *evaluation, prefix=stranger).ends(FAILED)
    assert f"the learner at {HERE}:{processes.port} refuses this machine's key 'robot'" in said

    # And the one that has pasted it trains.
    assert "robot" in processes.start("keys", "list", prefix=gpu).ends()
    _, steps = actor_totals(processes.actor("--ip", HERE, prefix=robot).ends())
    output = learner.ends()
    assert learner_totals(output) == (40, steps)
    assert "--insecure: any machine" not in output
    assert "unknown key" in output
    for text in (output, said):
        assert known.pair.secret not in text


@pytest.mark.slow
def test_on_loopback_an_actor_with_a_key_is_encrypted_and_has_its_name(processes, tmp_path, joined):
    short = {"learner__pretrain_steps": 0, "learner__max_steps": 10}
    learner = processes.learner(tmp_path / "run", "--keys", joined[0], **short)
    learner.says("listening on")
    assert mechanism_at(HERE, processes.port) == "CURVE"
    other = processes.actor("--keys", joined[1], "--actor_id", "right", kind=Command, **short).ends(WRONG_USAGE)
    assert "--actor_id=right: the learner knows this machine's key as 'left'" in other
    actor = processes.actor("--keys", joined[1], "--spool_path", str(tmp_path / "spool"), **short)
    _, steps = actor_totals(actor.ends())
    assert learner_totals(learner.ends()) == (10, steps)
    [segment] = (tmp_path / "run" / "journal" / "online").glob("*.journal")
    assert b"left-" in segment.read_bytes()  # its episodes' names begin with its own


OFFLINE = {"learner__pretrain_steps": 0, "learner__checkpoint_period": 20}


@pytest.mark.slow
def test_an_offline_phase_is_killed_and_goes_on_until_an_actor_takes_over(processes, tmp_path):
    run = tmp_path / "run"
    data = ("--debug", "--demo_path", str(processes.demos), "--checkpoint_path", str(run))
    evaluated = ("--eval_interval", "40", "--eval_episodes", "2")
    alone = ("--exp_name", "fake_aloha", "--learner", *data, *evaluated, *settings(**OFFLINE), "--online_steps", "0")

    killed = processes.start(*alone, "--offline_steps", "1000000")
    killed.until(lambda: max(checkpoints(run), default=0) >= 60, "no checkpoint of the offline phase appeared")
    killed.kill()

    total = checkpoints(run)[-1] + 60
    output = processes.both(run, *evaluated, "--offline_steps", str(total), **OFFLINE).ends()
    [step] = map(
        int, re.findall(r"resumed at step (\d+), 0 online steps, 4 demonstrations, in phase [0-9/]+ offline", output)
    )
    assert 60 <= step < total
    updates, steps = learner_totals(output)
    assert updates == total + 40
    assert actor_totals(output)[1] == steps > 0
    rows = read_metrics(run)["eval"]
    assert [row["step"] for row in rows] == sorted({*range(40, updates, 40), total, updates})
    assert all((run / "evaluations" / f"learner_{row['step']}.json").exists() for row in rows)
    assert json.loads((run / "config.json").read_text())["learner"]["offline_steps"] == total
