"""Writers of episodes in this project's HDF5 layout: a record sink for live episodes, and a target of conversions."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

from serl_chunk.data.formats.hdf5 import write_episode, write_file
from serl_chunk.data.frames import with_repeated_frames
from serl_chunk.data.source import Json
from serl_chunk.data.validate import check_shapes, shapes_of
from serl_chunk.io import folder_fault, fsync_path
from serl_chunk.types import Begin, ConfigError, DataError, End, Episode, RobotSpec, Step, StepBlock

_Closed = tuple[Begin, list[Step], End]  # an episode to be written


class EpisodeWriter:
    """Collects records and writes each closed episode that `keep` accepts to `directory/episode_<i>.hdf5`.

    Numbers continue after the highest one in the folder. No file is overwritten; several writers may share a folder.
    No record call waits for the disk: a thread calls `keep`, builds and writes the files, so the caller must not change
    the arrays afterwards. A failed write is raised by the next `begin`, `flush` or `close`, and its episode stays in
    memory for `again`; a with-statement closes.

    Raises ConfigError where the folder cannot be created.
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
        self.written: list[Path] = []
        self._thread = ThreadPoolExecutor(1, "episode-writer")
        self._writes: list[tuple[Future[None], _Closed]] = []
        self._failed: list[_Closed] = []

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
            self._submit((self._begin, self._steps, record))
        self._begin, self._steps = None, []

    def flush(self) -> None:
        """Wait until every closed episode is on disk. Raises the error of a failed write."""
        wait([write for write, _ in self._writes])
        self._raise_failure()

    def again(self) -> None:
        """Queue the writes that failed once more."""
        failed, self._failed = self._failed, []
        for closed in failed:
            self._submit(closed)

    def close(self) -> None:
        """Finish all writes and stop the thread; an open episode is dropped. May be called again."""
        self._thread.shutdown()
        self._raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, closed: _Closed) -> None:
        self._writes.append((self._thread.submit(self._write, *closed), closed))

    def _raise_failure(self) -> None:
        done = list(itertools.takewhile(lambda write: write[0].done(), self._writes))
        self._writes = self._writes[len(done) :]  # they end in their order
        failed = [(error, closed) for write, closed in done if (error := write.exception()) is not None]
        self._failed += [closed for _, closed in failed]
        if failed:
            raise failed[0][0]

    def _write(self, begin: Begin, steps: list[Step], end: End) -> None:
        block = StepBlock.from_steps(begin.episode_id, steps)
        episode = Episode(begin, *with_repeated_frames(block, end))
        if not self._keep(episode):
            return
        while True:
            path = self._directory / f"episode_{self._next}.hdf5"
            with contextlib.suppress(FileExistsError):  # another writer took the number
                write_episode(path, episode, self._spec, sim=self._sim, replace=False)
                self._next += 1
                self.written.append(path)
                return
            self._next += 1


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
                part, episode, self.spec, compress=self.compress, hz=layout["hz"], joints=self.joints, where=where,
                names=layout.get("names"),
            )  # fmt: skip
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return {"number": number}

    def placed(self, layout: Json, staged: list[Json]) -> int:
        for part in self.folder.glob(".staged_*.part"):
            part.unlink()
        return sum(1 for _ in itertools.takewhile(Path.exists, map(self._file, range(len(staged)))))

    def place(self, layout: Json, staged: list[Json]) -> None:
        os.replace(self._part(staged[-1]["number"]), self._file(len(staged) - 1))
        fsync_path(self.folder)

    def finish(self, layout: Json, staged: list[Json]) -> None:
        self.placed(layout, staged)

    def _part(self, number: int) -> Path:
        return self.folder / f".staged_{number}.part"

    def _file(self, index: int) -> Path:
        return self.folder / f"episode_{index}.hdf5"
