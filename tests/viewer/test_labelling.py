"""Labels from the page end where training reads them: a run's journal, and `labels.json` next to files."""

from __future__ import annotations

import fcntl
import functools
import json

import pytest
import viewed
from coded_episodes import SPEC
from viewed import KINDS, viewing

from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats import open_episodes
from serl_chunk.data.labels import FILE
from serl_chunk.data.source import ReadOptions
from serl_chunk.runs.amend import RunAmender
from serl_chunk.runs.episodes import FORMAT, RunSource
from serl_chunk.runs.folder import RUN_LOCK
from serl_chunk.types import Outcome
from serl_chunk.viewer import labelling


def demonstrations(folder) -> dict:
    """Task -> episode of what `--demo_path` loads."""
    demos = load_demos([folder], SPEC, more=(FORMAT,))
    return {episode.begin.task: episode for episode in demos.episodes}


@pytest.mark.parametrize("kind", ["hdf5", "run"])
def test_labels_reach_the_demonstrations(tmp_path, kind):
    folder = KINDS[kind](tmp_path / "data")
    with viewing(folder) as browser:
        browser.rows()
        assert browser.label(0, "failure").json["row"]["outcome"] == "failure"
        assert browser.label(2, "success").json["row"]["label"] == "success"
        assert browser.label(3, "discard").json["row"]["label"] == "discard"
        rows = browser.rows()
    assert [row["label"] for row in rows] == ["failure", "", "success", "discard"]
    assert [row["by"] for row in rows[:3]] == ["operator", "environment", "operator"]
    found = demonstrations(folder)
    assert sorted(found) == ["task 0", "task 1", "task 2"]
    assert found["task 0"].end.outcome is Outcome.FAILURE
    assert found["task 0"].end.outcome_by == "operator"
    assert found["task 0"].end.reward == 0
    assert found["task 1"].end.outcome is Outcome.FAILURE
    assert (found["task 2"].end.outcome, found["task 2"].end.terminated) == (Outcome.SUCCESS, True)
    assert found["task 2"].end.reward == 1
    with viewing(folder) as browser:  # another viewer has them
        labels = [row["label"] for row in browser.rows()]
    assert labels == (["failure", "", "success", "discard"] if kind == "hdf5" else ["failure", "", "success"])


@pytest.mark.parametrize("kind", ["hdf5", "run"])
def test_the_page_shows_the_labelled_episode(tmp_path, kind):
    with viewing(KINDS[kind](tmp_path / "data")) as browser:
        browser.rows()
        assert browser.get("episode/0")["reward"][-1] == 1
        assert browser.label(0, "failure").json["row"]["reward"] == 0
        content = browser.get("episode/0")
        assert (content["outcome"], content["by"], content["reward"][-1]) == ("failure", "operator", 0)
        assert browser.label(2, "success").json["row"]["reward"] == 1
        assert browser.get("episode/2")["terminated"] is True
        assert browser.label(0, None).json["row"]["reward"] == 1
        assert browser.get("episode/0")["reward"][-1] == 1


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


def test_a_lerobot_set_keeps_labels_by_index(tmp_path):
    folder = viewed.lerobot_set(tmp_path / "set")
    with viewing(folder) as browser:
        browser.rows()
        assert browser.label(2, "failure").status == 200
        assert browser.label(0, "discard").status == 200
    assert set(json.loads((folder / FILE).read_text())["labels"]) == {"episode_000000", "episode_000002"}
    source = open_episodes(folder, ReadOptions())
    assert source.keys() == ["episode_000001", "episode_000002", "episode_000003"]
    assert source.read("episode_000002").end.outcome is Outcome.FAILURE


@pytest.mark.parametrize("kind", KINDS)
def test_a_label_can_be_taken_back(tmp_path, kind):
    folder = KINDS[kind](tmp_path / "data")
    source = open_episodes(folder, ReadOptions(), None, (FORMAT,))
    before = source.read(source.keys()[0]).end
    with viewing(folder) as browser:
        (row, *_) = browser.rows()
        for label in ("failure", "success", None):
            answer = browser.label(0, label)
            assert answer.status == 200
        assert answer.json["row"] == row
    source = open_episodes(folder, ReadOptions(), None, (FORMAT,))
    after = source.read(source.keys()[0]).end
    assert (after.outcome, after.outcome_by, after.terminated) == (before.outcome, before.outcome_by, before.terminated)
    if kind != "run":  # whose last reward is given as a correction
        assert after.reward == before.reward


def test_a_discard_of_files_can_be_taken_back_and_one_of_a_run_cannot(tmp_path):
    for kind in ("hdf5", "run"):
        folder = KINDS[kind](tmp_path / kind)
        with viewing(folder) as browser:
            browser.rows()
            assert browser.get("info")["final_discard"] is (kind == "run")
            assert browser.label(3, "discard").status == 200
            assert browser.label(3, None).status == (422 if kind == "run" else 200)
            assert len(demonstrations(folder)) == (3 if kind == "run" else 4)


def test_a_run_whose_holder_takes_no_labels_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(labelling, "RunAmender", functools.partial(RunAmender, patience_s=0.1))
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


def test_an_episode_whose_actor_died_can_only_be_discarded(tmp_path):
    folder = viewed.died(viewed.run_folder(tmp_path / "run"))
    with viewing(folder) as browser:
        rows = browser.rows()
        assert [row["whole"] for row in rows] == [True, True, True, True, False]
        answer = browser.label(4, "success")
        assert answer.status == 422
        assert "e9" in answer.json["error"]
        assert browser.label(4, "discard").status == 200
    assert "c/e9" not in RunSource(folder).keys()


def test_a_single_file_is_labelled_in_its_folder(tmp_path):
    folder = viewed.hdf5_folder(tmp_path / "demos")
    with viewing(folder / "episode_2.hdf5") as browser:
        assert len(browser.rows()) == 1
        assert browser.label(0, "success").status == 200
    assert set(json.loads((folder / FILE).read_text())["labels"]) == {"episode_2.hdf5"}
    assert demonstrations(folder)["task 2"].end.outcome is Outcome.SUCCESS


def test_a_damaged_file_can_be_discarded_and_nothing_else(tmp_path):
    folder = viewed.hdf5_folder(tmp_path / "demos")
    (folder / "episode_1.hdf5").write_bytes(b"no HDF5")
    with viewing(folder) as browser:
        browser.rows()
        assert browser.label(1, "success").status == 422
        assert browser.label(1, "discard").json["row"]["label"] == "discard"
    assert sorted(demonstrations(folder)) == ["task 0", "task 2", "task 3"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"label": "good"}', b'{"label": 1}', b'{"label": ["failure"]}', b" " * 5000]
)
def test_a_body_that_is_no_label_changes_nothing(tmp_path, body):
    folder = viewed.hdf5_folder(tmp_path / "demos")
    with viewing(folder) as browser:
        browser.rows()
        answer = browser.request("label/0", body=body, headers={"Content-Type": "application/json"})
        assert answer.status in (400, 413, 422)
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        assert browser.request("label/0", body=b'{"label": "failure"}', headers=form).status == 400
        assert browser.rows()[0]["label"] == ""
    assert not (folder / FILE).exists()


def test_formats_without_lasting_names_take_no_labels(tmp_path):
    class Other:
        format = "ogbench"

    found = labelling.labelling_of(Other())
    assert isinstance(found, labelling.NoLabels)
    assert "ogbench" in found.refusal
