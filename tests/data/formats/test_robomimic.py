"""robomimic's HDF5 data sets."""

from __future__ import annotations

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
from data_sets import KEYS, amended, notes_of, read_all, robomimic

from serl_chunk.data.demos import end_at_first_success
from serl_chunk.data.formats import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import Outcome, Source

SUCCESS, FAILURE, UNKNOWN = Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "low_dim_v15.hdf5"


def test_demonstrations_come_back(path: Path) -> None:
    source = open_episodes(robomimic(path), ReadOptions())
    assert source.hz == open_episodes(path, ReadOptions(hz=20.0)).hz == 20
    first, second = map(source.read, source.keys())
    with h5py.File(path) as file:
        demo = file["data/demo_0"]
        state, after = (
            np.concatenate([demo[f"{group}/{k}"][()] for k in KEYS], axis=1).astype(np.float32)
            for group in ("obs", "next_obs")
        )
        assert np.array_equal(first.steps.observation["state"], state)
        assert np.array_equal(first.end.final_observation["state"], after[-1])
        assert np.array_equal(first.steps.action, demo["actions"][()].astype(np.float32))
    assert first.steps.reward.tolist() == [0, 0, 0, 1]
    assert np.allclose(first.steps.stamp, np.arange(4) / 20)
    assert set(first.steps.source) == {Source.HUMAN}
    assert first.begin.task == "NutAssemblySquare"
    assert (first.end.terminated, first.end.outcome) == (True, SUCCESS)
    assert (second.end.terminated, second.end.truncated, second.end.outcome) == (False, True, UNKNOWN)
    robomimic(path, ((0, 1),) * 12)  # in the order of their numbers
    assert open_episodes(path, ReadOptions()).keys() == [f"demo_{i}" for i in range(12)]
    assert open_episodes(path, ReadOptions(proportion=0.25)).keys() == ["demo_0", "demo_1", "demo_2"]
    generated = robomimic(path.parent / "mg" / "low_dim.hdf5")
    assert set(read_all(generated)[0].steps.source) == {Source.POLICY}


def test_the_state_has_an_order_of_its_own_and_is_said(path: Path) -> None:
    two = {"object": 41, "robot1_gripper_qpos": 2, "robot0_eef_pos": 3, "robot1_eef_pos": 3, "robot0_eef_quat": 4}
    (first, _), notes = read_all(robomimic(path, keys=two)), notes_of(path)
    order = ["robot0_eef_pos", "robot0_eef_quat", "robot1_eef_pos", "robot1_gripper_qpos", "object"]
    with h5py.File(path) as file:
        expected = np.concatenate([file[f"data/demo_0/obs/{k}"][0] for k in order]).astype(np.float32)
    assert np.array_equal(first.steps.observation["state"][0], expected)
    for said in (f"the state is {' + '.join(order)}\n", "not read: robot0_q", "filter keys train are not applied"):
        assert said in notes


def test_successes_are_where_rewards_are_1_and_an_outcome_may_be_said_of_the_others(path: Path) -> None:
    inside, last = read_all(robomimic(path, ((0, 1, 0), (0, 1, 1))))
    assert (inside.steps.n, inside.end.terminated, inside.end.outcome, last.end.terminated) == (3, False, UNKNOWN, True)
    assert [end_at_first_success(e)[0].steps.n for e in (inside, last)] == [2, 2]
    assert "2 episodes with a success that is not in" in notes_of(path)
    (shaped,) = read_all(robomimic(path, ((0.1, 0.5, 0.9),)))
    assert shaped.end.outcome is UNKNOWN
    assert np.allclose(shaped.steps.reward, [0.1, 0.5, 0.9])
    assert "rewards between 0 and 1" in notes_of(path)
    robomimic(path, ((0, 0, 1), (0, 0), (1, 0)))
    won, lost = read_all(path, success=True), read_all(path, success=False)
    assert [e.end.outcome for e in won] == [SUCCESS, SUCCESS, UNKNOWN]
    assert (won[1].end.terminated, won[1].end.reward) == (True, 1.0)
    assert (lost[1].end.terminated, lost[1].end.outcome, lost[1].end.reward) == (True, FAILURE, None)


def test_without_next_obs_the_last_observation_is_missing_unless_it_ends_the_task(path: Path) -> None:
    amended(robomimic(path, images=True), {f"data/demo_{i}/next_obs": None for i in range(2)})
    won, cut = read_all(path)
    assert won.end.terminated
    assert np.array_equal(won.end.final_observation["state"], won.steps.observation["state"][-1])
    assert set(won.end.final_observation) == {"state", "images/agentview", "images/eye_in_hand"}
    assert cut.end.final_observation is None
    assert "2 episodes without next_obs" in notes_of(path)


def test_images_stay_in_the_file_until_they_are_looked_at(path: Path) -> None:
    source = open_episodes(robomimic(path, images=True), ReadOptions())
    got = pickle.loads(pickle.dumps(source)).read("demo_0")
    swapped, _ = read_all(path, color="bgr", cameras=("agentview",))
    assert list(swapped.steps.sparse) == ["images/agentview"]
    with h5py.File(path) as file:
        stored, after = (file[f"data/demo_0/{group}/agentview_image"][()] for group in ("obs", "next_obs"))
    for episode, order in ((got, 1), (swapped, -1)):
        index, frames = episode.steps.sparse["images/agentview"]
        assert not isinstance(frames, np.ndarray)
        assert index.tolist() == [0, 1, 2, 3]
        assert np.array_equal(frames[2], stored[2, ..., ::order])
        assert np.array_equal(np.asarray(frames), stored[..., ::order])
        assert np.array_equal(episode.end.final_observation["images/agentview"], after[-1, ..., ::order])
    assert not read_all(path, cameras=())[0].steps.sparse
