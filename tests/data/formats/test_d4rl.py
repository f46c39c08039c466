"""D4RL's HDF5 data sets: where episodes end, and what is known of their ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import hdf5_file, transitions
from errors import naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.data.formats.d4rl import D4rlSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import DataError, Episode, Outcome, RobotSpec, Source

ANT = RobotSpec("ant", 10.0, 3, (-1.0,) * 2, (1.0,) * 2, (-1,) * 2, (), (), max_episode_steps=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "antmaze-umaze.hdf5"


def read_all(path: Path, **options: Any) -> list[Episode]:
    source = D4rlSource(path, ReadOptions(**options))
    return list(map(source.read, source.keys()))


def rows_of(episodes: list[Episode]) -> list[list[int]]:
    return [e.steps.observation["state"][:, 0].astype(int).tolist() for e in episodes]


def test_terminals_and_timeouts_end_episodes(path: Path) -> None:
    content = transitions("..G.O.T..")
    episodes = read_all(hdf5_file(path, content), hz=50.0)
    assert rows_of(episodes) == [[0, 1, 2], [3, 4], [5, 6], [7, 8]]
    goal, late, fell, last = episodes
    assert (goal.end.terminated, goal.end.outcome) == (True, Outcome.SUCCESS)
    assert goal.steps.reward.tolist() == [0, 0, 1]
    assert (late.end.terminated, late.end.truncated) == (False, True)
    assert (fell.end.terminated, fell.end.outcome) == (True, Outcome.UNKNOWN)
    assert last.end.truncated
    # The next row begins another episode: only where no target looks past the end does the last observation serve.
    assert [e.end.final_observation is None for e in episodes] == [False, True, False, True]
    assert goal.end.final_observation["state"].tolist() == [2, 2, 2]
    assert np.array_equal(late.steps.action, content["actions"][3:5])
    assert np.allclose(goal.steps.stamp, [0, 0.02, 0.04])


@pytest.mark.parametrize(
    ("ends", "stored", "options", "rows", "terminated", "notes"),
    [
        ("..G.O.T..", {}, {}, [[0, 1, 2], [3, 4], [5, 6], [7, 8]], [1, 0, 1, 0],
         ("by `terminals` and `timeouts`", "the last episode has no end", "2 truncated episodes in none")),
        ("..r..T.r....", {"timeouts": False, "successors": True}, {}, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9, 10, 11]],
         [0, 1, 0, 0], ("where the next row does not go on",)),
        (".....T.......", {"timeouts": False}, {"spec": ANT}, [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]],
         [0, 1, 0, 0], ("after 4 steps",)),
        ("..T.T", {"timeouts": False}, {}, [[0, 1, 2], [3, 4]], [1, 1], ("`terminals` alone",)),
        ("..GGG..O.G", {}, {}, [[0, 1, 2], [5, 6, 7], [8, 9]], [1, 0, 1], ("2 steps that are terminal like",)),
    ],
)  # fmt: skip
def test_what_ends_episodes_is_said(path, monkeypatch, ends, stored, options, rows, terminated, notes):
    hdf5_file(path, transitions(ends, **stored))
    for block in (100_000, 2, 3):
        monkeypatch.setattr("serl_chunk.data.formats.d4rl._BLOCK", block)
        episodes = read_all(path, **options)
        assert rows_of(episodes) == rows
        assert [e.end.terminated for e in episodes] == terminated
    said = D4rlSource(path, ReadOptions(**options)).notes()
    assert all(any(note in each for each in said) for note in notes)


def test_without_timeouts_successors_and_a_robot_the_ends_are_unknown(path: Path) -> None:
    with pytest.raises(DataError, match=naming(path, "timeouts", "next_observations", "max_episode_steps")):
        read_all(hdf5_file(path, transitions("..T..", timeouts=False)))


def test_stored_successors_are_the_final_observations(path: Path) -> None:
    episodes = read_all(hdf5_file(path, transitions("..G.O..", successors=True)))
    assert [e.end.final_observation["state"][0] for e in episodes] == [2.5, 4.5, 7]
    assert not any("not stored" in n for n in D4rlSource(path, ReadOptions()).notes())


def test_dense_rewards_tell_no_success(path: Path) -> None:
    rewards = np.array([0.5, 2, 3, 1], np.float32)
    (got,) = read_all(hdf5_file(path, transitions("...T") | {"rewards": rewards}))
    assert (got.end.terminated, got.end.outcome) == (True, Outcome.UNKNOWN)
    assert np.array_equal(got.steps.reward, rewards)
    assert any("rewards are not 0 and 1" in n for n in D4rlSource(path, ReadOptions()).notes())


@pytest.mark.parametrize(
    ("name", "source"),
    [("pen-human-v1", Source.HUMAN), ("hopper_random", Source.RANDOM), ("hopper_medium", Source.POLICY)],
)
def test_who_acted_is_told_by_the_name(tmp_path: Path, name: str, source: Source) -> None:
    (got,) = read_all(hdf5_file(tmp_path / f"{name}.hdf5", transitions("..O")))
    assert set(got.steps.source) == {source}


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends=st.text("..TO", min_size=1, max_size=20), proportion=st.floats(0.1, 1))
def test_every_row_is_in_one_episode(tmp_path: Path, ends: str, proportion: float) -> None:
    path = hdf5_file(tmp_path / "x.hdf5", transitions(ends))
    episodes = read_all(path)
    dropped = sum(a == b == "T" for a, b in zip("." + ends, ends, strict=False))
    rows = [r for rows in rows_of(episodes) for r in rows]
    assert len(rows) == len(ends) - dropped
    assert rows == sorted(set(rows))
    for episode in episodes:
        assert all(ends[r] == "." for r in rows_of([episode])[0][:-1])
    some = read_all(path, proportion=proportion)
    assert rows_of(some) == rows_of(episodes)[: len(some)]
    assert 1 <= len(some) <= len(episodes)


@pytest.mark.parametrize(("proportion", "kept"), [(0.01, 1), (0.5, 1), (0.8, 2), (0.9, 3), (1.0, 4)])
def test_a_share_is_one_of_the_steps(path: Path, proportion: float, kept: int) -> None:
    source = D4rlSource(hdf5_file(path, transitions(".....O..OOO")), ReadOptions(proportion=proportion))
    assert (source.lengths(), len(source.keys())) == ([6, 3, 1, 1][:kept], kept)
