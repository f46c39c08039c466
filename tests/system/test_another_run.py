"""A learner of another run on the same port: the actor goes over to it whole, and keeps what belongs to the first."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from processes import LISTENING, PATIENCE, learner_totals
from system_accounts import LIMITS, journal_rows

from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.robots.fake import spec as task
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire import records
from serl_chunk.types import Begin, Source, StepBlock

pytestmark = pytest.mark.timeout(4 * PATIENCE)
ENDLESS = {"learner__max_steps": 1_000_000, "learner__warmup_episodes": 1}
HUMAN_TICKS = 4  # of a run


class Journal(NamedTuple):
    """What a learner's journal holds, that was not delivered to the replay included."""

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
    first = processes.learner(a, **both, **ENDLESS, learner__steps_per_update=1)
    actor = processes.actor("--spool_path", str(spool), **both, **ENDLESS)
    first.until(lambda: version_of(a) >= 20 and has_episodes(a), "run A does not get on")
    first.kill()
    processes.demos = fewer
    second = processes.learner(b, **both, **LISTENING)
    actor.until(lambda: has_episodes(b), "no episodes of run B, or no human ticks in them")
    actor.signal(signal.SIGTERM)
    said = actor.ends()
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

    # What is of A and was not delivered stays in A's spool; together with A's journal it is all the actor recorded.
    assert of_b.steps == counted
    assert not set(of_a.begun) & set(of_b.begun)
    run_a, run_b = (json.loads((run / "config.json").read_text())["run_id"] for run in (a, b))
    left = re.search(rf"of run {run_b} now, it was of run {run_a}: (\d+) episodes, (\d+) steps", said)
    assert left, said
    kept = Spool(spool / "fake_aloha" / "actor" / run_a, LIMITS)
    assert kept.steps == int(left[2])
    undelivered, seq = 0, kept.acked
    while (entry := kept.at(seq)) is not None:
        undelivered, seq = undelivered + entry.item.steps, entry.item.end
        assert entry.item.kind in records.KINDS
    kept.close()
    assert of_a.steps + undelivered >= kept.steps
