"""Rows are on disk at once, and survive kills, full disks and threads."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from errors import naming
from metric_logs import Clock, add_episode, add_evaluation, open_log

from serl_chunk.runs.metrics import METRICS_FILE, Counters, read_metrics
from serl_chunk.types import DataError


def test_every_row_is_on_disk_before_the_call_returns(tmp_path):
    clock = Clock()
    log = open_log(tmp_path / "run", clock)
    clock.now += 2.5
    log.train(Counters(10, 40, 3), {"critic/critic_loss": np.float32(0.25), "replay/online": np.int64(40)})
    add_episode(log, Counters(11, 50, 4))
    add_evaluation(log, Counters(12, 60, 5))
    log.event("hello")
    rows = [json.loads(line) for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines()]
    common = {"wall": 2.5, "step": 10, "env_steps": 40, "human_ticks": 3}
    assert rows[0] == {"kind": "train", **common, "critic/critic_loss": 0.25, "replay/online": 40}
    assert rows[1]["kind"] == "episode"
    assert (rows[1]["episode/r"], rows[1]["episode/l"], rows[1]["succeed"]) == (1.0, 40, 1)
    assert (rows[1]["q"], rows[1]["g"]) == ([0.5, 0.7], [0.6, 0.9])
    assert (rows[2]["kind"], rows[2]["checkpoint"], rows[2]["low"]) == ("eval", 12, 0.83)
    assert rows[3] == {"kind": "event", "wall": 2.5, "step": 12, "env_steps": 60, "human_ticks": 5, "text": "hello"}


def test_running_time_and_counters_continue_over_a_restart(tmp_path):
    clock = Clock()
    with open_log(tmp_path, clock) as log:
        clock.now += 30
        log.train(Counters(5, 20, 0), {"loss": 1.0})
    clock.now += 1_000  # the time between two lives does not count
    with open_log(tmp_path, clock) as log:
        clock.now += 4
        log.event("again")
    (event,) = read_metrics(tmp_path)["event"]
    assert (event["wall"], event["step"]) == (34.0, 5)


def test_a_last_line_torn_anywhere_costs_only_itself_and_is_said(tmp_path):
    with open_log(tmp_path / "whole") as log:
        log.train(Counters(1, 1, 0), {"loss": 1.0})
        log.train(Counters(2, 2, 0), {"loss": 2.0})
    data = (tmp_path / "whole" / METRICS_FILE).read_bytes()
    start = data.index(b"\n") + 1
    run = tmp_path / "cut"
    run.mkdir()
    for cut in range(start, len(data) + 1):
        (run / METRICS_FILE).write_bytes(data[:cut])
        torn = start < cut < len(data) - 1
        with open_log(run) as log:
            log.train(Counters(3, 3, 0), {"loss": 3.0})
        metrics = read_metrics(run)
        assert metrics.bad_lines == torn
        assert [row["step"] for row in metrics["train"]] == ([1, 3] if cut < len(data) - 1 else [1, 2, 3])
        assert [f"{cut - start} bytes" in row["text"] for row in metrics["event"]] == [True] * torn
        with open_log(run):
            pass
        assert len(read_metrics(run)["event"]) == torn  # said once


def test_an_evaluation_that_opens_the_file_takes_nothing_from_a_learner_that_writes(tmp_path, monkeypatch):
    with open_log(tmp_path) as log:
        log.train(Counters(1, 1, 0), {"loss": 1.0})
        log.train(Counters(2, 2, 0), {"loss": 2.0})
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path)[:-20])  # a row on its way to the disk
    with open_log(tmp_path) as evaluation:
        monkeypatch.undo()
        add_evaluation(evaluation, Counters(1, 1, 0))
    metrics = read_metrics(tmp_path)
    assert [row["step"] for row in metrics["train"]] == [1, 2]
    assert (len(metrics["eval"]), metrics.bad_lines) == (1, 0)


def test_values_that_are_not_finite_become_null_and_are_told_once_per_key(tmp_path):
    with open_log(tmp_path) as log:
        for step in (7, 8):
            log.train(Counters(step, 0, 0), {"critic/critic_loss": float("nan"), "fine": 1.0})
        log.train(Counters(9, 0, 0), {"actor/actor_loss": np.float32("inf")})
        add_episode(log, Counters(9, 0, 0), q=[float("nan"), 0.5], g=[0.0, 0.1])
    metrics = read_metrics(tmp_path)
    assert [row["critic/critic_loss"] for row in metrics["train"][:2]] == [None, None]
    assert [row["fine"] for row in metrics["train"][:2]] == [1.0, 1.0]
    assert metrics["episode"][0]["q"] == [None, 0.5]
    texts = [row["text"] for row in metrics["event"]]
    assert [text.split()[1] for text in texts] == ["critic/critic_loss", "actor/actor_loss", "q"]
    assert "at step 7" in texts[0]


class FullDisk:
    """A raw file whose next writes take as many bytes as `takes` says, or fail where it says None."""

    def __init__(self, file, takes):
        self.file, self.takes, self.name = file, takes, file.name

    def write(self, data):
        if not self.takes:
            return self.file.write(data)
        take = self.takes.pop(0)
        if take is None:
            raise OSError(28, "No space left on device")
        return self.file.write(data[:take])

    def close(self):
        self.file.close()


def test_a_full_disk_loses_rows_but_says_so_and_goes_on(tmp_path, caplog):
    with open_log(tmp_path) as log:
        log._file = FullDisk(log._file, takes=[None, 12, None])
        for step in range(5):
            log.train(Counters(step, 0, 0), {"loss": 1.0})
    metrics = read_metrics(tmp_path)
    assert [row["step"] for row in metrics["train"]] == [3, 4]
    assert metrics.bad_lines == 1  # the twelve bytes
    assert ["3 metric rows" in row["text"] for row in metrics["event"]] == [True]
    assert sum("cannot write" in record.message for record in caplog.records) == 1


def test_rows_of_several_threads_do_not_mix(tmp_path):
    with open_log(tmp_path) as log:
        work = [
            threading.Thread(target=lambda i=i: [log.train(Counters(i, k, 0), {"x": [0.5] * 99}) for k in range(50)])
            for i in range(4)
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    metrics = read_metrics(tmp_path)
    assert metrics.bad_lines == 0
    assert {(row["step"], row["env_steps"]) for row in metrics["train"]} == {
        (i, k) for i in range(4) for k in range(50)
    }


def test_what_cannot_be_a_metric_is_refused(tmp_path):
    with open_log(tmp_path) as log:
        with pytest.raises(DataError, match=naming("step")):
            log.train(Counters(0, 0, 0), {"step": 3})
        with pytest.raises(DataError, match=naming("thing", "object")):
            log.train(Counters(0, 0, 0), {"thing": object()})
        with pytest.raises(DataError, match=naming("2 q", "1 g")):
            add_episode(log, Counters(0, 0, 0), q=[0.1, 0.2], g=[0.1])


def test_the_clock_of_a_run_stands_still_in_a_pause(tmp_path):
    clock = Clock()
    with open_log(tmp_path, clock) as log:
        clock.now += 10
        with log.pause():
            clock.now += 100
            add_evaluation(log, Counters(5, 0, 0), by="learner", seconds=100.0)
        clock.now += 1
        log.event("after")
    rows = read_metrics(tmp_path)
    assert [row["wall"] for row in (rows["eval"][0], rows["event"][-1])] == [10, 11]
    assert rows["eval"][0]["seconds"] == 100
