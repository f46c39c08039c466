"""D4RL's HDF5 data sets: where episodes end, and what is known of their ends."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from errors import naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.data.formats.d4rl import FORMAT, D4rlSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import ConfigError, DataError, Episode, Outcome, RobotSpec, Source

Arrays = dict[str, Any]


def arrays(ends: str, *, timeouts: bool = True, successors: bool = False) -> Arrays:
    """One row a letter: `.`, `T` terminal, `G` that with reward 1, `O` time-out, `r` before an unsaid reset."""
    n = len(ends)
    state = np.arange(n, dtype=np.float32)
    restart = np.array([c in "TGOr" for c in ends])
    out = {
        "observations": np.repeat(state[:, None], 3, axis=1),
        "actions": np.random.default_rng(0).uniform(-1, 1, (n, 2)).astype(np.float32),
        "rewards": np.array([c == "G" for c in ends], np.float32),
        "terminals": np.array([c in "TG" for c in ends]),
    }
    if timeouts:
        out["timeouts"] = np.array([c == "O" for c in ends])
    if successors:
        out["next_observations"] = np.repeat(np.where(restart, state + 0.5, state + 1)[:, None], 3, axis=1)
    return out


def save(path: Path, content: Arrays) -> Path:
    with h5py.File(path, "w") as file:
        for name, value in content.items():
            file[name] = value
        file["infos/qpos"] = np.zeros((len(content["actions"]), 2))
        file["metadata/algorithm"] = "sac"
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "antmaze-umaze.hdf5"


def read_all(path: Path, **options: Any) -> list[Episode]:
    source = D4rlSource(path, ReadOptions(**options))
    return list(map(source.read, source.keys()))


def rows_of(episodes: list[Episode]) -> list[list[int]]:
    return [e.steps.observation["state"][:, 0].astype(int).tolist() for e in episodes]


def test_terminals_and_timeouts_end_episodes(path: Path) -> None:
    content = arrays("..G.O.T..")
    episodes = read_all(save(path, content), hz=50.0)
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
    notes = "\n".join(D4rlSource(path, ReadOptions()).notes())
    assert "episodes end by `terminals` and `timeouts`" in notes
    assert "the last episode has no end" in notes
    assert "2 truncated episodes in none" in notes


def test_stored_successors_are_the_final_observations(path: Path) -> None:
    episodes = read_all(save(path, arrays("..G.O..", successors=True)))
    assert [e.end.final_observation["state"][0] for e in episodes] == [2.5, 4.5, 7]
    assert not any("not stored" in n for n in D4rlSource(path, ReadOptions()).notes())


def test_without_timeouts_a_break_ends_an_episode(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(path, arrays("..r..T.r....", timeouts=False, successors=True))
    for block in (100_000, 2, 3):
        monkeypatch.setattr("serl_chunk.data.formats.d4rl._BLOCK", block)
        episodes = read_all(path)
        assert rows_of(episodes) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9, 10, 11]]
    assert [e.end.terminated for e in episodes] == [False, True, False, False]
    assert any("where the next row does not go on" in n for n in D4rlSource(path, ReadOptions()).notes())


def test_without_timeouts_the_robots_time_limit_ends_an_episode(path: Path) -> None:
    robot = RobotSpec("ant", 10.0, 3, (-1.0,) * 2, (1.0,) * 2, (-1,) * 2, (), (), max_episode_steps=4)
    save(path, arrays(".....T.......", timeouts=False))
    episodes = read_all(path, spec=robot)
    assert rows_of(episodes) == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]]
    assert [e.end.terminated for e in episodes] == [False, True, False, False]
    assert any("after 4 steps" in n for n in D4rlSource(path, ReadOptions(spec=robot)).notes())
    with pytest.raises(DataError, match=naming("timeouts", "next_observations", "max_episode_steps")):
        read_all(path)


def test_terminals_alone_are_believed_where_they_end_the_file(path: Path) -> None:
    save(path, arrays("..T.T", timeouts=False))
    assert rows_of(read_all(path)) == [[0, 1, 2], [3, 4]]
    assert any("`terminals` alone" in n for n in D4rlSource(path, ReadOptions()).notes())


def test_steps_after_the_goal_are_left_out(path: Path) -> None:
    save(path, arrays("..GGG..O.G"))
    assert rows_of(read_all(path)) == [[0, 1, 2], [5, 6, 7], [8, 9]]
    assert any(n.startswith("2 steps that are terminal like") for n in D4rlSource(path, ReadOptions()).notes())


def test_dense_rewards_tell_no_success(path: Path) -> None:
    content = arrays("...T")
    content["rewards"] = np.array([0.5, 2, 3, 1], np.float32)
    (got,) = read_all(save(path, content))
    assert (got.end.terminated, got.end.outcome) == (True, Outcome.UNKNOWN)
    assert got.steps.reward.tolist() == [0.5, 2, 3, 1]
    assert any("rewards are not 0 and 1" in n for n in D4rlSource(path, ReadOptions()).notes())


@pytest.mark.parametrize(
    ("name", "source"),
    [("pen-human-v1", Source.HUMAN), ("hopper_random", Source.RANDOM), ("hopper_medium", Source.POLICY)],
)
def test_who_acted_is_told_by_the_name(tmp_path: Path, name: str, source: Source) -> None:
    (got,) = read_all(save(tmp_path / f"{name}.hdf5", arrays("..O")))
    assert set(got.steps.source) == {source}


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends=st.text("..TO", min_size=1, max_size=20), proportion=st.floats(0.1, 1))
def test_every_row_is_in_one_episode(tmp_path: Path, ends: str, proportion: float) -> None:
    path = save(tmp_path / "x.hdf5", arrays(ends))
    episodes = read_all(path)
    dropped = sum(a == b == "T" for a, b in zip("." + ends, ends, strict=False))
    rows = [r for rows in rows_of(episodes) for r in rows]
    assert len(rows) == len(ends) - dropped
    assert rows == sorted(set(rows))
    for episode in episodes:
        inner = rows_of([episode])[0][:-1]
        assert all(ends[r] == "." for r in inner)
    some = read_all(path, proportion=proportion)
    assert rows_of(some) == rows_of(episodes)[: len(some)]
    assert 1 <= len(some) <= len(episodes)


@pytest.mark.parametrize(("proportion", "kept"), [(0.01, 1), (0.5, 1), (0.8, 2), (0.9, 3), (1.0, 4)])
def test_a_share_is_one_of_the_steps(path: Path, proportion: float, kept: int) -> None:
    source = D4rlSource(save(path, arrays(".....O..OOO")), ReadOptions(proportion=proportion))
    assert (source.lengths(), len(source.keys())) == ([6, 3, 1, 1][:kept], kept)


def test_a_copy_reads_for_itself(path: Path) -> None:
    source = pickle.loads(pickle.dumps(D4rlSource(save(path, arrays("..O..O")), ReadOptions())))
    assert rows_of([source.read("3")]) == [[3, 4, 5]]
    with pytest.raises(DataError, match=naming(path.name, "1", 2, "3")):
        source.read("1")
    with pytest.raises(ConfigError, match=naming("success", "failure")):
        D4rlSource(path, ReadOptions(success=True))


def with_nan(name: str) -> Any:
    def change(content: Arrays) -> None:
        content[name][4] = np.nan

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.pop("actions"), ("actions", "infos, observations, rewards, terminals, timeouts")),
        (lambda c: c.pop("rewards"), ("rewards", "actions, infos, observations, terminals, timeouts")),
        (lambda c: c.update(observations=c["observations"][:-1]), ("observations", 5, "actions", 6)),
        (lambda c: c.update(timeouts=c["timeouts"][:-1]), ("timeouts", 5, "actions", 6)),
        (lambda c: c.update(observations=np.zeros((6, 8, 8, 3))), ("observations", 2, "[6, 8, 8, 3]")),
        (lambda c: c.update(actions=np.zeros((6, 2), "S1")), ("actions", "S1")),
        (
            lambda c: c.update(next_observations=np.zeros((6, 2))),
            ("next_observations", "[6, 2]", "observations", "[6, 3]"),
        ),
        (lambda c: c.update({k: v[:0] for k, v in c.items()}), ("steps",)),
        (with_nan("rewards"), ("rewards", 4)),
        (with_nan("observations"), (3, "state", 1)),
        (with_nan("actions"), (3, "action", 1)),
    ],
)
def test_bad_arrays(path: Path, change: Any, named: tuple[Any, ...]) -> None:
    content = arrays("..O..O")
    change(content)
    with h5py.File(path, "w") as file:
        for name, value in content.items():
            file[name] = value
        file["infos/x"] = 1
    with pytest.raises(DataError, match=naming(*named)) as caught:
        read_all(path)
    assert str(caught.value).startswith(str(path))


def test_truncated_files_and_others(path: Path, tmp_path: Path) -> None:
    whole = save(path, arrays("..O")).read_bytes()
    assert FORMAT.matches(path)
    bad = tmp_path / "bad.hdf5"
    for n in (0, 100, len(whole) - 1):
        bad.write_bytes(whole[:n])
        assert not FORMAT.matches(bad)
        with pytest.raises(DataError, match=naming("bad.hdf5", "HDF5")):
            read_all(bad)
    with h5py.File(bad, "w") as file:
        file["action"], file["observations/qpos"] = np.zeros((2, 2)), np.zeros((2, 2))
    assert not FORMAT.matches(bad)
    assert not FORMAT.matches(tmp_path)
