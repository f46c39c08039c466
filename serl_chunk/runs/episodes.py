"""Episodes of a run: what its actors recorded, read from the journal while the learner may be writing it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.data.demos import DemoSet, Origin, content_digest, file_digest, file_of
from serl_chunk.data.formats import open_one
from serl_chunk.data.frames import Frames, decode_image, with_repeated_frames
from serl_chunk.data.source import Format, ReadOptions, Source, take_fraction
from serl_chunk.data.validate import check_episode
from serl_chunk.runs import journal_index
from serl_chunk.runs.folder import CONFIG, RUN_LOCK, read_config, read_json
from serl_chunk.runs.journal_index import LIMITS, EpisodeIndexEntry, Index, JournalFile, segments_of
from serl_chunk.transport.storage import segment
from serl_chunk.transport.wire import records
from serl_chunk.types import (
    IMAGE_PREFIX,
    Amend,
    Begin,
    ConfigError,
    DataError,
    End,
    Episode,
    RobotSpec,
    SparseRows,
    StepBlock,
)
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Message, WireError

JOURNAL = Path("journal") / "online"  # in the run folder
DEMOS = "demos.json"  # in the run folder
_OPTIONS = (  # of ReadOptions
    "color", "hz", "success", "scores", "reward_every_step", "env", "env_if_judged", "env_reward", "solved", "task",
    "fields",
)  # fmt: skip


class FrameLocation(NamedTuple):
    """Where the bytes of one frame lie: in a file, or here where the message held them in its header."""

    segment: int  # names the file
    offset: int
    size: int
    jpeg: bool  # a JPEG file; else the pixels
    data: bytes | None = None


class JournalFrames(Frames):
    """Frames [H, W, 3] in the segments of a journal, old ones of which are dropped unless they are held."""

    def __init__(
        self, shape: tuple[int, int, int], pieces: list[FrameLocation], segments: Mapping[int, JournalFile], where: str
    ) -> None:
        super().__init__(shape, np.arange(len(pieces)))
        self._pieces, self._where = pieces, where
        self._segments = {n: segments[n] for n in {p.segment for p in pieces if p.data is None}}

    def decode(self, at: int) -> np.ndarray:
        piece, shape = self._pieces[at], self.shape[1:]
        data = self._read(piece)
        if piece.jpeg:
            return decode_image(data, f"{self._where}, frame {at}", shape)
        return np.frombuffer(data, np.uint8).reshape(shape)

    def encoded_at(self, at: int) -> bytes | None:
        piece = self._pieces[at]
        return self._read(piece) if piece.jpeg else None

    def _read(self, piece: FrameLocation) -> bytes:
        if piece.data is not None:
            return piece.data
        file = self._segments[piece.segment]
        data = file.read(piece.offset, piece.size, self._where)
        if len(data) != piece.size:
            raise DataError(f"{self._where}: {file.path} ends inside a frame; it was cut since it was indexed")
        return data


class RunSource:
    """The closed episodes of a run's journal, as the learner's replay has them, in the order in which they ended.

    Images are read when they are looked at, which fails once the learner has dropped their segments, unless they are
    held (`hold`). `keys` indexes the journal, again where it has grown. Of `options`, `spec` (None takes the run's),
    `cameras`, `task` and `proportion` are used. Raises ConfigError where the folder is no run, or has no journal.
    """

    format = "run"

    def __init__(self, path: Path | str, options: ReadOptions | None = None) -> None:
        self.path, self.options = Path(path), options or ReadOptions()
        self.spec = spec_of_run(self.path)
        self.hz: float | None = self.spec.control_hz
        if self.options.hz is not None and not math.isclose(self.options.hz, self.hz, rel_tol=1e-6):
            text = f"this run took {self.hz:g} steps a second, not {self.options.hz:g}"
            raise ConfigError(f"{self.path}: {text}. Leave --hz out")
        self._folder = self.path / JOURNAL
        self._index: Index | None = None
        self._held: dict[int, JournalFile] | None = None  # where segments are held: all of them, by number
        if not self._folder.is_dir():
            kept = "a learner keeps one with transport.journal=True, --local does not"
            raise ConfigError(f"{self.path}: this run has no journal ({JOURNAL}), and so no episodes: {kept}")
        unknown = set(self.options.cameras or ()) - {c.name for c in self.spec.cameras}
        if unknown:
            has = ", ".join(c.name for c in self.spec.cameras) or "none"
            raise ConfigError(f"{self.path}: robot {self.spec.name} has no camera {min(unknown)!r}; it has: {has}")

    def keys(self) -> list[str]:
        """See data.source.Source: SESSION/EPISODE."""
        if self._index is None or self._index.segments != tuple(segments_of(self._folder)):
            self._hold()
            self._index = journal_index.read_index(self._folder)
            self._hold()  # those that the learner began meanwhile
        keys = list(self._index.episodes)
        return keys if self.options.proportion == 1 else take_fraction(keys, self.options.proportion)

    def hold(self) -> None:
        """Keep the segments that `keys` finds from now on open, so that the learner may drop them."""
        self._held, self._index = {}, None

    def _hold(self) -> None:
        if self._held is None:
            return
        for number, _ in segments_of(self._folder):
            with contextlib.suppress(FileNotFoundError):  # dropped this moment: its episodes are not listed
                self._held.setdefault(number, JournalFile(self._folder, number)).hold()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": None}

    def notes(self) -> list[str]:
        """Return what is not among the episodes that `keys` gave last, and why."""
        return journal_index.error_summaries(self._indexed().counts)

    def about(self, key: str) -> EpisodeIndexEntry:
        """Return the index entry of an episode: outcome, steps, human steps. Raises DataError for another key."""
        episodes = self._indexed().episodes
        if key not in episodes:
            raise DataError(f"{self.path}: the journal has no closed episode {key}; list its episodes again")
        return episodes[key]

    def amended(self, key: str, amend: Amend) -> None:
        """Note a correction that this process appended to the journal, without indexing it again."""
        episodes = self._indexed().episodes
        if amend.discard:
            episodes.pop(key, None)
        else:
            entry = self.about(key)
            episodes[key] = dataclasses.replace(entry, amends=(*entry.amends, amend))

    def _indexed(self) -> Index:
        if self._index is None:
            self.keys()
        assert self._index is not None
        return self._index

    def read(self, key: str) -> Episode:
        """See data.source.Source. Raises DataError also where the learner dropped the episode meanwhile."""
        entry, where = self.about(key), f"{self.path}: episode {key}"
        begin: Begin | None = None
        end, blocks, frames = entry.end, [], _Images(where, self.spec, self.options.cameras)
        try:
            with contextlib.ExitStack() as stack:
                segments = {number: self._segment(stack, number, where) for number in set(entry.places[:, 0].tolist())}
                for place in entry.places.tolist():
                    message = self._fetch(segments, place, where, frames)
                    _, record = records.decode_record(message)
                    if isinstance(record, Begin):
                        begin = record
                    elif isinstance(record, StepBlock):
                        blocks.append(record)
                    elif isinstance(record, End):
                        end = record
            assert begin is not None
            episode = assembled(begin, blocks, end, frames.rows(segments))
        except WireError as error:
            raise DataError(f"{where}: an entry of the journal is no record: {error}; leave it out") from error
        for amend in entry.amends:
            episode = episode._replace(end=amend.correct(episode.end))
        if self.options.task and not begin.task:
            episode = episode._replace(begin=begin._replace(task=self.options.task))
        check_episode(where, episode, self.options.spec or self.spec)
        return episode

    def _segment(self, stack: contextlib.ExitStack, number: int, where: str) -> JournalFile:
        if self._held is not None and number in self._held:
            return self._held[number]
        file = JournalFile(self._folder, number)
        try:
            file.hold()
        except OSError as error:
            raise file.error(where, error) from error
        stack.callback(file.release)
        return file

    def _fetch(self, segments: dict[int, JournalFile], place: list[int], where: str, frames: _Images) -> Message:
        number, offset, size = place
        file = segments[number]
        data = file.read(offset, size, where)
        found = segment.parse(data, segment.salts(file.pread))
        if found is None:
            raise DataError(f"{where}: {file.path} is damaged at byte {offset}")
        message = codec.decode(found.frames[1:], LIMITS)
        if message.kind == records.STEPS:
            return frames.take(message, number, offset, data)
        if message.kind == records.END and self.options.cameras is not None:
            wanted = {f"{g}{IMAGE_PREFIX}{c}" for g in ("", "jpeg/") for c in self.options.cameras}
            kept = {k: v for k, v in message.arrays.items() if IMAGE_PREFIX not in k or k in wanted}
            return message._replace(arrays=kept)
        return message


class _Images:
    """Collects the locations of an episode's frames. `cameras`: None for all."""

    def __init__(self, where: str, spec: RobotSpec, cameras: tuple[str, ...] | None) -> None:
        self._where, self._cameras = where, cameras
        self._shapes: dict[str, tuple[int, ...]] = {IMAGE_PREFIX + c.name: (c.height, c.width, 3) for c in spec.cameras}
        self._pieces: dict[str, list[FrameLocation]] = {}
        self._ticks: dict[str, list[np.ndarray]] = {}

    def take(self, message: Message, number: int, offset: int, data: bytes) -> Message:
        """Return a block of steps without its images. `data` is its entry's, at `offset` of segment `number`."""
        arrays = dict(message.arrays)
        first = codec.count(message.header, "first_tick")
        base = np.frombuffer(data, np.uint8).__array_interface__["data"][0]

        def piece(array: np.ndarray, jpeg: bool) -> FrameLocation:
            at = array.__array_interface__["data"][0] - base
            if 0 <= at < len(data):
                return FrameLocation(number, offset + at, array.nbytes, jpeg)
            return FrameLocation(number, 0, array.nbytes, jpeg, array.tobytes())  # it travelled in the header

        for name in [n for n in arrays if n.startswith(f"index/{IMAGE_PREFIX}")]:
            key, index = name.removeprefix("index/"), arrays.pop(name)
            values = arrays.pop(f"values/{key}", None)
            files, sizes = arrays.pop(f"jpeg/{key}", None), arrays.pop(f"sizes/{key}", None)
            if self._cameras is not None and key.removeprefix(IMAGE_PREFIX) not in self._cameras:
                continue
            if values is not None:
                shape = self._shapes.setdefault(key, values.shape[1:])
                if values.dtype != np.uint8 or values.shape[1:] != shape:
                    raise WireError(f"{key} has frames {values.dtype}{values.shape[1:]} among those of uint8{shape}")
                pieces = [piece(v, False) for v in values]
            elif files is not None and sizes is not None and int(sizes.sum()) == len(files):
                stops = np.cumsum(sizes)
                pieces = [piece(files[b - n : b], True) for n, b in zip(sizes.tolist(), stops.tolist(), strict=True)]
                if key not in self._shapes:
                    self._shapes[key] = decode_image(files[: int(sizes[0])].tobytes(), self._where).shape
            else:
                raise WireError(f"{key} has neither frames nor JPEG files with their sizes")
            if len(pieces) != len(index):
                raise WireError(f"{key} has {len(pieces)} frames for {len(index)} ticks")
            self._pieces.setdefault(key, []).extend(pieces)
            self._ticks.setdefault(key, []).append(first + index)
        return message._replace(arrays=arrays)

    def rows(self, segments: dict[int, JournalFile]) -> dict[str, SparseRows]:
        out = {}
        for key, pieces in self._pieces.items():
            h, w, c = self._shapes[key]
            frames = JournalFrames((h, w, c), pieces, segments, self._where)
            out[key] = SparseRows(np.concatenate(self._ticks[key]).astype(np.int32), frames)
        return out


def assembled(
    begin: Begin, blocks: list[StepBlock], end: End, images: Mapping[str, SparseRows] = MappingProxyType({})
) -> Episode:
    """Join the records of an episode, and add `images`. JPEG images are decoded. Raises WireError."""
    if end.final_observation is not None:
        end = end._replace(final_observation={k: np.asarray(v) for k, v in end.final_observation.items()})
    try:
        steps = StepBlock.join(blocks)
    except DataError as error:
        raise WireError(str(error)) from error
    steps = dataclasses.replace(steps, sparse={**steps.sparse, **images})
    return Episode(begin, *with_repeated_frames(steps, end))


def is_run(path: Path) -> bool:
    """Return whether a folder looks like a run's."""
    return (path / CONFIG).is_file() and ((path / "journal").is_dir() or (path / RUN_LOCK).is_file())


def spec_of_run(path: Path) -> RobotSpec:
    """Return the robot of a run; raises ConfigError."""
    try:
        return RobotSpec.from_json(read_config(path)["robot_spec"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path / CONFIG} does not describe a run's robot ({error!r})") from error


FORMAT = Format("run", is_run, RunSource)


def note_of(demos: DemoSet, options: ReadOptions | None) -> dict[str, Any]:
    """Return the content of `demos.json`: the demonstrations that the current process reads, in their order."""
    options = options or ReadOptions()
    origins = [
        o._asdict() | {"path": str(o.path.expanduser().resolve()), "steps": len(e.steps.action)}
        for o, e in zip(demos.origins, demos.episodes, strict=True)
    ]
    return {"digest": demos.digest, "options": {name: getattr(options, name) for name in _OPTIONS}, "episodes": origins}


class RunDemos:
    """See data.source.Source: the demonstrations of a run's `demos.json`, not cut at their first success.

    A key is an episode's number. Of `options`, `cameras`, `task` and `proportion` are used. Raises ConfigError where
    the run noted none.
    """

    format = "run demonstrations"

    def __init__(self, path: Path | str, options: ReadOptions | None = None):
        self.path, self._given = Path(path), options or ReadOptions()
        self.spec: RobotSpec = spec_of_run(self.path)
        self.hz: float | None = self.spec.control_hz
        noted = read_json(self.path / DEMOS)
        try:
            read = dict(noted["options"])
            for name in ("scores", "fields"):
                read[name] = tuple(map(tuple, read[name]))
            self.options = ReadOptions(**{name: read[name] for name in _OPTIONS})  # with which the run read them
            self._origins = [Origin(Path(e["path"]), e["format"], e["key"], e["digest"]) for e in noted["episodes"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{self.path / DEMOS} is damaged ({error!r})") from error
        self._open: tuple[tuple[Path, str], Source] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    def keys(self) -> list[str]:
        keys = [f"{i:06d}" for i in range(len(self._origins))]
        return take_fraction(keys, self._given.proportion) if keys else keys

    def read(self, key: str) -> Episode:
        """See Source. Raises DataError also where a file is not what it was when the run read it."""
        origin = self._origins[int(key)]
        if not origin.path.exists():
            raise DataError(f"{origin.path}: the demonstration that {self.path} was started with is gone")
        given, at = self._given, (origin.path, origin.format)
        options = dataclasses.replace(
            self.options, spec=given.spec or self.spec, cameras=given.cameras, task=given.task or self.options.task
        )
        if self._open is None or self._open[0] != at:
            self._open = (at, open_one(origin.path, options, origin.format, (FORMAT,)))
        source = self._open[1]
        file, episode = file_of(source, origin.key), source.read(origin.key)
        if (content_digest(episode) if file is None else file_digest(file)) != origin.digest:
            raise DataError(
                f"{origin.path}: episode {origin.key} is not what it was when {self.path} read it: its content changed"
            )
        return episode

    def notes(self) -> list[str]:
        return []
