"""OGBench's .npz data sets: trajectories, successes by task, and what is wrong with a file."""

from __future__ import annotations

import importlib.util
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import Content, npz_file, trajectories
from errors import naming

from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats.ogbench import OgbenchSource, headers, load
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import ConfigError, DataError, Episode, Outcome, RobotSpec, Source

PLAY = Path(__file__).parents[1] / "ogbench_play.npz"  # rows of cube-single-play: 120 of one trajectory, 40 of another
TASK = "cube-single-play-singletask-task1-v0"


def read_all(path: Path, **options: Any) -> list[Episode]:
    source = OgbenchSource(path, ReadOptions(**options))
    return list(map(source.read, source.keys()))


def test_a_trajectory_has_a_step_less_than_rows(tmp_path: Path) -> None:
    content = trajectories()
    path = npz_file(tmp_path / "cube.npz", content)
    source = OgbenchSource(path, ReadOptions(hz=20.0))
    assert source.keys() == ["cube:0", "cube:5"]
    first, second = map(source.read, source.keys())
    assert first.steps.observation["state"][:, 0].tolist() == [0, 1, 2, 3]
    assert first.end.final_observation["state"].tolist() == [4] * 4
    assert second.steps.observation["state"][:, 0].tolist() == [5, 6]
    assert second.end.final_observation["state"].tolist() == [7] * 4
    assert np.array_equal(second.steps.action, content["actions"][5:7])
    for episode in (first, second):
        assert (episode.end.terminated, episode.end.truncated, episode.end.outcome) == (False, True, Outcome.UNKNOWN)
        assert not episode.steps.reward.any()
        assert (episode.steps.source == Source.SCRIPTED).all()
    with pytest.raises(ValueError, match=naming("read-only")):
        first.steps.observation["state"][0] = 7
    assert np.shares_memory(first.steps.action, source.read("cube:0").steps.action)  # one file is held
    assert np.allclose(first.steps.stamp, np.arange(4) / 20)
    assert first.begin.episode_id != second.begin.episode_id
    assert any("no rewards in the data" in note for note in source.notes())


def test_real_rows() -> None:
    first, second = read_all(PLAY)
    assert (first.steps.n, second.steps.n) == (119, 39)
    assert (first.steps.observation["state"].shape[1], first.steps.action.shape[1]) == (28, 5)
    step = np.linalg.norm(np.diff(first.steps.observation["state"], axis=0), axis=1)
    jump = np.linalg.norm(second.steps.observation["state"][0] - first.end.final_observation["state"])
    assert step.max() < jump


@pytest.mark.parametrize(("proportion", "kept"), [(0.01, 1), (0.35, 1), (0.5, 3), (0.72, 5), (1.0, 6)])
def test_a_share_is_one_of_the_steps(tmp_path: Path, proportion: float, kept: int) -> None:
    """As the published flag: solved steps that are kept are episodes of one step."""
    content = trajectories((11, 3))
    solved = np.isin(np.arange(14), (4, 5, 6, 7))
    path = npz_file(tmp_path / "cube.npz", content | {"rewards": solved - 1.0, "masks": 1.0 - solved})
    lengths = [4, 1, 1, 1, 3, 2]
    source = OgbenchSource(path, ReadOptions(solved="keep"))
    assert (source.lengths(), [source.read(k).steps.n for k in source.keys()]) == (lengths, lengths)
    options = ReadOptions(solved="keep", proportion=proportion)
    source = OgbenchSource(path, options)
    assert (source.lengths(), len(source.keys())) == (lengths[:kept], kept)
    robot = RobotSpec("point", 10.0, 4, (-1.0,) * 2, (1.0,) * 2, (-1,) * 2, (), (), max_episode_steps=20)
    demos = load_demos([path], robot, options=options)
    assert [e.steps.n for e in demos.episodes] == lengths[:kept]


@pytest.mark.parametrize("masked", [True, False])
def test_labelled_rows_end_episodes_at_successes(tmp_path: Path, masked: bool) -> None:
    content = trajectories((8, 4))
    success = np.array([0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0])
    content["rewards"] = (success - 1).astype(np.float32)
    if masked:
        content["masks"] = (1 - success).astype(np.float32)
    path = npz_file(tmp_path / "cube.npz", content)
    a, b, c = read_all(path)
    assert a.steps.observation["state"][:, 0].tolist() == [0, 1]
    assert a.end.final_observation["state"][0] == 2
    assert b.steps.observation["state"][:, 0].tolist() == [4, 5]
    assert c.steps.observation["state"][:, 0].tolist() == [8, 9, 10]
    for episode in (a, b):
        assert episode.steps.reward.tolist() == [0, 1]
        assert (episode.end.terminated, episode.end.outcome) == (True, Outcome.SUCCESS)
    assert (c.end.truncated, c.end.outcome) == (True, Outcome.UNKNOWN)
    (note,) = [n for n in OgbenchSource(path, ReadOptions()).notes() if "successes" in n]
    assert "2 episodes of 3" in note
    assert "3 steps that begin in a solved state are left out" in note
    kept = read_all(path, solved="keep")  # the step from row 2 to 3; those that leave begin what follows
    assert [e.steps.n for e in kept] == [2, 1, 3, 1, 3]
    assert (kept[1].steps.observation["state"][0, 0], kept[1].end.final_observation["state"][0]) == (2, 3)
    assert (kept[1].steps.reward.tolist(), kept[1].end.terminated, kept[1].end.outcome) == ([1], True, Outcome.SUCCESS)
    (note,) = [n for n in OgbenchSource(path, ReadOptions(solved="keep")).notes() if "successes" in n]
    assert "are episodes of one step" in note


def test_dense_rewards_count_what_is_missing_after_a_step(tmp_path: Path) -> None:
    """1 minus the parts, of the state a step leads to: with an offset of -1 OGBench's numbers, a step earlier."""
    content = trajectories((6, 3))
    content["rewards"] = np.array([-3, -2, -3, 0, -1, -1, -2, -1, -1], np.float32)
    path = npz_file(tmp_path / "scene.npz", content)
    first, second, third = read_all(path, env_reward="dense")
    assert first.steps.reward.tolist() == [-1, -2, 1]
    assert (first.end.terminated, first.end.outcome) == (True, Outcome.SUCCESS)
    assert (second.steps.reward.tolist(), second.end.outcome) == ([0], Outcome.UNKNOWN)
    assert third.steps.reward.tolist() == [0, 0]
    assert first.steps.reward.dtype == np.float32
    for dense, sparse in zip((first, second, third), read_all(path), strict=True):
        assert (dense.steps.n, dense.end.outcome) == (sparse.steps.n, sparse.end.outcome)
        assert sparse.steps.reward.tolist() == [float(r == 1) for r in dense.steps.reward]
    (note,) = [n for n in OgbenchSource(path, ReadOptions(env_reward="dense")).notes() if "successes" in n]
    assert "1 minus the parts still to be done" in note
    for unlabelled in (trajectories(), content | {"rewards": np.zeros(9), "masks": np.arange(9) % 2.0}):
        with pytest.raises(DataError, match=naming(path.name, "dense", "env")):
            read_all(npz_file(path, unlabelled), env_reward="dense")


def test_an_outcome_may_be_said(tmp_path: Path) -> None:
    path = npz_file(tmp_path / "cube.npz", trajectories())
    won, lost = read_all(path, success=True)[0], read_all(path, success=False)[0]
    assert won.steps.reward.tolist() == [0, 0, 0, 1]
    assert (won.end.terminated, won.end.outcome) == (True, Outcome.SUCCESS)
    assert (lost.end.terminated, lost.end.outcome, lost.steps.reward.max()) == (True, Outcome.FAILURE, 0)


@pytest.fixture
def fake_ogbench(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A package that knows one environment, of 4 values, solved where qpos[0] > 1."""
    seen: dict[str, Any] = {"closed": 0}

    def make(name: str, env_only: bool) -> Any:
        assert env_only
        if name != TASK:
            raise RuntimeError("doesn't exist")
        spec = types.SimpleNamespace(id="cube-single-singletask-task1-v0")
        return types.SimpleNamespace(
            observation_space=types.SimpleNamespace(shape=(4,)),
            unwrapped=types.SimpleNamespace(spec=spec),
            close=lambda: seen.update(closed=seen["closed"] + 1),
        )

    def relabel(name: str, env: Any, rows: Content) -> None:
        seen["name"] = name
        rows["masks"] = np.where(rows["qpos"][:, 0] > 1, 0.0, 1.0)
        rows["rewards"] = -np.clip(2 - rows["qpos"][:, 0], 0, 2).round()

    utils = types.ModuleType("ogbench.relabel_utils")
    package = types.ModuleType("ogbench")
    utils.relabel_dataset = relabel  # type: ignore[attr-defined]
    package.make_env_and_datasets = make  # type: ignore[attr-defined]
    package.relabel_utils = utils  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ogbench", package)
    monkeypatch.setitem(sys.modules, "ogbench.relabel_utils", utils)
    return seen


def test_a_task_is_judged_by_its_environment(tmp_path: Path, fake_ogbench: dict[str, Any]) -> None:
    content = trajectories((6,))
    content["qpos"][:, 0] = [0, 0, 0, 2, 2, 0]
    path = npz_file(tmp_path / "cube.npz", content)
    (got,) = read_all(path, env=TASK)
    assert got.steps.n == 3
    assert got.steps.reward.tolist() == [0, 0, 1]
    assert got.begin.task == TASK
    (dense,) = read_all(path, env=TASK, env_reward="dense")
    assert dense.steps.reward.tolist() == [-1, -1, 1]
    assert fake_ogbench == {"closed": 2, "name": "cube-single-singletask-task1-v0"}
    with pytest.raises(ConfigError, match=naming("env", "cube-nope-singletask-v0", "doesn't exist")):
        read_all(path, env="cube-nope-singletask-v0")
    with pytest.raises(ConfigError, match=naming("env", "cube-single-play-v0", "cube-single-play-singletask-task1-v0")):
        read_all(path, env="cube-single-play-v0")
    del content["qpos"]
    with pytest.raises(DataError, match=naming("env", TASK, "qpos", "button_states")):
        read_all(npz_file(path, content), env=TASK)
    content["observations"] = content["observations"][:, :3]
    with pytest.raises(DataError, match=naming("observations", 3, "env", "[4]")):
        read_all(npz_file(path, content), env=TASK)


def test_a_task_without_ogbench_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ogbench", None)
    path = npz_file(tmp_path / "cube.npz", trajectories())
    assert len(read_all(path)) == 2
    with pytest.raises(ConfigError, match=naming("ogbench", "pip install 'serl-chunk[ogbench]'")):
        read_all(path, env=TASK)


def test_real_rows_by_the_real_environment() -> None:
    """Rows 35 to 89 of the first trajectory are successes of task 1."""
    if importlib.util.find_spec("ogbench") is None:  # looked up only: importing it decides how MuJoCo renders
        pytest.skip("the [ogbench] extra is not installed")
    before, after, other = read_all(PLAY, env=TASK)
    assert (before.steps.n, after.steps.n, other.steps.n) == (35, 29, 39)
    assert before.steps.reward.tolist() == [0] * 34 + [1]
    assert [e.end.terminated for e in (before, after, other)] == [True, False, False]


def test_a_folder_of_shards_without_its_validation_set(tmp_path: Path) -> None:
    for i in (10, 2, 1):
        npz_file(tmp_path / f"cube-{i:d}.npz", trajectories((4, 3), seed=i))
    npz_file(tmp_path / "cube-1-val.npz", trajectories((4,), seed=9))
    source = OgbenchSource(tmp_path, ReadOptions())
    assert source.keys() == ["cube-1:0", "cube-1:4", "cube-2:0", "cube-2:4", "cube-10:0", "cube-10:4"]
    firsts = [source.read(k).steps.observation["state"][0, 0] for k in source.keys()]
    assert firsts == [100, 104, 200, 204, 1000, 1004]
    assert len(read_all(tmp_path, proportion=0.5)) == 3
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(copy.read("cube-2:4").steps.action, source.read("cube-2:4").steps.action)
    labelled = trajectories((4,), seed=11) | {"rewards": np.array([-1.0, -1, -1, 0]), "masks": np.array([1.0, 1, 1, 0])}
    npz_file(tmp_path / "cube-11.npz", labelled)
    with pytest.raises(DataError, match=naming("cube-11.npz", "rewards", "env")):
        read_all(tmp_path)
    validation = tmp_path / "validation"
    validation.mkdir()
    npz_file(validation / "a-val.npz", trajectories())
    with pytest.raises(DataError, match=naming(validation, ".npz", "*-val.npz")):
        OgbenchSource(validation, ReadOptions())


def test_trajectories_without_an_end_or_a_step(tmp_path: Path) -> None:
    content = trajectories((1, 4, 3))
    content["terminals"][-1] = False
    path = npz_file(tmp_path / "cube.npz", content)
    first, last = read_all(path)
    assert (first.steps.n, last.steps.n) == (3, 2)
    notes = "\n".join(OgbenchSource(path, ReadOptions()).notes())
    assert "1 file whose last trajectory has no terminal" in notes
    assert "trajectories of one row, which hold no step, left out: 1" in notes


@pytest.mark.parametrize("compress", [True, False])
def test_damaged_files(tmp_path: Path, compress: bool) -> None:
    path = npz_file(tmp_path / "bad.npz", trajectories(), compress)
    whole = path.read_bytes()
    at = whole.index(b"actions.npy") + 140
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    with pytest.raises(DataError, match=naming("bad.npz")):
        read_all(path)


def test_an_array_that_is_not_what_its_header_says(tmp_path: Path) -> None:
    """A header that declares a terabyte costs nothing."""
    path = npz_file(tmp_path / "bomb.npz", {k: v for k, v in trajectories().items() if k != "actions"})
    with zipfile.ZipFile(path, "a") as file, file.open("actions.npy", "w") as data:
        np.lib.format.write_array_header_1_0(  # type: ignore[arg-type]
            data, {"descr": "<f4", "fortran_order": False, "shape": (8, 2**35)}
        )
        data.write(b"\0" * 64)
    with pytest.raises(DataError, match=naming("bomb.npz", "actions")):
        read_all(path)


def test_arrays_are_those_whose_headers_were_read(tmp_path: Path) -> None:
    path = npz_file(tmp_path / "a.npz", trajectories())
    first = load(path, ("observations",))["observations"]
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("observations", b"not what the header says")
    assert np.array_equal(load(path, ("observations",))["observations"], first)
    assert read_all(path)[0].steps.n == 4


def test_arrays_are_bounded_by_what_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    npz_file(path, {"observations": np.zeros((200_000, 8), np.float32)})  # deflate's best, 1:1000, is read
    assert headers(path)["observations"].shape == (200_000, 8)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file, file.open("observations.npy", "w") as data:
        np.lib.format.write_array(data, np.zeros((2**21, 8), np.float32))
    with pytest.raises(DataError, match=naming("observations", 67108992)):
        headers(path)
