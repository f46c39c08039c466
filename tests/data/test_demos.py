"""What --demo_path accepts, and where a demonstration ends."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serl_chunk.data.demos import end_at_first_success, find_demos, load_demos
from serl_chunk.data.hdf5 import write_episode
from serl_chunk.types import ConfigError, DataError, Outcome


@pytest.fixture
def folder(tmp_path, spec, make_episode) -> Path:
    """episode_1, episode_2 and episode_10, of 4, 5 and 6 steps, beside a file that is no episode."""
    directory = tmp_path / "demos"
    directory.mkdir()
    for k, number in enumerate((1, 2, 10)):
        write_episode(directory / f"episode_{number}.hdf5", make_episode(spec, 4 + k, seed=number), spec)
    (directory / "notes.txt").write_text("take 2 was best")
    return directory


def test_files_folders_patterns_and_home(folder, spec, monkeypatch):
    names = ["episode_1.hdf5", "episode_2.hdf5", "episode_10.hdf5"]
    monkeypatch.setenv("HOME", str(folder.parent))
    for paths in ([folder], [str(folder / "*.hdf5")], ["~/demos"], [str(folder.parent / "**" / "*.hdf5")]):
        assert [p.name for p in load_demos(paths, spec).files] == names
    assert [p.name for p in find_demos([folder / "episode_10.hdf5", folder / "episode_1.hdf5"])] == [
        "episode_10.hdf5",
        "episode_1.hdf5",
    ]
    assert find_demos(str(folder)) == find_demos([folder])


def test_a_name_with_wildcard_characters_is_taken_literally_first(folder, spec):
    odd = folder / "take[1].hdf5"
    shutil.copy(folder / "episode_1.hdf5", odd)
    assert find_demos([odd]) == [odd]


def test_no_paths_are_no_demonstrations(spec):
    assert load_demos([], spec) == ([], [], 0, 0, "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: "", "a demonstration path is empty; give an HDF5 file, a folder"),
        (lambda d: "  ", "a demonstration path is empty"),
        (lambda d: d / "absent", r"no demonstration matches '.*absent'; give"),
        (lambda d: d / "*.h5", r"no demonstration matches '.*\*\.h5'"),
        (lambda d: d / "empty", r"has no \*\.hdf5 file \(it has: no file\)"),
        (lambda d: d / "text", r"has no \*\.hdf5 file \(it has: 2 \.txt\)"),
        (lambda d: d / "old.pkl", r"old\.pkl: pickled demonstrations .* not read, because unpickling runs .*HDF5"),
        (lambda d: d / "*.p*l", r"old\.pkl: pickled demonstrations"),
        (lambda d: d / "pickles", r"pickles: pickled demonstrations"),
    ],
)
def test_a_path_without_demonstrations_is_named(tmp_path, spec, make, message):
    for name in ("empty", "text", "pickles"):
        (tmp_path / name).mkdir()
    (tmp_path / "text" / "a.txt").touch()
    (tmp_path / "text" / "b.txt").touch()
    (tmp_path / "pickles" / "a.PKL").touch()
    (tmp_path / "old.pkl").write_bytes(pickle.dumps([{"rewards": 1}]))
    with pytest.raises(ConfigError, match=message):
        load_demos([make(tmp_path)], spec)


def test_every_content_is_loaded_once(folder, spec):
    shutil.copy(folder / "episode_2.hdf5", folder / "episode_3.hdf5")
    demos = load_demos([folder, folder / "episode_1.hdf5"], spec)
    assert [p.name for p in demos.files] == ["episode_1.hdf5", "episode_2.hdf5", "episode_10.hdf5"]
    assert [e.steps.n for e in demos.episodes] == [4, 5, 6]
    assert demos.duplicates == 2


def test_the_digest_is_of_the_contents(folder, spec, make_episode):
    whole = load_demos([folder], spec).digest
    moved = folder.parent / "elsewhere"
    shutil.copytree(folder, moved)
    (moved / "episode_1.hdf5").rename(moved / "episode_99.hdf5")
    assert load_demos([moved, folder], spec).digest == whole
    assert load_demos([folder / "episode_1.hdf5"], spec).digest != whole
    write_episode(folder / "episode_1.hdf5", make_episode(spec, 4, seed=77), spec)
    assert load_demos([folder], spec).digest != whole


def test_two_episodes_of_one_id_stay_apart(folder, spec, make_episode):
    write_episode(folder / "episode_3.hdf5", make_episode(spec, 7, seed=3, episode_id="e2"), spec)
    episodes = load_demos([folder], spec).episodes
    ids = [e.begin.episode_id for e in episodes]
    assert len(set(ids)) == 4
    assert ids[1] == "e2"
    assert ids[2].startswith("e2-")
    assert episodes[2].steps.episode_id == episodes[2].end.episode_id == ids[2]


def test_progress_counts_files(folder, spec):
    calls = []
    shutil.copy(folder / "episode_2.hdf5", folder / "episode_3.hdf5")
    load_demos([folder], spec, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_another_robot_and_damage_name_the_file(folder, spec, joints_spec):
    with pytest.raises(DataError, match=r"episode_1\.hdf5: robot arm2 has 2 actions, /action has 3; is this a demons"):
        load_demos([folder], joints_spec)
    damaged = folder / "episode_2.hdf5"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"episode_2\.hdf5: the file is truncated"):
        load_demos([folder], spec)


def test_steps_after_the_first_success_are_dropped_and_counted(folder, spec, make_episode):
    episode = make_episode(spec, 9, seed=5, success_at=(3, 6), decision_ticks=(0, 4))
    write_episode(folder / "episode_3.hdf5", episode, spec)
    demos = load_demos([folder], spec)
    assert demos.dropped_steps == 5
    _, steps, end = demos.episodes[2]
    np.testing.assert_array_equal(steps.action, episode.steps.action[:4])
    np.testing.assert_array_equal(steps.sparse["images/top"].index, [0, 1, 2, 3])
    np.testing.assert_array_equal(steps.sparse["decision/value"].index, [0])
    assert (end.length, end.terminated, end.truncated) == (4, True, False)
    assert (end.outcome, end.outcome_by) == (Outcome.SUCCESS, "reward")
    np.testing.assert_array_equal(end.final_observation["state"], episode.steps.observation["state"][4])
    np.testing.assert_array_equal(end.final_observation["images/wrist"], episode.steps.sparse["images/wrist"].values[4])


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 8), data=st.data())
def test_first_success_property(spec, make_episode, assert_same, n, data):
    success_at = tuple(data.draw(st.lists(st.integers(0, n - 1), unique=True), label="success_at"))
    last = data.draw(st.sampled_from([None, 0.0, 1.0]), label="End.reward")
    final = data.draw(st.booleans(), label="final")
    episode = make_episode(spec, n, success_at=success_at, reward=last, final=final)
    effective = list(episode.steps.reward)
    if last is not None:
        effective[-1] = last
    cut, dropped = end_at_first_success(episode)
    if max(effective) < 1:
        assert dropped == 0
        assert_same(cut, episode)
        return
    first = next(t for t, r in enumerate(effective) if r >= 1)
    assert (cut.steps.n, dropped) == (first + 1, n - first - 1)
    assert (cut.end.length, cut.end.terminated, cut.end.truncated) == (first + 1, True, False)
    assert cut.end.outcome is Outcome.SUCCESS
    assert (cut.steps.reward[-1] if cut.end.reward is None else cut.end.reward) >= 1
    states = list(episode.steps.observation["state"])
    states.append(episode.end.final_observation["state"] if final else states[-1])
    np.testing.assert_array_equal(cut.end.final_observation["state"], states[first + 1])
    again, none = end_at_first_success(cut)
    assert_same(again, cut)
    assert none == 0


def test_a_judged_success_keeps_its_judge(spec, make_episode):
    episode = make_episode(spec, 4, success_at=(3,))
    judged = episode._replace(end=episode.end._replace(outcome=Outcome.SUCCESS, outcome_by="operator"))
    assert end_at_first_success(judged)[0].end.outcome_by == "operator"
