"""A learner puts back what the one before it received, and counts nothing twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from learner_tools import Rows, feed, learner_of
from point_robot import HORIZON, experiment

from serl_chunk.learner.learner import Learner
from serl_chunk.learner.schedule import Phase
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import Amend, Begin, End, Outcome, Source, Step, StepBlock

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("quick")]

LENGTH = 12
CONFIG = experiment(pretrain_steps=0, max_steps=30)


@pytest.fixture
def life(demos, tmp_path) -> Iterator:
    """Learners of one run, one after the other; `kill` ends the last without another word."""
    lives: list[Learner] = []

    def begin(config=CONFIG) -> Learner:
        if lives:
            lives[-1].metrics.close()
        lives.append(learner_of(config, demos, tmp_path / "run"))
        return lives[-1]

    yield begin
    lives[-1].metrics.close()


def save(learner: Learner) -> None:
    learner.checkpoint()
    learner.checkpoints.close()


def counted(learner: Learner) -> tuple:
    learner._count_episodes()
    return learner.env_steps, learner.human_ticks, learner.episodes, learner.replay.ready


def journal(episodes: int) -> Rows:
    """(entry, session, record) of episodes in blocks; a human acts on ticks 2..4 of every second one."""
    rows: Rows = []
    for e in range(episodes):
        name, helped = f"e{e}", e % 2 == 1
        steps = []
        for t in range(LENGTH):  # a policy's step names its decision, a human's none
            source, decided = (Source.HUMAN, -1) if helped and 2 <= t < 5 else (Source.POLICY, t - t % HORIZON)
            seen = {"state": np.array([e, t], np.float32)}
            steps.append(Step(t, seen, np.zeros(2, np.float32), 0.25, source, decided, 1, 0.1 * t))
        final = {"state": np.array([e, LENGTH], np.float32)}
        outcome = Outcome.UNKNOWN if helped else Outcome.SUCCESS
        for record in (
            Begin(name),
            StepBlock.from_steps(name, steps[:5]),
            StepBlock.from_steps(name, steps[5:]),
            End(name, LENGTH, final, not helped, helped, outcome),
        ):
            rows.append((len(rows), "actor/s", record))
    return rows


@pytest.mark.parametrize("at", [0, 17])  # entries received when the checkpoint was written
def test_counters_and_outcomes_are_those_of_a_learner_that_never_stopped(life, tmp_path, at):
    first, rows = life(), journal(6)
    rows.append((len(rows), "actor/s", Amend("e0", Outcome.FAILURE, "operator", reward=0.0)))
    feed(first, rows[:at])
    save(first)
    feed(first, rows[at:])  # received, journalled, acknowledged; and then it is killed
    expected = counted(first)
    second = life()
    assert second.refill(rows) == 6 * LENGTH
    assert counted(second) == expected == (6 * LENGTH, 9, 6, first.replay.ready)
    found = [(row["succeed"], row["episode/r"]) for row in read_metrics(tmp_path / "run")["episode"]]
    assert found == [(0, 2.75), (0, 3.0), (1, 3.0), (0, 3.0), (1, 3.0), (0, 3.0)]


@pytest.mark.parametrize("at", [2, 3, 4])  # before the steps, before the giving up, behind it
def test_an_episode_that_was_given_up_is_counted_once(life, tmp_path, at):
    first, rows = life(), journal(2)
    rows = [*rows[:3], (3, "actor/s", None), *((n + 1, "actor/t", r) for n, _, r in rows[4:])]
    feed(first, rows[:at])
    save(first)
    feed(first, rows[at:])
    expected = counted(first)
    second = life()
    second.refill(rows)
    assert counted(second) == expected == (2 * LENGTH, 3, 2, first.replay.ready)
    second.metrics.close()
    assert len(read_metrics(tmp_path / "run")["episode"]) == 2


def test_interventions_that_the_journal_no_longer_has_are_told(life, caplog):
    config = dataclasses.replace(CONFIG, replay=dataclasses.replace(CONFIG.replay, capacity=60))
    first, rows = life(config), journal(12)
    feed(first, rows)
    held = int(first.replay.stats()["replay/human_rows"])
    assert held > 0
    save(first)
    life(config).refill(rows[-8:])
    assert f"{held} of {held} steps of old interventions could not be put back" in caplog.text
    caplog.clear()
    life(config).refill(rows)
    assert "old interventions" not in caplog.text


def test_training_goes_on_at_once(life, caplog):
    first, rows = life(), journal(6)
    feed(first, rows[:16])
    while first.work():
        pass
    feed(first, rows[16:])
    while first.updates < 20 and first.work():
        pass
    assert first.updates >= 20
    save(first)
    second = life()
    second.refill(rows)
    assert second.trainer.phase is Phase.WARMUP
    second.work()
    assert second.trainer.phase is Phase.TRAIN  # without a single new step
    feed(second, [(24, "actor/s", Begin("new")), (25, "actor/s", dataclasses.replace(rows[1][2], episode_id="new"))])
    assert second.work()
    assert second.updates == 21
    assert "empty" not in caplog.text


def test_what_does_not_fit_is_left_out_and_a_journal_that_ends_too_early_is_logged(life, caplog):
    first, rows = life(), journal(2)
    feed(first, rows)
    save(first)
    second = life()
    assert second.refill(rows[:4]) == LENGTH
    assert "the journal ends at entry 4, the checkpoint covers 8" in caplog.text
    feed(second, [(4, "actor/t", Begin("later"))])
    assert second.env_steps == 2 * LENGTH
    number, session, bad = rows[5]
    rows[5] = (number, session, bad.slice(1, bad.n))  # the experiment is not what it was
    assert life().refill(rows) == LENGTH
    assert "expected tick 0" in caplog.text
    assert "records of the journal were left out" in caplog.text
