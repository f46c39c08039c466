"""What a trainer in iterations shows of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from errors import naming
from learner_tools import feed, journal_of, learner_of, let_go
from point_robot import HORIZON, experiment

from serl_chunk.agents.groups.rows import Episodes, uncredited
from serl_chunk.cli.learner import dry_run
from serl_chunk.config.presets import configured
from serl_chunk.evaluation.by_learner import OwnEvaluation
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.groups.collector import Collected
from serl_chunk.learner.groups.starts import Memory, StartRecord
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.schedule import Phase
from serl_chunk.learner.trainers import iterations
from serl_chunk.learner.training_stats import TrainingStats
from serl_chunk.runs.checkpoints import LearnerCheckpoints
from serl_chunk.runs.status_line import format_status
from serl_chunk.types import ConfigError, Source

CONFIG = configured(experiment(), [("learner.pretrain_steps", "0")], preset="ript-flow-sde")
COUNTERS = {"success": 0.42, "groups": 8.0, "mixed": 3.0, "solved": 1.0}


def test_an_iteration_is_shown_by_its_sampled_success(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    config = dataclasses.replace(CONFIG, group=dataclasses.replace(CONFIG.group, iterations=2, eval_every=0))
    learner = learner_of(config, None, tmp_path / "run")
    ended = Collected(0, "all were tried", [], [], "none is mixed", "", COUNTERS)
    while learner.trainer.phase is not Phase.COLLECT:
        learner.work()
    monkeypatch.setattr(learner.trainer.collector, "poll", lambda: ended)
    monkeypatch.setattr(TrainingStats, "success_without_intervention", 0.2)
    for _ in range(2):
        learner.work()
    shown = format_status("collect", learner.status())
    let_go(learner)
    assert "1 iteration done: sampled success 42.0%, 3 of 8 groups mixed, 0 gradient steps, " in caplog.text
    assert "collect 1/2 | 0 env steps" in shown
    assert "sampled success 42% (of the last iteration)" in shown
    assert not any(words in shown for words in ("step 1", "without intervention", "updates/s"))


def test_tasks_that_are_none_of_the_robots_are_refused(tmp_path):
    group = dataclasses.replace(CONFIG.group, tasks=("push", "juggle"))
    with pytest.raises(ConfigError, match=naming("group.tasks", "juggle", CONFIG.robot.task)):
        learner_of(dataclasses.replace(CONFIG, group=group), None, tmp_path / "run")
    with pytest.raises(ConfigError, match=naming("group.tasks", "juggle")):
        dry_run(dataclasses.replace(CONFIG, group=group), RunOptions())


def test_an_iteration_that_memory_cannot_hold_is_refused_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(iterations, "available_bytes", lambda: 100_000)
    with pytest.raises(ConfigError, match=r"128 groups of 8 have up to 5,120 decisions, which take .*iB \(98 KiB are"):
        learner_of(CONFIG, None, tmp_path / "run")


def ends_without_an_update(learner, iterations):
    """Work until so many iterations more are over, none of which has anything to train on."""
    learner.trainer.collector.poll = lambda: Collected(0, "all were tried", [], [], "none is mixed", "", COUNTERS)
    end = learner.updates + iterations
    while not learner.trainer.done and (learner.updates < end or learner.trainer.phase is not Phase.COLLECT):
        learner.work()


def test_a_resume_makes_up_for_an_evaluation_that_was_due_and_for_no_other(tmp_path, monkeypatch):
    evaluated, failing = [], False

    def evaluate(self, learner, snapshot):
        if not failing:
            evaluated.append(learner.updates)
            learner.metrics.evaluation(learner.counters(), checkpoint=learner.updates, by="learner", mode="mean")

    monkeypatch.setattr(OwnEvaluation, "__call__", evaluate)
    config = dataclasses.replace(CONFIG, group=dataclasses.replace(CONFIG.group, iterations=4, eval_every=3))

    def run(iterations):
        learner = learner_of(config, None, tmp_path / "run")
        ends_without_an_update(learner, iterations)
        let_go(learner)

    run(1)
    run(1)
    assert evaluated == [0]
    failing = True  # as where a stop cuts it short
    run(2)
    failing = False
    run(0)
    assert evaluated == [0, 4]
    run(0)
    assert evaluated == [0, 4]


@pytest.mark.parametrize(("changes", "forgets", "counts"), [
    ({}, False, True), ({"clip": 0.1}, False, True), ({"sigma": 0.5}, False, False), ({"density": "end"}, False, False),
    ({"init_states": "seeds:4"}, True, False),
])  # fmt: skip
def test_what_was_sampled_under_other_settings_counts_no_more(changes, forgets, counts, tmp_path, caplog):
    group = dataclasses.replace(CONFIG.group, eval_every=0, init_states="seeds:3")
    first = learner_of(dataclasses.replace(CONFIG, group=group), None, tmp_path / "run")
    first.trainer.collector.scheduler.memory = Memory({("", "seed-5"): StartRecord(3, True)})
    ends_without_an_update(first, 1)
    let_go(first)
    changed = dataclasses.replace(CONFIG, group=dataclasses.replace(group, **changes))
    again = learner_of(changed, None, tmp_path / "run")
    scheduler = again.trainer.collector.scheduler
    let_go(again)
    assert (scheduler.since == first.version) is counts
    assert ("what was known of them is forgotten" in caplog.text) is forgets
    assert bool(scheduler.memory.starts) is not forgets


def sampled(rows):
    """What an actor journals of an iteration that is over, with the steps of demonstrations."""
    begin, steps, end = (record for _, _, record in rows)
    steps = dataclasses.replace(steps, source=np.full_like(steps.source, Source.POLICY))
    return [(n, "a/s", record) for n, record in enumerate((begin._replace(ticket="7.0.0.0"), steps, end))]


@pytest.mark.usefixtures("quick")
def test_an_iteration_clones_all_successes_so_far(demos, tmp_path, monkeypatch):
    given = [("agent.successes", "all"), ("group.minibatch", "8"), ("group.eval_every", "0")]
    config = configured(experiment(), [*given, ("learner.pretrain_steps", "0")], preset="filtered-bc")
    learner, one = learner_of(config, None, tmp_path / "run"), np.ones((12, HORIZON), np.float32)
    ended, rows = Collected(0, "", [None], [], "", "", COUNTERS), uncredited({}, {}, one)
    monkeypatch.setattr(learner.trainer.collector, "poll", lambda: ended)
    monkeypatch.setattr(learner.trainer, "rows_of", lambda _: (rows, Episodes(*np.array([[1], [0], [12]]))))
    steps = []
    for records in ([], sampled(journal_of(config, demos, 1))):
        feed(learner, records)
        while learner.work() and learner.trainer.phase is not Phase.COLLECT:
            pass
        while learner.work() and learner.trainer.phase is Phase.TRAIN:
            pass
        steps.append(learner.trainer._figures["group/gradient_steps"])
    let_go(learner)
    assert steps == [0, 4]  # two epochs of the iteration's 12 decisions
    assert learner.stats.has_updated
    assert learner.stats.rates["rates/updates_per_s"] > 0
    assert learner.trainer._figures["actor/bc_share"] > 0.5  # windows reach beyond its end


def test_nothing_is_kept_of_a_state_within_an_iteration(tmp_path, monkeypatch):
    """As where the disk was full when its checkpoint was due: half an iteration would be trained on twice."""
    config = dataclasses.replace(CONFIG, group=dataclasses.replace(CONFIG.group, eval_every=0))
    learner = learner_of(config, None, tmp_path / "run")
    monkeypatch.setattr(LearnerCheckpoints, "timed_due", True)
    saved: list[Phase] = []
    monkeypatch.setattr(Learner, "checkpoint", lambda self, **_: saved.append(self.trainer.phase))
    ends_without_an_update(learner, 1)
    learner.work()
    assert learner.trainer.phase is Phase.TRAIN
    let_go(learner)
    assert Phase.TRAIN not in saved


def test_a_policy_that_cannot_be_published_is_not_sampled_under_the_name_of_the_last_one(tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, group=dataclasses.replace(CONFIG.group, eval_every=0, iterations=3))
    learner = learner_of(config, None, tmp_path / "run")
    scheduler = learner.trainer.collector.scheduler
    ends_without_an_update(learner, 1)
    with monkeypatch.context() as full:
        full.setattr("serl_chunk.learner.learner.os.pwrite", lambda *_: 0)
        ends_without_an_update(learner, 1)
        assert not learner.work()
        assert (learner.updates, scheduler.iteration) == (2, 1)
    assert learner.work()
    assert (scheduler.iteration, scheduler.version) == (2, learner.version) == (2, 3)
    with monkeypatch.context() as full:
        full.setattr("serl_chunk.learner.learner.os.pwrite", lambda *_: 0)
        ends_without_an_update(learner, 1)
    assert learner.trainer.done  # no run goes on for ever
    let_go(learner)


def test_a_run_that_patience_ended_stays_ended_until_that_is_raised(tmp_path, caplog):
    caplog.set_level("INFO")
    learner = learner_of(CONFIG, None, tmp_path / "run")
    while learner.trainer.phase is not Phase.COLLECT:
        learner.work()
    learner.trainer.collector.scheduler.memory, learner.updates = Memory({}, CONFIG.group.patience), 1
    learner.checkpoint()
    let_go(learner)
    patient = dataclasses.replace(CONFIG, group=dataclasses.replace(CONFIG.group, patience=9))
    for config, over in ((CONFIG, True), (patient, False)):
        again = learner_of(config, None, tmp_path / "run")
        assert (again.trainer.done, "raise group.patience to go on" in caplog.text) == (over, True)
        let_go(again)
