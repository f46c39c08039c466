"""What --demo_path accepts, and where a demonstration ends."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.data.convert.convert import convert
from serl_chunk.data.demos import content_digest, end_at_first_success, find_demos, load_demos
from serl_chunk.data.formats import open_episodes
from serl_chunk.data.formats.episodes import EpisodeFiles
from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.data.frames import Frames, SingleFrame, observation_at
from serl_chunk.data.source import Format, ReadOptions, decode_images
from serl_chunk.types import ConfigError, DataError, Episode, Outcome, SparseRows, StepBlock


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
        assert [o.path.name for o in load_demos(paths, spec).origins] == names
    assert [p.name for p in find_demos([folder / "episode_10.hdf5", folder / "episode_1.hdf5"])] == [
        "episode_10.hdf5",
        "episode_1.hdf5",
    ]


def test_a_name_with_wildcard_characters_is_taken_literally_first(folder, spec):
    odd = folder / "take[1].hdf5"
    shutil.copy(folder / "episode_1.hdf5", odd)
    assert find_demos([odd]) == [odd]


def test_one_path_may_stand_alone(folder):
    assert find_demos(folder) == find_demos(str(folder)) == find_demos([folder]) != []


def test_no_paths_are_no_demonstrations(spec):
    assert load_demos([], spec) == ([], [], 0, 0, "", ())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda d: "", ("empty",)),
        (lambda d: "  ", ("empty",)),
        (lambda d: d / "absent", ("/absent",)),
        (lambda d: d / "*.h5", ("/*.h5",)),
        (lambda d: d / "empty", ("/empty", "*.hdf5")),
        (lambda d: d / "text", ("/text", "*.hdf5", 2, ".txt")),
        (lambda d: d / "text" / "a.txt", ("a.txt", "episodes")),
    ],
)
def test_a_path_without_demonstrations_is_named(tmp_path, spec, make, named):
    for name in ("empty", "text"):
        (tmp_path / name).mkdir()
    (tmp_path / "text" / "a.txt").touch()
    (tmp_path / "text" / "b.txt").touch()
    with pytest.raises(ConfigError, match=naming(*named)):
        load_demos([make(tmp_path)], spec)


def test_a_format_that_does_not_exist_is_named(folder, spec):
    with pytest.raises(ConfigError, match=naming("demo_format", "hdf6", "episodes")):
        load_demos([folder], spec, format="hdf6")


class Ran:
    """Runs where it is unpickled."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('it ran')",))


@pytest.mark.parametrize("what", ["bomb.pkl", "bombs", "*.p*l"])
def test_a_pickle_is_read_but_never_run(tmp_path, spec, what):
    (tmp_path / "bombs").mkdir()
    for file in (tmp_path / "bomb.pkl", tmp_path / "bombs" / "bomb.pkl"):
        file.write_bytes(pickle.dumps([{"observations": Ran()}]))
    with pytest.raises(DataError, match=naming("bomb.pkl", "builtins.exec")):
        load_demos([tmp_path / what], spec)


def test_every_content_is_loaded_once(folder, spec):
    shutil.copy(folder / "episode_2.hdf5", folder / "episode_3.hdf5")
    demos = load_demos([folder, folder / "episode_1.hdf5"], spec)
    assert [o.path.name for o in demos.origins] == ["episode_1.hdf5", "episode_2.hdf5", "episode_10.hdf5"]
    assert [e.steps.n for e in demos.episodes] == [4, 5, 6]
    assert demos.duplicates == 2


TEXTS = {("lift", "push"): 2, ("lift", "lift"): 1, ("lift", ""): 1, ("", "lift"): 1, ("", "lift", "push"): 2,
         ("lift", "", "push"): 2}  # fmt: skip


@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("format", ["files", "lerobot"])
def test_one_motion_may_show_several_tasks(tmp_path, spec, make_episode, texts, format):
    files = tmp_path / "files"
    files.mkdir()
    for k, task in enumerate(texts):
        write_episode(files / f"episode_{k}.hdf5", make_episode(spec, 6, episode_id=f"e{k}", task=task), spec)
    if format == "lerobot":
        pytest.importorskip("pyarrow")
        from serl_chunk.data.lerobot.writer import LeRobotSink

        source = open_episodes(files, ReadOptions(spec=spec))
        sink = LeRobotSink(tmp_path / "lerobot", image_codec="png", tolerance_s=None)
        convert(source, source.keys(), sink, tmp_path / "lerobot", workers=0)
    demos = load_demos([tmp_path / format], spec)
    assert (len(demos.episodes), demos.duplicates) == (TEXTS[texts], len(texts) - TEXTS[texts])
    assert {e.begin.task for e in demos.episodes} == {*texts} - {""}


@pytest.mark.parametrize("codec", ["png", "jpeg"])
def test_a_copy_in_another_format_is_the_same_demonstration(tmp_path, spec, make_episode, codec):
    pytest.importorskip("pyarrow")
    from serl_chunk.data.lerobot.writer import LeRobotSink

    ours, other = tmp_path / "ours", tmp_path / "lerobot"
    ours.mkdir()
    shades = np.linspace(0, 200, 20, dtype=np.uint8)

    def smooth(episode: Episode, add: int) -> Episode:
        sparse = {}
        for key, rows in episode.steps.sparse.items():
            frames = rows.values
            if key.startswith("images/"):
                frames = np.broadcast_to((shades[rows.index] + add)[:, None, None, None], frames.shape).copy()
            sparse[key] = rows._replace(values=frames)
        stamp = np.arange(episode.steps.n) / spec.control_hz
        return episode._replace(steps=dataclasses.replace(episode.steps, sparse=sparse, stamp=stamp))

    for k in range(2):
        write_episode(ours / f"episode_{k}.hdf5", smooth(make_episode(spec, 6 + k, seed=k), 0), spec)
    source = open_episodes(ours, ReadOptions(spec=spec))
    convert(source, source.keys(), LeRobotSink(other, image_codec=codec, tolerance_s=None), other, workers=0)
    # The same motions, rendered in another light, are other demonstrations.
    write_episode(tmp_path / "light.hdf5", smooth(make_episode(spec, 6, seed=0), 50), spec)
    alone = load_demos([ours], spec)
    for paths in ([ours, other, tmp_path / "light.hdf5"], [tmp_path / "light.hdf5", other, ours]):
        demos = load_demos(paths, spec)
        assert (len(demos.episodes), demos.duplicates) == (3, 2)
    assert load_demos([ours, other], spec).digest == load_demos([other, ours], spec).digest
    assert alone.duplicates == 0


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


def test_another_robot_and_damage_name_the_file(folder, spec, joints_spec):
    with pytest.raises(DataError, match=naming("episode_1.hdf5", "arm2", 2, "/action", 3)):
        load_demos([folder], joints_spec)
    damaged = folder / "episode_2.hdf5"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(DataError, match=naming("episode_2.hdf5", "HDF5")):
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


class Held(Frames):
    """Frames in memory that count how many were decoded."""

    decoded = 0

    def __init__(self, images: np.ndarray) -> None:
        super().__init__(images.shape[1:], np.arange(len(images)))
        self.images = images

    def decode(self, at: int) -> np.ndarray:
        type(self).decoded += 1
        return self.images[at]


class Many:
    """A data set of several episodes in one file."""

    format, hz = "many", 50.0

    def __init__(self, path: Path, options: ReadOptions, episodes: dict[str, Episode]) -> None:
        self.path, self.options, self.episodes = path, options, episodes

    def keys(self) -> list[str]:
        return list(self.episodes)

    def read(self, key: str) -> Episode:
        begin, steps, end = self.episodes[key]
        sparse = {k: SparseRows(r.index, Held(r.values)) for k, r in steps.sparse.items()}
        return Episode(begin, dataclasses.replace(steps, sparse=sparse), end)

    def notes(self) -> list[str]:
        return ["rates are guessed"]


def many(episodes) -> Format:
    return Format(
        "many", "a test's", lambda path: path.suffix == ".many", lambda path, options: Many(path, options, episodes)
    )


def test_a_data_set_gives_its_episodes_with_their_frames_left_where_they_are(tmp_path, spec, make_episode, assert_same):
    given = {
        "a": make_episode(spec, 5, seed=1),
        "b": make_episode(spec, 9, seed=2, success_at=(3,)),
        "again": make_episode(spec, 5, seed=1),
    }
    for name in ("one.many", "two.many"):
        (tmp_path / name).touch()
    Held.decoded = 0
    demos = load_demos([tmp_path / "*.many"], spec, more=[many(given)])
    assert Held.decoded <= 2 * 6 * 3 * 2  # three frames a camera and episode, to know it again
    assert (len(demos.episodes), demos.duplicates, demos.dropped_steps, demos.notes) == (
        2,
        4,
        5,
        ("rates are guessed",),
    )
    assert [(o.path.name, o.format, o.key) for o in demos.origins] == [
        ("one.many", "many", "a"),
        ("one.many", "many", "b"),
    ]
    assert_same(decode_images(demos.episodes[0]), given["a"])
    cut = demos.episodes[1]
    assert isinstance(cut.steps.sparse["images/top"].values, Frames)
    assert isinstance(cut.end.final_observation["images/top"], SingleFrame)
    assert_same(decode_images(cut), end_at_first_success(given["b"])[0])


def test_a_pattern_names_data_sets_that_are_folders_and_files_in_others(folder, spec, make_episode):
    (folder.parent / "set.many").mkdir()
    format = many({"a": make_episode(spec, 5, seed=1)})
    assert find_demos([folder.parent / "*"], more=[format]) == [folder.parent / "set.many"]
    found = find_demos([folder.parent / "**"], more=[format])
    assert folder not in found
    assert folder / "episode_1.hdf5" in found
    with pytest.raises(ConfigError, match=naming(folder.parent / "*")):
        find_demos([folder.parent / "*"], format="episodes", more=[format])


def test_the_same_motion_before_other_cameras_is_another_demonstration(tmp_path, spec, make_episode):
    one = make_episode(spec, 5, seed=1)
    other = {k: SparseRows(r.index, 255 - r.values) for k, r in one.steps.sparse.items()}
    changed = one._replace(steps=dataclasses.replace(one.steps, sparse=other))
    (tmp_path / "x.many").touch()
    assert content_digest(one) == content_digest(changed)
    demos = load_demos([tmp_path / "x.many"], spec, more=[many({"a": one, "b": changed})])
    assert len({e.begin.episode_id for e in demos.episodes}) == 2


def test_content_digests_tell_everything_but_images(spec, make_episode):
    one = make_episode(spec, 5, seed=1)
    others = [
        one._replace(end=one.end._replace(outcome=Outcome.FAILURE)),
        one._replace(end=one.end._replace(final_observation=None)),
        one._replace(steps=dataclasses.replace(one.steps, action=one.steps.action + 1)),
        one._replace(steps=dataclasses.replace(one.steps, stamp=one.steps.stamp + 1)),
    ]
    assert len({content_digest(e) for e in (one, *others)}) == 5


def test_an_empty_data_set_is_said(tmp_path, spec):
    (tmp_path / "x.many").touch()
    with pytest.raises(ConfigError, match=naming("x.many", "(many)")):
        load_demos([tmp_path / "x.many"], spec, more=[many({})])


def test_frames_of_files_are_left_there_and_are_equal(folder, spec, assert_same):
    demos = load_demos([folder], spec)
    for episode, origin in zip(demos.episodes, demos.origins, strict=True):
        assert isinstance(episode.steps.sparse["images/top"].values, Frames)
        assert_same(decode_images(episode), read_episode(origin.path, spec))


def test_options_reach_the_files(tmp_path, joints_spec):
    """ALOHA's files record neither colours nor outcomes; folders of scores do the latter."""
    import h5py

    for score in ("score_5", "score_1"):
        (tmp_path / score).mkdir()
        with h5py.File(tmp_path / score / "episode_0.hdf5", "w") as file:
            rng = np.random.default_rng(len(list(tmp_path.rglob("*.hdf5"))))
            file["/observations/qpos"] = rng.normal(size=(6, 2)).astype(np.float32)
            file["/action"] = rng.normal(size=(6, 2)).astype(np.float32)
            file["/observations/images/top"] = rng.integers(0, 256, (6, 16, 16, 3), np.uint8)
    one = tmp_path / "score_5" / "episode_0.hdf5"
    with pytest.raises(DataError, match=naming("episode_0.hdf5", "color", "color")):
        load_demos([one], joints_spec)
    for options, outcome in (
        (ReadOptions(color="bgr", success=True), Outcome.SUCCESS),
        (ReadOptions(color="bgr"), Outcome.UNKNOWN),
    ):
        (episode,) = load_demos([one], joints_spec, options=options).episodes
        assert episode.end.outcome is outcome
    scores = (("score_5", 1.0), ("score_1", 0.0))
    demos = load_demos([tmp_path], joints_spec, options=ReadOptions(color="rgb", scores=scores))
    assert sorted((o.key.split("/")[0], e.end.outcome) for o, e in zip(demos.origins, demos.episodes, strict=True)) == [
        ("score_1", Outcome.FAILURE),
        ("score_5", Outcome.SUCCESS),
    ]
    assert load_demos([one], joints_spec, cameras=()).episodes[0].steps.sparse == {}


def test_a_single_frame_is_an_image(spec, make_episode):
    steps = make_episode(spec, 4, image_ticks={"top": [0, 2]}).steps
    lazy = dataclasses.replace(steps, sparse={k: SparseRows(r.index, Held(r.values)) for k, r in steps.sparse.items()})
    assert sorted(observation_at(lazy, 1)) == ["state"]
    frame, image = observation_at(lazy, 2)["images/top"], steps.observation_at(2)["images/top"]
    assert (frame.shape, frame.ndim, frame.dtype, frame.nbytes, len(frame)) == ((4, 6, 3), 3, np.uint8, 72, 4)
    np.testing.assert_array_equal(np.asarray(frame), image)
    np.testing.assert_array_equal(frame[1:3, 0], image[1:3, 0])
    assert frame[None].shape == (1, 4, 6, 3)
    assert np.asarray(frame, np.float32).dtype == np.float32
    np.testing.assert_array_equal(observation_at(steps, 2)["images/top"], image)
    assert isinstance(lazy, StepBlock)


def test_the_first_part_of_the_demonstrations(tmp_path, spec, make_episode):
    for i in range(5):
        write_episode(tmp_path / f"episode_{i}.hdf5", make_episode(spec, 3 + i, seed=i), spec)
    for proportion, n in ((0.4, 2), (0.01, 1), (1.0, 5)):
        demos = load_demos([tmp_path], spec, options=ReadOptions(proportion=proportion))
        assert [e.steps.n for e in demos.episodes] == [3, 4, 5, 6, 7][:n]
    with pytest.raises(ConfigError, match=naming("proportion", 0, "(0, 1]")):
        load_demos([tmp_path], spec, options=ReadOptions(proportion=0.0))


@pytest.mark.parametrize(
    ("kinds", "lengths"),
    [(("told", "told"), [9, 1, 1]), (("told", "read"), [9, 1]), (("read", "read"), [9, 1])],
)
def test_a_share_of_all_paths_is_one_of_steps_where_all_tell_theirs(tmp_path, spec, make_episode, kinds, lengths):
    class Told:
        """Episodes of so many steps."""

        def __init__(self, path, options):
            self.path, self.format, self.hz, self.first = path, path.suffix[1:], None, int(path.stem)
            self.steps = [(9, 1), (1, 7)][self.first]

        def keys(self):
            return ["0", "1"]

        def read(self, key):
            assert key in self.keys()
            return make_episode(spec, self.steps[int(key)], seed=2 * self.first + int(key))

        def notes(self):
            return []

    class Telling(Told):
        def lengths(self):
            return list(self.steps)

    more = [
        Format(name, "", lambda path, name=name: path.suffix == f".{name}", kind)
        for name, kind in (("read", Told), ("told", Telling))
    ]
    paths = [tmp_path / f"{i}.{kind}" for i, kind in enumerate(kinds)]
    for path in paths:
        path.touch()
    demos = load_demos(paths, spec, options=ReadOptions(proportion=0.6), more=more)
    assert [e.steps.n for e in demos.episodes] == lengths


def test_scored_folders_remember_what_they_are_worth(tmp_path, joints_spec, make_episode):
    """Opened once more from what a run wrote down, an episode is what it was."""
    for name in ("score_5", "score_1"):
        (tmp_path / name).mkdir()
        plain_aloha(tmp_path / name / "episode_0.hdf5", joints_spec, make_episode(joints_spec, 6, seed=int(name[-1])))
    options = ReadOptions(scores=(("score_5", 1.0), ("score_1", 0.0)), color="rgb")
    demos = load_demos([tmp_path], joints_spec, options=options)
    assert [e.end.outcome for e in demos.episodes] == [Outcome.FAILURE, Outcome.SUCCESS]
    for origin, episode in zip(demos.origins, demos.episodes, strict=True):
        assert origin.path == tmp_path
        source = open_episodes(origin.path, dataclasses.replace(options, spec=joints_spec), origin.format)
        assert source.read(origin.key).end.outcome is episode.end.outcome


def plain_aloha(path, spec, episode):
    with h5py.File(path, "w") as file:
        file["/observations/qpos"], file["/action"] = episode.steps.observation["state"], episode.steps.action


def test_another_rate_than_the_robots_is_refused(tmp_path, spec, make_episode):
    write_episode(tmp_path / "a.hdf5", make_episode(spec, 4), dataclasses.replace(spec, control_hz=10.0))
    with pytest.raises(DataError, match=naming("a.hdf5", 10, "arm3", 50)):
        load_demos([tmp_path], spec)


def test_rewards_that_tell_no_success_end_nothing(tmp_path, spec, make_episode, monkeypatch):
    write_episode(tmp_path / "a.hdf5", make_episode(spec, 6, success_at=(2,)), spec)
    assert load_demos([tmp_path], spec).episodes[0].steps.n == 3
    monkeypatch.setattr(EpisodeFiles, "rewards_mark_success", False, raising=False)
    assert load_demos([tmp_path], spec).episodes[0].steps.n == 6
