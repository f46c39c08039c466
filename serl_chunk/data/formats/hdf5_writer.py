"""Writers of episodes in this project's HDF5 layout: a record sink for live episodes, and a target of conversions."""

from __future__ import annotations

import dataclasses
import os
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from serl_chunk.data.formats.hdf5 import read_episode, write_episode, write_file
from serl_chunk.data.frames import with_repeated_frames
from serl_chunk.data.source import Json
from serl_chunk.data.validate import check_shapes, shapes_of
from serl_chunk.io import folder_fault, fsync_path
from serl_chunk.types import Amend, Begin, ConfigError, DataError, End, Episode, RobotSpec, Step, StepBlock

_Closed = tuple[Begin, list[Step], End]


class EpisodeWriter:
    """Collects records and writes each closed episode that `keep` accepts to `directory/episode_<i>.hdf5`.

    Numbers continue after the highest one in the folder. No file is overwritten except by an `Amend` of its own
    episode; several writers may share a folder. No record call waits for the disk: a thread builds and writes the
    files, so the caller must not change the arrays afterwards. `flush` waits for it. A failed write is raised by the
    next `begin`, `flush` or `close`; a with-statement closes.

    `keep` is called in the writer's thread with each closed episode, and again after an `Amend` of it. Raises
    ConfigError where the folder cannot be created.
    """

    def __init__(
        self,
        directory: Path | str,
        spec: RobotSpec,
        *,
        keep: Callable[[Episode], bool] = lambda episode: True,
        sim: bool | None = None,
    ) -> None:
        self._directory, self._spec, self._keep, self._sim = Path(directory), spec, keep, sim
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(folder_fault(self._directory, error)) from error
        taken = (re.fullmatch(r"episode_(\d+)\.hdf5", p.name) for p in self._directory.iterdir())
        self._next = max((int(match[1]) for match in taken if match), default=-1) + 1
        self._begin: Begin | None = None
        self._steps: list[Step] = []
        self._written: dict[str, Path] = {}  # episode id -> file
        self._rejected: Episode | None = None  # the latest one: an amendment can still accept it
        self._rejected_count = 0
        self._failure: Exception | None = None
        self._work: queue.SimpleQueue[_Closed | Amend | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="episode-writer", daemon=True)
        self._thread.start()

    @property
    def written(self) -> list[Path]:
        return list(self._written.values())

    @property
    def rejected(self) -> int:
        """Closed episodes that `keep` refused or an amendment discarded; final after `flush`."""
        return self._rejected_count

    def begin(self, record: Begin) -> None:
        self._raise_failure()
        if self._begin is not None:
            raise DataError(f"episode {record.episode_id} begins before the end of {self._begin.episode_id}")
        self._begin, self._steps = record, []

    def step(self, record: Step) -> None:
        if self._begin is None:
            raise DataError(f"step {record.tick} belongs to no open episode")
        self._steps.append(record)

    def end(self, record: End) -> None:
        """Close the open episode and queue it for the thread; an episode without steps is dropped."""
        if self._begin is None or self._begin.episode_id != record.episode_id:
            opened = "none" if self._begin is None else self._begin.episode_id
            raise DataError(f"the end of episode {record.episode_id} does not match the open one ({opened})")
        if self._steps:
            self._work.put((self._begin, self._steps, record))
        self._begin, self._steps = None, []

    def amend(self, record: Amend) -> None:
        """Correct an episode of this writer: its file is rewritten, or removed where `keep` no longer accepts it.

        A rejected episode can be corrected until the next one is rejected.
        """
        self._work.put(record)

    def flush(self) -> None:
        """Wait until everything queued is on disk. Raises the error of a failed write."""
        done = threading.Event()
        self._work.put(done)
        while not done.wait(1.0):
            if not self._thread.is_alive():  # closed: what was queued before is done
                break
        self._raise_failure()

    def close(self) -> None:
        """Finish all writes and stop the thread; an open episode is dropped. May be called again."""
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join()
        self._raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                if isinstance(item, Amend):
                    self._apply(item)
                else:
                    begin, steps, end = item
                    block = StepBlock.from_steps(begin.episode_id, steps)
                    self._store(Episode(begin, *with_repeated_frames(block, end)))
            except Exception as error:  # raised to the caller: see _raise_failure
                self._failure = self._failure or error

    def _store(self, episode: Episode) -> None:
        if not self._keep(episode):
            self._rejected, self._rejected_count = episode, self._rejected_count + 1
            return
        path = None
        while path is None:
            path = self._directory / f"episode_{self._next}.hdf5"
            self._next += 1
            try:
                write_episode(path, episode, self._spec, sim=self._sim, replace=False)
            except FileExistsError:  # another writer took the number
                path = None
        self._written[episode.begin.episode_id] = path

    def _apply(self, amend: Amend) -> None:
        path = self._written.get(amend.episode_id)
        if path is not None:
            episode = amended(read_episode(path, self._spec), amend)
            if amend.discard or not self._keep(episode):
                path.unlink()
                del self._written[amend.episode_id]
                self._rejected, self._rejected_count = episode, self._rejected_count + 1
            else:
                write_episode(path, episode, self._spec, sim=self._sim)
        elif self._rejected is not None and self._rejected.begin.episode_id == amend.episode_id:
            if not amend.discard:
                episode, self._rejected = amended(self._rejected, amend), None
                self._rejected_count -= 1
                self._store(episode)
        else:
            raise DataError(f"episode {amend.episode_id}: cannot amend it, this writer has not written it")


def amended(episode: Episode, amend: Amend) -> Episode:
    """Return `episode` with the fields that `amend` gives, except `discard`, on which the caller acts."""
    return episode._replace(end=amend.correct(episode.end))


@dataclasses.dataclass(frozen=True)
class Hdf5Sink:
    """A `data.source.Sink` that writes `folder/episode_<index>.hdf5`, from 0 on.

    An episode is staged as a hidden file of the same folder and renamed when its index is known. The same episode
    always becomes the same bytes.
    """

    folder: Path
    spec: RobotSpec | None = None  # for its layout (state values that are joints) and rate
    compress: bool = False  # gzip the frames, see `hdf5.write_episode`
    joints: tuple[int, ...] | None = None  # the state values that are joints, for `spec` None

    def layout(self, sample: Episode, hz: float | None) -> Json:
        return {"hz": hz, **shapes_of(sample)}

    def stage(self, layout: Json, number: int, episode: Episode) -> Json:
        where = f"episode {episode.begin.episode_id}"
        check_shapes(where, episode, layout)
        part = self._part(number)
        part.unlink(missing_ok=True)
        try:
            write_file(
                part, episode, self.spec, compress=self.compress, hz=layout["hz"], joints=self.joints, where=where
            )
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return {"number": number}

    def placed(self, layout: Json, staged: list[Json]) -> int:
        for part in self.folder.glob(".staged_*.part"):
            part.unlink()
        there = (self._file(index).exists() for index in range(len(staged)))
        return next((index for index, is_there in enumerate(there) if not is_there), len(staged))

    def place(self, layout: Json, index: int, staged: Json) -> None:
        os.replace(self._part(staged["number"]), self._file(index))
        fsync_path(self.folder)

    def finish(self, layout: Json, staged: list[Json]) -> None:
        self.placed(layout, staged)

    def _part(self, number: int) -> Path:
        return self.folder / f".staged_{number}.part"

    def _file(self, index: int) -> Path:
        return self.folder / f"episode_{index}.hdf5"
