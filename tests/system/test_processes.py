"""Learners and actors as processes: two actors, Ctrl-C, streamed demonstrations, policy servers, and another run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from ports import free_port
from processes import (
    LISTENING,
    PATIENCE,
    SIMULATED,
    Cluster,
    Process,
    actor_totals,
    checkpoints,
    descendants,
    learner_totals,
    resumed_at,
)
from system_accounts import journal_rows

from serl_chunk.cli.process import load
from serl_chunk.data.demos import load_demos, short_digest
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.fleet.engines import RESTARTS
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.episodes import RunSource
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import Begin, Source, StepBlock

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
def test_two_actors_of_one_command_and_one_of_them_is_killed(processes, tmp_path):
    run = tmp_path / "run"
    both = processes.both(run, "--actors", "2", "--spool_path", str(tmp_path / "spool"), **ENDLESS)

    def recorded(name: str) -> int:
        rows = read_metrics(run)["episode"] if (run / "metrics.jsonl").exists() else []
        return sum(row["actor_id"] == name for row in rows)

    both.until(lambda: recorded("actor-1") and recorded("actor-2"), "no training with episodes of both actors")
    [pid] = [p for p in descendants(both.pid) if Path(f"/proc/{p}/cmdline").read_text().endswith("actor-2\0")]
    before = recorded("actor-2")
    os.kill(pid, signal.SIGKILL)
    both.says(f"actor-2 was ended by SIGKILL: restart 1 of {RESTARTS} in 1 s")
    both.until(lambda: recorded("actor-2") > before + 1, "no episode after the restart")
    both.signal(signal.SIGTERM)
    output = both.ends()
    assert learner_totals(output)[0] == checkpoints(run)[-1]
    assert sorted(p.name for p in (tmp_path / "spool" / "fake_aloha").iterdir()) == ["actor-1", "actor-2"]
    assert output.count("actor ended (") == 2


@pytest.mark.slow
def test_a_run_goes_on_with_more_and_with_fewer_devices(processes, environment, tmp_path):
    """Eight, then one, then four simulated ones; each serves an actor, and resumes where the others stopped."""
    run, steps, seen = tmp_path / "run", 0, []
    for devices, parts in ((8, 2), (1, 1), (4, 4)):
        steps += 20
        cut = {} if devices == 1 else {"learner__fsdp_devices": parts, "learner__fsdp_least": 1e-4}
        flags = processes.flags(learner__max_steps=steps, **cut)
        xla = f"XLA_FLAGS={environment['XLA_FLAGS']} {SIMULATED.format(devices)}"
        learner = processes.start(
            *flags, "--learner", "--debug", "--demo_path", str(processes.demos), "--checkpoint_path", str(run),
            prefix=("env", xla),
        )  # fmt: skip
        actor = processes.start(*flags, "--actor")
        output = learner.ends()
        actor_totals(actor.ends())
        shape = f"{devices} devices train ({devices // parts} data x {parts} fsdp)"
        assert (shape in output) == (devices > 1)
        seen += [resumed_at(output)[0]] if steps > 20 else []
        assert checkpoints(run)[-1] == steps
    assert seen == [20, 40]


def two_processes(c: Cluster, run: Path, xla: str) -> list[Process]:
    """A learner in two processes of four simulated devices."""
    flags = [
        *c.flags(learner__fsdp_devices=4, learner__fsdp_least=1e-4, **ENDLESS), "--learner", "--debug",
        "--demo_path", str(c.demos), "--checkpoint_path", str(run), "--coordinator", f"127.0.0.1:{free_port()}",
    ]  # fmt: skip
    prefix = ("env", f"XLA_FLAGS={xla} {SIMULATED.format(4)}")
    return [c.start(*flags, "--process", f"{i}/2", prefix=prefix) for i in range(2)]


@pytest.mark.slow
def test_two_processes_of_one_learner_end_together_and_go_on(processes, environment, tmp_path):
    """Kill each, then stop the second by a signal. The run ends on one device and holds every step once."""
    run = tmp_path / "run"
    spool = ("--spool_path", str(tmp_path / "spool"))
    actors = [processes.actor("--actor_id", name, *spool, **ENDLESS) for name in ("left", "right")]

    def trains(first: Process, more: int) -> None:
        goal = max(checkpoints(run), default=0) + more
        first.until(lambda: max(checkpoints(run), default=0) >= goal, "no training", at_work="train ")

    first, second = two_processes(processes, run, environment["XLA_FLAGS"])
    trains(first, 20)
    assert "8 devices train (2 data x 4 fsdp)" in first.output
    second.kill()
    assert first.wait() == 1
    assert "learner process 1/2 has been silent for 20 s" in first.output
    assert all(actor.running for actor in actors)

    first, second = two_processes(processes, run, environment["XLA_FLAGS"])
    trains(first, 20)
    first.kill()
    assert second.wait() != 0
    assert "leader task" in second.output  # JAX's own words, before ours

    first, second = two_processes(processes, run, environment["XLA_FLAGS"])
    trains(first, 20)
    second.signal(signal.SIGTERM)
    updates, steps = learner_totals(first.ends())
    second.ends()
    assert checkpoints(run)[-1] == updates
    assert steps == sum(actor_totals(actor.ends())[1] for actor in actors)

    alone = processes.learner(run, learner__max_steps=updates).ends()
    assert f"resumed at step {updates}: training is complete" in alone


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


STREAMED_TO = {"learner__max_steps": 100_000, "learner__warmup_episodes": 1}


def recording(c: Cluster, out: Path, n: int, cwd: Path) -> Process:
    return c.start(
        "record", *c.flags(**STREAMED_TO), "--policy", "scripted", "--n_demos", str(n), "--out", str(out),
        "--ip", "127.0.0.1", cwd=cwd,
    )  # fmt: skip


def received(learner: Process) -> list[str]:
    return re.findall(r"demonstration received: (\S+),", learner.output)


def streamed(run: Path) -> Counter[str]:
    source = RunSource(run)
    entries = [source.about(key) for key in source.keys()]
    return Counter(e.end.episode_id for e in entries if e.demonstration)


@pytest.mark.slow
def test_each_demonstration_arrives_once_whoever_is_killed(processes, tmp_path):
    c, run, out, cwd = processes, tmp_path / "run", tmp_path / "streamed", tmp_path / "robot"
    spec = robot_spec(load("fake_aloha", []).robot)
    cwd.mkdir()
    # No learner yet: the files are written, and the command says what is missing.
    alone = recording(c, out, 2, cwd)
    text = alone.ends(1)
    assert "no learner answers" in text
    assert "the learner lacks 2 of those on disk" in text
    assert len(list(out.glob("*.hdf5"))) == 2

    learner = c.learner(run, **STREAMED_TO)
    learner.says("listening on")
    recorder = recording(c, out, 40, cwd)
    learner.until(lambda: len(received(learner)) >= 4, "four demonstrations never came")
    recorder.kill()
    learner.kill()
    assert 4 <= len(list(out.glob("*.hdf5"))) < 40

    learner = c.learner(run, **STREAMED_TO)
    learner.says("listening on")
    learner.says("streamed demonstrations put back")
    n = len(list(out.glob("*.hdf5"))) + 2
    assert f"the learner has all {n}" in recording(c, out, n, cwd).ends()
    again = recording(c, out, n, cwd).ends()
    assert f"0 demonstrations streamed; the learner has all {n}" in again
    assert streamed(run) == Counter({name: 1 for name in streamed(run)})
    known = {short_digest(e) for e in load_demos([c.demos], spec).episodes}  # by --demo_path: these are not sent
    digests = [short_digest(e) for e in load_demos([out], spec).episodes]
    new = [d for d in digests if d not in known]
    assert 4 <= len(new) == len(streamed(run))

    actor = c.start(*c.flags(**STREAMED_TO), "--actor", cwd=cwd)
    learner.until(lambda: len(read_metrics(run)["train"]) >= 3, "it never trained")
    row = read_metrics(run)["train"][-1]
    assert row["replay/demo_episodes"] == len(new) + len(known)
    actor.kill()
    learner.signal(signal.SIGINT)
    _, steps = learner_totals(learner.ends())
    source = RunSource(run)
    online = [e for e in map(source.about, source.keys()) if not e.demonstration]
    rows, events = read_metrics(run)["episode"], [row["text"] for row in read_metrics(run)["event"]]
    assert sum("demonstration received" in text for text in events) == len(new)
    assert 0 < len(rows) <= len(online)  # the one that was open at the kill is in neither
    assert 0 <= steps - sum(e.length for e in online) < 40  # of that one
    assert not any("demonstrations" in row["actor_id"] for row in rows)


TWO_RUNS = {"learner__max_steps": 1_000_000, "learner__warmup_episodes": 1}
HUMAN_TICKS = 4  # of a run


class Journal(NamedTuple):
    begun: list[str]  # episode ids
    blocks: dict[str, list[StepBlock]]

    @classmethod
    def of(cls, run: Path) -> Journal:
        found = cls([], {})
        for record in (row.record for row in journal_rows(run)):
            if isinstance(record, Begin):
                found.begun.append(record.episode_id)
            elif isinstance(record, StepBlock):
                found.blocks.setdefault(record.episode_id, []).append(record)
        return found

    @property
    def steps(self) -> int:
        return sum(b.n for blocks in self.blocks.values() for b in blocks)


def version_of(run: Path) -> int:
    file = run / "snapshot_version"
    return int(file.read_text() or 0) if file.exists() else 0


def human_ticks(run: Path) -> int:
    return sum(row["intervention_steps"] for row in read_metrics(run)["episode"])


def has_episodes(run: Path) -> bool:
    there = (run / "metrics.jsonl").exists() and len(read_metrics(run)["episode"]) >= 3
    return there and human_ticks(run) == HUMAN_TICKS


def normaliser_of(run: Path) -> Normaliser:
    checkpoint = CheckpointStore(run).restore_policy(0)
    return Normaliser.restored(checkpoint.meta, checkpoint.normaliser)


def decoded_otherwise(blocks: list[StepBlock], normaliser: Normaliser) -> int:
    """Steps of the policy whose commands are not what `normaliser`, and the robot's limits, make of the chunk."""
    low, high = np.array(task.ACTION_LOW), np.array(task.ACTION_HIGH)
    rate = np.where(np.isin(np.arange(task.ACTION_DIM), task.GRIPPER), task.GRIPPER_RATE, task.JOINT_RATE)
    states = np.concatenate([b.observation["state"] for b in blocks])
    actions = np.concatenate([b.action for b in blocks])
    rows = [(b.first_tick, b.sparse["decision/chunk"]) for b in blocks if "decision/chunk" in b.sparse]
    chunks = {first + int(i): chunk for first, sparse in rows for i, chunk in zip(*sparse, strict=True)}
    wrong = 0
    for tick in np.flatnonzero(np.concatenate([b.source for b in blocks]) == Source.POLICY):
        decided = int(np.concatenate([b.decision_tick for b in blocks])[tick])
        command = np.clip(normaliser.decode(states[decided], chunks[decided])[tick - decided], low, high)
        joints = states[tick][: task.ACTION_DIM]
        wrong += not np.allclose(np.clip(command, joints - rate, joints + rate), actions[tick], atol=1e-5)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["lockstep", "realtime"])
def test_the_actor_goes_over_to_another_run_on_the_same_port(processes, demos, tmp_path, clock):
    """Run A is far ahead in versions; B begins at 1, with other demonstrations and thus another normaliser."""
    a, b, fewer, spool = (tmp_path / name for name in ("a", "b", "fewer", "spool"))
    fewer.mkdir()
    shutil.copy(sorted(demos.iterdir())[0], fewer)
    both = {"actor__clock": clock, "actor__max_human_ticks": HUMAN_TICKS}
    first = processes.learner(a, **both, **TWO_RUNS, learner__steps_per_update=1)
    actor = processes.actor("--spool_path", str(spool), **both, **TWO_RUNS)
    first.until(lambda: version_of(a) >= 20 and has_episodes(a), "run A does not get on")
    first.kill()
    processes.demos = fewer
    second = processes.learner(b, **LISTENING | both)
    actor.until(lambda: has_episodes(b), "no episodes of run B, or no human ticks in them")
    actor.signal(signal.SIGTERM)
    actor.ends()
    second.signal(signal.SIGTERM)
    _, counted = learner_totals(second.ends())
    of_a, of_b = Journal.of(a), Journal.of(b)

    # Of B's parameters and normaliser alone.
    published = version_of(b)
    assert published < 20 <= version_of(a)
    versions = Counter(int(v) for blocks in of_b.blocks.values() for block in blocks for v in block.policy_version)
    assert set(versions) <= set(range(-1, published + 1)) - {0}, f"B published up to {published}: {versions}"
    normalisers = normaliser_of(a), normaliser_of(b)
    assert len({n.digest() for n in normalisers}) == 2
    wrong = [sum(decoded_otherwise(blocks, n) for blocks in of_b.blocks.values()) for n in normalisers]
    assert wrong[1] == 0
    assert wrong[0] > 0  # A's would have been noticed

    # Counters begin anew: B's first episode is number 0, and B has human ticks although A used up its own.
    assert of_b.begun[0].endswith("-000000")
    assert (human_ticks(a), human_ticks(b)) == (HUMAN_TICKS, HUMAN_TICKS)
    assert [int(name[-6:]) for name in of_b.begun] == list(range(len(of_b.begun)))
    assert of_b.steps == counted
    assert not set(of_a.begun) & set(of_b.begun)
