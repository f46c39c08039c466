"""OGBench's .npz data sets: trajectories, successes by task, what is wrong with a file, and shards that take turns."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import time
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import Content, npz_file, read_all, states_of, trajectories
from errors import naming
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.data.formats.ogbench import cut_at_successes, headers, label_states, load
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.rotating_dataset import ShardedSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import ConfigError, DataError, Outcome, Source

PLAY = Path(__file__).parents[1] / "ogbench_play.npz"  # rows of cube-single-play: 120 of one trajectory, 40 of another
TASK = "cube-single-play-singletask-task1-v0"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cube.npz"


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.booleans())
def test_every_step_outside_a_success_is_in_one_episode(flags: list[bool], keep: bool) -> None:
    """Which ends at its first success; with `keep` those that begin in a success are too."""
    success = np.array(flags)
    stretches = cut_at_successes(success, keep_solved=keep)
    steps = [t for s in stretches for t in range(s.start, s.stop)]
    assert steps == [t for t in range(len(flags) - 1) if keep or not flags[t]]
    for s in stretches:
        assert not success[s.start + 1 : s.stop].any()
        assert s.success == success[s.stop]
        assert s.success or s.stop == len(flags) - 1


def test_which_states_are_successes_and_what_the_others_lack() -> None:
    def judged(rewards: list[float], masks: list[float] | None = None) -> tuple[list[bool], list[float] | None]:
        out = label_states("f", np.array(rewards, np.float32), None if masks is None else np.array(masks))
        return out.success.tolist(), None if out.missing is None else out.missing.tolist()

    for masks in ([1, 1, 0], None):
        assert judged([-2, -1, 0], masks) == ([False, False, True], [2, 1, 0])
    for masks in ([1, 0, 1], None):
        assert judged([0, 1, 0], masks) == ([False, True, False], [1, 0, 1])
    assert judged([0, 0], [1, 1]) == ([False, False], [1, 1])
    assert judged([0, 0], [0, 0]) == ([True, True], [0, 0])
    for shaped in ([0, 0, 0], [0.5, 0.25, 0]):  # masks tell a success from the rest, and nothing tells more
        assert judged(shaped, [1, 0, 1]) == ([False, True, False], None)
    for unclear in ([0, 0], [0.5, 0], [-1, 1]):
        with pytest.raises(DataError, match=naming("f", "rewards", min(unclear), max(unclear), "masks", "env")):
            judged(unclear)
    with pytest.raises(DataError, match=naming("f", "masks", 0, 1, 2)):
        judged([-2, -1, 0], [1, 2, 0])


def test_a_trajectory_has_a_step_less_than_rows(path: Path) -> None:
    content = trajectories()
    source = open_episodes(npz_file(path, content), ReadOptions(hz=20.0))
    assert source.keys() == ["cube:0", "cube:5"]
    first, second = episodes = [source.read(key) for key in source.keys()]
    assert states_of(episodes) == [[0, 1, 2, 3], [5, 6]]
    assert [e.end.final_observation["state"].tolist() for e in episodes] == [[4] * 4, [7] * 4]
    assert np.array_equal(second.steps.action, content["actions"][5:7])
    for episode in episodes:
        assert (episode.end.terminated, episode.end.truncated, episode.end.outcome) == (False, True, Outcome.UNKNOWN)
        assert not episode.steps.reward.any()
        assert set(episode.steps.source) == {Source.SCRIPTED}
    with pytest.raises(ValueError, match=naming("read-only")):
        first.steps.observation["state"][0] = 7
    assert np.shares_memory(first.steps.action, source.read("cube:0").steps.action)  # one file is held
    assert np.allclose(first.steps.stamp, np.arange(4) / 20)
    assert first.begin.episode_id != second.begin.episode_id
    won, lost = read_all(path, success=True)[0], read_all(path, success=False)[0]  # an outcome may be said
    assert (won.steps.reward.tolist(), won.end.terminated, won.end.outcome) == ([0, 0, 0, 1], True, Outcome.SUCCESS)
    assert (lost.end.terminated, lost.end.outcome, lost.steps.reward.max()) == (True, Outcome.FAILURE, 0)
    content = trajectories((1, 4, 3))
    content["terminals"][-1] = False
    assert [e.steps.n for e in read_all(npz_file(path, content))] == [3, 2]


def test_labelled_rows_end_episodes_at_successes(path: Path) -> None:
    success = np.array([0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0])
    labels = {"rewards": (success - 1).astype(np.float32), "masks": (1 - success).astype(np.float32)}
    npz_file(path, trajectories((8, 4)) | labels)
    a, b, c = episodes = read_all(path)
    assert states_of(episodes) == [[0, 1], [4, 5], [8, 9, 10]]
    assert a.end.final_observation["state"][0] == 2
    for episode in (a, b):
        assert (episode.steps.reward.tolist(), episode.end.terminated) == ([0, 1], True)
        assert episode.end.outcome is Outcome.SUCCESS
    assert (c.end.truncated, c.end.outcome) == (True, Outcome.UNKNOWN)
    kept = read_all(path, solved="keep")  # the step from row 2 to 3; those that leave begin what follows
    assert states_of(kept) == [[0, 1], [2], [3, 4, 5], [6], [8, 9, 10]]
    assert kept[1].end.final_observation["state"][0] == 3
    assert (kept[1].steps.reward.tolist(), kept[1].end.terminated, kept[1].end.outcome) == ([1], True, Outcome.SUCCESS)


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


def test_a_task_is_judged_by_its_environment(path: Path, fake_ogbench: dict[str, Any]) -> None:
    content = trajectories((6,))
    content["qpos"][:, 0] = [0, 0, 0, 2, 2, 0]
    npz_file(path, content)
    (got,), (dense,) = read_all(path, env=TASK), read_all(path, env=TASK, env_reward="dense")
    assert (got.steps.reward.tolist(), dense.steps.reward.tolist(), got.begin.task) == ([0, 0, 1], [-1, -1, 1], TASK)
    assert fake_ogbench == {"closed": 2, "name": "cube-single-singletask-task1-v0"}
    for env, named in (
        ("cube-nope-singletask-v0", ("doesn't exist",)),
        ("cube-single-play-v0", ("cube-single-play-singletask-task1-v0",)),
    ):
        with pytest.raises(ConfigError, match=naming("env", env, *named)):
            read_all(path, env=env)
    del content["qpos"]
    with pytest.raises(DataError, match=naming("env", TASK, "qpos", "button_states")):
        read_all(npz_file(path, content), env=TASK)
    content["observations"] = content["observations"][:, :3]
    with pytest.raises(DataError, match=naming("observations", 3, "env", "[4]")):
        read_all(npz_file(path, content), env=TASK)


def test_real_rows_by_the_real_environment() -> None:
    """Rows 35 to 89 of the first trajectory are successes of task 1."""
    first, second = read_all(PLAY)
    assert (first.steps.observation["state"].shape, second.steps.action.shape) == ((119, 28), (39, 5))
    if importlib.util.find_spec("ogbench") is None:  # looked up only: importing it decides how MuJoCo renders
        pytest.skip("the [ogbench] extra is not installed")
    judged = read_all(PLAY, env=TASK)
    assert ([e.steps.n for e in judged], judged[0].steps.reward.tolist()) == ([35, 29, 39], [0] * 34 + [1])
    assert [e.end.terminated for e in judged] == [True, False, False]


def test_a_folder_of_shards_without_its_validation_set(tmp_path: Path) -> None:
    for i in (10, 2, 1):
        npz_file(tmp_path / f"cube-{i:d}.npz", trajectories((4, 3), seed=i))
    npz_file(tmp_path / "cube-1-val.npz", trajectories((4,), seed=9))
    source = open_episodes(tmp_path, ReadOptions())
    assert source.keys() == ["cube-1:0", "cube-1:4", "cube-2:0", "cube-2:4", "cube-10:0", "cube-10:4"]
    assert [states[0] for states in states_of(read_all(tmp_path))] == [100, 104, 200, 204, 1000, 1004]
    assert len(read_all(tmp_path, proportion=0.5)) == 3
    labelled = trajectories((4,), seed=11) | {"rewards": np.array([-1.0, -1, -1, 0]), "masks": np.array([1.0, 1, 1, 0])}
    npz_file(tmp_path / "cube-11.npz", labelled)
    with pytest.raises(DataError, match=naming("cube-11.npz", "rewards", "env")):
        read_all(tmp_path)
    validation = tmp_path / "validation"
    validation.mkdir()
    npz_file(validation / "a-val.npz", trajectories())
    with pytest.raises(DataError, match=naming(validation, ".npz", "*-val.npz")):
        open_episodes(validation, ReadOptions(), "ogbench")
    with pytest.raises(ConfigError, match=naming("replace_interval", 1, 0)):
        ShardedSource(tmp_path, ReadOptions(), replace_interval=0)


def test_arrays_are_those_of_their_headers_and_bounded_by_what_is_stored(path: Path) -> None:
    content = trajectories()
    for compress in (True, False):  # a damaged byte
        whole = npz_file(path, content, compress).read_bytes()
        at = whole.index(b"actions.npy") + 140
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(DataError, match=naming("cube.npz")):
            read_all(path)
    npz_file(path, {k: v for k, v in content.items() if k != "actions"})
    with zipfile.ZipFile(path, "a") as file, file.open("actions.npy", "w") as data:  # declares a terabyte
        header = {"descr": "<f4", "fortran_order": False, "shape": (8, 2**35)}
        np.lib.format.write_array_header_1_0(data, header)  # type: ignore[arg-type]
        data.write(b"\0" * 64)
    with pytest.raises(DataError, match=naming("cube.npz", "actions")):
        read_all(path)
    with zipfile.ZipFile(npz_file(path, content), "a") as file:
        file.writestr("observations", b"not what the header says")
    assert np.array_equal(load(path, ("observations",))["observations"], content["observations"])
    assert read_all(path)[0].steps.n == 4
    npz_file(path, {"observations": np.zeros((200_000, 8), np.float32)})  # deflate's best, 1:1000, is read
    assert headers(path)["observations"].shape == (200_000, 8)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file, file.open("observations.npy", "w") as data:
        np.lib.format.write_array(data, np.zeros((2**21, 8), np.float32))
    with pytest.raises(DataError, match=naming("observations", 67108992)):
        headers(path)


WAIT = 10.0


def write(folder: Path, i: int, lengths: tuple[int, ...] = (3, 3), **more: Any) -> None:
    content = trajectories(lengths)
    state = np.full_like(content["observations"], i)
    npz_file(folder / f"shard-{i}.npz", content | {"observations": state} | more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(4):
        write(tmp_path, i)
    return tmp_path


def sharded(*args: Any, **options: Any) -> contextlib.closing[ShardedSource]:
    return contextlib.closing(ShardedSource(*args, **options))


def shard_of(source: ShardedSource) -> int:
    (value,) = {int(e.steps.observation["state"][0, 0]) for e in source.episodes}
    assert source.current.name == f"shard-{value}.npz"
    return value


def walk(source: ShardedSource, n: int) -> list[tuple[int, bool]]:
    return [(shard_of(source), source.advance()) for _ in range(n)]


def test_every_pass_has_every_shard_in_an_order_of_its_own(folder: Path) -> None:
    def turns(seed: int) -> list[int]:
        with sharded(folder, ReadOptions(), replace_interval=1, seed=seed) as source:
            seen = walk(source, 24)
        assert all(advanced for _, advanced in seen)
        return [shard for shard, _ in seen]

    seen = turns(3)
    passes = [tuple(seen[i : i + 4]) for i in range(0, 24, 4)]
    assert all(sorted(p) == [0, 1, 2, 3] for p in passes)
    assert len(set(passes)) > 1
    assert all(a != b for a, b in itertools.pairwise(seen))
    assert turns(3) == seen != turns(4)


def test_seeking_and_beginning_later_lead_where_advancing_does(folder: Path) -> None:
    with sharded(folder, ReadOptions(), replace_interval=3, seed=5) as source:
        at = walk(source, 60)
    for begun in (0, 7, 12):
        with sharded(folder, ReadOptions(), replace_interval=3, seed=5, updates=begun) as source:
            assert walk(source, 8) == at[begun : begun + 8]
            for updates in (1, 40, 0, 14, 3, 7, 2):
                source.seek(updates)
                assert walk(source, 20) == at[updates : updates + 20]


def test_an_error_of_the_thread_is_raised_before_the_shard_is_due(folder: Path) -> None:
    with sharded(folder, ReadOptions(), replace_interval=1, seed=1) as first:
        current = first.current
    for path in folder.iterdir():
        if path != current:
            path.write_bytes(b"PK broken")

    def advance_for_long() -> None:
        for _ in range(int(100 * WAIT)):
            source.advance()
            time.sleep(0.01)

    with sharded(folder, ReadOptions(), replace_interval=10_000, seed=1) as source:
        for call in (advance_for_long, source.advance):
            with pytest.raises(DataError, match=naming(folder, "zip")):
                call()
            assert (source.current, len(source.episodes)) == (current, 2)
