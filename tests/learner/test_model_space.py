"""Recorded actions that a policy cannot output are warned of, once a run, with the settings to change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from learner_tools import learner_of, let_go
from metric_logs import open_log
from point_robot import experiment, record_demos

from serl_chunk.learner.training_stats import ModelSpace
from serl_chunk.replay.replay import OutsideCount
from serl_chunk.runs.metrics import Counters, read_metrics

NOW = Counters(3, 40, 0)


def counted(demo: tuple[int, int] = (0, 0), online: tuple[int, int] = (0, 0)) -> SimpleNamespace:
    return SimpleNamespace(outside_model_space={"demo": OutsideCount(*demo), "online": OutsideCount(*online)})


def warnings(run) -> list[str]:
    return [row["text"] for row in read_metrics(run)["event"] if row["text"].startswith("warning")]


def test_each_half_is_warned_of_once_in_the_log_and_as_an_event(tmp_path, caplog):
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


@pytest.mark.parametrize(
    ("mode", "demo", "remedy"),
    [
        ("relative", (0, 5_000), ("normaliser.demo_range", "demo_path")),
        ("relative", (0, 0), ("demo_path", "normaliser.actions=absolute_range")),
        ("absolute_demo", (0, 5_000), ("normaliser.demo_range", "demo_path")),
        ("absolute_range", (0, 5_000), ("action_low", "action_high", "normaliser.actions=relative")),
        ("norm_stats", (0, 5_000), ("normaliser.norm_stats", "serl-chunk data stats")),
    ],
)
def test_the_remedy_is_of_the_normalisers_kind(tmp_path, caplog, mode, demo, remedy):
    with open_log(tmp_path) as log:
        ModelSpace(log, counted(demo, (900, 5_000)), mode).check(NOW)
    [line] = caplog.messages
    assert f"normaliser.actions={mode}" in line
    assert all(word in line.partition("In a new run")[2] for word in remedy)


@pytest.mark.compiles
def test_a_learner_looks(tmp_path, caplog):
    learner = learner_of(experiment(), record_demos(tmp_path / "demos", 2), tmp_path / "run")
    demo = learner.replay.outside_model_space["demo"]
    assert demo.numbers > 0 == demo.outside
    learner.replay.outside_model_space["online"] = OutsideCount(500, 5_000)
    let_go(learner)
    assert len(warnings(tmp_path / "run")) == 1
    assert sum("actions outside of model space" in line for line in caplog.messages) == 1
