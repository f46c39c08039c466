"""Rows survive kills and full disks, and are read back but for those a resume undid; wandb gets them, too."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from errors import naming
from metric_logs import Clock, add_episode, add_evaluation, open_log

from serl_chunk.runs.metrics import METRICS_FILE, WANDB_ID_FILE, Counters, read_metrics
from serl_chunk.runs.status_line import LOG_PERIOD, STATUS_LOGGER, StatusLine
from serl_chunk.types import Amend, DataError, Outcome


def steps(run, kind="train", name="step"):
    return [row[name] for row in read_metrics(run)[kind]]


def test_every_row_is_on_disk_before_the_call_returns(tmp_path):
    clock = Clock()
    log = open_log(tmp_path / "run", clock)
    clock.now += 2.5
    log.train(Counters(10, 40, 3), {"critic/critic_loss": np.float32(0.25), "replay/online": np.int64(40)})
    add_episode(log, Counters(11, 50, 4))
    add_evaluation(log, Counters(12, 60, 5))
    log.event("hello")
    train, episode, evaluation, event = map(json.loads, (tmp_path / "run" / METRICS_FILE).read_text().splitlines())
    common = {"wall": 2.5, "step": 10, "env_steps": 40, "human_ticks": 3}
    assert train == {"kind": "train", **common, "critic/critic_loss": 0.25, "replay/online": 40}
    assert [episode[k] for k in ("kind", "episode/r", "episode/l", "succeed")] == ["episode", 1.0, 40, 1]
    assert (episode["q"], episode["g"]) == ([0.5, 0.7], [0.6, 0.9])
    assert (evaluation["kind"], evaluation["checkpoint"], evaluation["low"]) == ("eval", 12, 0.83)
    assert event == {"kind": "event", "wall": 2.5, "step": 12, "env_steps": 60, "human_ticks": 5, "text": "hello"}


def test_the_clock_of_a_run_counts_its_lives_without_what_lies_between_and_without_pauses(tmp_path):
    clock = Clock()
    with open_log(tmp_path, clock) as log:
        clock.now += 30
        log.train(Counters(5, 20, 0), {"loss": 1.0})
    clock.now += 1_000
    with open_log(tmp_path, clock) as log:
        clock.now += 4
        log.event("again")
        with log.pause():
            clock.now += 100
            add_evaluation(log, Counters(5, 0, 0), by="learner", seconds=100.0)
        clock.now += 1
        log.event("after")
    rows = read_metrics(tmp_path)
    assert [(row["wall"], row["step"]) for row in rows["event"]] == [(34.0, 5), (35.0, 5)]
    assert (rows["eval"][0]["wall"], rows["eval"][0]["seconds"]) == (34.0, 100)


def test_a_last_line_torn_anywhere_costs_only_itself_and_is_said(tmp_path):
    with open_log(tmp_path / "whole") as log:
        for step in (1, 2):
            log.train(Counters(step, step, 0), {"loss": 1.0})
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
        assert steps(run) == ([1, 3] if cut < len(data) - 1 else [1, 2, 3])
        assert [f"{cut - start} bytes" in row["text"] for row in metrics["event"]] == [True] * torn
        with open_log(run):
            pass
        assert len(read_metrics(run)["event"]) == torn  # said once


def test_an_evaluation_that_opens_the_file_takes_nothing_from_a_learner_that_writes(tmp_path, monkeypatch):
    with open_log(tmp_path) as log:
        for step in (1, 2):
            log.train(Counters(step, step, 0), {"loss": 1.0})
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path)[:-20])  # a row on its way to the disk
    with open_log(tmp_path) as evaluation:
        monkeypatch.undo()
        add_evaluation(evaluation, Counters(1, 1, 0))
    assert (steps(tmp_path), steps(tmp_path, "eval"), read_metrics(tmp_path).bad_lines) == ([1, 2], [1], 0)


def test_values_that_are_not_finite_become_null_and_lines_that_are_no_row_are_counted(tmp_path):
    with open_log(tmp_path) as log:
        for step in (7, 8):
            log.train(Counters(step, 0, 0), {"critic/critic_loss": float("nan"), "fine": 1.0})
        log.train(Counters(9, 0, 0), {"actor/actor_loss": np.float32("inf")})
        add_episode(log, Counters(9, 0, 0), q=[float("nan"), 0.5], g=[0.0, 0.1])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('gibberish\n[1]\n{"kind":"train"}\n\n')
    metrics = read_metrics(tmp_path)
    assert metrics.bad_lines == 3
    assert [(row["critic/critic_loss"], row["fine"]) for row in metrics["train"][:2]] == [(None, 1.0)] * 2
    assert metrics["episode"][0]["q"] == [None, 0.5]
    texts = [row["text"] for row in metrics["event"]]
    assert [text.split()[1] for text in texts] == ["critic/critic_loss", "actor/actor_loss", "q"]
    assert "at step 7" in texts[0]


class FullDisk:
    """A raw file whose next writes take as many bytes as `takes` says, or fail where it says None."""

    def __init__(self, file, takes):
        self.file, self.takes, self.name, self.close = file, takes, file.name, file.close

    def write(self, data):
        if not self.takes:
            return self.file.write(data)
        take = self.takes.pop(0)
        if take is None:
            raise OSError(28, "No space left on device")
        return self.file.write(data[:take])


def test_a_full_disk_loses_rows_but_says_so_and_goes_on(tmp_path, caplog):
    with open_log(tmp_path) as log:
        log._file = FullDisk(log._file, takes=[None, 12, None])
        for step in range(5):
            log.train(Counters(step, 0, 0), {"loss": 1.0})
    metrics = read_metrics(tmp_path)
    assert (steps(tmp_path), metrics.bad_lines) == ([3, 4], 1)  # the twelve bytes
    assert ["3 metric rows" in row["text"] for row in metrics["event"]] == [True]
    assert sum("cannot write" in record.message for record in caplog.records) == 1


def test_what_cannot_be_a_metric_is_refused(tmp_path):
    with open_log(tmp_path) as log:
        for values, named in (({"step": 3}, ("step",)), ({"thing": object()}, ("thing", "object"))):
            with pytest.raises(DataError, match=naming(*named)):
                log.train(Counters(0, 0, 0), values)
        with pytest.raises(DataError, match=naming("2 q", "1 g")):
            add_episode(log, Counters(0, 0, 0), q=[0.1, 0.2], g=[0.1])
    with pytest.raises(DataError, match=naming(tmp_path / "none", "metrics.jsonl")):
        read_metrics(tmp_path / "none")


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
    assert steps(tmp_path, "episode", "actor_id") == ["first10", "first20", "second30"]
    assert steps(tmp_path, "event", "text") == ["said in the first life", "resumed at step 20"]
    assert (metrics["eval"], metrics.superseded) == ([], 3)
    with open_log(tmp_path) as log:  # once more, further back
        log.resumed(Counters(10, 20, 0), episodes=0)
        log.train(Counters(12, 20, 0), {})
    assert steps(tmp_path) == [10, 12]


def test_an_episode_has_the_outcome_to_which_it_was_corrected_also_after_a_resume_wrote_it_again(tmp_path):
    first, later, labels = Counters(1, 40, 0), Counters(9, 90, 0), (Outcome.FAILURE, Outcome.UNKNOWN, Outcome.SUCCESS)
    with open_log(tmp_path) as log:
        for number in range(1, 6):
            add_episode(log, first, number=number, episode=f"a/b/e{number}", last_reward=1.0)
        for number, outcome in enumerate(labels, 1):
            log.correction("a/b", Amend(f"e{number}", outcome, "operator", reward=float(number == 3)), later)
        log.correction("a/b", Amend("e4", discard=True))
        log.correction("a/b", Amend("gone", Outcome.FAILURE, "operator"))
        log.resumed(first, episodes=1)
        for number in (2, 3):
            add_episode(log, first, number=number, episode=f"a/b/e{number}", last_reward=1.0)
    rows = read_metrics(tmp_path)["episode"]
    assert [(row["succeed"], row["episode/r"]) for row in rows] == [(0, 0.0), (0, 0.0), (1, 1.0)]
    assert {tuple(row["g"]) for row in rows} == {(None, None)}, "their discounted returns are not known"
    with open_log(tmp_path) as log:
        add_episode(log, first, number=4, episode="a/b/e4", last_reward=1.0)
    assert read_metrics(tmp_path)["episode"][3]["succeed"] is None, "a discarded one is neither"


class FakeWandb(types.ModuleType):
    """Records what is asked of it; `fail` names the call that raises."""

    def __init__(self, fail=""):
        super().__init__("wandb")
        self.fail, self.inits, self.logged, self.finished = fail, [], [], 0
        self.Settings = dict
        self.dir = "runs/first/wandb/offline-run-1/files"

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


def test_wandb_continues_the_same_run_after_a_restart_and_says_where_it_is_written(tmp_path, wandb, caplog):
    caplog.set_level("INFO", "serl_chunk")
    for _ in range(2):
        with open_log(tmp_path, wandb_project="p", wandb_name="n", config={"seed": 1}):
            pass
    first, second = wandb.inits
    assert first["id"] == second["id"] == (tmp_path / WANDB_ID_FILE).read_text()
    assert (first["project"], first["name"], first["config"], first["resume"]) == ("p", "n", {"seed": 1}, "allow")
    assert wandb.finished == 2
    assert "wandb sync runs/first/wandb/offline-run-1" in caplog.messages[0]


def test_wandb_gets_the_numbers_under_hil_serls_names(tmp_path, wandb):
    with open_log(tmp_path, wandb_project="p") as log:
        log.train(Counters(4, 9, 2), {"critic/critic_loss": 0.5, "actor/actor_loss": float("nan")})
        add_episode(log, Counters(4, 9, 2), success_without_intervention=0.35)
        add_evaluation(log, Counters(4, 9, 2), mode="sampled")
    train, episode, evaluation = wandb.logged
    assert train == {"critic/critic_loss": 0.5, "wall": 0.0, "step": 4, "env_steps": 9, "human_ticks": 2}
    wanted = {"environment/succeed": 1, "environment/success_without_intervention": 0.35, "environment/episode/r": 1.0}
    assert (episode | wanted, evaluation["eval/sampled/success_rate"]) == (episode, 0.9)


def test_wandb_is_offline_without_a_key_or_a_network(tmp_path, wandb, monkeypatch):
    def mode(**options):
        with open_log(tmp_path, wandb_project="p", **options):
            return wandb.inits[-1]["mode"]

    assert mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")  # no server listens there
    assert mode() == "offline"
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: types.SimpleNamespace(close=lambda: None))
    assert mode() == "online"
    assert mode(offline=True) == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert mode() == "disabled"


@pytest.mark.parametrize("fail", ["init", "log"])
def test_a_failure_of_wandb_is_said_once_and_training_goes_on(tmp_path, wandb, fail):
    wandb.fail = fail
    with open_log(tmp_path, wandb_project="p") as log:
        for step in range(3):
            log.train(Counters(step, 0, 0), {"loss": 1.0})
    metrics = read_metrics(tmp_path)
    assert len(metrics["train"]) == 3
    (event,) = metrics["event"]
    assert "no route" in event["text"]


def test_wandb_that_is_not_installed_is_said_with_the_remedy_where_it_is_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises
    for folder, options, said in ((tmp_path / "on", {"wandb_project": "p"}, True), (tmp_path / "off", {}, False)):
        with open_log(folder, **options) as log:
            log.train(Counters(0, 0, 0), {"loss": 1.0})
        metrics = read_metrics(folder)
        assert ["pip install wandb" in row["text"] for row in metrics["event"]] == [True] * said
        assert (len(metrics["train"]), (folder / WANDB_ID_FILE).exists()) == (1, False)


def test_the_real_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with open_log(tmp_path, wandb_project="p", wandb_name="n", offline=True) as log:
        log.train(Counters(2, 5, 0), {"critic/critic_loss": 0.5})
        log.train(Counters(1, 5, 0), {"critic/critic_loss": 0.5})  # as after a resume
    assert read_metrics(tmp_path)["event"] == []
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert file.stem == "run-" + (tmp_path / WANDB_ID_FILE).read_text()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def logged(caplog):
    caplog.set_level("INFO", STATUS_LOGGER)
    return lambda: [record.getMessage() for record in caplog.records if record.name == STATUS_LOGGER]


class Screen:
    def __init__(self):
        self.shown: list[str] = []
        self.kept = 0

    def state(self, text):
        self.shown.append(text)

    def keep(self):
        self.kept += 1


def test_a_log_gets_a_line_at_most_every_ten_seconds_the_last_state_and_an_evaluation_at_once(clock, logged):
    with StatusLine(clock=clock) as status:
        for step in range(300):
            status.update("train", {"step": step})
            clock.now += LOG_PERIOD / 128  # exact in binary
        status.update("train", {"step": 300, "evaluating": True})
    assert logged() == [*(f"train | step {step}" for step in (0, 128, 256)), "train | evaluating | step 300"]


def test_the_time_left_of_iterations_goes_on_over_their_stages(clock, logged):
    with StatusLine(clock=clock) as status:
        status.update("pretrain", {"done": 20, "total": 20})
        for done in range(4):
            for phase in ("collect", "train"):
                status.update(phase, {"done": done, "total": 20, "mixed": (3, 8), "sampled": 0.42})
                clock.now += 8
    left = "eta 4:32 | 3/8 mixed groups | sampled success 42% (of the last iteration)"
    assert logged()[3] == f"collect 3/20 | {left}"


def test_a_screen_shows_a_state_five_times_a_second_and_keeps_the_last(clock, logged):
    screen = Screen()
    with StatusLine(screen, clock=clock) as status:
        for step in range(9):
            status.update("train", {"step": step})
            clock.now += 0.0625
        assert screen.kept == 0
    assert (screen.shown, screen.kept) == ([f"train | step {step}" for step in (0, 4, 8, 8)], 1)
    assert logged() == ["train | step 0", "train | step 8"]
