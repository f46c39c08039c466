"""Rows are read back, but for those that a resume undid."""

import pytest
from errors import naming
from metric_logs import Clock, add_episode, add_evaluation, open_log

from serl_chunk.runs.metrics import METRICS_FILE, Counters, read_metrics
from serl_chunk.types import DataError


def test_resume_supersedes_what_the_lost_life_wrote_after_the_checkpoint(tmp_path):
    with open_log(tmp_path) as log:
        for number, step in enumerate((10, 20, 30), 1):
            log.train(Counters(step, 2 * step, 0), {"loss": 1.0})
            add_episode(log, Counters(step, 2 * step, 0), actor_id=f"first{step}", number=number)
        add_evaluation(log, Counters(30, 60, 0))
        log.event("said in the first life", Counters(30, 60, 0))
    with open_log(tmp_path) as log:
        log.resumed(Counters(20, 40, 0), episodes=2)
        log.train(Counters(30, 60, 0), {"loss": 2.0})
        add_episode(log, Counters(30, 60, 0), actor_id="second30", number=3)
    metrics = read_metrics(tmp_path)
    assert [(row["step"], row["loss"]) for row in metrics["train"]] == [(10, 1.0), (20, 1.0), (30, 2.0)]
    assert [row["actor_id"] for row in metrics["episode"]] == ["first10", "first20", "second30"]
    assert metrics["eval"] == []
    assert [row["text"] for row in metrics["event"]] == ["said in the first life", "resumed at step 20"]
    assert metrics.superseded == 3


def test_an_episode_without_steps_after_the_checkpoint_is_superseded_too(tmp_path):
    """The end that a killed actor's successor writes takes no step."""
    with open_log(tmp_path) as log:
        for number in (1, 2, 3):
            add_episode(log, Counters(20, 40, 0), actor_id=f"first{number}", number=number)
    with open_log(tmp_path) as log:
        log.resumed(Counters(20, 40, 0), episodes=2)
        add_episode(log, Counters(20, 40, 0), actor_id="again3", number=3)
    assert [row["actor_id"] for row in read_metrics(tmp_path)["episode"]] == ["first1", "first2", "again3"]


def test_a_second_resume_further_back_supersedes_both_lives(tmp_path):
    with open_log(tmp_path) as log:
        for resume, steps in ((None, (10, 20, 30)), (20, (25, 35)), (10, (12,))):
            if resume is not None:
                log.resumed(Counters(resume, 0, 0), episodes=0)
            for step in steps:
                log.train(Counters(step, 0, 0), {})
    assert [row["step"] for row in read_metrics(tmp_path)["train"]] == [10, 12]


def test_episodes_brought_back_from_the_journal_stay(tmp_path):
    with open_log(tmp_path) as log:
        add_episode(log, Counters(30, 60, 0), actor_id="journalled", number=1)
        add_episode(log, Counters(30, 90, 0), actor_id="lost", number=2)
        log.resumed(Counters(20, 60, 0), episodes=1)  # the journal knew 60 steps, the checkpoint fewer
    assert [row["actor_id"] for row in read_metrics(tmp_path)["episode"]] == ["journalled"]


def test_lines_that_are_no_row_are_counted(tmp_path):
    good = '{"kind":"train","wall":1.0,"step":1,"env_steps":1,"human_ticks":0}\n'
    (tmp_path / METRICS_FILE).write_text(good + 'gibberish\n[1]\n{"kind":"train"}\n\n' + good)
    metrics = read_metrics(tmp_path)
    assert (len(metrics["train"]), metrics.bad_lines) == (2, 3)


def test_a_folder_without_metrics_is_no_run(tmp_path):
    with pytest.raises(DataError, match=naming(tmp_path, "metrics.jsonl")):
        read_metrics(tmp_path)


def test_an_evaluation_of_an_early_checkpoint_does_not_say_where_the_run_stands(tmp_path):
    clock = Clock()
    with open_log(tmp_path, clock) as log:
        for step in (0, 0, 10, 20):
            clock.now += 5
            log.train(Counters(step, 2 * step, 1), {})
        clock.now += 100
        add_evaluation(log, Counters(10, 20, 0))
    metrics = read_metrics(tmp_path)
    last = metrics.last()
    assert (last["step"], last["env_steps"], last["human_ticks"], last["wall"]) == (20, 40, 1, 20.0)
    assert metrics.trained_wall(metrics["eval"][0]) == 15.0  # not 120, when it was evaluated


def test_a_run_that_holds_evaluations_only_stands_at_the_newest(tmp_path):
    with open_log(tmp_path) as log:
        add_evaluation(log, Counters(10, 20, 0))
    metrics = read_metrics(tmp_path)
    assert metrics.last()["step"] == 10
    assert metrics.trained_wall(metrics["eval"][0]) == metrics["eval"][0]["wall"]
