"""A data set larger than memory: a folder of shards, of which one after the other is there.

Each `replace_interval` calls of `advance` the shard in use gives way to the next, which a thread has read meanwhile. So
at most two are in memory, as long as the caller keeps nothing of the one that has gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from serl_chunk.data.formats.ogbench import OgbenchSource, shard_files
from serl_chunk.data.source import ReadOptions, Source, materialised
from serl_chunk.types import ConfigError, Episode

Open = Callable[[Path, ReadOptions], Source]


class _Loader(threading.Thread):
    """Reads one shard; the result, or what went wrong, is fetched with `take`."""

    def __init__(self, read: Callable[[], list[Episode]], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._read = read
        self._episodes: list[Episode] | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._episodes = self._read()
        except BaseException as error:  # raised again by take, in the thread that needs the shard
            self._error = error

    def take(self) -> list[Episode]:
        """Wait for the shard; raises what reading it raised."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._episodes is not None
        return self._episodes


class ShardedSource:
    """The episodes of one shard of a folder, and of another one later.

    The order of the shards is drawn anew for every pass from `seed`, each shard once a pass and none twice in a row.
    `options.proportion` applies to every shard: the first of its episodes, whole ones. With a single shard nothing is
    replaced and no thread runs.

    Args:
        folder: .npz files of OGBench; `*-val.npz` are left out.
        options: what is read of each, see `source.ReadOptions`.
        replace_interval: calls of `advance` between two shards.
        seed: of the order.
        open_shard: how one file is opened.

    Raises:
        ConfigError: `replace_interval` is below 1.
        DataError: the folder has no shard, or the first one cannot be read.
    """

    def __init__(
        self,
        folder: Path | str,
        options: ReadOptions,
        *,
        replace_interval: int,
        seed: int = 0,
        open_shard: Open = OgbenchSource,
    ) -> None:
        if replace_interval < 1:
            raise ConfigError(f"replace_interval must be at least 1 call of advance(), got {replace_interval}")
        self.path = Path(folder).expanduser()
        self.files = shard_files(self.path)
        self._options, self._interval, self._open = options, replace_interval, open_shard
        self._rng = np.random.default_rng(seed)
        self._order: list[int] = []
        self._calls = 0
        self._loader: _Loader | None = None
        self._current = self._next_number(None)
        self.episodes: list[Episode] = self._read(self._current)
        """Of the shard in use, in its order."""
        self._load_next()

    @property
    def current(self) -> Path:
        """The shard in use."""
        return self.files[self._current]

    def advance(self) -> bool:
        """Count one update; True where `episodes` now are those of another shard.

        Returns at once unless the next shard is due and not read yet: then it waits for it. Raises DataError where the
        next shard cannot be read, as soon as that is known; the shard in use stays.
        """
        self._calls += 1
        loader = self._loader
        if loader is None:
            return False
        if not loader.is_alive():
            loader.take()  # an error is said when it is known, not only when the shard is due
        if self._calls < self._interval:
            return False
        self.episodes = loader.take()
        self._calls, self._current, self._loader = 0, self._next, None
        self._load_next()
        return True

    def close(self) -> None:
        """Wait for the thread, and let go of what it read."""
        if self._loader is not None:
            self._loader.join()
            self._loader = None

    def __enter__(self) -> ShardedSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_number(self, current: int | None) -> int:
        """Of the shard after `current`."""
        if not self._order:
            self._order = [int(i) for i in self._rng.permutation(len(self.files))]
            if self._order[0] == current and len(self._order) > 1:
                self._order.append(self._order.pop(0))
        return self._order.pop(0)

    def _load_next(self) -> None:
        if len(self.files) > 1:
            self._next = self._next_number(self._current)
            number = self._next
            self._loader = _Loader(lambda: self._read(number), f"shard {self.files[number].name}")
            self._loader.start()

    def _read(self, number: int) -> list[Episode]:
        source = self._open(self.files[number], self._options)
        return [materialised(source.read(key)) for key in source.keys()]
