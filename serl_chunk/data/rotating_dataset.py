"""A data set larger than memory: a folder of OGBench's shards, of which one at a time is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np

from serl_chunk.data.demos import check_rate
from serl_chunk.data.formats.ogbench import OgbenchSource, shard_files
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import ConfigError, Episode


def _start(read: Callable[[], list[Episode]], name: str) -> Future[list[Episode]]:
    """Read one shard in a thread that does not keep the process alive."""
    future: Future[list[Episode]] = Future()

    def run() -> None:
        try:
            future.set_result(read())
        except BaseException as error:  # raised again by `result`, in the thread that needs the shard
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class ShardedSource:
    """The episodes of one shard of a folder, and of another one later.

    Every `replace_interval` calls of `advance` the next shard, which a thread has read meanwhile, replaces the current
    one. So at most two are in memory, if the caller keeps no reference to the previous one; one, in addition to the
    caller's copy, if the caller takes the episodes with `take`. A single shard is never replaced, and no thread runs.

    The order of the shards is drawn for every pass from `seed`, each shard once a pass and none twice in a row.

    Args:
        folder: .npz files of OGBench; `*-val.npz` are left out.
        options: of every shard; `proportion` is that of its steps.
        updates: start as after so many calls of `advance`, for a resumed run; the shards before are not read.
    """

    def __init__(
        self, folder: Path | str, options: ReadOptions, *, replace_interval: int, seed: int = 0, updates: int = 0
    ) -> None:
        if replace_interval < 1:
            raise ConfigError(f"must be at least 1 update, got {replace_interval}", parameter="replace_interval")
        self.path = Path(folder).expanduser()
        self.files = shard_files(self.path)
        self._options, self._interval = options, replace_interval
        self._rng = np.random.default_rng(seed)
        self._order: list[int] = []  # the shards of the first so many turns
        self._turn, self._calls = divmod(updates, self._interval)
        self._next: Future[list[Episode]] | None = None
        self.notes: list[str] = []  # of the first shard that was read; the others are of its kind
        self.episodes = self._read(self._turn)  # of the shard in use; none after `take`
        self._load_next()

    @property
    def current(self) -> Path:
        return self.files[self._number(self._turn)]

    @property
    def updates_left(self) -> int | None:
        """Updates up to the next shard; None where there is one alone."""
        return None if self._next is None else max(1, self._interval - self._calls)

    def advance(self) -> bool:
        """Count one update; return True where `episodes` now are those of another shard.

        Waits only where the next shard is due and not read yet. Raises DataError as soon as the next shard is found
        unreadable; the current one stays.
        """
        self._calls += 1
        if self._next is None:
            return False
        if self._next.done():
            self._next.result()  # raises an error at once, not only when the shard is due
        if self._calls < self._interval:
            return False
        self.episodes = self._next.result()
        self._turn, self._calls, self._next = self._turn + 1, 0, None
        self._load_next()
        return True

    def seek(self, updates: int) -> None:
        """Continue as after `updates` calls of `advance`, for a resumed run, without reading the shards between.

        Raises DataError where the shard cannot be read.
        """
        turn, self._calls = divmod(updates, self._interval)
        if self._next is not None and turn != self._turn:
            self.close()
            self._turn, self.episodes = turn, []  # first, so that there never are three
            self.episodes = self._read(turn)
            self._load_next()

    def take(self) -> list[Episode]:
        """Return the episodes of the current shard and drop them here: for a caller that copies them."""
        taken, self.episodes = self.episodes, []
        return taken

    def close(self) -> None:
        if self._next is not None:
            wait([self._next])
            self._next = None

    def _number(self, turn: int) -> int:
        while len(self._order) <= turn:
            order = [int(i) for i in self._rng.permutation(len(self.files))]
            if order[:1] == self._order[-1:] and len(order) > 1:
                order.append(order.pop(0))
            self._order += order
        return self._order[turn]

    def _load_next(self) -> None:
        if len(self.files) > 1:
            turn = self._turn + 1
            self._next = _start(lambda: self._read(turn), f"shard {self.files[self._number(turn)].name}")

    def _read(self, turn: int) -> list[Episode]:
        source = OgbenchSource(self.files[self._number(turn)], self._options)
        episodes = [source.read(key) for key in source.keys()]
        if self._options.spec is not None:
            check_rate(source, self._options.spec)
        self.notes = self.notes or source.notes()
        return episodes
