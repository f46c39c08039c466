"""robomimic's HDF5 data sets."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_sets import KEYS, amended, robomimic

from serl_chunk.data.demos import end_at_first_success
from serl_chunk.data.formats.robomimic import RobomimicSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import Episode, Outcome, Source


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "low_dim_v15.hdf5"


def read_all(path: Path, **options: Any) -> list[Episode]:
    source = RobomimicSource(path, ReadOptions(**options))
    return list(map(source.read, source.keys()))


def notes_of(path: Path, **options: Any) -> str:
    return "\n".join(RobomimicSource(path, ReadOptions(**options)).notes())


def test_demonstrations_come_back(path: Path) -> None:
    source = RobomimicSource(robomimic(path), ReadOptions())
    assert source.hz == RobomimicSource(path, ReadOptions(hz=20.0)).hz == 20
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
    robomimic(path, ((0, 1),) * 12)
    assert RobomimicSource(path, ReadOptions()).keys() == [f"demo_{i}" for i in range(12)]
    assert RobomimicSource(path, ReadOptions(proportion=0.25)).keys() == ["demo_0", "demo_1", "demo_2"]


def test_the_state_has_an_order_of_its_own_and_is_said(path: Path) -> None:
    two = {"object": 41, "robot1_gripper_qpos": 2, "robot0_eef_pos": 3, "robot1_eef_pos": 3, "robot0_eef_quat": 4}
    (first, _), notes = read_all(robomimic(path, keys=two)), notes_of(path)
    order = ["robot0_eef_pos", "robot0_eef_quat", "robot1_eef_pos", "robot1_gripper_qpos", "object"]
    assert f"the state is {' + '.join(order)}\n" in notes
    with h5py.File(path) as file:
        expected = np.concatenate([file[f"data/demo_0/obs/{k}"][0] for k in order]).astype(np.float32)
    assert np.array_equal(first.steps.observation["state"][0], expected)
    assert "not read: robot0_q" in notes
    assert "filter keys train are not applied" in notes


def test_a_success_before_the_last_step_is_kept_and_said(path: Path) -> None:
    inside, last = read_all(robomimic(path, ((0, 1, 0), (0, 1, 1))))
    assert inside.steps.n == 3
    assert (inside.end.terminated, inside.end.outcome) == (False, Outcome.UNKNOWN)
    assert last.end.terminated
    assert [end_at_first_success(e)[0].steps.n for e in (inside, last)] == [2, 2]
    assert "2 episodes with a success that is not in" in notes_of(path)


def test_shaped_rewards_are_no_success(path: Path) -> None:
    (got,) = read_all(robomimic(path, ((0.1, 0.5, 0.9),)))
    assert got.end.outcome is Outcome.UNKNOWN
    assert np.allclose(got.steps.reward, [0.1, 0.5, 0.9])
    assert "rewards between 0 and 1" in notes_of(path)


def test_an_outcome_may_be_said_of_episodes_without_one(path: Path) -> None:
    robomimic(path, ((0, 0, 1), (0, 0), (1, 0)))
    assert [e.end.outcome for e in read_all(path, success=True)] == [Outcome.SUCCESS, Outcome.SUCCESS, Outcome.UNKNOWN]
    won, lost = read_all(path, success=True)[1], read_all(path, success=False)[1]
    assert (won.end.terminated, won.end.reward) == (True, 1.0)
    assert (lost.end.terminated, lost.end.outcome, lost.end.reward) == (True, Outcome.FAILURE, None)


def test_without_next_obs_the_last_observation_is_missing_unless_it_ends_the_task(path: Path) -> None:
    amended(robomimic(path, images=True), {f"data/demo_{i}/next_obs": None for i in range(2)})
    won, cut = read_all(path)
    assert won.end.terminated
    assert np.array_equal(won.end.final_observation["state"], won.steps.observation["state"][-1])
    assert set(won.end.final_observation) == {"state", "images/agentview", "images/eye_in_hand"}
    assert cut.end.final_observation is None
    assert "2 episodes without next_obs" in notes_of(path)


def test_images_stay_in_the_file_until_they_are_looked_at(path: Path) -> None:
    source = RobomimicSource(robomimic(path, images=True), ReadOptions())
    got = pickle.loads(pickle.dumps(source)).read("demo_0")
    with h5py.File(path) as file:
        stored, after = (file[f"data/demo_0/{group}/agentview_image"][()] for group in ("obs", "next_obs"))
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


def test_machine_generated_data_is_a_policys(tmp_path: Path) -> None:
    assert set(read_all(robomimic(tmp_path / "mg" / "low_dim.hdf5"))[0].steps.source) == {Source.POLICY}
