"""HDF5 episodes as a source: every recorder's variant, scored folders, and what nobody may guess."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import aloha, amended, image_file, jpeg_rows, notes_of
from errors import naming
from PIL import Image

from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats import hdf5_io
from serl_chunk.data.formats.episodes import FORMAT
from serl_chunk.data.formats.hdf5 import open_episode, read_episode, write_episode
from serl_chunk.data.frames import Frames
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.types import DataError, End, Episode, Outcome, RobotSpec, Source

RGB = ReadOptions(color="rgb")
TOP = "observations/images/top"
VELOCITY = {"observations/qvel": np.zeros((6, 2)), "observations/effort": np.zeros((6, 2))}
RECORDERS: dict[str, dict[str, Any]] = {
    "act_sim": {"dtype": np.float64, "more": {"@sim": True, "observations/qvel": np.zeros((6, 2))}},
    "aloha": {"more": {"@sim": False, **VELOCITY}},
    "mobile_aloha": {
        "frames": lambda frames: jpeg_rows(frames, padding=9),
        "more": {"@sim": False, "@compress": True, "base_action": np.ones((6, 2), np.float32), **VELOCITY},
    },
    "openpi_input": {},  # no attribute, neither qvel nor effort
}


def _read(path: Path, options: ReadOptions = RGB) -> Episode:
    return FORMAT.open(path, options).read(path.name)


def frames_of(path: Path, camera: str = "top", **options: Any) -> Any:
    return _read(path, ReadOptions(**{"color": "rgb"} | options)).steps.sparse[f"images/{camera}"].values


def robot(actions: int, *joints: int, hz: float = 25.0) -> RobotSpec:
    joints = joints or (0, 1) + (-1,) * (actions - 2)
    return RobotSpec("mobile", hz, 2, (-9.0,) * actions, (9.0,) * actions, joints, (), (), 100)


@pytest.mark.parametrize("recorder", RECORDERS)
def test_every_recorders_file_is_read(tmp_path, recorder):
    path = tmp_path / "episode_0.hdf5"
    file = aloha(path, **RECORDERS[recorder])
    begin, steps, end = _read(path)
    np.testing.assert_array_equal(steps.observation["state"], file["observations/qpos"].astype(np.float32))
    np.testing.assert_array_equal(steps.action, file["action"].astype(np.float32))
    assert steps.action.dtype == steps.observation["state"].dtype == np.float32
    assert not steps.reward.any()
    assert set(steps.source) == {Source.SCRIPTED if recorder == "act_sim" else Source.HUMAN}
    assert set(steps.decision_tick) == {-1}
    assert sorted(steps.sparse) == ["images/top", "images/wrist"]
    for camera in ("top", "wrist"):
        index, frames = steps.sparse[f"images/{camera}"]
        assert index.tolist() == list(range(6))
        assert isinstance(frames, Frames)
        assert (frames.shape, frames.dtype, len(frames)) == ((6, 16, 24, 3), np.uint8, 6)
        error = np.abs(np.asarray(frames).astype(int) - file[f"observations/images/{camera}"]).mean()
        assert error < 12 if recorder == "mobile_aloha" else error == 0  # quality 50; other frames are 80 apart
    assert end == End(begin.episode_id, 6, None, False, True, Outcome.UNKNOWN, "environment")


@pytest.mark.parametrize("success", [True, False])
def test_a_known_outcome_terminates_at_the_last_observation(tmp_path, success):
    path = tmp_path / "a.hdf5"
    file = aloha(path)
    _, steps, end = _read(path, ReadOptions(color="rgb", success=success))
    np.testing.assert_array_equal(steps.action, file["action"][:5])
    np.testing.assert_array_equal(end.final_observation["state"], file["observations/qpos"][5])
    np.testing.assert_array_equal(end.final_observation["images/top"], file[TOP][5])
    np.testing.assert_array_equal(steps.reward, [0, 0, 0, 0, float(success)])
    assert (end.terminated, end.truncated, end.length) == (True, False, 5)
    assert end.outcome is (Outcome.SUCCESS if success else Outcome.FAILURE)
    every = _read(path, ReadOptions(color="rgb", success=success, reward_every_step=True))
    assert every.steps.reward.tolist() == [float(success)] * 5
    aloha(path, 1, more={"@task": "fold the towel" if success else np.bytes_("fold the towel")})
    one = _read(path)
    assert (one.steps.n, one.begin.task) == (1, "fold the towel")
    with pytest.raises(DataError, match=naming("a.hdf5", 2, 1)):  # one step has no outcome
        _read(path, ReadOptions(color="rgb", success=success))


@pytest.mark.parametrize("recorder", ["aloha", "mobile_aloha"])
def test_the_order_of_colours_is_what_the_file_says_else_the_caller(tmp_path, recorder):
    path = tmp_path / "a.hdf5"
    aloha(path, **RECORDERS[recorder])
    bgr, rgb = frames_of(path, color="bgr"), frames_of(path)
    everything = np.asarray(rgb)
    np.testing.assert_array_equal(np.asarray(bgr), everything[..., ::-1])
    np.testing.assert_array_equal(bgr[2], everything[2, ..., ::-1])
    for part in (slice(None, None, 2), np.array([4, 0]), np.arange(6) > 3, slice(0, 0)):
        np.testing.assert_array_equal(np.asarray(rgb[part]), everything[part])
    assert bgr.encoded(2) is None
    assert not _read(path, ReadOptions(cameras=())).steps.sparse
    amended(path, {"@color": np.bytes_("rgb")})
    np.testing.assert_array_equal(frames_of(path, color="bgr")[0], everything[0])


def test_jpeg_files_are_handed_out_as_they_are_stored(tmp_path):
    path = tmp_path / "a.hdf5"
    file = aloha(path, **RECORDERS["mobile_aloha"])
    frames = frames_of(path, "wrist")
    for i in (0, 5):
        stored = frames.encoded(i)
        assert stored == image_file(file["observations/images/wrist"][i], quality=50)
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(stored))), frames[i])
    assert frames[3:].encoded(2) == frames.encoded(5)
    row = np.frombuffer(image_file(file[TOP][0], mode="L") + bytes(9), np.uint8)  # grey: decoded, not copied
    amended(path, {TOP: np.stack([row] * 6)})
    assert (frames_of(path).encoded(0), frames_of(path)[0].shape) == (None, (16, 24, 3))
    aloha(path)
    assert frames_of(path).encoded(0) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: rows[:, : np.flatnonzero(rows[2])[-1] - 20],
        lambda rows: np.vstack([rows[:2], 0 * rows[:1], rows[3:]]),
    ],
)
def test_a_damaged_jpeg_row_is_named_when_it_is_looked_at_and_when_it_is_copied(tmp_path, damage):
    aloha(tmp_path / "a.hdf5", **RECORDERS["mobile_aloha"])
    frames = frames_of(amended(tmp_path / "a.hdf5", {TOP: damage}))
    for look in (frames.__getitem__, frames.encoded):
        with pytest.raises(DataError, match=naming("a.hdf5", f"/{TOP}", 2, "JPEG", "PNG")):
            look(2)


def test_frames_survive_pickling_and_name_a_file_that_changed(tmp_path, monkeypatch):
    paths = [tmp_path / f"{i}.hdf5" for i in range(3)]
    for i, path in enumerate(paths):
        aloha(path, seed=i)
    monkeypatch.setattr(hdf5_io.open_files, "limit", 2)
    hdf5_io.close_files()
    all_frames = [frames_of(path) for path in paths]
    copies = pickle.loads(pickle.dumps(all_frames))
    before = len(os.listdir("/proc/self/fd"))
    for i in (0, 1, 2, 0, 1):
        np.testing.assert_array_equal(copies[i][4], all_frames[i][4])
    assert len(os.listdir("/proc/self/fd")) == before + 2
    aloha(tmp_path / "new.hdf5", 7, seed=9)
    os.replace(tmp_path / "new.hdf5", paths[0])
    with pytest.raises(DataError, match=naming("0.hdf5")):
        all_frames[0][0]
    paths[1].unlink()
    with pytest.raises(DataError, match=naming("1.hdf5", f"/{TOP}", 3)):
        all_frames[1][3]
    hdf5_io.close_files()
    assert len(os.listdir("/proc/self/fd")) == before


def test_images_at_some_steps_only_are_not_repeated(tmp_path):
    """Document 000's chunk format, as written while a policy acted."""
    path, ticks = tmp_path / "a.hdf5", np.array([0, 3, 6])
    marks = {"image_indices": ticks, "chunk_starts": ticks.astype(np.int32)}
    file = aloha(path, 8, frames=lambda frames: frames[ticks], more=marks)
    _, steps, end = _read(path, ReadOptions(color="rgb", success=True))
    index, frames = steps.sparse["images/top"]
    assert index.tolist() == [0, 3, 6]
    np.testing.assert_array_equal(np.asarray(frames), file[TOP][ticks])
    assert set(steps.source) == {Source.POLICY}
    assert steps.decision_tick.tolist() == [0, 0, 0, 3, 3, 3, 6]
    assert sorted(end.final_observation) == ["state"]  # no camera was read at the last tick
    aloha(path, more={"chunk_starts": np.array([0, 0, 1, 0, 1, 0])})  # flags, which may begin late
    assert _read(path).steps.decision_tick.tolist() == [-1, -1, 2, 2, 4, 4]
    aloha(path, 4, frames=lambda v: v[1:3], more={"image_indices": np.array([1, 2], np.uint8)})
    steps = _read(path).steps
    assert set(steps.source) == {Source.HUMAN}
    assert steps.sparse["images/top"].index.tolist() == [1, 2]


def test_joints_and_the_mobile_base_are_the_robots(tmp_path):
    path = tmp_path / "a.hdf5"
    file = aloha(path, **RECORDERS["mobile_aloha"])
    with_base = ReadOptions(cameras=(), spec=robot(4))
    action = np.hstack([file["action"], np.ones((6, 2))]).astype(np.float32)
    np.testing.assert_array_equal(_read(path, with_base).steps.action, action)
    swapped = _read(path, ReadOptions(cameras=(), spec=robot(2, 1, 0))).steps
    assert swapped.action.shape == (6, 2)
    np.testing.assert_array_equal(swapped.observation["state"], file["observations/qpos"][:, ::-1])
    np.testing.assert_allclose(np.diff(swapped.stamp), 1 / 25)
    amended(path, {"other": 1})
    notes = notes_of(path, color="rgb")
    for said in ("base_action is not read: the mobile base", "qvel is not read: a state", "other is not read"):
        assert said in notes
    assert "top" not in notes
    assert "base_action" not in notes_of(path, spec=robot(4))
    amended(path, {"base_action": np.ones((6, 3))})
    with pytest.raises(DataError, match=naming("a.hdf5", "/base_action", "[6, 3]", "[6, 2]")):
        _read(path, with_base)


def test_the_rate_is_the_files_else_what_the_caller_says_else_nobody_knows(tmp_path):
    path = tmp_path / "a.hdf5"
    aloha(path)
    notes = notes_of(path, color="rgb")
    assert FORMAT.open(path, RGB).hz is None
    assert not _read(path).steps.stamp.any()
    assert "hz" in notes
    assert "the source of actions is not recorded: all steps are taken for a human's" in notes
    assert "one step earlier" not in notes
    assert "episodes end one step earlier" in notes_of(path, color="rgb", success=True)
    said = ReadOptions(color="rgb", hz=20)
    assert FORMAT.open(path, said).hz == 20
    np.testing.assert_allclose(np.diff(_read(path, said).steps.stamp), 1 / 20)
    aloha(tmp_path / "b.hdf5", more={"@hz": 30})
    with pytest.raises(DataError, match=naming("b.hdf5", 30, 20)):
        FORMAT.open(tmp_path, said).read("b.hdf5")
    path.unlink()
    assert FORMAT.open(tmp_path, RGB).hz == 30
    with pytest.raises(DataError, match=naming("b.hdf5", 30, 20, "hz")):
        FORMAT.open(tmp_path, said)


def _scored(folder: Path, *names: str) -> None:
    for k, name in enumerate(names):
        for i in (10, 2):
            aloha(folder / name / f"episode_{i}.hdf5", 4 + k, seed=i)


def test_folders_of_document_000_have_their_rewards(tmp_path):
    _scored(tmp_path, "score_5", "score_1")
    source = FORMAT.open(tmp_path, RGB)
    assert source.keys() == [f"score_{k}/episode_{i}.hdf5" for k in (1, 5) for i in (2, 10)]
    for key, rewards, outcome in (("score_1", [0] * 4, Outcome.FAILURE), ("score_5", [0, 0, 1], Outcome.SUCCESS)):
        _, steps, end = source.read(f"{key}/episode_2.hdf5")
        assert (steps.reward.tolist(), end.outcome, end.terminated) == (rewards, outcome, True)
    assert "score_1 = 0, score_5 = 1" in notes_of(tmp_path, "episodes", color="rgb")


def test_any_folder_can_be_given_a_reward_and_none_is_left_without(tmp_path, joints_spec):
    _scored(tmp_path, "score_5", "score_3", "notes_to_self")
    scores = (("score_5", 1.0), ("score_3", 0.5), ("notes_to_self", 0.0))
    for given, named in (
        ((), ("notes_to_self", "score_3", "scores: the rewards", "notes_to_self=REWARD")),
        ((*scores, ("score_9", 1.0)), ("score_9", "scores", "notes_to_self")),
    ):
        with pytest.raises(DataError, match=naming(*named)):
            FORMAT.open(tmp_path, ReadOptions(scores=given))
    source = FORMAT.open(tmp_path, ReadOptions(scores=scores, color="rgb", reward_every_step=True))
    middle = source.read("score_3/episode_10.hdf5")
    assert middle.steps.reward.tolist() == [0.5] * middle.steps.n
    assert (middle.end.outcome, middle.end.terminated) == (Outcome.UNKNOWN, True)
    # Opened once more from what a run wrote down, an episode is what it was.
    options = ReadOptions(scores=scores, cameras=())
    demos = load_demos([tmp_path], joints_spec, options=options)
    outcomes = (Outcome.FAILURE, Outcome.UNKNOWN, Outcome.SUCCESS)
    assert [e.end.outcome for e in demos.episodes] == [outcome for outcome in outcomes for _ in range(2)]
    for origin, episode in zip(demos.origins, demos.episodes, strict=True):
        assert origin.path == tmp_path
        assert FORMAT.open(tmp_path, options).read(origin.key).end.outcome is episode.end.outcome


def test_our_own_files_keep_what_they_record(tmp_path, spec, make_episode, assert_same):
    (tmp_path / "score_1").mkdir()
    path = tmp_path / "score_1" / "episode_0.hdf5"
    episode = make_episode(spec, 5, success_at=(4,), image_ticks={"top": [0, 2, 3], "wrist": [1]}, task="")
    write_episode(path, episode, spec)
    source = FORMAT.open(tmp_path, ReadOptions(spec=spec, task="stack"))
    assert source.hz == spec.control_hz
    read = source.read("score_1/episode_0.hdf5")
    assert isinstance(read.steps.sparse["images/top"].values, Frames)
    assert read.begin.task == "stack"  # where the file has no text
    assert_same(decode_images(read)._replace(begin=episode.begin), episode)
    assert "keep the rewards that they record" in notes_of(tmp_path, "episodes", spec=spec)
    assert sorted(open_episode(path, ReadOptions(cameras=("wrist",))).steps.sparse) == ["images/wrist"]
    amended(path, {"rl@conditions": None})
    assert read_episode(path).begin == episode.begin._replace(conditions="")


def test_folders_hold_files_in_their_order_under_ids_of_their_own(tmp_path, joints_spec):
    for path, named in ((tmp_path, "*.hdf5"), (tmp_path / "absent", "HDF5")):
        with pytest.raises(DataError, match=naming(path, named)):
            FORMAT.open(path, RGB)
    monday, tuesday = folders = tmp_path / "monday", tmp_path / "tuesday"
    for folder in folders:
        aloha(folder / "b.hdf5", seed=len(folder.name), frames=None)
    ids = [e.begin.episode_id for e in load_demos(folders, joints_spec).episodes]
    assert len(set(ids)) == 2
    assert ids[0].startswith("b-")
    (monday / "a.hdf5").write_text("damaged")
    (monday / "c.hdf5").symlink_to(tuesday / "b.hdf5")
    (monday / "d.hdf5").symlink_to(tuesday / "none.hdf5")
    source = FORMAT.open(monday, RGB)
    assert source.keys() == ["a.hdf5", "b.hdf5", "c.hdf5", "d.hdf5"]
    assert source.notes()  # of those that can be read
    assert FORMAT.open(monday, ReadOptions(proportion=0.5)).keys() == ["a.hdf5", "b.hdf5"]
    assert source.read("c.hdf5").steps.n == 6
    with pytest.raises(DataError, match=naming("d.hdf5")):
        source.read("d.hdf5")
