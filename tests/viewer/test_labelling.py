"""Labels from the page end where training reads them: a run's journal, and `labels.json` next to files."""

from __future__ import annotations

import fcntl
import functools

import pytest
import viewed
from coded_episodes import SPEC
from viewed import KINDS, viewing

from serl_chunk.data.demos import load_demos
from serl_chunk.data.labels import FILE
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.runs.amend import RunAmender
from serl_chunk.runs.episodes import FORMAT, RunSource
from serl_chunk.runs.folder import RUN_LOCK
from serl_chunk.types import Outcome
from serl_chunk.viewer import server


def demonstrations(folder) -> dict:
    """Task -> episode of what `--demo_path` loads."""
    demos = load_demos([folder], SPEC, more=(FORMAT,))
    return {episode.begin.task: episode for episode in demos.episodes}


@pytest.mark.parametrize("kind", ["hdf5", "run"])
def test_labels_reach_the_demonstrations_and_the_page(tmp_path, kind):
    folder = KINDS[kind](tmp_path / "data")
    with viewing(folder) as browser:
        browser.rows()
        assert browser.get("info")["final_discard"] is (kind == "run")
        assert browser.get("episode/0")["reward"][-1] == 1
        row = browser.label(0, "failure").json["row"]
        assert (row["outcome"], row["reward"]) == ("failure", 0)
        content = browser.get("episode/0")
        assert (content["outcome"], content["by"], content["reward"][-1]) == ("failure", "operator", 0)
        row = browser.label(2, "success").json["row"]
        assert (row["label"], row["reward"]) == ("success", 1)
        assert browser.get("episode/2")["terminated"] is True
        assert browser.label(3, "discard").json["row"]["label"] == "discard"
        rows = browser.rows()
    assert [row["label"] for row in rows] == ["failure", "", "success", "discard"]
    assert [row["by"] for row in rows[:3]] == ["operator", "environment", "operator"]
    found = demonstrations(folder)
    assert {task: (e.end.outcome, e.end.terminated, e.end.reward) for task, e in found.items() if task != "task 1"} == {
        "task 0": (Outcome.FAILURE, True, 0),
        "task 2": (Outcome.SUCCESS, True, 1),
    }
    assert (found["task 0"].end.outcome_by, found["task 1"].end.outcome) == ("operator", Outcome.FAILURE)
    with viewing(folder) as browser:  # another viewer has them
        labels = [row["label"] for row in browser.rows()]
        assert labels == ["failure", "", "success", "discard"][: 4 if kind == "hdf5" else 3]
        if kind == "hdf5":  # a discard of files can be taken back, and one of a run cannot
            assert browser.label(3, None).status == 200
            assert len(demonstrations(folder)) == 4


def test_a_file_that_was_recorded_again_is_shown_as_such_and_can_be_labelled_anew(tmp_path):
    folder = viewed.hdf5_folder(tmp_path / "demos")
    with viewing(folder) as browser:
        browser.rows()
        assert browser.label(1, "success").status == 200
    (folder / "episode_1.hdf5").write_bytes((folder / "episode_2.hdf5").read_bytes())
    with viewing(folder) as browser:
        assert FILE in browser.rows()[1]["error"]
        assert browser.label(1, "success").json["row"]["error"] == ""
        assert browser.rows()[1]["outcome"] == "success"


@pytest.mark.parametrize("kind", KINDS)
def test_a_label_can_be_taken_back(tmp_path, kind):
    folder = KINDS[kind](tmp_path / "data")

    def end():
        source = open_episodes(folder, ReadOptions(), None, (FORMAT,))
        end = source.read(source.keys()[0]).end
        # The last reward of a run is given as a correction.
        return end.outcome, end.outcome_by, end.terminated, kind == "run" or end.reward

    before = end()
    with viewing(folder) as browser:
        (row, *_) = browser.rows()
        for label in ("failure", "success", None):
            answer = browser.label(0, label)
            assert answer.status == 200
        assert answer.json["row"] == row
    assert end() == before


def test_a_run_whose_holder_takes_no_labels_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "RunAmender", functools.partial(RunAmender, patience_s=0.1))
    folder = viewed.run_folder(tmp_path / "run")
    with viewing(folder) as browser, (folder / RUN_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        browser.rows()
        answer = browser.label(0, "failure")
        assert answer.status == 422
        assert str(folder) in answer.json["error"]
        assert browser.rows()[0]["label"] == ""
        assert browser.get("episode/0")["outcome"] == "success"
    assert RunSource(folder).about("a/e0").outcome is Outcome.SUCCESS


def test_an_episode_whose_actor_died_and_a_damaged_file_hide_no_other_and_can_only_be_discarded(tmp_path):
    run = viewed.died(viewed.run_folder(tmp_path / "run"))
    with viewing(run) as browser:
        answer = browser.label(4, "success")
        assert (answer.status, "e9" in answer.json["error"]) == (422, True)
        assert browser.label(4, "discard").status == 200
        assert browser.label(4, None).status == 422, "the discard of a run is final"
    assert "c/e9" not in RunSource(run).keys()
    folder = viewed.hdf5_folder(tmp_path / "demos")
    (folder / "episode_1.hdf5").write_bytes(b"no HDF5")
    with viewing(folder) as browser:
        assert ["episode_1.hdf5" in row["error"] for row in browser.rows()] == [False, True, False, False]
        assert not any(row["error"] for row in browser.rows() if row["number"] != 1)
        for answer in (browser.request("episode/1"), browser.label(1, "success")):
            assert (answer.status, "episode_1.hdf5" in answer.json["error"]) == (422, True)
        assert browser.label(1, "discard").json["row"]["label"] == "discard"
    assert sorted(demonstrations(folder)) == ["task 0", "task 2", "task 3"]


def test_a_body_that_is_no_label_changes_nothing(tmp_path):
    folder = viewed.hdf5_folder(tmp_path / "demos")
    bodies = (b"", b"{", b"[]", b'{"label": "good"}', b'{"label": 1}', b'{"label": ["failure"]}', b" " * 5000)
    with viewing(folder) as browser:
        browser.rows()
        for body in bodies:
            answer = browser.request("label/0", body=body, headers={"Content-Type": "application/json"})
            assert answer.status in (400, 413, 422), body
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        assert browser.request("label/0", body=b'{"label": "failure"}', headers=form).status == 400
        assert browser.rows()[0]["label"] == ""
    assert not (folder / FILE).exists()
