"""`--viewer` of recordings and evaluations: a viewer's keys reach the robot, and the page counts episodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import viewed
from actor_helpers import SPEC, LineEnv, NoisyAgent, identity, make_config
from errors import naming
from live_desk import NAMES, Viewer
from processes import Process
from viewed import Browser

from serl_chunk.cli import evaluation, record
from serl_chunk.cli.evaluation import EvaluationOptions, run_evaluation
from serl_chunk.cli.record import run_record
from serl_chunk.console.bindings import REPEAT
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.live.server import LivePage
from serl_chunk.main import main
from serl_chunk.runs.episodes import RunSource
from serl_chunk.runs.metrics import Counters
from serl_chunk.types import Outcome, Snapshot


class Slow(LineEnv):
    def step(self, action):
        time.sleep(0.002)
        return super().step(action)


@contextlib.contextmanager
def pressing(monkeypatch, key: str):
    """A viewer that presses a key wherever the policy acts; yields the lines of progress and titles that it saw."""
    seen: list[str] = []
    begin, threads = LivePage.begin, []

    def watched(page, *a, **k):
        begin(page, *a, **k)
        threads.append(threading.Thread(target=watch, args=(Viewer(page.url, NAMES[0]), k["title"])))
        threads[-1].start()

    def watch(viewer, title):
        seen.append(title)
        pressed = 0.0
        for event in viewer.events():
            if event and event["state"]["word"] == "POLICY":
                seen.append(event["state"]["progress"])
                if time.monotonic() - pressed > 2 * REPEAT:
                    pressed = time.monotonic()
                    viewer.press(key)

    monkeypatch.setattr(LivePage, "begin", watched)
    yield seen
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()  # the page has ended


def test_a_viewer_labels_what_a_script_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "make_env", lambda robot: Slow(length=10_000))
    monkeypatch.setattr(record, "spec_of", lambda config: SPEC)
    monkeypatch.setattr(record, "make_expert", lambda env: Mock(act=lambda: np.zeros(2, np.float32)))
    how = {"policy": "scripted", "noise": None, "cameras": (), "viewer": "0"}
    with pressing(monkeypatch, "s") as seen:
        assert run_record(make_config(), 1, str(tmp_path), **how) == 0
    assert "live page: http://127.0.0.1:" in capsys.readouterr().out
    assert seen[:2] == [f"{make_config().name}: record", "demonstration 1 of 1: 0 attempts, 0 kept"]
    [file] = tmp_path.glob("*.hdf5")
    end = read_episode(file).end
    assert (end.outcome, end.outcome_by) == (Outcome.SUCCESS, "operator")


def test_a_viewer_labels_the_episodes_of_an_evaluation(tmp_path, monkeypatch):
    checkpoint = evaluation.Checkpoint(Snapshot(5, {"bias": np.float32(0)}), identity(8), Counters(5, 0, 0))
    monkeypatch.setattr(evaluation, "make_env", lambda *a, **k: Slow(length=10_000))
    monkeypatch.setattr(evaluation, "spec_of", lambda config: SPEC)
    monkeypatch.setattr(evaluation, "make_agent", lambda *a: NoisyAgent(8))
    monkeypatch.setattr(evaluation, "checkpoints_of_run", lambda *a: [checkpoint])
    monkeypatch.setattr(evaluation, "build_report", lambda run: run / "report.html")
    monkeypatch.setattr(evaluation, "stop_on_signals", lambda stop, how: None)
    with pressing(monkeypatch, "f") as seen:
        assert run_evaluation(make_config(), EvaluationOptions(("5",), 2), tmp_path, viewer="0") == 0
    assert seen[:2] == [f"{make_config().name}: evaluation", "episode 1 of 2, start 1"]
    assert "episode 2 of 2, start 2" in seen
    [result] = json.loads((tmp_path / "evaluations" / "evaluation_5.json").read_text())["results"]
    assert [(e["outcome"], e["ended_by"]) for e in result["episodes"]] == [("failure", "operator")] * 2


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Path:
    return viewed.hdf5_folder(tmp_path_factory.mktemp("view") / "demos")


@pytest.mark.system
def test_it_serves_until_ctrl_c(tmp_path):
    folder = viewed.run_folder(tmp_path / "run")
    process = Process(["view", str(folder)], tmp_path / "log", os.environ)
    try:
        process.says("Ctrl-C")
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", process.output)
        browser = Browser(url)
        assert len(browser.rows()) == 4
        assert browser.label(0, "failure").status == 200
        process.signal(signal.SIGINT)
        process.ends(0)
        assert "Traceback" not in process.output
    finally:
        process.close()
    assert RunSource(folder).about("a/e0").outcome == "failure"


def test_the_page_and_the_figures_of_chosen_episodes(demos, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["view", str(demos), "--out", str(out), "--episodes", "1-2", "--size_mb", "2"]) == 0
    assert str(out) in capsys.readouterr().out
    assert 10_000 < out.stat().st_size < 2e6
    assert main(["view", str(demos), "--out", str(out)]) == 2
    assert re.match(naming("--out", out), capsys.readouterr().err)


def test_an_episode_for_foxglove(demos, tmp_path, capsys):
    pytest.importorskip("mcap")
    out = tmp_path / "e.mcap"
    assert main(["view", str(demos), "--mcap", str(out), "--episodes", "3"]) == 0
    assert out.read_bytes().startswith(b"\x89MCAP")
    assert str(out) in capsys.readouterr().out
