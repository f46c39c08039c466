"""Converting a source's episodes into a data set: in parallel, in order, and continued where it was interrupted."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from serl_chunk.data.convert.manifest import Manifest
from serl_chunk.data.convert.workers import (
    QUEUED,
    ConversionSpec,
    EpisodeJob,
    ProcessPool,
    RefusedEpisode,
    Result,
    SerialPool,
    Staged,
    WorkerFault,
    WorkerPool,
)
from serl_chunk.data.source import Json, Sink, Source
from serl_chunk.types import ConfigError, DataError


class Progress(NamedTuple):
    """How far a conversion is; frames, bytes and seconds are those of this process."""

    done: int  # episodes decided on, the skipped ones too
    total: int
    skipped: int
    frames: int
    nbytes: int  # of arrays and decoded frames
    seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What a conversion came to, over all the processes that worked on it."""

    episodes: int  # in the data set
    steps: int
    frames: int
    nbytes: int  # of arrays and decoded frames
    already: int  # of the episodes: they were there when this process began
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
        skip_bad: leave episodes out that cannot be converted. Otherwise the first of them ends the conversion, when
            all before it are done.
        progress: called now and then.
        settings: what else the data set depends on (options of source and sink): it is continued with the same only.
        max_samples: end with the episode that brings the steps to this number.
        tolerance_s: seconds by which a step's time stamp may leave its place at the rate, counted from the first.

    Raises:
        ConfigError: the folder is taken, or holds a conversion with other settings; names them.
        DataError: an episode is bad, its process died, or it could not be written; begins with the file.
    """
    if workers < 0:
        raise ConfigError(f"--workers must be at least 0, got {workers}")
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"--max_samples must be at least 1, got {max_samples}")
    if tolerance_s is not None and not tolerance_s > 0:
        raise ConfigError(f"--tolerance_s must be above 0 seconds, got {tolerance_s}")
    if not keys:
        raise DataError(f"{source.path}: no episodes to convert")
    if source.path.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise ConfigError(f"{folder} lies in {source.path}, which is read: choose a folder outside of it")
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
    with Manifest(folder, wanted, resume=resume) as manifest:
        conversion = _Conversion(source, keys, sink, manifest, skip_bad, progress, max_samples)
        try:
            if not manifest.of_kind("finished"):
                conversion.prepare()
                conversion.run(workers, tolerance_s)
                conversion.finish()
            return conversion.report()
        except OSError as error:  # a full disk, where episodes are placed or the data set is described
            raise DataError(
                f"{folder}: cannot be written ({error}). What is converted is kept: make room, and go on with --resume"
            ) from error


class _Conversion:
    """A conversion in progress. Decided are the episodes before number `self.decided`: placed, or skipped."""

    def __init__(
        self,
        source: Source,
        keys: Sequence[str],
        sink: Sink,
        manifest: Manifest,
        skip_bad: bool,
        progress: Callable[[Progress], None] | None,
        max_samples: int | None,
    ) -> None:
        self.source, self.keys, self.sink, self.manifest = source, keys, sink, manifest
        self.skip_bad, self.progress, self.max_samples = skip_bad, progress, max_samples
        self.began = time.monotonic()
        self.layout: Json = {}
        self.already = len(manifest.of_kind("placed"))
        self.frames = self.nbytes = 0

    def prepare(self) -> None:
        """Decide the layout, or find out how far an earlier process came."""
        if not self.manifest.of_kind("keys"):  # a source that grows or shrinks meanwhile: who resumes asks for these
            self.manifest.append({"kind": "keys", "keys": list(self.keys)})
        layout = self.manifest.layout
        if layout is None:
            layout = self.decide_layout()
            self.manifest.append({"kind": "layout", "layout": layout})
        self.layout = layout
        staged = [e["staged"] for e in self.manifest.of_kind("placed")]
        self.already = self.sink.placed(layout, staged)
        self.manifest.keep_placed(self.already)
        self.placed = self.manifest.of_kind("placed")
        self.steps = sum(e["steps"] for e in self.placed)
        self.skipped = len(self.manifest.of_kind("skipped"))
        self.decided = len(self.placed) + self.skipped

    def decide_layout(self) -> Json:
        """The sink's, from the first episode that can be read."""
        first: DataError | None = None
        for key in self.keys:
            try:
                sample = self.source.read(key)
            except DataError as error:
                if not self.skip_bad:
                    raise DataError(f"{error}\n{_HINT}") from error
                first = first or error
            else:
                return self.sink.layout(sample, self.source.hz)
        raise DataError(f"none of the {len(self.keys)} episodes of {self.source.path} can be converted. {first}")

    def run(self, workers: int, tolerance_s: float | None) -> None:
        """Stage what is left and place it, in order."""
        self.tell()
        if self.enough():
            return
        work = ConversionSpec(self.source, self.sink, self.layout, tolerance_s)
        n = min(workers, len(self.keys) - self.decided)
        stagers: WorkerPool = ProcessPool(work, n, self.manifest.descriptor) if n else SerialPool(work)
        try:
            self.drive(stagers, window=max(1, QUEUED * n))
        finally:
            stagers.close()

    def drive(self, stagers: WorkerPool, window: int) -> None:
        """Keep the stagers busy, at most `window` episodes ahead of the one to be placed next."""
        begun, limit = self.decided, len(self.keys)
        ready: dict[int, Result] = {}
        while not self.enough():
            while begun < min(limit, self.decided + window) and stagers.idle():
                stagers.submit(EpisodeJob(begun, self.keys[begun]))
                begun += 1
            for result in stagers.results():
                if isinstance(result, WorkerFault):
                    raise (ConfigError if result.is_config else DataError)(result.error)
                if isinstance(result, RefusedEpisode) and not self.skip_bad:
                    limit = min(limit, result.job.number)  # it ends the conversion: nothing after it is begun
                ready[result.job.number] = result
            while not self.enough() and self.decided in ready:
                self.decide(ready.pop(self.decided))

    def enough(self) -> bool:
        """Whether nothing is left to do."""
        return self.decided == len(self.keys) or (self.max_samples is not None and self.steps >= self.max_samples)

    def decide(self, result: Result) -> None:
        """Place or skip the next episode, or end the conversion with it."""
        number, key = result.job
        if isinstance(result, Staged):
            entry = {
                "kind": "placed",
                "number": number,
                "key": key,
                "staged": result.staged,
                "steps": result.steps,
                "frames": result.frames,
                "bytes": result.nbytes,
            }
            self.manifest.append(entry)
            self.sink.place(self.layout, len(self.placed), result.staged)
            self.placed.append(entry)
            self.steps += result.steps
            self.frames += result.frames
            self.nbytes += result.nbytes
        elif isinstance(result, RefusedEpisode):
            if not self.skip_bad:
                raise DataError(f"{result.reason}\n{_HINT}")
            self.manifest.append({"kind": "skipped", "number": number, "key": key, "reason": result.reason})
            self.skipped += 1
        self.decided += 1
        self.tell()

    def tell(self) -> None:
        """Call `progress`."""
        if self.progress is not None:
            seconds = time.monotonic() - self.began
            self.progress(Progress(self.decided, len(self.keys), self.skipped, self.frames, self.nbytes, seconds))

    def finish(self) -> None:
        """Complete the data set."""
        if not self.placed:
            first = self.manifest.of_kind("skipped")[0]["reason"]
            raise DataError(f"none of the {len(self.keys)} episodes of {self.source.path} can be converted. {first}")
        self.sink.finish(self.layout, [e["staged"] for e in self.placed])
        self.manifest.append({"kind": "finished"})

    def report(self) -> Report:
        """See Report."""
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


_HINT = "Nothing after this episode was converted. Go on without it: --resume --skip-bad"
