"""Conversion of a source's episodes into a data set: in parallel, in order, resumed where it was interrupted."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from serl_chunk.data.convert.manifest import Manifest
from serl_chunk.data.convert.workers import ConversionSpec, EpisodeJob, Pool, RefusedEpisode, Staged, WorkerFault
from serl_chunk.data.source import Json, Sink, Source
from serl_chunk.io import os_faults, plural
from serl_chunk.types import ConfigError, DataError


class Progress(NamedTuple):
    """State of a conversion; frames, bytes and seconds are those of this process."""

    done: int  # episodes decided on, the skipped ones too
    total: int
    skipped: int
    frames: int
    nbytes: int  # of arrays and decoded frames
    seconds: float


class ConversionError(DataError):
    """A conversion stopped. What it has converted is kept, and `resume` continues it."""

    def __init__(self, message: str, *, bad_episode: bool = False) -> None:
        super().__init__(message)
        self.bad_episode = bad_episode  # `skip_bad` leaves it out


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of a conversion, over all the processes that worked on it."""

    episodes: int  # in the data set
    steps: int
    frames: int
    nbytes: int  # of arrays and decoded frames
    already: int  # of the episodes: converted before this process began
    skipped: tuple[RefusedEpisode, ...]
    seconds: float  # of this process


def convert(
    source: Source,
    keys: Sequence[str],
    sink: Sink,
    folder: Path,
    *,
    workers: int = 1,
    resume: bool = False,
    skip_bad: bool = False,
    progress: Callable[[Progress], None] | None = None,
    settings: Json | None = None,
    max_samples: int | None = None,
    tolerance_s: float | None = None,
) -> Report:
    """Put the episodes `keys` of `source` into the data set that `sink` writes to `folder`, in their order.

    Killed at any moment, it is continued by a call with the same arguments and `resume=True`; the data set then is
    that of an uninterrupted conversion, byte for byte where the sink writes the same bytes for the same episode.

    Args:
        workers: processes that read and encode, each one episode at a time; 0 works in this one.
        resume: continue what is in `folder`, if anything is. Otherwise the folder must be empty or absent.
        skip_bad: leave out bad episodes. Otherwise the first ends the conversion, when all before it are done.
        settings: what else the data set depends on (options of source and sink); a resume needs the same.
        max_samples: end with the episode that brings the steps to this number.
        tolerance_s: seconds by which a step's time stamp may leave its place at the rate, counted from the first.

    Raises:
        ConfigError: an argument is out of range, or the folder has other files or a conversion with other settings.
        ConversionError: an episode is bad, its process died, or it could not be written; begins with the file.
        DataError: there is no episode, none can be converted, or the manifest is damaged.
    """
    for name, value, least in (("workers", workers, 0), ("max_samples", max_samples, 1)):
        if value is not None and value < least:
            raise ConfigError(f"must be at least {least}, got {value}", parameter=name)
    if tolerance_s is not None and not tolerance_s > 0:
        raise ConfigError(f"must be above 0 seconds, got {tolerance_s}", parameter="tolerance_s")
    if not keys:
        raise DataError(f"{source.path}: no episodes to convert")
    for path in getattr(source, "parts", ()) or (source.path,):
        if path.resolve() in (folder.resolve(), *folder.resolve().parents):
            raise ConfigError(f"{folder}: lies in {path}, which is read. Choose a folder outside of it")
    wanted = {
        "path": str(source.path.resolve()),
        "format": source.format,
        "hz": source.hz,
        "episodes": len(keys),
        "episodes_digest": hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16],
        "max_samples": max_samples,
        "tolerance_s": tolerance_s,
        **(settings or {}),
    }
    with contextlib.closing(Manifest(folder, wanted, resume=resume)) as manifest:
        conversion = _Conversion(source, keys, sink, manifest, skip_bad, progress, max_samples)
        with os_faults(ConversionError, f"{folder}: cannot be written", "Make room, and resume"):
            if not manifest.of_kind("finished"):
                conversion.prepare()
                conversion.run(workers, tolerance_s)
                conversion.finish()
            return conversion.report()


@dataclasses.dataclass
class _Conversion:
    """A conversion in progress. The episodes before number `self.decided` are placed or skipped."""

    source: Source
    keys: Sequence[str]
    sink: Sink
    manifest: Manifest
    skip_bad: bool
    progress: Callable[[Progress], None] | None
    max_samples: int | None

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.already = len(self.manifest.of_kind("placed"))
        self.frames = self.nbytes = 0

    def prepare(self) -> None:
        if not self.manifest.of_kind("keys"):  # a source may grow or shrink until a resume, which needs these
            self.manifest.append({"kind": "keys", "keys": list(self.keys)})
        if not self.manifest.of_kind("layout"):
            self.manifest.append({"kind": "layout", "layout": self.decide_layout()})
        self.layout: Json = self.manifest.of_kind("layout")[0]["layout"]
        staged = [e["staged"] for e in self.manifest.of_kind("placed")]
        self.already = self.sink.placed(self.layout, staged)
        self.manifest.keep_placed(self.already)
        self.staged: list[Json] = staged[: self.already]  # of the placed episodes
        self.steps = sum(e["steps"] for e in self.manifest.of_kind("placed"))
        self.decided = len(self.staged) + len(self.manifest.of_kind("skipped"))

    def decide_layout(self) -> Json:
        """Return the sink's layout, from the first episode that can be read."""
        first: DataError | None = None
        for key in self.keys:
            try:
                sample = self.source.read(key)
            except DataError as error:
                if not self.skip_bad:
                    raise _bad_episode(error) from error
                first = first or error
            else:
                layout = self.sink.layout(sample, self.source.hz)
                columns = getattr(self.source, "column_names", lambda: ())()  # of foreign arrays: kept, for their order
                fits = [len(names) for names in columns] == [layout["state_dim"], layout["action_dim"]]
                return layout | ({"names": columns} if fits else {})
        raise self.nothing(first)

    def nothing(self, first: object) -> DataError:
        return DataError(f"{self.source.path}: none of its {plural(len(self.keys), 'episode')} is convertible. {first}")

    def run(self, workers: int, tolerance_s: float | None) -> None:
        self.report_progress()
        work = ConversionSpec(self.source, self.sink, self.layout, tolerance_s)
        n = 0 if self.enough() else min(workers, len(self.keys) - self.decided)
        with contextlib.closing(Pool(work, n, self.manifest.descriptor)) as pool:
            self.drive(pool)

    def drive(self, pool: Pool) -> None:
        """Keep the pool busy, at most its window of episodes ahead of the one to be placed next."""
        begun, limit = self.decided, len(self.keys)
        ready: dict[int, Staged | RefusedEpisode] = {}
        while not self.enough():
            while begun < min(limit, self.decided + pool.window) and pool.idle():
                pool.submit(EpisodeJob(begun, self.keys[begun]))
                begun += 1
            for result in pool.results():
                if isinstance(result, WorkerFault):
                    raise (ConfigError if result.is_config else ConversionError)(result.error)
                if isinstance(result, RefusedEpisode) and not self.skip_bad:
                    limit = min(limit, result.job.number)  # it ends the conversion: nothing after it is begun
                ready[result.job.number] = result
            while not self.enough() and self.decided in ready:
                self.decide(ready.pop(self.decided))

    def enough(self) -> bool:
        return self.decided == len(self.keys) or (self.max_samples is not None and self.steps >= self.max_samples)

    def decide(self, result: Staged | RefusedEpisode) -> None:
        number, key = result.job
        if isinstance(result, Staged):
            sizes = {"steps": result.steps, "frames": result.frames, "bytes": result.nbytes}
            self.manifest.append({"kind": "placed", "number": number, "key": key, "staged": result.staged, **sizes})
            self.staged.append(result.staged)
            self.sink.place(self.layout, self.staged)
            self.steps += result.steps
            self.frames += result.frames
            self.nbytes += result.nbytes
        elif not self.skip_bad:
            raise _bad_episode(result.reason)
        else:
            self.manifest.append({"kind": "skipped", "number": number, "key": key, "reason": result.reason})
        self.decided += 1
        self.report_progress()

    def report_progress(self) -> None:
        if self.progress is not None:
            seconds, skipped = time.monotonic() - self.began, self.decided - len(self.staged)
            self.progress(Progress(self.decided, len(self.keys), skipped, self.frames, self.nbytes, seconds))

    def finish(self) -> None:
        if not self.staged:
            raise self.nothing(self.manifest.of_kind("skipped")[0]["reason"])
        self.sink.finish(self.layout, self.staged)
        self.manifest.append({"kind": "finished"})

    def report(self) -> Report:
        placed, skipped = self.manifest.of_kind("placed"), self.manifest.of_kind("skipped")
        return Report(
            episodes=len(placed),
            steps=sum(e["steps"] for e in placed),
            frames=sum(e["frames"] for e in placed),
            nbytes=sum(e["bytes"] for e in placed),
            already=self.already,
            skipped=tuple(RefusedEpisode(EpisodeJob(e["number"], e["key"]), e["reason"]) for e in skipped),
            seconds=time.monotonic() - self.began,
        )


def _bad_episode(reason: object) -> ConversionError:
    return ConversionError(
        f"{reason}\nNothing after this episode was converted. Resume with skip_bad to leave it out", bad_episode=True
    )
