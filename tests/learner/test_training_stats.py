"""What is counted of episodes, and what is warned of: returns beyond a critic's range, actions beyond model space."""

from __future__ import annotations

import time
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_tools import learner_of, let_go
from metric_logs import open_log
from point_robot import experiment

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.learner.profiling import device_memory
from serl_chunk.learner.training_stats import ModelSpace, TrainingStats, ValueRange
from serl_chunk.replay.episode import EpisodeStats
from serl_chunk.replay.replay import OutsideCount
from serl_chunk.runs.metrics import Counters, read_metrics
from serl_chunk.types import Amend, Begin, End, Episode, Outcome, Source, Step, StepBlock

NOW = Counters(3, 40, 0)
HELPED, ALONE, FAILED, UNKNOWN = (True, 5), (True, 0), (False, 0), (None, 0)  # success, human ticks


@pytest.mark.parametrize(
    ("episodes", "shares"),
    [  # all of the last 20 episodes are the denominator, helped ones included; unknown outcomes are not counted
        ([HELPED] * 20 + [ALONE] * 5, [0.0] * 20 + [0.05, 0.1, 0.15, 0.2, 0.25]),
        ([FAILED, ALONE, UNKNOWN], [0.0, 0.5, 0.5]),
        ([UNKNOWN], [None]),
    ],
)
def test_a_helped_episode_is_no_success_without_intervention(tmp_path, episodes, shares):
    with open_log(tmp_path) as log:
        stats = TrainingStats(log, mock.Mock(), 100, lambda: Counters(0, 0, 0), "relative")
        for i, (success, ticks) in enumerate(episodes):
            of = EpisodeStats("left_cell/0", f"e{i}", 40, float(bool(success)), (), success, ticks, int(ticks > 0))
            stats.episode(of, number=i + 1, phase="train")
        before = stats.success_without_intervention
        if len(episodes) == 3:  # of e0, which failed, and e1, a success
            for corrected, share in (("e1", 0.0), ("e1", 0.0), ("e0", 0.5)):
                stats.correction("left_cell/0", Amend(corrected, Outcome(("success", "unknown")[corrected == "e1"])))
                assert stats.success_without_intervention == share
            stats.correction("left_cell/0", Amend("e1", discard=True))
            assert stats.success_without_intervention == 1.0
            assert [row["succeed"] for row in read_metrics(tmp_path)["episode"]] == [1, None, None]
    found = [row["success_without_intervention"] for row in read_metrics(tmp_path)["episode"]]
    assert found == (shares if None in shares else pytest.approx(shares))
    assert before == found[-1]


@pytest.mark.parametrize(("conditions", "begun"), [
    ('{"profile": "a", "start": "other", "since_reset": 70}', ("other", 70)), ("", (None, None)),
    *((text, (None, None)) for text in ("{", "[1]", "7", '{"start": 1, "since_reset": 2}', '{"start": "reset"}')),
])  # fmt: skip
def test_a_row_has_how_an_episode_of_tasks_in_turns_began(tmp_path, conditions, begun):
    with open_log(tmp_path) as log:
        stats = TrainingStats(log, mock.Mock(), 100, lambda: Counters(0, 0, 0), "relative")
        stats.episode(EpisodeStats("a/0", "e", 4, 0.0, (), True, 0, 0, conditions=conditions), number=1, phase="train")
    [row] = read_metrics(tmp_path)["episode"]
    assert (row["start"], row["since_reset"]) == begun


def test_what_takes_minutes_is_logged_at_once_and_named_while_it_lasts(tmp_path, caplog):
    with open_log(tmp_path) as log, caplog.at_level("INFO"):
        stats = TrainingStats(log, mock.Mock(), 100, lambda: Counters(0, 0, 0), "relative")
        seen = []
        for what in ("updates", "updates", "updates of the policy"):
            with stats.first_call(what):
                seen.append((stats.busy, len(caplog.messages)))
        assert seen == [("it compiles updates", 1), ("", 2), ("it compiles updates of the policy", 3)]
        with stats.evaluation():
            assert stats.busy == "it evaluates"
    assert stats.busy == ""


def test_a_row_has_the_deviation_of_imitation_the_seconds_of_each_part_and_the_devices_memory(tmp_path, monkeypatch):
    devices = [
        SimpleNamespace(memory_stats=lambda n=n: {"bytes_in_use": n, "peak_bytes_in_use": 2 * n}) for n in (5, 9)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    spent = {"replay/feature_seconds": 2.0}
    with open_log(tmp_path) as log:
        replay = SimpleNamespace(stats=lambda: dict(spent))
        stats = TrainingStats(log, replay, 4, lambda: NOW, "relative", publishing=lambda: 3.0)
        for row in range(2):
            with stats.timed("relabelling"):
                time.sleep(0.01)
            for loss in (1.0, 3.0, 1.0, 3.0):
                stats.updated(1, {"actor/bc_loss": jnp.float32(loss + row)})
            spent["replay/feature_seconds"] = 6.0
    first, second = read_metrics(tmp_path)["train"]
    assert (first["actor/bc_loss_std"], second["actor/bc_loss_std"]) == (1.0, 1.0)
    assert [(row["timer/embed"], row["timer/publish"]) for row in (first, second)] == [(0.5, 0.75), (1.0, 0.0)]
    assert first["timer/relabel"] >= 0.01 / 4
    assert [first[f"device/{name}"] for name in ("bytes", "peak_bytes", "spread_bytes")] == [9, 18, 4]
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: None)])
    assert device_memory() == {}


def value_range(agent) -> ValueRange:
    return ValueRange(ExperimentConfig("x", FakeAlohaConfig(), agent=agent, discount=0.5))


@pytest.mark.parametrize(("agent", "warned"), [(AcfqlConfig(), True), (AcrlpdConfig(), False)])
def test_a_demonstration_of_several_stages(agent, warned, caplog):
    """A classifier of several stages gives more than one reward."""
    steps = [
        Step(t, {"state": np.zeros(2, np.float32)}, np.zeros(2, np.float32), reward, Source.HUMAN, -1, -1, 0.0)
        for t, reward in enumerate((0.0, 1.0, 0.5, 1.0))  # returns 0.75, 1.5, 1, 1 with a discount of 0.5
    ]
    end = End("d", 4, None, True, False, Outcome.SUCCESS, reward=None)
    episode = Episode(Begin("d"), StepBlock.from_steps("d", steps), end)
    value_range(agent).demonstrations([episode, episode])
    assert len(caplog.messages) == warned
    assert not warned or "demonstration d has returns of 0 to 1.5" in caplog.messages[0]


def counted(demo: tuple[int, int] = (0, 0), online: tuple[int, int] = (0, 0)) -> SimpleNamespace:
    return SimpleNamespace(outside_model_space={"demo": OutsideCount(*demo), "online": OutsideCount(*online)})


def warnings(run) -> list[str]:
    return [row["text"] for row in read_metrics(run)["event"] if row["text"].startswith("warning")]


def test_each_half_outside_of_model_space_is_warned_of_once_in_the_log_and_as_an_event(tmp_path, caplog):
    replay = counted((500, 10_000), (60, 999))
    with open_log(tmp_path) as log:
        watch = ModelSpace(log, replay, "relative")
        watch.check(NOW)
        assert caplog.messages == []  # 5 % are fine, and 999 numbers too few to judge
        replay.outside_model_space["online"] = OutsideCount(123, 1_000)
        watch.check(NOW)
        watch.check(NOW)
        [line] = caplog.messages
        assert "online episodes, 12.3% of their numbers (expected at most 5%) with normaliser.actions=relative" in line
        replay.outside_model_space["demo"] = OutsideCount(501, 10_000)
        watch.check(NOW)
    assert len(caplog.messages) == 2
    assert [text.removeprefix("warning: ") for text in warnings(tmp_path)] == caplog.messages
    caplog.clear()
    with open_log(tmp_path) as log:  # a resumed run says it no more
        ModelSpace(log, replay, "relative").check(NOW)
    assert caplog.messages == []
    assert len(warnings(tmp_path)) == 2


@pytest.mark.compiles
def test_a_learner_looks(demos, tmp_path, caplog, quick):
    learner = learner_of(experiment(), demos, tmp_path / "run")
    demo = learner.replay.outside_model_space["demo"]
    assert demo.numbers > 0 == demo.outside
    learner.replay.outside_model_space["online"] = OutsideCount(500, 5_000)
    let_go(learner)
    assert len(warnings(tmp_path / "run")) == 1
    assert sum("actions outside of model space" in line for line in caplog.messages) == 1
