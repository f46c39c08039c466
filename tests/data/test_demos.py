"""What --demo_path accepts, where a demonstration ends, and what `labels.json` changes in the episodes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from deferred_episodes import lazy
from errors import naming
from held_source import HeldSource
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.data.demos import NoEpisodesError, end_at_first_success, find_demos, load_demos
from serl_chunk.data.formats.episodes import EpisodeFiles
from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.data.frames import Frames, SingleFrame
from serl_chunk.data.labels import FILE, as_recorded, correction, write_label
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import Format, ReadOptions, decode_images
from serl_chunk.types import ConfigError, DataError, End, Episode, Outcome


@pytest.fixture
def folder(tmp_path, spec, make_episode) -> Path:
    """episode_1, episode_2 and episode_10, of 4, 5 and 6 steps, beside a file that is no episode."""
    directory = tmp_path / "demos"
    directory.mkdir()
    for k, number in enumerate((1, 2, 10)):
        write_episode(directory / f"episode_{number}.hdf5", make_episode(spec, 4 + k, seed=number), spec)
    (directory / "notes.txt").write_text("take 2 was best")
    return directory


def test_files_folders_patterns_and_home(folder, spec, make_episode, monkeypatch):
    names = ["episode_1.hdf5", "episode_2.hdf5", "episode_10.hdf5"]
    monkeypatch.setenv("HOME", str(folder.parent))
    for paths in ([folder], [str(folder / "*.hdf5")], ["~/demos"], [str(folder.parent / "**" / "*.hdf5")]):
        assert [o.path.name for o in load_demos(paths, spec).origins] == names
    assert find_demos([folder / names[2], folder / names[0]]) == [folder / names[2], folder / names[0]]
    assert find_demos(folder) == find_demos(str(folder)) == find_demos([folder]) == [folder]  # one path may stand alone
    demos = load_demos([folder], spec, options=ReadOptions(proportion=0.6))
    assert [e.steps.n for e in demos.episodes] == [4, 5]
    odd = folder / "take[1].HDF5"  # is taken literally first
    shutil.copy(folder / "episode_1.hdf5", odd)
    assert find_demos([odd]) == [odd]
    assert open_episodes(folder, ReadOptions()).keys() == [*names, odd.name]
    assert load_demos([], spec) == ([], [], 0, 0, "", ())
    # Data sets that are folders, and files in other folders.
    (folder.parent / "set.many").mkdir()
    format = many({"a": make_episode(spec, 5, seed=1)})
    assert find_demos([folder.parent], more=[format]) == find_demos([folder.parent / "*"], more=[format])
    assert find_demos([folder.parent], more=[format]) == [folder, folder.parent / "set.many"]
    found = find_demos([folder.parent / "**"], more=[format])
    assert folder not in found
    assert folder / "episode_1.hdf5" in found
    assert find_demos([folder.parent / "*"], format="episodes", more=[format]) == [folder]


@pytest.fixture
def days(tmp_path, spec, make_episode) -> Path:
    """One episode in each of two folders, of four steps and of five, and a labels.json in the second."""
    for k in (1, 2):
        (tmp_path / "all" / f"2025-10-0{k}").mkdir(parents=True)
        write_episode(tmp_path / "all" / f"2025-10-0{k}" / "episode_0.hdf5", make_episode(spec, 3 + k, seed=k), spec)
    return tmp_path / "all"


@pytest.mark.parametrize("path", ["", "*", "2025-10-0?", "*/*.hdf5", "**/*.hdf5", "**", "2025*/episode_0*"])
def test_folders_by_day_are_one_source_for_every_command(days, spec, path):
    second = days / "2025-10-02"
    write_label(second, "episode_0.hdf5", "failure", read_episode(second / "episode_0.hdf5"))
    keys = ["2025-10-01/episode_0.hdf5", "2025-10-02/episode_0.hdf5"]
    source = open_episodes(days / path, ReadOptions(spec=spec, success=True))
    assert (source.path, source.keys(), source.format) == (days, keys, "episodes")
    assert [source.read(key).steps.n for key in keys] == [4, 5]
    assert source.read(keys[1]).end.outcome is Outcome.FAILURE
    loaded = load_demos([days / path], spec, options=ReadOptions(success=True))
    assert [origin.path for origin in loaded.origins] == [days / key for key in keys]


def test_a_folder_with_files_of_its_own_stands_for_these_and_says_so(days, spec):
    shutil.copy(days / "2025-10-01" / "episode_0.hdf5", days)
    source = open_episodes(days, ReadOptions(spec=spec))
    assert (source.keys(), load_demos([days], spec).duplicates) == (["episode_0.hdf5"], 0)
    (note,) = (note for note in source.notes() if "not read" in note)
    for part in ("2025-10-01, 2025-10-02", str(days / "**" / "*.hdf5")):
        assert part in note
    assert len(open_episodes(days / "**" / "*.hdf5", ReadOptions(spec=spec)).keys()) == 3  # the remedy


def test_several_data_sets_are_one_source(tmp_path, spec, make_episode):
    format = many({"a": make_episode(spec, 5, seed=1), "b": make_episode(spec, 9, seed=2)})
    for name in ("one.many", "two.many"):
        (tmp_path / name).touch()
    source = open_episodes(tmp_path / "*.many", ReadOptions(proportion=0.75), more=[format])
    assert source.keys() == ["one.many/a", "one.many/b", "two.many/a"]
    assert (source.read("two.many/a").steps.n, source.notes()) == (5, ["the rate was guessed"])
    with pytest.raises(DataError, match=naming("two.many/c", "two.many/b")):
        source.read("two.many/c")
    rates = iter((10.0, 20.0))
    other = dataclasses.replace(format, open=lambda path, options: rated(format.open(path, options), next(rates)))
    with pytest.raises(DataError, match=naming("two.many", 20, "one.many", 10)):
        open_episodes(tmp_path / "*.many", ReadOptions(), more=[other])


@pytest.mark.parametrize(("variable", "below"), [
    ("HF_LEROBOT_HOME", "user/set"), ("HF_HOME", "lerobot/user/set"),
    ("XDG_CACHE_HOME", "huggingface/lerobot/user/set"), ("HOME", ".cache/huggingface/lerobot/user/set"),
    ("HF_LEROBOT_HOME", "hub/datasets--user--set/snapshots/0f"),
])  # fmt: skip
def test_a_repository_is_looked_for_where_lerobot_keeps_it(tmp_path, monkeypatch, variable, below):
    monkeypatch.chdir(tmp_path)
    for name in ("HF_LEROBOT_HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "home"))
    with pytest.raises(NoEpisodesError, match=naming("user/set", "hf download user/set", tmp_path / "home")):
        find_demos("user/set")
    info = tmp_path / "home" / below / "meta" / "info.json"
    info.parent.mkdir(parents=True)
    info.touch()
    assert find_demos("user/set") == [tmp_path / "home" / below]


@pytest.mark.parametrize(("name", "named"), [
    ("  ", ("empty",)), ("{}/*.h5", ("/*.h5", "pattern")), ("{}/text", ("/text", "*.hdf5", 2, ".txt", "1 folder")),
    ("{}/text/a.txt", ("a.txt", "an empty file")), ("{}/x.many", ("x.many", "(many)")),
])  # fmt: skip
def test_a_path_without_demonstrations_is_named(tmp_path, spec, name, named):
    (tmp_path / "text" / "empty").mkdir(parents=True)
    for file in ("text/a.txt", "text/b.txt", "x.many"):
        (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=naming(*named)):
        load_demos([name.format(tmp_path)], spec, more=[many({})])
    with pytest.raises(ConfigError, match=naming("demo_format", "hdf6", "episodes")):
        load_demos([tmp_path], spec, format="hdf6")


def test_every_content_is_loaded_once_and_frames_are_left_in_their_files(folder, spec, make_episode, assert_same):
    whole = load_demos([folder], spec)
    shutil.copy(folder / "episode_2.hdf5", folder / "episode_3.hdf5")
    demos = load_demos([folder, folder / "episode_1.hdf5"], spec)
    assert [o.path.name for o in demos.origins] == ["episode_1.hdf5", "episode_2.hdf5", "episode_10.hdf5"]
    assert ([e.steps.n for e in demos.episodes], demos.duplicates) == ([4, 5, 6], 2)
    for episode, origin in zip(demos.episodes, demos.origins, strict=True):
        assert isinstance(episode.steps.sparse["images/top"].values, Frames)
        assert_same(decode_images(episode), read_episode(origin.path, spec))
    # The digest is of the contents.
    moved = folder.parent / "elsewhere"
    shutil.copytree(folder, moved)
    (moved / "episode_1.hdf5").rename(moved / "episode_99.hdf5")
    assert load_demos([moved, folder], spec).digest == demos.digest == whole.digest
    # Another episode of an id has an id of its own.
    write_episode(folder / "episode_3.hdf5", make_episode(spec, 7, seed=3, episode_id="e2"), spec)
    other = load_demos([folder], spec)
    assert other.digest != whole.digest
    ids = [e.begin.episode_id for e in other.episodes]
    assert (len(set(ids)), ids[1], ids[2][:3]) == (4, "e2", "e2-")
    assert other.episodes[2].steps.episode_id == other.episodes[2].end.episode_id == ids[2]


TEXTS = {("lift", ""): 1, ("", "lift", "push"): 2}


@pytest.mark.parametrize("texts", TEXTS)
def test_one_motion_may_show_several_tasks(tmp_path, spec, make_episode, texts):
    files = tmp_path / "files"
    files.mkdir()
    for k, task in enumerate(texts):
        write_episode(files / f"episode_{k}.hdf5", make_episode(spec, 6, episode_id=f"e{k}", task=task), spec)
    demos = load_demos([files], spec)
    assert (len(demos.episodes), demos.duplicates) == (TEXTS[texts], len(texts) - TEXTS[texts])
    assert {e.begin.task for e in demos.episodes} == {*texts} - {""}


def test_another_robot_its_rate_and_damage_name_the_file(folder, spec, joints_spec):
    with pytest.raises(DataError, match=naming("episode_1.hdf5", "arm2", 2, "/action", 3)):
        load_demos([folder], joints_spec)
    with pytest.raises(DataError, match=naming("demos", 50, "arm3", 10, "robot.control_hz=50")):
        load_demos([folder], dataclasses.replace(spec, control_hz=10.0))
    damaged = folder / "episode_2.hdf5"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(DataError, match=naming("episode_2.hdf5", "HDF5")):
        load_demos([folder], spec)
    whole = load_demos([folder], spec, options=ReadOptions(skip_bad=True))
    assert len(whole.episodes) == len(list(folder.glob("*.hdf5"))) - 1
    assert [f"left out: {damaged}: " in note for note in whole.notes] == [True]


def test_steps_after_the_first_success_are_dropped_and_counted(folder, spec, make_episode, monkeypatch):
    episode = make_episode(spec, 9, seed=5, success_at=(3, 6), decision_ticks=(0, 4))
    write_episode(folder / "episode_3.hdf5", episode, spec)
    demos = load_demos([folder], spec)
    _, steps, end = demos.episodes[2]
    assert (demos.dropped_steps, end.outcome_by) == (5, "reward")
    np.testing.assert_array_equal(steps.action, episode.steps.action[:4])
    np.testing.assert_array_equal(steps.sparse["images/top"].index, [0, 1, 2, 3])
    np.testing.assert_array_equal(steps.sparse["decision/value"].index, [0])
    np.testing.assert_array_equal(end.final_observation["images/wrist"], episode.steps.sparse["images/wrist"].values[4])
    judged = make_episode(spec, 4, success_at=(3,))
    judged = judged._replace(end=judged.end._replace(outcome=Outcome.SUCCESS, outcome_by="operator"))
    assert end_at_first_success(judged)[0].end.outcome_by == "operator"
    dense = judged._replace(steps=dataclasses.replace(judged.steps, reward=np.linspace(0.2, 2, 4, dtype=np.float32)))
    assert end_at_first_success(dense) == (dense, 0)
    monkeypatch.setattr(EpisodeFiles, "rewards_mark_success", False, raising=False)
    assert load_demos([folder], spec).episodes[2].steps.n == 9


@settings(max_examples=examples(100), deadline=None)
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
    first = next((t for t, r in enumerate(effective) if r >= 1), None)
    if first is None or (first == 0 and n > 1):  # paid from the first step on
        assert dropped == 0
        assert_same(cut, episode)
        return
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


class Many(HeldSource):
    """A data set of several episodes in one file, whose frames are decoded when they are looked at."""

    format = "many"

    def read(self, key: str) -> Episode:
        return lazy(super().read(key))


def rated(source: Many, hz: float) -> Many:
    source.hz = hz
    return source


def many(episodes) -> Format:
    def open_many(path, options):
        source = Many(episodes)
        source.path = path
        return source

    return Format("many", lambda path: path.suffix == ".many", open_many)


def test_a_data_set_gives_its_episodes_with_their_frames_left_where_they_are(tmp_path, spec, make_episode, assert_same):
    given = {
        "a": make_episode(spec, 5, seed=1),
        "b": make_episode(spec, 9, seed=2, success_at=(3,)),
        "again": make_episode(spec, 5, seed=1),
    }
    for name in ("one.many", "two.many"):
        (tmp_path / name).touch()
    demos = load_demos([tmp_path / "*.many"], spec, more=[many(given)])
    assert (len(demos.episodes), demos.duplicates, demos.dropped_steps) == (2, 4, 5)
    assert demos.notes == ("the rate was guessed",)
    first, cut = demos.episodes
    assert all(len(rows.values.decoded) <= 3 for rows in first.steps.sparse.values())  # to know it again
    assert [(o.path.name, o.format, o.key) for o in demos.origins] == [("one.many", "many", k) for k in "ab"]
    assert_same(decode_images(first), given["a"])
    assert isinstance(cut.steps.sparse["images/top"].values, Frames)
    assert isinstance(cut.end.final_observation["images/top"], SingleFrame)
    assert_same(decode_images(cut), end_at_first_success(given["b"])[0])


NAMES = [f"episode_{i}.hdf5" for i in range(3)]


@pytest.fixture
def judged(tmp_path, spec, make_episode) -> Path:
    """Three HDF5 episodes: a success at its last step, one that ran out of time, a failure."""
    for i, outcome in enumerate((Outcome.SUCCESS, Outcome.UNKNOWN, Outcome.FAILURE)):
        episode = make_episode(spec, 10, seed=i, success_at=(9,) if i == 0 else ())
        end = episode.end._replace(outcome=outcome, terminated=i != 1, truncated=i == 1, outcome_by="environment")
        write_episode(tmp_path / NAMES[i], episode._replace(end=end), spec)
    return tmp_path


def label(judged: Path, key: str, text: str | None) -> None:
    write_label(judged, key, text, read_episode(judged / key))


def loaded(judged: Path, spec, **options) -> dict:
    demos = load_demos([judged], spec, options=ReadOptions(**options))
    return {origin.key: episode for origin, episode in zip(demos.origins, demos.episodes, strict=True)}


def test_demonstrations_have_the_labels_outcomes(judged, spec):
    before, digests = loaded(judged, spec)[NAMES[0]], [load_demos([judged], spec).digest]
    for key, text in zip(NAMES, ("failure", "success", "discard"), strict=True):
        label(judged, key, text)
        digests.append(load_demos([judged], spec).digest)
    assert len(set(digests)) == 4
    assert sorted(p.name for p in judged.iterdir()) == [*NAMES, FILE]
    found = loaded(judged, spec)
    assert list(found) == NAMES[:2]
    failed, succeeded = found[NAMES[0]], found[NAMES[1]]
    assert (failed.end.outcome, failed.end.outcome_by, failed.end.terminated) == (Outcome.FAILURE, "operator", True)
    assert (failed.steps.n, failed.end.reward, failed.steps.reward.max() < 1) == (10, 0, True)
    assert (succeeded.end.outcome, succeeded.end.terminated, succeeded.end.reward) == (Outcome.SUCCESS, True, 1)
    assert list(loaded(judged, spec, labels=False)) == NAMES
    source = open_episodes(judged, ReadOptions(spec=spec))  # applies them
    assert (source.keys(), source.read(NAMES[0]).end.outcome) == (NAMES[:2], Outcome.FAILURE)
    for key in NAMES:
        label(judged, key, None)  # taken back: as recorded
    assert load_demos([judged], spec).digest == digests[0]
    after = loaded(judged, spec)[NAMES[0]]
    assert after.end._replace(final_observation=None) == before.end._replace(final_observation=None)
    np.testing.assert_array_equal(after.steps.reward, before.steps.reward)


def test_labels_lie_next_to_their_files_and_may_discard_all_of_a_folder(judged, spec):
    (judged / "score_5").mkdir()
    shutil.copy(judged / NAMES[1], judged / "score_5" / "x.hdf5")
    label(judged / "score_5", "x.hdf5", "success")
    source = open_episodes(judged, ReadOptions(spec=spec))
    assert source.read("score_5/x.hdf5").end.outcome is Outcome.SUCCESS
    assert source.read(NAMES[1]).end.outcome is Outcome.UNKNOWN
    (judged / NAMES[0]).write_bytes(b"no HDF5")
    write_label(judged, NAMES[0], "discard", None)
    assert list(loaded(judged, spec)) == NAMES[1:]
    label(judged / "score_5", "x.hdf5", "discard")
    for name in NAMES[1:]:
        label(judged, name, "discard")
    with pytest.raises(NoEpisodesError, match=naming(FILE)):
        load_demos([judged], spec)


def test_a_file_that_was_recorded_again_has_no_label(judged, spec, make_episode):
    label(judged, NAMES[0], "failure")
    label(judged, NAMES[1], "discard")
    write_episode(judged / NAMES[0], make_episode(spec, 10, seed=7), spec)
    with pytest.raises(DataError, match=naming(judged / NAMES[0], FILE)):
        loaded(judged, spec)
    write_episode(judged / NAMES[1], make_episode(spec, 10, seed=8), spec)
    with pytest.raises(DataError, match=naming(NAMES[1], FILE)):
        open_episodes(judged, ReadOptions(spec=spec)).keys()


@pytest.mark.parametrize(("label", "terminated", "reward", "expected"), [
    ("success", False, 0.0, (Outcome.SUCCESS, True, 1.0)), ("success", True, 3.0, (Outcome.SUCCESS, True, 3.0)),
    ("failure", True, 1.0, (Outcome.FAILURE, True, 0.0)), ("failure", False, -0.5, (Outcome.FAILURE, False, -0.5)),
])  # fmt: skip
def test_what_a_label_means(label, terminated, reward, expected):
    end = End("e", 5, None, terminated, not terminated, Outcome.UNKNOWN, "environment")
    amended = correction(label, end, reward).correct(end)
    assert (amended.outcome, amended.terminated, amended.reward) == expected
    assert amended.truncated is not amended.terminated
    back = as_recorded(end, reward).correct(amended)
    assert back == end._replace(reward=reward)
