"""A learner puts back what the one before it received, and counts nothing twice."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from point_robot import HORIZON, experiment, record_demos

from serl_chunk.cli import learner as learner_command
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.schedule import Phase
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.folder import open_run
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import Begin, End, Outcome, Source, Step, StepBlock

pytestmark = pytest.mark.compiles

LENGTH = 12


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> str:
    return record_demos(tmp_path_factory.mktemp("demos"), 2)


def build(config, demos, run):
    spec = robot_spec(config.robot)
    folder = open_run(config, spec, str(run))
    return learner_command.make_learner(
        config, RunOptions([demos]), folder, spec, publish=lambda s, i: None, threaded=False
    )


def journal(episodes: int) -> list[tuple[int, str, object]]:
    """(entry, session, record) of episodes in blocks; a human acts on ticks 2..4 of every second one."""
    rows: list[tuple[int, str, object]] = []
    for e in range(episodes):
        name = f"e{e}"
        steps = [
            Step(t, {"state": np.array([e, t], np.float32)}, np.zeros(2, np.float32), 0.0,
                 Source.HUMAN if e % 2 and 2 <= t < 5 else Source.POLICY, t - t % HORIZON, 1, 0.1 * t)
            for t in range(LENGTH)
        ]  # fmt: skip
        for i in range(len(steps)):  # a policy's step names its decision, a human's none
            if steps[i].source is Source.HUMAN:
                steps[i] = steps[i]._replace(decision_tick=-1)
        final = {"state": np.array([e, LENGTH], np.float32)}
        for record in (
            Begin(name),
            StepBlock.from_steps(name, steps[:5]),
            StepBlock.from_steps(name, steps[5:]),
            End(name, LENGTH, final, e % 2 == 0, e % 2 == 1, Outcome.SUCCESS if e % 2 == 0 else Outcome.UNKNOWN),
        ):
            rows.append((len(rows), "actor/s", record))
    return rows


def feed(learner, rows) -> None:
    for number, session, record in rows:
        learner.router.insert(session, record, number + 1)


@pytest.mark.parametrize("at", [0, 6, 8, 17, 23, 24])  # entries received when the checkpoint was written
def test_counters_are_those_of_a_learner_that_never_stopped(demos, tmp_path, at):
    config, rows = experiment(pretrain_steps=0, critic_warmup_steps=0), journal(6)
    first = build(config, demos, tmp_path / "run")
    feed(first, rows[:at])
    first.checkpoint()
    first.checkpoints.close()
    feed(first, rows[at:])  # received, journalled, acknowledged; and then it is killed
    first._count_episodes()
    first.metrics.close()

    second = build(config, demos, tmp_path / "run")
    assert second.refill(rows) == 6 * LENGTH
    second._count_episodes()
    assert (second.env_steps, second.human_ticks, second.episodes) == (6 * LENGTH, 9, 6)
    assert (first.env_steps, first.human_ticks, first.episodes) == (6 * LENGTH, 9, 6)
    assert second.replay.ready == first.replay.ready
    second.metrics.close()


@pytest.mark.parametrize("at", [2, 3, 4])  # before the steps, before the giving up, behind it
def test_an_episode_that_was_given_up_is_counted_once(demos, tmp_path, at):
    config, rows = experiment(pretrain_steps=0, critic_warmup_steps=0), journal(2)
    rows = [*rows[:3], (3, "actor/s", None), *((n + 1, "actor/t", r) for n, _, r in rows[4:])]
    first = build(config, demos, tmp_path / "run")

    def take(part):
        for number, session, record in part:
            if record is None:
                first.router.close_session(session, gone=True, position=number + 1)
            else:
                first.router.insert(session, record, number + 1)

    take(rows[:at])
    first.checkpoint()
    first.checkpoints.close()
    take(rows[at:])
    first._count_episodes()
    first.metrics.close()
    second = build(config, demos, tmp_path / "run")
    second.refill(rows)
    second._count_episodes()
    assert (first.env_steps, first.episodes, first.human_ticks) == (2 * LENGTH, 2, 3)
    assert (second.env_steps, second.episodes, second.human_ticks) == (2 * LENGTH, 2, 3)
    assert second.replay.ready == first.replay.ready
    second.metrics.close()
    assert len(read_metrics(tmp_path / "run")["episode"]) == 2


def test_interventions_that_the_journal_no_longer_has_are_told(demos, tmp_path, caplog):
    config = experiment(pretrain_steps=0, critic_warmup_steps=0)
    config = dataclasses.replace(config, replay=dataclasses.replace(config.replay, capacity=60))
    first, rows = build(config, demos, tmp_path / "run"), journal(12)
    feed(first, rows)
    held = int(first.replay.stats()["replay/human_rows"])
    assert held > 0
    first.checkpoint()
    first.checkpoints.close()
    first.metrics.close()
    second = build(config, demos, tmp_path / "run")
    second.refill(rows[-8:])
    assert any(f"{held} of {held} steps of old interventions could not be put back" in line for line in caplog.messages)
    second.metrics.close()
    caplog.clear()
    third = build(config, demos, tmp_path / "run")
    third.refill(rows)
    assert not any("old interventions" in line for line in caplog.messages)
    third.metrics.close()


def test_training_goes_on_at_once(demos, tmp_path, caplog):
    config, rows = experiment(pretrain_steps=0, critic_warmup_steps=0, max_steps=30), journal(6)
    first = build(config, demos, tmp_path / "run")
    feed(first, rows[:16])
    while first.work():
        pass
    feed(first, rows[16:])
    while first.updates < 20 and first.work():
        pass
    assert first.updates >= 20
    first.checkpoint()
    first.checkpoints.close()
    first.metrics.close()

    second = build(config, demos, tmp_path / "run")
    second.refill(rows)
    assert second.trainer.phase is Phase.WARMUP
    second.work()
    assert second.trainer.phase is Phase.TRAIN  # without a single new step
    feed(second, [(24, "actor/s", Begin("new")), (25, "actor/s", dataclasses.replace(rows[1][2], episode_id="new"))])
    assert second.work()
    assert second.updates == 21
    assert not any("empty" in line for line in caplog.messages)
    second.metrics.close()


def test_what_does_not_fit_is_left_out_and_logged(demos, tmp_path, caplog):
    config, rows = experiment(pretrain_steps=0, critic_warmup_steps=0), journal(2)
    number, session, bad = rows[5]
    rows[5] = (number, session, bad.slice(1, bad.n))  # the experiment is not what it was
    learner = build(config, demos, tmp_path / "run")
    assert learner.refill(rows) == LENGTH
    assert any("expected tick 0" in line for line in caplog.messages)
    assert any("records of the journal were left out" in line for line in caplog.messages)
    learner.metrics.close()


def test_a_journal_that_ends_before_the_checkpoint_is_logged(demos, tmp_path, caplog):
    config, rows = experiment(pretrain_steps=0, critic_warmup_steps=0), journal(2)
    first = build(config, demos, tmp_path / "run")
    feed(first, rows)
    first.checkpoint()
    first.checkpoints.close()
    first.metrics.close()
    second = build(config, demos, tmp_path / "run")
    assert second.refill(rows[:4]) == LENGTH
    assert any("the journal ends at entry 4, the checkpoint covers 8" in line for line in caplog.messages)
    second.router.insert("actor/t", Begin("later"), 5)
    assert second.env_steps == 2 * LENGTH
    second.metrics.close()
