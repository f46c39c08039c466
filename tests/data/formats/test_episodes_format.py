"""HDF5 episodes as a source: every recorder's variant, scored folders, and what nobody may guess."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from errors import naming
from PIL import Image

from serl_chunk.data.formats import hdf5_io
from serl_chunk.data.formats.episodes import FORMAT
from serl_chunk.data.formats.hdf5 import open_episode, write_episode
from serl_chunk.data.frames import Frames
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.types import DataError, End, Episode, Outcome, RobotSpec, Source

J = 14
CAMERAS = ("cam_high", "cam_left_wrist")
RGB = ReadOptions(color="rgb")


def _jpeg(frame: np.ndarray, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.fromarray(frame).convert(mode).save(out, "JPEG", quality=50)
    return out.getvalue()


class Recorder:
    """Writes files as the recorders in use do; keeps what it wrote."""

    def __init__(self, path: Path, n: int = 6, seed: int = 0, dtype: Any = np.float32) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(seed)
        self.path, self.n = path, n
        self.qpos, self.action = rng.normal(size=(n, J)).astype(dtype), rng.normal(size=(n, J)).astype(dtype)
        smooth = rng.integers(0, 256, (n, len(CAMERAS), 2, 2, 3), dtype=np.uint8)
        self.frames = smooth.repeat(8, axis=2).repeat(12, axis=3)  # 16 x 24: of 2 x 2 colours, kind to JPEG
        with h5py.File(path, "w") as file:
            file["/observations/qpos"], file["/action"] = self.qpos, self.action

    def add(self, **items: Any) -> Recorder:
        with h5py.File(self.path, "r+") as file:
            for name, value in items.items():
                file[name] = value
        return self

    def attributes(self, **values: Any) -> Recorder:
        with h5py.File(self.path, "r+") as file:
            file.attrs.update(values)
        return self

    def raw(self, rows: slice | list[int] = slice(None)) -> Recorder:
        for i, camera in enumerate(CAMERAS):
            self.add(**{f"/observations/images/{camera}": self.frames[rows, i]})
        return self

    def jpeg(self) -> Recorder:
        files = [[_jpeg(frame) for frame in camera] for camera in self.frames.swapaxes(0, 1)]
        longest = max(len(f) for camera in files for f in camera)
        for name, camera in zip(CAMERAS, files, strict=True):
            rows = np.stack([np.pad(np.frombuffer(f, np.uint8), (0, longest - len(f))) for f in camera])
            self.add(**{f"/observations/images/{name}": rows})
        # in the recorder's own order of cameras, which the file does not have
        return self.add(compress_len=np.array([[len(f) for f in camera] for camera in files[::-1]], np.float32))


def act_sim(path: Path) -> Recorder:
    r = Recorder(path, dtype=np.float64).raw().attributes(sim=True)
    return r.add(**{"/observations/qvel": r.qpos})


def aloha(path: Path) -> Recorder:
    r = Recorder(path).raw().attributes(sim=False)
    return r.add(**{"/observations/qvel": r.qpos, "/observations/effort": r.qpos})


def mobile_aloha(path: Path) -> Recorder:
    r = Recorder(path).jpeg().attributes(sim=False, compress=True)
    r.add(base_action=np.ones((r.n, 2), np.float32))
    return r.add(**{"/observations/qvel": r.qpos, "/observations/effort": r.qpos})


def openpi_input(path: Path) -> Recorder:
    return Recorder(path).raw()  # no attribute, neither qvel nor effort


def _read(path: Path, options: ReadOptions = RGB) -> Episode:
    return FORMAT.open(path, options).read(path.name)


@pytest.mark.parametrize("write", [act_sim, aloha, mobile_aloha, openpi_input])
def test_every_recorders_file_is_read(tmp_path, write: Callable[[Path], Recorder]):
    file = write(tmp_path / "episode_0.hdf5")
    assert FORMAT.matches(file.path)
    begin, steps, end = _read(file.path)
    np.testing.assert_array_equal(steps.observation["state"], file.qpos.astype(np.float32))
    np.testing.assert_array_equal(steps.action, file.action.astype(np.float32))
    assert steps.action.dtype == steps.observation["state"].dtype == np.float32
    assert (steps.source == (Source.SCRIPTED if write is act_sim else Source.HUMAN)).all()
    assert sorted(steps.sparse) == [f"images/{c}" for c in CAMERAS]
    for i, camera in enumerate(CAMERAS):
        index, frames = steps.sparse[f"images/{camera}"]
        assert index.tolist() == list(range(6))
        assert isinstance(frames, Frames)
        assert (frames.shape, frames.dtype, len(frames)) == ((6, 16, 24, 3), np.uint8, 6)
        error = np.abs(np.asarray(frames).astype(int) - file.frames[:, i]).mean()
        assert error < 12 if write is mobile_aloha else error == 0  # JPEG of quality 50; other frames are 80 apart
    assert end == End(begin.episode_id, 6, None, False, True, Outcome.UNKNOWN, "environment")


def test_blue_green_red_frames_are_turned(tmp_path):
    for write in (aloha, mobile_aloha):
        file = write(tmp_path / f"{write.__name__}.hdf5")
        bgr = _read(file.path, ReadOptions(color="bgr")).steps.sparse["images/cam_high"].values
        rgb = _read(file.path).steps.sparse["images/cam_high"].values
        np.testing.assert_array_equal(np.asarray(bgr), np.asarray(rgb)[..., ::-1])
        np.testing.assert_array_equal(bgr[2], rgb[2][..., ::-1])
        assert bgr.encoded(2) is None


def test_nobody_guesses_the_order_of_colours(tmp_path):
    file = aloha(tmp_path / "a.hdf5")
    with pytest.raises(DataError, match=naming("a.hdf5", "color", "color", "cameras")):
        _read(file.path, ReadOptions())
    assert not _read(file.path, ReadOptions(cameras=())).steps.sparse


def test_jpeg_files_are_handed_out_as_they_are_stored(tmp_path):
    file = mobile_aloha(tmp_path / "a.hdf5")
    frames = _read(file.path).steps.sparse["images/cam_left_wrist"].values
    for i in (0, 5):
        stored = frames.encoded(i)
        assert stored == _jpeg(file.frames[i, 1])
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(stored))), frames[i])
    assert frames[3:].encoded(2) == frames.encoded(5)
    assert _read(aloha(tmp_path / "b.hdf5").path).steps.sparse["images/cam_high"].values.encoded(0) is None


def test_grey_jpeg_files_are_decoded_to_three_channels_not_copied(tmp_path):
    file = Recorder(tmp_path / "a.hdf5", n=1)
    row = np.frombuffer(_jpeg(file.frames[0, 0], "L") + bytes(9), np.uint8)
    file.add(**{"/observations/images/cam_high": row[None]})
    frames = _read(file.path).steps.sparse["images/cam_high"].values
    assert frames.encoded(0) is None
    assert frames[0].shape == (16, 24, 3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: rows[:, : np.flatnonzero(rows[2])[-1] - 20],
        lambda rows: np.vstack([rows[:2], 0 * rows[:1], rows[3:]]),
    ],
)
def test_a_damaged_jpeg_row_is_named_when_it_is_looked_at_and_when_it_is_copied(tmp_path, damage):
    file = mobile_aloha(tmp_path / "a.hdf5")
    with h5py.File(file.path, "r+") as opened:
        rows = opened["/observations/images/cam_high"][()]
        del opened["/observations/images/cam_high"]
        opened["/observations/images/cam_high"] = damage(rows)
    frames = _read(file.path).steps.sparse["images/cam_high"].values
    with pytest.raises(DataError, match=naming("a.hdf5", "/observations/images/cam_high", 2, "JPEG", "PNG")):
        frames[2]
    with pytest.raises(DataError, match=naming("a.hdf5", "/observations/images/cam_high", 2, "JPEG", "PNG")):
        frames.encoded(2)


def test_frames_survive_pickling_and_name_a_file_that_changed(tmp_path, monkeypatch):
    paths = [aloha(tmp_path / f"{i}.hdf5").path for i in range(3)]
    monkeypatch.setattr(hdf5_io.open_files, "limit", 2)
    hdf5_io.close_files()
    all_frames = [_read(p).steps.sparse["images/cam_high"].values for p in paths]
    copies = pickle.loads(pickle.dumps(all_frames))
    before = len(os.listdir("/proc/self/fd"))
    for i in (0, 1, 2, 0, 1):
        np.testing.assert_array_equal(copies[i][4], all_frames[i][4])
    assert len(os.listdir("/proc/self/fd")) == before + 2
    os.replace(Recorder(tmp_path / "new", n=7, seed=9).raw().path, paths[0])
    with pytest.raises(DataError, match=naming("0.hdf5")):
        all_frames[0][0]
    paths[1].unlink()
    with pytest.raises(DataError, match=naming("1.hdf5", "/observations/images/cam_high", 3)):
        all_frames[1][3]
    hdf5_io.close_files()
    assert len(os.listdir("/proc/self/fd")) == before


def test_selections_of_frames_are_those_frames(tmp_path):
    frames = _read(aloha(tmp_path / "a.hdf5").path).steps.sparse["images/cam_high"].values
    everything = np.asarray(frames)
    for part in (slice(1, 4), slice(None, None, 2), np.array([4, 0]), np.arange(6) > 3, slice(0, 0)):
        np.testing.assert_array_equal(np.asarray(frames[part]), everything[part])


def test_images_at_some_steps_only_are_not_repeated(tmp_path):
    """Document 000's chunk format, as written while a policy acted."""
    file = Recorder(tmp_path / "a.hdf5", n=8).raw([0, 3, 6])
    file.add(image_indices=np.array([0, 3, 6]), chunk_starts=np.array([0, 3, 6], np.int32))
    _, steps, end = _read(file.path, ReadOptions(color="rgb", success=True))
    index, frames = steps.sparse["images/cam_high"]
    assert index.tolist() == [0, 3, 6]
    np.testing.assert_array_equal(np.asarray(frames), file.frames[[0, 3, 6], 0])
    assert (steps.source == Source.POLICY).all()
    assert steps.decision_tick.tolist() == [0, 0, 0, 3, 3, 3, 6]
    assert sorted(end.final_observation) == ["state"]  # no camera was read at the last tick


def test_chunk_starts_may_be_flags_and_may_begin_late(tmp_path):
    file = Recorder(tmp_path / "a.hdf5", n=6).add(chunk_starts=np.array([0, 0, 1, 0, 1, 0]))
    assert _read(file.path).steps.decision_tick.tolist() == [-1, -1, 2, 2, 4, 4]
    file = Recorder(tmp_path / "b.hdf5", n=4).add(image_indices=np.array([1, 2], np.uint8)).raw([1, 2])
    steps = _read(file.path).steps
    assert (steps.source == Source.HUMAN).all()
    assert steps.sparse["images/cam_high"].index.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("image_indices", [0, 6], ("/image_indices", "0..5", "int64[2]", "[0, 6]")),
        ("image_indices", [3, 1], ("/image_indices", "0..5", "[3, 1]")),
        ("image_indices", [0.0, 1.0], ("/image_indices", "0..5", "float64[2]")),
        ("image_indices", [0, 1, 2], ("/observations/images/cam_high", 2, "/image_indices", 3)),
        ("chunk_starts", [4, 2], ("/chunk_starts", "0..5", 6, "[4, 2]")),
        ("chunk_starts", [[0, 2]], ("/chunk_starts", "int64[1, 2]")),
    ],
)
def test_wrong_chunk_marks_are_named(tmp_path, name, value, named):
    file = Recorder(tmp_path / "a.hdf5")
    file.raw([0, 1] if name == "image_indices" else slice(None)).add(**{name: np.array(value)})
    with pytest.raises(DataError, match=naming(*named)):
        _read(file.path)


def _spec(actions: int) -> RobotSpec:
    joints = tuple(range(J)) + (-1,) * (actions - J)
    return RobotSpec("mobile", 50.0, J, (-9.0,) * actions, (9.0,) * actions, joints, (), (), 100)


def test_the_mobile_base_belongs_to_robots_that_have_one(tmp_path):
    file = mobile_aloha(tmp_path / "a.hdf5")
    with_base = _read(file.path, ReadOptions(cameras=(), spec=_spec(J + 2))).steps
    np.testing.assert_array_equal(with_base.action, np.hstack([file.action, np.ones((6, 2))]).astype(np.float32))
    assert _read(file.path, ReadOptions(cameras=(), spec=_spec(J))).steps.action.shape == (6, J)
    file.add(other=1)
    notes = " ".join(FORMAT.open(file.path, RGB).notes())
    assert "base_action is not read: the mobile base" in notes
    assert "observations/qvel is not read: a state is made of joint positions" in notes
    assert "other is not read" in notes
    assert "cam_high" not in notes
    assert "base_action" not in " ".join(FORMAT.open(file.path, ReadOptions(spec=_spec(J + 2))).notes())


def test_the_rate_is_the_files_else_what_the_caller_says_else_nobody_knows(tmp_path):
    path = aloha(tmp_path / "a.hdf5").path
    unknown = FORMAT.open(path, RGB)
    assert (unknown.format, unknown.hz) == ("episodes", None)
    assert not unknown.read("a.hdf5").steps.stamp.any()
    assert any("hz" in note for note in unknown.notes())
    assert "the source of actions is not recorded: all steps are taken for a human's" in unknown.notes()
    assert not any("one step earlier" in note for note in unknown.notes())
    judged = FORMAT.open(path, ReadOptions(color="rgb", success=True))
    assert any("episodes end one step earlier" in note for note in judged.notes())
    said = FORMAT.open(path, ReadOptions(color="rgb", hz=20))
    assert said.hz == 20
    np.testing.assert_allclose(np.diff(said.read("a.hdf5").steps.stamp), 1 / 20)
    Recorder(tmp_path / "b.hdf5").attributes(hz=30)
    mixed = FORMAT.open(tmp_path, ReadOptions(color="rgb", hz=20))
    with pytest.raises(DataError, match=naming("b.hdf5", 30, 20)):
        mixed.read("b.hdf5")
    (tmp_path / "a.hdf5").unlink()
    assert FORMAT.open(tmp_path, RGB).hz == 30
    with pytest.raises(DataError, match=naming("b.hdf5", 30, 20, "hz")):
        FORMAT.open(tmp_path, ReadOptions(hz=20))
    Recorder(tmp_path / "b.hdf5").attributes(hz=0.0)
    with pytest.raises(DataError, match=naming("b.hdf5", "hz", 0.0)):
        FORMAT.open(tmp_path, RGB).read("b.hdf5")


def _scored(folder: Path, *names: str) -> None:
    for k, name in enumerate(names):
        for i in (10, 2):
            Recorder(folder / name / f"episode_{i}.hdf5", n=4 + k, seed=i)


def test_folders_of_document_000_have_their_rewards(tmp_path):
    _scored(tmp_path, "score_5", "score_1")
    source = FORMAT.open(tmp_path, RGB)
    assert source.keys() == [f"score_{k}/episode_{i}.hdf5" for k in (1, 5) for i in (2, 10)]
    bad, good = source.read("score_1/episode_2.hdf5"), source.read("score_5/episode_2.hdf5")
    assert good.steps.reward.tolist() == [0, 0, 1]
    assert bad.steps.reward.tolist() == [0, 0, 0, 0]
    assert (good.end.outcome, good.end.terminated) == (Outcome.SUCCESS, True)
    assert (bad.end.outcome, bad.end.terminated) == (Outcome.FAILURE, True)
    assert any("score_1 = 0, score_5 = 1" in note for note in source.notes())


def test_any_folder_can_be_given_a_reward_and_none_is_left_without(tmp_path):
    _scored(tmp_path, "score_5", "score_3", "notes_to_self")
    with pytest.raises(
        DataError, match=naming("notes_to_self", "score_3", "scores: the rewards", "notes_to_self=REWARD")
    ):
        FORMAT.open(tmp_path, RGB)
    scores = (("score_5", 1.0), ("score_3", 0.5), ("notes_to_self", 0.0))
    source = FORMAT.open(tmp_path, ReadOptions(scores=scores, reward_every_step=True))
    middle = source.read("score_3/episode_10.hdf5")
    assert middle.steps.reward.tolist() == [0.5] * middle.steps.n
    assert (middle.end.outcome, middle.end.terminated) == (Outcome.UNKNOWN, True)
    with pytest.raises(DataError, match=naming("score_9", "scores", "notes_to_self")):
        FORMAT.open(tmp_path, ReadOptions(scores=(*scores, ("score_9", 1.0))))


def test_reward_on_every_step_needs_a_reward(tmp_path):
    path = Recorder(tmp_path / "a.hdf5").path
    with pytest.raises(DataError, match=naming("a.hdf5", "success", "failure", "scores")):
        _read(path, ReadOptions(reward_every_step=True))
    assert _read(path, ReadOptions(reward_every_step=True, success=True)).steps.reward.tolist() == [1] * 5
    assert _read(path, ReadOptions(success=True)).steps.reward.tolist() == [0, 0, 0, 0, 1]


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
    assert any("keep the rewards that they record" in note for note in source.notes())
    only = open_episode(path, ReadOptions(cameras=("wrist",)))
    assert sorted(only.steps.sparse) == ["images/wrist"]


def test_a_file_without_conditions_or_an_arm_is_read(tmp_path, spec, make_episode):
    path, episode = tmp_path / "episode_0.hdf5", make_episode(spec, 3)
    write_episode(path, episode, spec)
    with h5py.File(path, "r+") as file:
        del file["rl"].attrs["conditions"]
    read = open_episode(path, ReadOptions())
    assert read.begin == episode.begin._replace(conditions="")


def test_what_is_no_folder_of_episodes(tmp_path):
    assert not FORMAT.matches(tmp_path)
    assert not FORMAT.matches(tmp_path / "absent")
    with pytest.raises(DataError, match=naming(tmp_path, "*.hdf5")):
        FORMAT.open(tmp_path, RGB)
    with pytest.raises(DataError, match=naming(tmp_path / "absent", "HDF5")):
        FORMAT.open(tmp_path / "absent", RGB)
    (tmp_path / "a.txt").write_text("hello")
    assert not FORMAT.matches(tmp_path / "a.txt")
    (tmp_path / ".episode_0.hdf5").write_text("half")
    assert not FORMAT.matches(tmp_path)
    Recorder(tmp_path / "b.hdf5")
    (tmp_path / "a.hdf5").write_text("damaged")
    source = FORMAT.open(tmp_path, RGB)
    assert source.keys() == ["a.hdf5", "b.hdf5"]
    assert source.notes()  # of the one that can be read
    assert FORMAT.open(tmp_path, ReadOptions(proportion=0.5)).keys() == ["a.hdf5"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"/action": np.zeros((4, J))}, ("/observations/qpos", "(6, 14)", "/action", "(4, 14)")),
        ({"/action": np.full((6, J), np.nan)}, ("action", 0)),
        ({"/observations/qpos": np.full((6, J), 1e300)}, ("state", 0)),
        ({"/action": np.zeros((0, J)), "/observations/qpos": np.zeros((0, J))}, ("steps",)),
        ({"/action": np.zeros(6)}, ("/observations/qpos", "/action", "(6,)")),
        (
            {"/observations/images/cam_high": np.zeros((6, 4, 4), np.uint8)},
            ("/observations/images/cam_high", "uint8[6, 4, 4]"),
        ),
        (
            {"/observations/images/cam_high": np.zeros((5, 4, 4, 3), np.uint8)},
            ("/observations/images/cam_high", 5, "/action", 6),
        ),
    ],
)
def test_bad_files_are_named(tmp_path, change, named):
    file = Recorder(tmp_path / "episode_7.hdf5").raw()
    with h5py.File(file.path, "r+") as opened:
        for name, value in change.items():
            del opened[name]
            opened[name] = value
    with pytest.raises(DataError, match=naming("episode_7.hdf5", *named)):
        _read(file.path)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=naming("episode_7.hdf5", "HDF5")):
        _read(file.path)


def test_a_missing_camera_is_named(tmp_path):
    file = aloha(tmp_path / "a.hdf5")
    with pytest.raises(DataError, match=naming("a.hdf5", "cam_low", "cam_high", "cam_left_wrist")):
        _read(file.path, ReadOptions(color="rgb", cameras=("cam_low",)))


def test_a_link_to_nothing_is_an_episode_that_is_missing(tmp_path):
    Recorder(tmp_path / "there" / "episode_0.hdf5")
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "episode_0.hdf5").symlink_to(tmp_path / "there" / "episode_0.hdf5")
    (folder / "episode_1.hdf5").symlink_to(tmp_path / "there" / "episode_1.hdf5")
    source = FORMAT.open(folder, ReadOptions(color="rgb"))
    assert source.keys() == ["episode_0.hdf5", "episode_1.hdf5"]
    assert source.read("episode_0.hdf5").steps.n == 6
    with pytest.raises(DataError, match=naming("episode_1.hdf5")):
        source.read("episode_1.hdf5")
