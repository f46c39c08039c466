"""HDF5 episodes: every recorder's variant and scored folders; our own layout, its writes, and the sink of a folder."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_sets import aloha, amended, image_file, jpeg_rows, notes_of
from errors import naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from properties import examples

from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats import hdf5_io, hdf5_writer
from serl_chunk.data.formats.episodes import FORMAT
from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.data.frames import Frames
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import Begin, ConfigError, DataError, End, Episode, Outcome, RobotSpec, Source, SparseRows, Step

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
    assert (set(steps.decision_tick), sorted(steps.sparse)) == ({-1}, ["images/top", "images/wrist"])
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
    assert _read(path).begin.task == "fold the towel"
    with pytest.raises(DataError, match=naming("a.hdf5", 2, 1)):  # one step has no outcome
        _read(path, ReadOptions(color="rgb", success=success))


def test_the_order_of_colours_is_what_the_file_says_else_the_caller(tmp_path):
    path = tmp_path / "a.hdf5"
    aloha(path, **RECORDERS["mobile_aloha"])
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
    aloha(path, **RECORDERS["mobile_aloha"])
    frames = frames_of(amended(path, {TOP: lambda rows: np.vstack([rows[:2], 0 * rows[:1], rows[3:]])}))
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
    assert (set(steps.source), steps.decision_tick.tolist()) == ({Source.POLICY}, [0, 0, 0, 3, 3, 3, 6])
    assert sorted(end.final_observation) == ["state"]  # no camera was read at the last tick
    aloha(path, more={"chunk_starts": np.array([0, 0, 1, 0, 1, 0])})  # flags, which may begin late
    assert _read(path).steps.decision_tick.tolist() == [-1, -1, 2, 2, 4, 4]
    aloha(path, 4, frames=lambda v: v[1:3], more={"image_indices": np.array([1, 2], np.uint8)})
    steps = _read(path).steps
    assert (set(steps.source), steps.sparse["images/top"].index.tolist()) == ({Source.HUMAN}, [1, 2])


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
    assert "base_action is not read" in notes_of(path, color="rgb")
    assert "base_action" not in notes_of(path, spec=robot(4))
    amended(path, {"base_action": np.ones((6, 3))})
    with pytest.raises(DataError, match=naming("a.hdf5", "/base_action", "[6, 3]", "[6, 2]")):
        _read(path, with_base)


def test_the_rate_is_the_files_else_what_the_caller_says_else_nobody_knows(tmp_path):
    path = tmp_path / "a.hdf5"
    aloha(path)
    assert FORMAT.open(path, RGB).hz is None
    assert not _read(path).steps.stamp.any()
    assert "hz" in notes_of(path, color="rgb")
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


def test_any_folder_can_be_given_a_reward_and_none_is_left_without(tmp_path, joints_spec):
    _scored(tmp_path, "score_5", "score_3", "notes_to_self")
    scores = (("score_5", 1.0), ("score_3", 0.5), ("notes_to_self", 0.0))
    for few, named in (
        ((), ("notes_to_self", "score_3", "scores: the rewards", "notes_to_self=REWARD")),
        ((*scores, ("score_9", 1.0)), ("score_9", "scores", "notes_to_self")),
    ):
        with pytest.raises(DataError, match=naming(*named)):
            FORMAT.open(tmp_path, ReadOptions(scores=few))
    source = FORMAT.open(tmp_path, ReadOptions(scores=scores, color="rgb", reward_every_step=True))
    middle = source.read("score_3/episode_10.hdf5")
    assert middle.steps.reward.tolist() == [0.5] * middle.steps.n
    assert (middle.end.outcome, middle.end.terminated) == (Outcome.UNKNOWN, True)
    demos = load_demos([tmp_path], joints_spec, options=ReadOptions(scores=scores, cameras=()))
    outcomes = (Outcome.FAILURE, Outcome.UNKNOWN, Outcome.SUCCESS)
    assert [e.end.outcome for e in demos.episodes] == [outcome for outcome in outcomes for _ in range(2)]


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


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_round_trip_keeps_every_byte(tmp_path, spec, joints_spec, drawn_episode, assert_same, data):
    robot = data.draw(st.sampled_from([spec, joints_spec]), label="robot")
    episode = drawn_episode(data, robot)
    outcome, terminated = data.draw(st.sampled_from(Outcome)), data.draw(st.booleans())
    episode = episode._replace(
        end=episode.end._replace(outcome=outcome, terminated=terminated, truncated=not terminated)
    )
    path = tmp_path / "episode_0.hdf5"
    write_episode(path, episode, robot, compress=data.draw(st.booleans()))
    assert_same(read_episode(path, robot), episode)
    assert_same(read_episode(path), episode)


def test_layout_is_alohas(tmp_path, spec, make_episode):
    path = tmp_path / "a.hdf5"
    episode = make_episode(spec, 6, image_ticks={"top": list(range(6)), "wrist": [1, 4]}, decision_ticks=(0, 5))
    write_episode(path, episode, spec, sim=True)
    with h5py.File(path) as file:
        # joint_of_action is (2, 0, 1): qpos is in the order of the actions
        np.testing.assert_array_equal(file["observations/qpos"], episode.steps.observation["state"][:, [2, 0, 1]])
        np.testing.assert_array_equal(file["action"], episode.steps.action)
        top = file["observations/images/top"]
        assert (file["observations/qpos"].dtype, top.shape, top.chunks) == (np.float32, (6, 4, 6, 3), (1, 4, 6, 3))
        np.testing.assert_array_equal(file["rl/image_index/wrist"], [1, 4])
        assert file["rl/decision/chunk"].shape == (2, 4, 3)
        about = {name: file.attrs[name] for name in ("sim", "compress", "color", "hz")}
        assert about == {"sim": True, "compress": False, "color": "rgb", "hz": 50.0}
        assert list(file.attrs["cameras"]) == ["top", "wrist"]
    write_episode(path, make_episode(spec, 5, decision_ticks=(0,), shared=(1, 4), lost={2: 151}, ticket=""), spec)
    with h5py.File(path) as file:
        assert sorted(file["rl/decision"]) == ["chunk", "value"]
        assert file["rl/human_dims"][()].tolist() == [[0, 1, 0], [1, 0, 1]]
        assert (file["rl/human_dims"].dtype, file["rl/human_dims_index"].dtype) == (np.uint8, np.int32)
        assert file["rl/lost_ticks"][()].tolist() == [0, 0, 151, 0, 0]
        assert (file["rl"].attrs["init_state"], "ticket" in file["rl"].attrs) == (b"init-3", False)


def test_only_the_chosen_cameras_are_read(tmp_path, spec, make_episode):
    path = tmp_path / "a.hdf5"
    write_episode(path, make_episode(spec, 4), spec)
    wrist = read_episode(path, spec, cameras=("wrist",))
    assert sorted(wrist.steps.sparse) == ["images/wrist"]
    assert sorted(wrist.end.final_observation) == ["images/wrist", "state"]
    assert not read_episode(path, spec, cameras=()).steps.sparse
    fewer = dataclasses.replace(spec, cameras=spec.cameras[:1])
    with pytest.raises(DataError, match=naming("arm3", "wrist", "top")):
        read_episode(path, fewer)
    assert sorted(read_episode(path, fewer, cameras=("top",)).steps.sparse) == ["images/top"]


@pytest.mark.parametrize("links", [True, False])
def test_replaces_atomically_or_refuses(tmp_path, spec, make_episode, assert_same, monkeypatch, links):
    def no_links(source, target):
        raise PermissionError("this file system has no hard links")

    calls, path = [], tmp_path / "a.hdf5"
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    for name in ("fsync", "link", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    first, second = make_episode(spec, 4), make_episode(spec, 5, seed=1)
    write_episode(path, first, spec, replace=False)
    with pytest.raises(FileExistsError):
        write_episode(path, second, spec, replace=False)
    assert_same(read_episode(path), first)
    calls.clear()
    write_episode(path, second, spec)
    assert calls == ["fsync", "replace", "fsync"]  # the content is on disk before the name
    assert_same(read_episode(path), second)
    assert os.listdir(tmp_path) == ["a.hdf5"]


def test_a_killed_process_leaves_no_episode(tmp_path, spec, make_episode, assert_same):
    """SIGKILL right before the rename: the earlier file is whole, and nothing looks like another episode."""
    path, first = tmp_path / "a.hdf5", make_episode(spec, 4)
    write_episode(path, first, spec)
    code = (
        "import os, sys\n"
        "from serl_chunk.data.formats import hdf5\n"
        "hdf5._publish = lambda *a: os.kill(os.getpid(), 9)\n"
        "hdf5.write_episode(sys.argv[1], hdf5.read_episode(sys.argv[1]), None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert_same(read_episode(path), first)
    assert [p.name for p in tmp_path.glob("*.hdf5")] == ["a.hdf5"]


def test_a_damaged_byte_is_a_data_error_or_other_data(tmp_path, spec, make_episode):
    """Whatever byte of the structure is hit, the caller sees an episode of the same robot or a DataError."""
    path = tmp_path / "a.hdf5"
    write_episode(path, make_episode(spec, 3), spec)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.choice(len(whole), 150, replace=False):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            assert read_episode(path, spec).steps.action.shape[1] == 3
        except DataError:
            refused += 1
    assert refused > 10


def test_missing_files_are_named_and_inconsistent_episodes_not_written(tmp_path, spec, joints_spec, make_episode):
    with pytest.raises(DataError, match=naming("gone.hdf5")):
        read_episode(tmp_path / "gone.hdf5")
    path, episode = tmp_path / "a.hdf5", make_episode(spec, 4)

    def ended(**changes) -> Episode:
        return episode._replace(end=episode.end._replace(**changes))

    odd_column, nothing_of_it = (make_episode(spec, 4, shared=(0,)) for _ in range(2))
    odd_column.steps.sparse["depth/top"] = SparseRows(np.array([0], np.int32), np.zeros((1, 2), np.float32))
    nothing_of_it.steps.sparse["human_dims"].values[:] = 0
    forced = {**episode.end.final_observation, "force": np.zeros(1, np.float32)}
    for named, case in (
        (("e0", "other"), ended(episode_id="other")),
        ((9, "/action", 4), ended(length=9)),
        ((0, 3, 1), episode._replace(steps=episode.steps.slice(1, 4))),
        (("depth/top", "images/<camera>", "decision/<name>", "human_dims"), odd_column),
        (("human_dims", "tick 0", "[0, 0, 0]"), nothing_of_it),
        (("state", "images/<camera>", "force"), ended(final_observation=forced)),
        (("arm3", 3, "/action", 2), make_episode(joints_spec, 4)),
        (("a.hdf5", repr("nul\0")), episode._replace(begin=episode.begin._replace(task="nul\0"))),
    ):
        with pytest.raises(DataError, match=naming(*named)):
            write_episode(path, case, spec)
    with pytest.raises(DataError, match=naming("absent/a.hdf5", os.strerror(errno.ENOENT))):
        write_episode(tmp_path / "absent" / "a.hdf5", episode, spec)
    assert os.listdir(tmp_path) == []


def _feed(writer: EpisodeWriter, records: tuple[Begin, list[Step], End], outcome: Outcome = Outcome.UNKNOWN) -> None:
    """Hand them over one by one, as a control loop does."""
    begin, steps, end = records
    writer.begin(begin)
    for step in steps:
        writer.step(step)
    writer.end(end._replace(outcome=outcome))


def test_records_become_files_and_nothing_is_overwritten(tmp_path, spec, make_records, make_episode, assert_same):
    (tmp_path / "episode_7.hdf5").write_text("mine")
    options = [{"n": 3 + k, "seed": k, "decision_ticks": (0, 2), "shared": (1,)} for k in range(3)]
    with EpisodeWriter(tmp_path, spec) as first, EpisodeWriter(tmp_path, spec) as second:
        for writer, each in zip((first, second, first), options, strict=True):
            _feed(writer, make_records(spec, **each))
            writer.flush()
    assert [[p.name for p in w.written] for w in (first, second)] == [
        ["episode_8.hdf5", "episode_10.hdf5"],
        ["episode_9.hdf5"],
    ]
    for k, each in enumerate(options):
        assert_same(read_episode(tmp_path / f"episode_{8 + k}.hdf5", spec), make_episode(spec, **each))
    assert (tmp_path / "episode_7.hdf5").read_text() == "mine"


def test_keep_chooses_and_a_failed_write_reaches_the_caller_once(tmp_path, spec, joints_spec, make_records):
    folder = tmp_path / "new" / "demos"
    writer = EpisodeWriter(folder, spec, keep=lambda e: e.end.outcome is Outcome.SUCCESS)
    _feed(writer, make_records(joints_spec, 3, seed=8), Outcome.SUCCESS)
    with pytest.raises(DataError, match=naming("episode_0.hdf5", "arm3", 3, "/action", 2)):
        writer.flush()
    for k, outcome in enumerate((Outcome.FAILURE, Outcome.SUCCESS, Outcome.UNKNOWN)):
        _feed(writer, make_records(spec, 3, seed=k), outcome)
    writer.close()
    writer.close()
    assert [read_episode(p).begin.episode_id for p in writer.written] == ["e1"]
    assert writer.written == list(folder.iterdir())


def test_an_episode_that_had_no_room_is_written_later_under_the_next_number(tmp_path, spec, make_records, monkeypatch):
    def full(*args, **options):
        raise DataError("the disk is full")

    with EpisodeWriter(tmp_path, spec) as writer:
        with monkeypatch.context() as disk:
            disk.setattr(hdf5_writer, "write_episode", full)
            _feed(writer, make_records(spec, 3, seed=8))
            for _ in range(2):
                with pytest.raises(DataError, match="full"):
                    writer.flush()
                writer.again()
            with pytest.raises(DataError, match="full"):
                writer.flush()
        writer.flush()
        assert os.listdir(tmp_path) == []
        writer.again()
        _feed(writer, make_records(spec, 3, seed=9))
        writer.flush()
    assert [read_episode(p).begin.episode_id for p in writer.written] == ["e8", "e9"]
    assert sorted(os.listdir(tmp_path)) == ["episode_0.hdf5", "episode_1.hdf5"]


def test_records_out_of_order_and_a_folder_that_cannot_be_made_are_refused(tmp_path, spec, make_records):
    step = Step(0, {"state": np.zeros(5, np.float32)}, np.zeros(3, np.float32), 0.0, Source.HUMAN, -1, -1, 0.0)
    end = End("a", 1, None, False, True, Outcome.UNKNOWN)
    with EpisodeWriter(tmp_path, spec) as writer:
        writer.begin(Begin("a"))
        writer.step(step)
        writer.step(step._replace(tick=2))
        writer.end(end)
        with pytest.raises(DataError, match=naming("a", "ticks")):
            writer.flush()
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=naming("file", "is a file", "expected a folder")):
        EpisodeWriter(tmp_path / "file" / "demos", spec)
