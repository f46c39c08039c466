import json
import sys
import threading
import types

import numpy as np
import pytest

from serl_chunk.learner.metrics import METRICS_FILE, WANDB_ID_FILE, Counters, MetricsLog, read_metrics
from serl_chunk.types import DataError


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def open_log(run, clock=None, **options):
    options = {"wandb_project": None, "wandb_name": "", "config": {}} | options
    return MetricsLog(run, clock=clock or Clock(), **options)


def add_episode(log, counters, **changes):
    fields = {"actor_id": "a", "ret": 1.0, "length": 40, "succeed": True, "intervention_steps": 3,
              "intervention_count": 1, "phase": "train", "q": [0.5, 0.7], "g": [0.6, 0.9]}  # fmt: skip
    log.episode(counters, **fields | changes)


def add_evaluation(log, counters, **changes):
    fields = {"success_rate": 0.9, "n": 100, "low": 0.83, "high": 0.94, "mode": "mean", "mean_time_s": 1.7,
              "mean_length": 85.0, "checkpoint": counters.step}  # fmt: skip
    log.evaluation(counters, **fields | changes)


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


def test_a_last_line_torn_anywhere_is_repaired_and_costs_only_itself(tmp_path):
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
        assert read_metrics(run).bad_lines == torn  # a reader tolerates it while nobody has repaired it
        with open_log(run) as log:
            log.train(Counters(3, 3, 0), {"loss": 3.0})
        metrics = read_metrics(run)
        assert metrics.bad_lines == 0
        assert [row["step"] for row in metrics["train"]] == ([1, 3] if cut < len(data) - 1 else [1, 2, 3])
        assert [f"{cut - start} bytes" in row["text"] for row in metrics["event"]] == [True] * torn


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


def test_resume_supersedes_what_the_lost_life_wrote_after_the_checkpoint(tmp_path):
    with open_log(tmp_path) as log:
        for step in (10, 20, 30):
            log.train(Counters(step, 2 * step, 0), {"loss": 1.0})
            add_episode(log, Counters(step, 2 * step, 0), actor_id=f"first{step}")
        add_evaluation(log, Counters(30, 60, 0))
        log.event("said in the first life", Counters(30, 60, 0))
    with open_log(tmp_path) as log:
        log.resumed(Counters(20, 40, 0))
        log.train(Counters(30, 60, 0), {"loss": 2.0})
        add_episode(log, Counters(30, 60, 0), actor_id="second30")
    metrics = read_metrics(tmp_path)
    assert [(row["step"], row["loss"]) for row in metrics["train"]] == [(10, 1.0), (20, 1.0), (30, 2.0)]
    assert [row["actor_id"] for row in metrics["episode"]] == ["first10", "first20", "second30"]
    assert metrics["eval"] == []
    assert [row["text"] for row in metrics["event"]] == ["said in the first life", "resumed at step 20"]
    assert metrics.superseded == 3
    everything = read_metrics(tmp_path, superseded=True)
    assert (len(everything["train"]), len(everything["episode"]), everything.superseded) == (4, 4, 0)


def test_a_second_resume_further_back_supersedes_both_lives(tmp_path):
    with open_log(tmp_path) as log:
        for resume, steps in ((None, (10, 20, 30)), (20, (25, 35)), (10, (12,))):
            if resume is not None:
                log.resumed(Counters(resume, 0, 0))
            for step in steps:
                log.train(Counters(step, 0, 0), {})
    assert [row["step"] for row in read_metrics(tmp_path)["train"]] == [10, 12]


def test_episodes_brought_back_from_the_journal_stay(tmp_path):
    with open_log(tmp_path) as log:
        add_episode(log, Counters(30, 60, 0), actor_id="journalled")
        add_episode(log, Counters(30, 90, 0), actor_id="lost")
        log.resumed(Counters(20, 60, 0))  # the journal knew 60 steps, the checkpoint fewer
    assert [row["actor_id"] for row in read_metrics(tmp_path)["episode"]] == ["journalled"]


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


def test_lines_that_are_no_row_are_counted(tmp_path):
    good = '{"kind":"train","wall":1.0,"step":1,"env_steps":1,"human_ticks":0}\n'
    (tmp_path / METRICS_FILE).write_text(good + 'gibberish\n[1]\n{"kind":"train"}\n\n' + good)
    metrics = read_metrics(tmp_path)
    assert (len(metrics["train"]), metrics.bad_lines) == (2, 3)


def test_what_cannot_be_a_metric_is_refused(tmp_path):
    with open_log(tmp_path) as log:
        with pytest.raises(DataError, match="called step"):
            log.train(Counters(0, 0, 0), {"step": 3})
        with pytest.raises(DataError, match="'thing' is a object"):
            log.train(Counters(0, 0, 0), {"thing": object()})
        with pytest.raises(DataError, match="2 q and 1 g"):
            add_episode(log, Counters(0, 0, 0), q=[0.1, 0.2], g=[0.1])


def test_a_folder_without_metrics_is_no_run(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist.*is not a run folder"):
        read_metrics(tmp_path)


class FakeWandb(types.ModuleType):
    """Records what is asked of it; `fail` names the call that raises."""

    def __init__(self, fail=""):
        super().__init__("wandb")
        self.fail, self.inits, self.logged, self.finished = fail, [], [], 0
        self.Settings = dict

    def _call(self, name):
        if name == self.fail:
            raise ConnectionError("no route")

    def init(self, **options):
        self._call("init")
        self.inits.append(options)
        return self

    def define_metric(self, *_, **__):
        pass

    def log(self, row):
        self._call("log")
        self.logged.append(row)

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_continues_the_same_run_after_a_restart(tmp_path, wandb):
    for _ in range(2):
        with open_log(tmp_path, wandb_project="p", wandb_name="n", config={"seed": 1}):
            pass
    first, second = wandb.inits
    assert first["id"] == second["id"] == (tmp_path / WANDB_ID_FILE).read_text()
    assert (first["project"], first["name"], first["config"], first["resume"]) == ("p", "n", {"seed": 1}, "allow")
    assert wandb.finished == 2


def test_wandb_gets_the_numbers_under_hil_serls_names(tmp_path, wandb):
    with open_log(tmp_path, wandb_project="p") as log:
        log.train(Counters(4, 9, 2), {"critic/critic_loss": 0.5, "actor/actor_loss": float("nan")})
        add_episode(log, Counters(4, 9, 2))
        add_evaluation(log, Counters(4, 9, 2), mode="sampled")
    axes = {"wall": 0.0, "step": 4, "env_steps": 9, "human_ticks": 2}
    train, episode, evaluation = wandb.logged
    assert train == {"critic/critic_loss": 0.5, **axes}
    assert episode["environment/succeed"] == 1
    assert episode["environment/episode/r"] == 1.0
    assert "environment/q" not in episode
    assert evaluation["eval/sampled/success_rate"] == 0.9


def test_wandb_is_offline_without_a_key_or_a_network(tmp_path, wandb, monkeypatch):
    def mode(**options):
        with open_log(tmp_path, wandb_project="p", **options):
            return wandb.inits[-1]["mode"]

    assert mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")  # nobody listens there
    assert mode() == "offline"
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: types.SimpleNamespace(close=lambda: None))
    assert mode() == "online"
    assert mode(offline=True) == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert mode() == "disabled"


def test_wandb_is_not_imported_where_it_is_off(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    with open_log(tmp_path) as log:
        log.train(Counters(0, 0, 0), {"loss": 1.0})
    assert read_metrics(tmp_path)["event"] == []
    assert not (tmp_path / WANDB_ID_FILE).exists()


@pytest.mark.parametrize(("fail", "reason"), [("init", "start failed"), ("log", "log failed")])
def test_a_failure_of_wandb_is_said_once_and_training_goes_on(tmp_path, wandb, caplog, fail, reason):
    wandb.fail = fail
    with open_log(tmp_path, wandb_project="p") as log:
        for step in range(3):
            log.train(Counters(step, 0, 0), {"loss": 1.0})
    metrics = read_metrics(tmp_path)
    assert len(metrics["train"]) == 3
    (event,) = metrics["event"]
    assert reason in event["text"]
    assert "no route" in event["text"]
    assert len(caplog.records) == 1


def test_wandb_that_is_not_installed_is_said_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with open_log(tmp_path, wandb_project="p") as log:
        log.train(Counters(0, 0, 0), {"loss": 1.0})
    metrics = read_metrics(tmp_path)
    assert "pip install wandb" in metrics["event"][0]["text"]
    assert len(metrics["train"]) == 1


def test_the_real_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with open_log(tmp_path, wandb_project="p", wandb_name="n", offline=True) as log:
        log.train(Counters(2, 5, 0), {"critic/critic_loss": 0.5})
        log.train(Counters(1, 5, 0), {"critic/critic_loss": 0.5})  # as after a resume
    assert read_metrics(tmp_path)["event"] == []
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert file.stem == "run-" + (tmp_path / WANDB_ID_FILE).read_text()
