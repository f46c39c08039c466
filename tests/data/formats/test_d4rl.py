"""D4RL's HDF5 data sets: where episodes end, and what is known of their ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_sets import hdf5_file, notes_of, read_all, states_of, transitions
from errors import naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.data.formats import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import DataError, Outcome, RobotSpec, Source

ANT = RobotSpec("ant", 10.0, 3, (-1.0,) * 2, (1.0,) * 2, (-1,) * 2, (), (), max_episode_steps=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "antmaze-umaze.hdf5"


def test_terminals_and_timeouts_end_episodes(path: Path) -> None:
    content = transitions("..G.O.T..")
    goal, late, fell, last = read_all(hdf5_file(path, content), hz=50.0)
    assert (goal.end.terminated, goal.end.outcome, goal.steps.reward.tolist()) == (True, Outcome.SUCCESS, [0, 0, 1])
    assert (late.end.terminated, late.end.truncated, last.end.truncated) == (False, True, True)
    assert (fell.end.terminated, fell.end.outcome) == (True, Outcome.UNKNOWN)
    # The next row begins another episode: only where no target looks past the end does the last observation serve.
    assert goal.end.final_observation["state"].tolist() == [2, 2, 2]
    assert [each.end.final_observation is None for each in (late, fell, last)] == [True, False, True]
    assert np.array_equal(late.steps.action, content["actions"][3:5])
    assert np.allclose(goal.steps.stamp, [0, 0.02, 0.04])
    stored = read_all(hdf5_file(path, transitions("..G.O..", successors=True)))
    assert [e.end.final_observation["state"][0] for e in stored] == [2.5, 4.5, 7]
    assert "not stored" not in notes_of(path)
    rewards = np.array([0.5, 2, 3, 1], np.float32)  # dense ones tell no success
    (got,) = read_all(hdf5_file(path, transitions("...T") | {"rewards": rewards}))
    assert (got.end.terminated, got.end.outcome, got.steps.reward.tolist()) == (True, Outcome.UNKNOWN, rewards.tolist())
    assert "rewards are not 0 and 1" in notes_of(path)
    for name, actor in (("pen-human", Source.HUMAN), ("hopper_random", Source.RANDOM), ("hopper", Source.POLICY)):
        (got,) = read_all(hdf5_file(path.with_name(f"{name}.hdf5"), transitions("..O")))
        assert set(got.steps.source) == {actor}  # told by the name


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
        assert states_of(episodes) == rows
        assert [e.end.terminated for e in episodes] == terminated
    said = notes_of(path, **options)
    assert all(note in said for note in notes)


def test_without_timeouts_successors_and_a_robot_the_ends_are_unknown(path: Path) -> None:
    with pytest.raises(DataError, match=naming(path, "timeouts", "next_observations", "max_episode_steps")):
        read_all(hdf5_file(path, transitions("..T..", timeouts=False)))


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends=st.text("..TO", min_size=1, max_size=20), proportion=st.floats(0.1, 1))
def test_every_row_is_in_one_episode(tmp_path: Path, ends: str, proportion: float) -> None:
    path = hdf5_file(tmp_path / "x.hdf5", transitions(ends))
    episodes = states_of(read_all(path))
    dropped = sum(a == b == "T" for a, b in zip("." + ends, ends, strict=False))
    rows = [int(r) for rows in episodes for r in rows]
    assert len(rows) == len(ends) - dropped
    assert rows == sorted(set(rows))
    assert all(ends[int(r)] == "." for rows in episodes for r in rows[:-1])
    some = states_of(read_all(path, proportion=proportion))
    assert 1 <= len(some) <= len(episodes)
    assert some == episodes[: len(some)]


@pytest.mark.parametrize(("proportion", "kept"), [(0.01, 1), (0.8, 2), (0.9, 3), (1.0, 4)])
def test_a_share_is_one_of_the_steps(path: Path, proportion: float, kept: int) -> None:
    source = open_episodes(hdf5_file(path, transitions(".....O..OOO")), ReadOptions(proportion=proportion))
    assert (source.lengths(), len(source.keys())) == ([6, 3, 1, 1][:kept], kept)
