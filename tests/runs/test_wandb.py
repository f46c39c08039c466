"""Weights & Biases gets the numbers where it can, and never stops a run."""

import sys
import types

import pytest
from metric_logs import add_episode, add_evaluation, open_log

from serl_chunk.runs.metrics import WANDB_ID_FILE, Counters, read_metrics


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
    assert caplog.messages[0].endswith("wandb sync runs/first/wandb/offline-run-1")


def test_wandb_gets_the_numbers_under_hil_serls_names(tmp_path, wandb):
    with open_log(tmp_path, wandb_project="p") as log:
        log.train(Counters(4, 9, 2), {"critic/critic_loss": 0.5, "actor/actor_loss": float("nan")})
        add_episode(log, Counters(4, 9, 2), success_without_intervention=0.35)
        add_evaluation(log, Counters(4, 9, 2), mode="sampled")
    axes = {"wall": 0.0, "step": 4, "env_steps": 9, "human_ticks": 2}
    train, episode, evaluation = wandb.logged
    assert train == {"critic/critic_loss": 0.5, **axes}
    assert episode["environment/succeed"] == 1
    assert episode["environment/success_without_intervention"] == 0.35
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
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")  # no server listens there
    assert mode() == "offline"
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: types.SimpleNamespace(close=lambda: None))
    assert mode() == "online"
    assert mode(offline=True) == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert mode() == "disabled"


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
    assert sum(r.levelname == "WARNING" for r in caplog.records) == 1


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
