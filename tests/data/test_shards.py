"""Shards that take turns: which, when, and how many there are at a time."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from serl_chunk.data.formats.ogbench import OgbenchSource
from serl_chunk.data.shards import ShardedSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import ConfigError, DataError, Episode

WAIT = 10.0


def write(folder: Path, i: int, trajectories: int = 2) -> Path:
    terminals = np.tile([False, False, True], trajectories)
    n = len(terminals)
    path = folder / f"shard-{i}.npz"
    state = np.full((n, 4), i, np.float32)
    np.savez(path, observations=state, actions=np.zeros((n, 2), np.float32), terminals=terminals)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(4):
        write(tmp_path, i)
    return tmp_path


def shard_of(source: ShardedSource) -> int:
    (value,) = {int(e.steps.observation["state"][0, 0]) for e in source.episodes}
    assert source.current.name == f"shard-{value}.npz"
    return value


def turns(folder: Path, n: int, **options: int) -> list[int]:
    with ShardedSource(folder, ReadOptions(), replace_interval=1, **options) as source:
        seen = [shard_of(source)]
        for _ in range(n - 1):
            assert source.advance()
            seen.append(shard_of(source))
    return seen


def test_every_pass_has_every_shard_in_an_order_of_its_own(folder: Path) -> None:
    seen = turns(folder, 24, seed=3)
    passes = [tuple(seen[i : i + 4]) for i in range(0, 24, 4)]
    assert all(sorted(p) == [0, 1, 2, 3] for p in passes)
    assert len(set(passes)) > 1
    assert all(a != b for a, b in itertools.pairwise(seen))
    assert turns(folder, 24, seed=3) == seen
    assert turns(folder, 24, seed=4) != seen


def test_a_shard_stays_for_the_interval(folder: Path) -> None:
    with ShardedSource(folder, ReadOptions(), replace_interval=5) as source:
        for _ in range(3):
            before = source.episodes
            assert [source.advance() for _ in range(4)] == [False] * 4
            assert source.episodes is before
            assert source.advance()
            assert source.episodes is not before


def test_two_shards_are_in_memory_at_most(folder: Path) -> None:
    alive: list[weakref.ref[np.ndarray]] = []
    most = 0

    class Counted(OgbenchSource):
        def read(self, key: str) -> Episode:
            nonlocal most
            episode = super().read(key)
            if key.endswith(":0"):
                alive.append(weakref.ref(episode.steps.observation["state"]))
            gc.collect()
            most = max(most, sum(r() is not None for r in alive))
            return episode

    with ShardedSource(folder, ReadOptions(), replace_interval=1, open_shard=Counted) as source:
        for _ in range(8):
            source.advance()
    assert len(alive) >= 9
    assert most == 2


class Gate(OgbenchSource):
    """Lets a thread read when the test says so, and the test itself at once."""

    open = threading.Event()

    def read(self, key: str) -> Episode:
        if threading.current_thread() is not threading.main_thread():
            assert self.open.wait(WAIT)
        return super().read(key)


def test_it_waits_only_where_the_next_shard_is_due_and_not_read(folder: Path) -> None:
    Gate.open.clear()
    with ShardedSource(folder, ReadOptions(), replace_interval=3, open_shard=Gate) as source:
        first = source.episodes
        assert [source.advance(), source.advance()] == [False, False]  # the thread is kept from reading meanwhile
        assert source.episodes is first
        started = time.perf_counter()
        timer = threading.Timer(0.2, Gate.open.set)
        timer.start()
        assert source.advance()
        assert time.perf_counter() - started > 0.1
        timer.join()
        assert source.episodes is not first


def test_an_error_of_the_thread_is_raised_before_the_shard_is_due(folder: Path) -> None:
    first = ShardedSource(folder, ReadOptions(), replace_interval=1, seed=1)
    first.close()
    for path in folder.iterdir():
        if path != first.current:
            path.write_bytes(b"PK broken")
    with ShardedSource(folder, ReadOptions(), replace_interval=10_000, seed=1) as source:
        with pytest.raises(DataError, match=r"shard-\d\.npz: not a whole \.npz file"):
            poll(source.advance)
        assert source.current == first.current
        assert len(source.episodes) == 2
        with pytest.raises(DataError, match="not a whole"):
            source.advance()


def poll(call: Callable[[], bool]) -> None:
    for _ in range(int(100 * WAIT)):
        call()
        time.sleep(0.01)


def test_proportion_and_single_shards(tmp_path: Path) -> None:
    write(tmp_path, 0, trajectories=4)
    with ShardedSource(tmp_path, ReadOptions(proportion=0.5), replace_interval=1) as source:
        assert [e.steps.n for e in source.episodes] == [2, 2]
        before = threading.active_count()
        assert not any(source.advance() for _ in range(10))
        assert threading.active_count() == before


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.npz file"):
        ShardedSource(tmp_path, ReadOptions(), replace_interval=1)
    write(tmp_path, 0)
    with pytest.raises(ConfigError, match="replace_interval must be at least 1"):
        ShardedSource(tmp_path, ReadOptions(), replace_interval=0)
    (tmp_path / "shard-0.npz").write_bytes(b"")
    with pytest.raises(DataError, match=r"shard-0\.npz: not a whole"):
        ShardedSource(tmp_path, ReadOptions(), replace_interval=1)
