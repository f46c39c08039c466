"""robomimic's HDF5 data sets."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from errors import naming

from serl_chunk.data.demos import end_at_first_success
from serl_chunk.data.formats.robomimic import FORMAT, RobomimicSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import DataError, Episode, Outcome, Source

KEYS = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "object": 10}
ENV = {"env_name": "NutAssemblySquare", "type": 1, "env_kwargs": {"control_freq": 20, "reward_shaping": False}}
Edit = Callable[[h5py.File], Any]


def write(
    path: Path,
    rewards: tuple[tuple[float, ...], ...] = ((0, 0, 0, 1), (0, 0, 0)),
    *,
    images: bool = False,
    keys: dict[str, int] | None = None,
    edit: Edit | None = None,
) -> Path:
    rng = np.random.default_rng(0)
    keys = KEYS if keys is None else keys
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps(ENV)
        data.attrs["total"] = sum(map(len, rewards))
        for i, reward in enumerate(rewards):
            n = len(reward)
            demo = data.create_group(f"demo_{i}")
            demo.attrs["num_samples"] = n
            demo["actions"] = rng.uniform(-1, 1, (n, 7))
            demo["rewards"] = np.array(reward, np.float64)
            demo["dones"] = np.array([0] * (n - 1) + [1])
            demo["states"] = rng.normal(size=(n, 45))
            for name, width in (keys | {"robot0_joint_pos": 7}).items():
                values = rng.normal(size=(n + 1, width))
                demo[f"obs/{name}"], demo[f"next_obs/{name}"] = values[:-1], values[1:]
            for camera in ("agentview", "robot0_eye_in_hand") if images else ():
                frames = rng.integers(0, 256, (n + 1, 6, 8, 3), dtype=np.uint8)
                demo[f"obs/{camera}_image"], demo[f"next_obs/{camera}_image"] = frames[:-1], frames[1:]
        file["mask/train"] = np.array([b"demo_0"])
        if edit is not None:
            edit(file)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "low_dim_v15.hdf5"


def read_all(path: Path, **options: Any) -> list[Episode]:
    source = RobomimicSource(path, ReadOptions(**options))
    return list(map(source.read, source.keys()))


def test_demonstrations_come_back(path: Path) -> None:
    source = RobomimicSource(write(path), ReadOptions())
    assert source.keys() == ["demo_0", "demo_1"]
    assert source.hz == 20
    first, second = map(source.read, source.keys())
    with h5py.File(path) as file:
        demo = file["data/demo_0"]
        state = np.concatenate([demo[f"obs/{k}"][()] for k in KEYS], axis=1).astype(np.float32)
        after = np.concatenate([demo[f"next_obs/{k}"][()] for k in KEYS], axis=1).astype(np.float32)
        assert np.array_equal(first.steps.observation["state"], state)
        assert np.array_equal(first.end.final_observation["state"], after[-1])
        assert np.array_equal(first.steps.action, demo["actions"][()].astype(np.float32))
    assert first.steps.reward.tolist() == [0, 0, 0, 1]
    assert np.allclose(first.steps.stamp, np.arange(4) / 20)
    assert (first.steps.source == Source.HUMAN).all()
    assert first.begin.task == "NutAssemblySquare"
    assert (first.end.terminated, first.end.outcome) == (True, Outcome.SUCCESS)
    assert (second.end.terminated, second.end.truncated, second.end.outcome) == (False, True, Outcome.UNKNOWN)


def test_demonstrations_are_in_the_order_of_their_numbers(path: Path) -> None:
    write(path, ((0, 1),) * 12)
    assert RobomimicSource(path, ReadOptions()).keys() == [f"demo_{i}" for i in range(12)]
    assert RobomimicSource(path, ReadOptions(proportion=0.25)).keys() == ["demo_0", "demo_1", "demo_2"]


def test_the_state_has_an_order_of_its_own_and_is_said(path: Path) -> None:
    two = {"object": 41, "robot1_gripper_qpos": 2, "robot0_eef_pos": 3, "robot1_eef_pos": 3, "robot0_eef_quat": 4}
    write(path, keys=two)
    source = RobomimicSource(path, ReadOptions())
    (note,) = [n for n in source.notes() if n.startswith("the state is")]
    order = ["robot0_eef_pos", "robot0_eef_quat", "robot1_eef_pos", "robot1_gripper_qpos", "object"]
    assert note == f"the state is {' + '.join(order)}"
    with h5py.File(path) as file:
        expected = np.concatenate([file[f"data/demo_0/obs/{k}"][0] for k in order]).astype(np.float32)
    assert np.array_equal(source.read("demo_0").steps.observation["state"][0], expected)
    notes = "\n".join(source.notes())
    assert "not read: robot0_joint_pos" in notes
    assert "filter keys train are not applied" in notes


def test_a_success_before_the_last_step_is_kept_and_said(path: Path) -> None:
    write(path, ((0, 1, 0), (0, 1, 1)))
    inside, last = read_all(path)
    assert inside.steps.n == 3
    assert (inside.end.terminated, inside.end.outcome) == (False, Outcome.UNKNOWN)
    assert last.end.terminated
    assert [end_at_first_success(e)[0].steps.n for e in (inside, last)] == [2, 2]
    assert any(
        n.startswith("2 episodes with a success that is not in") for n in RobomimicSource(path, ReadOptions()).notes()
    )


def test_shaped_rewards_are_no_success(path: Path) -> None:
    write(path, ((0.1, 0.5, 0.9),))
    (got,) = read_all(path)
    assert got.end.outcome is Outcome.UNKNOWN
    assert np.allclose(got.steps.reward, [0.1, 0.5, 0.9])
    assert any("rewards between 0 and 1" in n for n in RobomimicSource(path, ReadOptions()).notes())


def test_an_outcome_may_be_said_of_episodes_without_one(path: Path) -> None:
    write(path, ((0, 0, 1), (0, 0), (1, 0)))
    assert [e.end.outcome for e in read_all(path, success=True)] == [Outcome.SUCCESS, Outcome.SUCCESS, Outcome.UNKNOWN]
    won, lost = read_all(path, success=True)[1], read_all(path, success=False)[1]
    assert (won.end.terminated, won.end.reward) == (True, 1.0)
    assert (lost.end.terminated, lost.end.outcome, lost.end.reward) == (True, Outcome.FAILURE, None)


def test_without_next_obs_the_last_observation_is_missing_unless_it_ends_the_task(path: Path) -> None:
    def edit(file: h5py.File) -> None:
        for demo in file["data"].values():
            del demo["next_obs"]

    write(path, images=True, edit=edit)
    won, cut = read_all(path)
    assert won.end.terminated
    assert np.array_equal(won.end.final_observation["state"], won.steps.observation["state"][-1])
    assert set(won.end.final_observation) == {"state", "images/agentview", "images/robot0_eye_in_hand"}
    assert cut.end.final_observation is None
    assert any(n.startswith("2 episodes without next_obs") for n in RobomimicSource(path, ReadOptions()).notes())


def test_images_stay_in_the_file_until_they_are_looked_at(path: Path) -> None:
    write(path, images=True)
    source = RobomimicSource(path, ReadOptions())
    got = pickle.loads(pickle.dumps(source)).read("demo_0")
    with h5py.File(path) as file:
        stored, after = file["data/demo_0/obs/agentview_image"][()], file["data/demo_0/next_obs/agentview_image"][()]
    frames = got.steps.sparse["images/agentview"]
    assert not isinstance(frames.values, np.ndarray)
    assert frames.index.tolist() == [0, 1, 2, 3]
    assert np.array_equal(frames.values[2], stored[2])
    assert np.array_equal(np.asarray(frames.values), stored)
    assert np.array_equal(got.end.final_observation["images/agentview"], after[-1])
    (swapped, _) = read_all(path, color="bgr", cameras=("agentview",))
    assert list(swapped.steps.sparse) == ["images/agentview"]
    assert np.array_equal(swapped.steps.sparse["images/agentview"].values[1], stored[1][..., ::-1])
    assert np.array_equal(swapped.end.final_observation["images/agentview"], after[-1][..., ::-1])
    assert not read_all(path, cameras=())[0].steps.sparse
    with pytest.raises(DataError, match=naming("top", "agentview", "robot0_eye_in_hand")):
        read_all(path, cameras=("top",))


def test_machine_generated_data_is_a_policys(tmp_path: Path) -> None:
    (tmp_path / "mg").mkdir()
    assert set(read_all(write(tmp_path / "mg" / "low_dim.hdf5"))[0].steps.source) == {Source.POLICY}


def replace(name: str, value: Any) -> Edit:
    def edit(file: h5py.File) -> None:
        del file[name]
        if value is not None:
            file[name] = value

    return edit


NAN = np.zeros((3, 7))
NAN[2, 3] = np.nan


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (replace("data", None), ("data/demo_0", "robomimic")),
        (lambda f: f["data"].attrs.update(env_args="{"), ("env_args", "/data", "JSON")),
        (replace("data/demo_0/obs", None), ("demo_0", "obs", "actions, dones, next_obs, rewards, states")),
        (replace("data/demo_1/obs", None), ("demo_1", "obs", "actions, dones, next_obs, rewards, states")),
        (replace("data/demo_1/actions", None), ("demo_1", "actions", "dones, next_obs, obs, rewards, states")),
        (replace("data/demo_1/actions", NAN), ("demo_1", "action", 2)),
        (replace("data/demo_1/actions", np.zeros((3, 7), "S1")), ("demo_1", "actions", "S1")),
        (replace("data/demo_1/actions", np.zeros(3)), ("demo_1", "actions", 2, "[3]")),
        (replace("data/demo_1/actions", np.zeros((0, 7))), ("demo_1", "episodes")),
        (replace("data/demo_1/actions", np.zeros((2, 7))), ("demo_1", "actions", 2, "num_samples", 3)),
        (replace("data/demo_1/rewards", np.zeros(2)), ("demo_1", "reward", 2, "/action", 3)),
        (replace("data/demo_1/rewards", np.full(3, np.inf)), ("demo_1", "reward", 0)),
        (replace("data/demo_1/obs/object", None), ("/data/demo_1/obs", "object")),
        (replace("data/demo_1/obs/object", np.zeros((2, 10))), ("/data/demo_1/obs/object", 2, "actions", 3)),
        (replace("data/demo_1/next_obs/object", np.zeros((2, 10))), ("/data/demo_1/next_obs/object", 2, "actions", 3)),
        (replace("data/demo_1/next_obs/object", np.zeros((3, 9))), ("demo_1", "state", 19, "(18,)")),
        (replace("data/demo_1/obs/agentview_image", None), ("/data/demo_1/obs/agentview_image",)),
        (
            replace("data/demo_1/obs/agentview_image", np.zeros((3, 6, 8, 3))),
            ("/data/demo_1/obs/agentview_image", "float64[3, 6, 8, 3]"),
        ),
        (
            replace("data/demo_1/next_obs/agentview_image", None),
            ("demo_1", "agentview_image", "robot0_eye_in_hand_image"),
        ),
    ],
)
def test_bad_files(path: Path, edit: Edit, named: tuple[Any, ...]) -> None:
    write(path, images=True, edit=edit)
    with pytest.raises(DataError, match=naming(*named)) as caught:
        read_all(path)
    assert str(caught.value).startswith(str(path))


def test_a_state_of_nothing_known(path: Path) -> None:
    write(path, keys={"ee_pos": 3})
    with pytest.raises(DataError, match=naming("obs", "robot0_eef_pos", "ee_pos", "robot0_joint_pos")):
        read_all(path)


def test_truncated_files(path: Path, tmp_path: Path) -> None:
    whole = write(path).read_bytes()
    bad = tmp_path / "bad.hdf5"
    for n in (0, 100, len(whole) // 2, len(whole) - 1):
        bad.write_bytes(whole[:n])
        with pytest.raises(DataError, match=naming("bad.hdf5", "HDF5")):
            read_all(bad)
        assert not FORMAT.matches(bad)


def test_what_it_looks_like(path: Path, tmp_path: Path) -> None:
    assert FORMAT.matches(write(path))
    assert not FORMAT.matches(tmp_path)
    with h5py.File(tmp_path / "aloha.hdf5", "w") as file:
        file["action"], file["observations/qpos"] = np.zeros((2, 2)), np.zeros((2, 2))
    assert not FORMAT.matches(tmp_path / "aloha.hdf5")
    with pytest.raises(DataError, match=naming("demo_7", 2, "demo_0", "demo_1")):
        RobomimicSource(path, ReadOptions()).read("demo_7")
