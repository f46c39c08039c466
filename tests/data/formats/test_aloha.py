"""Plain ALOHA and ACT files, which have no /rl group."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import h5py
import numpy as np
import pytest
from errors import naming
from PIL import Image

from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import DataError, End, Outcome, Source

RED = np.full((16, 16, 3), (250, 10, 20), np.uint8)


def _foreign(path: Path, n: int = 6, joints: int = 2, actions: int = 2, **attributes) -> tuple[np.ndarray, np.ndarray]:
    """A file as ACT's recorder writes it, without frames; returns its qpos and action."""
    rng = np.random.default_rng(n)
    qpos, action = rng.normal(size=(n, joints)), rng.normal(size=(n, actions)).astype(np.float32)
    with h5py.File(path, "w") as file:
        file["/observations/qpos"], file["/observations/qvel"] = qpos, qpos
        file["/action"] = action
        file.attrs.update(attributes)
    return qpos.astype(np.float32), action


def _add(path: Path, name: str, value: np.ndarray) -> None:
    with h5py.File(path, "r+") as file:
        file[name] = value


def _jpeg_rows(frames: list[np.ndarray], padding: int) -> np.ndarray:
    files = []
    for frame in frames:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG", quality=95)
        files.append(np.frombuffer(buffer.getvalue(), np.uint8))
    width = max(map(len, files)) + padding
    return np.stack([np.pad(f, (0, width - len(f))) for f in files])


def test_unknown_outcome_is_an_unfinished_episode(tmp_path, joints_spec):
    qpos, action = _foreign(tmp_path / "episode_0.hdf5", sim=False)
    begin, steps, end = read_episode(tmp_path / "episode_0.hdf5", joints_spec)
    np.testing.assert_array_equal(steps.observation["state"], qpos)
    np.testing.assert_array_equal(steps.action, action)
    assert not steps.reward.any()
    assert (steps.source == Source.HUMAN).all()
    assert (steps.decision_tick == -1).all()
    np.testing.assert_allclose(np.diff(steps.stamp), 1 / 25)
    assert end == End(begin.episode_id, 6, None, False, True, Outcome.UNKNOWN, "environment")


@pytest.mark.parametrize("task", ["fold the towel", np.bytes_("fold the towel")])
def test_the_task_is_text_however_it_is_stored(tmp_path, joints_spec, task):
    _foreign(tmp_path / "a.hdf5", task=task)
    assert read_episode(tmp_path / "a.hdf5", joints_spec).begin.task == "fold the towel"


@pytest.mark.parametrize("success", [True, False])
def test_a_known_outcome_terminates_at_the_last_observation(tmp_path, joints_spec, success):
    qpos, action = _foreign(tmp_path / "episode_0.hdf5", sim=True)
    _, steps, end = read_episode(tmp_path / "episode_0.hdf5", joints_spec, success=success)
    np.testing.assert_array_equal(steps.action, action[:5])
    np.testing.assert_array_equal(end.final_observation["state"], qpos[5])
    np.testing.assert_array_equal(steps.reward, [0, 0, 0, 0, float(success)])
    assert (steps.source == Source.SCRIPTED).all()
    assert (end.terminated, end.truncated, end.length) == (True, False, 5)
    assert end.outcome is (Outcome.SUCCESS if success else Outcome.FAILURE)


def test_one_step_with_an_outcome_is_refused(tmp_path, joints_spec):
    _foreign(tmp_path / "a.hdf5", n=1)
    assert read_episode(tmp_path / "a.hdf5", joints_spec).steps.n == 1
    with pytest.raises(DataError, match=naming("a.hdf5", 2, 1)):
        read_episode(tmp_path / "a.hdf5", joints_spec, success=True)


def test_joints_are_put_in_the_states_order(tmp_path, joints_spec):
    qpos, _ = _foreign(tmp_path / "a.hdf5")
    swapped = dataclasses.replace(joints_spec, joint_of_action=(1, 0))
    state = read_episode(tmp_path / "a.hdf5", swapped).steps.observation["state"]
    np.testing.assert_array_equal(state, qpos[:, ::-1])


def test_another_robot_is_named(tmp_path, joints_spec, spec):
    _foreign(tmp_path / "a.hdf5", joints=7, actions=7)
    with pytest.raises(DataError, match=naming("arm2", 2, "/action", 7)):
        read_episode(tmp_path / "a.hdf5", joints_spec)
    _foreign(tmp_path / "a.hdf5", joints=7, actions=2)
    with pytest.raises(DataError, match=naming("arm2", 2, "/observations/qpos", 7)):
        read_episode(tmp_path / "a.hdf5", joints_spec)
    _foreign(tmp_path / "a.hdf5", joints=3, actions=3)
    with pytest.raises(DataError, match=naming("arm3", 5, "ALOHA", 3)):
        read_episode(tmp_path / "a.hdf5", spec)


def test_not_an_episode(tmp_path, joints_spec):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["weights"] = np.zeros(3)
    with pytest.raises(DataError, match=naming("a.hdf5", "/observations/qpos")):
        read_episode(tmp_path / "a.hdf5", joints_spec)
    _foreign(tmp_path / "b.hdf5")
    with h5py.File(tmp_path / "b.hdf5", "r+") as file:
        del file["action"]
        file["action"] = np.zeros((3, 2))
    with pytest.raises(DataError, match=naming("/observations/qpos", "(6, 2)", "/action", "(3, 2)")):
        read_episode(tmp_path / "b.hdf5", joints_spec)


def test_the_order_of_colours_is_asked_for(tmp_path, joints_spec):
    path = tmp_path / "a.hdf5"
    _foreign(path, n=3)
    _add(path, "/observations/images/top", np.stack([RED] * 3))
    with pytest.raises(DataError, match=naming("a.hdf5", "color", "color", "cameras")):
        read_episode(path, joints_spec)
    rgb = read_episode(path, joints_spec, color="rgb").steps.sparse["images/top"]
    np.testing.assert_array_equal(rgb.index, [0, 1, 2])
    np.testing.assert_array_equal(rgb.values[0], RED)
    bgr = read_episode(path, joints_spec, color="bgr").steps.sparse["images/top"]
    np.testing.assert_array_equal(bgr.values[0], RED[..., ::-1])
    assert not read_episode(path, joints_spec, cameras=()).steps.sparse
    with h5py.File(path, "r+") as file:
        file.attrs["color"] = np.bytes_("rgb")
    # what the file records wins over what the caller says of files that record nothing
    np.testing.assert_array_equal(
        read_episode(path, joints_spec, color="bgr").steps.sparse["images/top"].values[0], RED
    )


def test_padded_jpeg_rows_are_decoded(tmp_path, joints_spec):
    path = tmp_path / "a.hdf5"
    _foreign(path, n=2, compress=True)
    _add(path, "/observations/images/top", _jpeg_rows([RED, RED[..., ::-1]], padding=50))
    frames = read_episode(path, joints_spec, color="rgb").steps.sparse["images/top"].values
    assert frames.shape == (2, 16, 16, 3)
    np.testing.assert_allclose(frames[0].astype(int), RED, atol=6)
    np.testing.assert_allclose(frames[1].astype(int), RED[..., ::-1], atol=6)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (lambda rows: np.zeros_like(rows), ("/observations/images/top", 0, "JPEG", "PNG")),
        (lambda rows: rows[:, : rows.shape[1] // 3], ("/observations/images/top", 0, "JPEG", "PNG")),
        (lambda rows: rows[:1], ("/observations/images/top", 1, "/action", 2)),
        (lambda rows: rows[:, 0], ("/observations/images/top", "uint8[T, H, W, 3]", "uint8[2]")),
    ],
)
def test_damaged_frames_are_named(tmp_path, joints_spec, rows, named):
    path = tmp_path / "a.hdf5"
    _foreign(path, n=2)
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    _add(path, "/observations/images/top", rows(_jpeg_rows([noise, noise], padding=0)))
    with pytest.raises(DataError, match=naming(*named)):
        read_episode(path, joints_spec, color="rgb")


def test_frames_of_two_sizes_are_named(tmp_path, joints_spec):
    path = tmp_path / "a.hdf5"
    _foreign(path, n=2)
    _add(path, "/observations/images/top", _jpeg_rows([RED, RED[:8]], padding=0))
    with pytest.raises(DataError, match=naming("/observations/images/top", 1, "8x16", "16x16")):
        read_episode(path, joints_spec, color="rgb")


def test_folders_of_foreign_files_keep_distinct_ids(tmp_path, joints_spec):
    for folder, n in (("monday", 5), ("tuesday", 6)):
        (tmp_path / folder).mkdir()
        _foreign(tmp_path / folder / "episode_0.hdf5", n=n)
    demos = load_demos([tmp_path / "monday", tmp_path / "tuesday"], joints_spec, options=ReadOptions(success=True))
    first, second = (e.begin.episode_id for e in demos.episodes)
    assert first != second
    assert first.startswith("episode_0-")
    assert [e.end.terminated for e in demos.episodes] == [True, True]
