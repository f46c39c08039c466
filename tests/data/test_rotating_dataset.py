"""Shards that take turns: which, when, and how many there are at a time."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import npz_file, trajectories
from errors import naming

from serl_chunk.data.formats.ogbench import OgbenchSource
from serl_chunk.data.rotating_dataset import ShardedSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import ConfigError, DataError, Episode

WAIT = 10.0
SOURCE = "serl_chunk.data.rotating_dataset.OgbenchSource"


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
    with sharded(folder, ReadOptions(), replace_interval=5) as source:
        assert any("no rewards in the data" in note for note in source.notes)  # of the first shard
        before = source.episodes
        assert [source.advance() for _ in range(4)] == [False] * 4
        assert source.episodes is before
        assert source.advance()
        assert source.episodes is not before


def test_seeking_and_beginning_later_lead_where_advancing_does(folder: Path) -> None:
    with sharded(folder, ReadOptions(), replace_interval=3, seed=5) as source:
        at = walk(source, 60)
    for begun in (0, 7, 12):
        with sharded(folder, ReadOptions(), replace_interval=3, seed=5, updates=begun) as source:
            assert walk(source, 8) == at[begun : begun + 8]
            for updates in (1, 40, 0, 14, 3, 7, 2):
                source.seek(updates)
                assert walk(source, 20) == at[updates : updates + 20]


def test_two_shards_are_in_memory_at_most(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[np.ndarray]] = []
    most = 0
    gc.collect()
    gc.freeze()  # what other tests left need not be looked through once an episode

    class Counted(OgbenchSource):
        def read(self, key: str) -> Episode:
            nonlocal most
            episode = super().read(key)
            if key.endswith(":0"):
                alive.append(weakref.ref(episode.steps.observation["state"]))
            gc.collect()
            most = max(most, sum(r() is not None for r in alive))
            return episode

    monkeypatch.setattr(SOURCE, Counted)
    with sharded(folder, ReadOptions(), replace_interval=1) as source:
        for _ in range(8):
            source.advance()
        assert (len(alive) >= 9, most) == (True, 2)
        taken = [weakref.ref(e.steps.observation["state"]) for e in source.take()]  # the caller's alone
        gc.collect()
        assert not any(ref() is not None for ref in taken)
        assert source.episodes == []
        assert source.advance()
        assert shard_of(source) >= 0


class Gate(OgbenchSource):
    """Lets a thread read when the test says so, and the test itself at once."""

    open = threading.Event()

    def read(self, key: str) -> Episode:
        if threading.current_thread() is not threading.main_thread():
            assert self.open.wait(WAIT)
        return super().read(key)


def test_it_waits_only_where_the_next_shard_is_due_and_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SOURCE, Gate)
    Gate.open.clear()
    with sharded(folder, ReadOptions(), replace_interval=3) as source:
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


def test_proportions_of_steps_and_single_shards(tmp_path: Path) -> None:
    write(tmp_path, 0, (3, 3, 3, 3))
    with sharded(tmp_path, ReadOptions(proportion=0.5), replace_interval=1) as source:
        assert [e.steps.n for e in source.episodes] == [2, 2]
        before = threading.active_count()
        assert not any(source.advance() for _ in range(10))
        assert threading.active_count() == before
    solved = np.isin(np.arange(12), (4, 5, 6, 7))
    for i in range(2):
        write(tmp_path, i, (12,), rewards=solved - 1.0, masks=1.0 - solved)
    with sharded(tmp_path, ReadOptions(solved="keep", proportion=0.4), replace_interval=1) as source:
        for _ in range(2):
            assert [e.steps.n for e in source.episodes] == [4]  # of 4, 1, 1, 1 and 4
            source.advance()


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=naming(tmp_path, ".npz", "*-val.npz")):
        ShardedSource(tmp_path, ReadOptions(), replace_interval=1)
    write(tmp_path, 0)
    with pytest.raises(ConfigError, match=naming("replace_interval", 1, 0)):
        ShardedSource(tmp_path, ReadOptions(), replace_interval=0)
    (tmp_path / "shard-0.npz").write_bytes(b"")
    with pytest.raises(DataError, match=naming("shard-0.npz", "zip")):
        ShardedSource(tmp_path, ReadOptions(), replace_interval=1)
