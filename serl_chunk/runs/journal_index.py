"""Index of a run's journal, which takes no lock: where its episodes lie, in segments that the learner may drop.

Undelivered rows, holes, episodes without an end and amendments are treated as by `RecordStore.replay` and the replay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np

from serl_chunk.io import allow_open_files
from serl_chunk.transport.storage import record_store
from serl_chunk.transport.storage.journal import SUFFIX
from serl_chunk.transport.storage.record_store import SessionState
from serl_chunk.transport.storage.segment import Found, scan
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.records import Item
from serl_chunk.types import Amend, Begin, ConfigError, DataError, End, Outcome, Source
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Limits, Message, WireError

_LEFT = 64  # files that the rest of the process may want to open


class JournalFile:
    """One file of a journal. Held, it stays readable when the learner drops it; a pickled copy is not held."""

    def __init__(self, folder: Path, number: int) -> None:
        self.path, self._number, self._fd = folder / f"{number:020d}{SUFFIX}", number, -1

    def __reduce__(self) -> tuple[Any, ...]:
        return JournalFile, (self.path.parent, self._number)

    def __del__(self) -> None:
        self.release()

    def hold(self) -> None:
        """Keep it open from now on. Raises OSError, and ConfigError where this process has too many files open."""
        if self._fd < 0:
            self._fd = _open(self.path)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def pread(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, fewer at its end. Raises OSError; see `error`."""
        if self._fd >= 0:
            return os.pread(self._fd, size, offset)
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), size, offset)

    def read(self, offset: int, size: int, where: str) -> bytes:
        """As `pread`, but raises DataError."""
        try:
            return self.pread(offset, size)
        except OSError as error:
            raise self.error(where, error) from error

    def error(self, where: str, cause: OSError) -> DataError:
        """Return the error of a file that cannot be held or read; the text begins with `where`."""
        if not isinstance(cause, FileNotFoundError):
            return DataError(f"{where}: {self.path} cannot be read: {cause.strerror}")
        dropped = "was dropped by the learner, whose replay does not need it (transport.journal_bytes keeps more)"
        return DataError(f"{where}: {self.path} {dropped}. Leave the episode out (--skip-bad), or list them again")


def _open(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if (limit := allow_open_files(fd + _LEFT)) < fd + _LEFT:
        os.close(fd)
        remedy = "Raise that (ulimit -n), or give a data set that `serl-chunk data export` wrote"
        raise ConfigError(f"{path.parent}: needs more open files than the {limit} this process may have. {remedy}")
    return fd


LIMITS = Limits(1 << 40, 1 << 16)  # the learner that accepted these messages had its own


@dataclasses.dataclass(frozen=True)
class EpisodeIndexEntry:
    """A closed episode of the journal."""

    key: str  # SESSION/EPISODE
    actor_id: str
    places: np.ndarray  # int64[K, 3]: segment, offset and size of its entries, in order
    ended: bool  # its End is the last of them; False: its actor died, or what followed is lost
    length: int  # steps
    human_steps: int
    end: End  # without its arrays, not amended
    task: str = ""
    rewards: float = 0.0  # sum of those of its steps, and ...
    last_reward: float = 0.0  # ... of the last one, both as recorded with the steps
    lowest_q: float | None = None  # of its decisions' best candidates; None where they recorded no value
    amends: tuple[Amend, ...] = ()
    demonstration: bool = False  # streamed by `record --ip`: no actor's episode

    @property
    def outcome(self) -> Outcome:
        return self.corrected_end.outcome

    @property
    def corrected_end(self) -> End:
        end = self.end
        for amend in self.amends:
            end = amend.correct(end)
        return end

    @property
    def episode_return(self) -> float:
        """Sum of the rewards, the last one as it was corrected."""
        reward = self.corrected_end.reward
        return self.rewards if reward is None else self.rewards - self.last_reward + reward


class Index(NamedTuple):
    """Closed episodes in the order of their ends, so that a run that goes on appends; and what is not among them."""

    episodes: dict[str, EpisodeIndexEntry]
    counts: Counter[str]  # see `error_summaries`
    segments: tuple[tuple[int, int], ...]  # number and size of the files it was made from


_TEXTS = {
    "open": "episodes were not over yet: left out; export again for them",
    "died": "episodes have no end, because their actor died in them: they end as truncated",
    "cut": "episodes lack what followed, because records are damaged or lost: they end as truncated, there",
    "empty": "episodes without a step: left out",
    "unfinished": "demonstrations have no end, because their recording died in them: left out",
    "discarded": "episodes were discarded by a correction: left out",
    "orphans": "steps belong to no whole episode (dropped with old segments, or never delivered): left out",
    "twice": "episodes began twice in one session: the first is kept",
    "amends": "corrections are of episodes that are not here, not over, or not whole: ignored",
    "unreadable": "entries of the journal are no records: skipped",
    "damaged": "damaged stretches of the journal: skipped",
    "vanished": "segments of the journal were dropped by the learner meanwhile",
}


def error_summaries(counts: Counter[str]) -> list[str]:
    """Return a line for each kind of error in an index."""
    return [f"{counts[name]} {text}" for name, text in _TEXTS.items() if counts[name]]


def segments_of(folder: Path) -> list[tuple[int, int]]:
    """Return number and size of the journal's files, oldest first; those that vanish meanwhile are left out."""
    out = []
    for path in sorted(p for p in folder.glob(f"*{SUFFIX}") if re.fullmatch("[0-9]{20}", p.stem)):
        with contextlib.suppress(FileNotFoundError):
            out.append((int(path.stem), path.stat().st_size))
    return out


def read_index(folder: Path) -> Index:
    """Index the journal in `folder`, one segment in memory at a time; raises DataError for an unreadable one."""
    pass_, segments = _Pass(), segments_of(folder)
    for number, _ in segments:
        path = JournalFile(folder, number).path
        for found in _entries(path, last=number == segments[-1][0], counts=pass_.counts):
            pass_.take(number, found)
    pass_.counts["open"] += sum(not e.discarded for e in pass_.open.values())
    return Index(pass_.closed, pass_.counts, tuple(segments))


def _entries(path: Path, *, last: bool, counts: Counter[str]) -> Iterator[Found]:
    try:
        for found in scan(path):
            if isinstance(found, Found):
                yield found
            elif not (found.torn and last):  # a learner that is writing has a torn tail
                counts["damaged"] += 1
    except DataError:
        if path.exists():
            raise
        counts["vanished"] += 1


class _Block(NamedTuple):
    """The figures of a block of steps."""

    steps: int
    human: int
    rewards: float
    last_reward: float
    lowest_q: float | None

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> _Block:
        columns, q = records.columns_in(arrays["columns"]), arrays.get("values/decision/q")
        source, reward = columns["source"], columns["reward"]
        human = int((source == Source.HUMAN).sum())
        return cls(len(source), human, float(reward.sum()), float(reward[-1]), None if q is None else lowest_value(q))


def lowest_value(q: np.ndarray) -> float | None:
    """Return the lowest of the decisions' values [M] or [M, candidates], of which the best was executed; None if none.

    Values that are no numbers are left out.
    """
    if not q.size:
        return None
    best = np.asarray(q, np.float64).reshape(len(q), -1).max(1)
    finite = best[np.isfinite(best)]
    return float(finite.min()) if len(finite) else None


@dataclasses.dataclass
class _Open:
    begin: Begin
    actor_id: str
    places: list[tuple[int, int, int]]
    blocks: list[_Block] = dataclasses.field(default_factory=list)
    length: int = 0
    discarded: bool = False

    def take_back(self) -> None:
        if self.blocks:
            self.places.pop()
            self.length -= self.blocks.pop().steps

    def entry(self, key: str, end: End, *, ended: bool) -> EpisodeIndexEntry:
        places = np.array(self.places, np.int64).reshape(-1, 3)
        human = sum(block.human for block in self.blocks)
        values = [block.lowest_q for block in self.blocks if block.lowest_q is not None]
        rewards, last = sum(block.rewards for block in self.blocks), self.blocks[-1].last_reward
        return EpisodeIndexEntry(key, self.actor_id, places, ended, self.length, human, end, self.begin.task,
                                 rewards, last, min(values, default=None),
                                 demonstration=self.begin.demonstration)  # fmt: skip


class _Pass:
    """The state of one pass, which follows sessions by their sequence numbers, as the learner's own restart does."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._states: dict[str, SessionState] = {}
        self.open: dict[str, _Open] = {}
        self.closed: dict[str, EpisodeIndexEntry] = {}
        self._cut: set[str] = set()  # keys of closed episodes that lack what followed

    def take(self, segment: int, found: Found) -> None:
        try:
            tag, *values = msgpack.unpackb(found.frames[0])
            if tag == record_store.TABLE:
                for state in map(SessionState.from_row, values[0]):
                    self._table(state)
                return
            if tag == record_store.RETIRED:
                return
            if tag == record_store.CORRECTION:
                session, _, amend = record_store.read_correction(values, found.frames[1:], LIMITS)
                self._amend(session, amend)
                return
            state = SessionState.from_row(values[0])
            if tag == record_store.PLACE:
                self._give_up(state)
                return
            if tag != record_store.RECORD:
                raise ValueError(f"an entry of kind {tag}")
            delivered = bool(values[1])
            message = codec.decode(found.frames[1:], LIMITS)
            n = len(message.arrays["action"]) if message.kind == records.STEPS else 1
            item = Item(message.kind, state.expected, n, codec.text(message.header, "episode_id"))
        except (WireError, ValueError, TypeError, LookupError, msgpack.UnpackException):
            self.counts["unreadable"] += 1  # what follows of its session does not follow: a hole
            return
        session, known = state.session, self._states.get(state.session)
        if known is None or known.expected != state.expected:
            self._hole(session)
        self._states[session] = state.after(item, delivered=delivered)
        if not delivered:
            self.counts["orphans"] += item.steps
            return
        try:
            self._record(session, state.actor_id, message, (segment, found.offset, found.size))
        except (WireError, LookupError, ValueError, TypeError):
            self.counts["unreadable"] += 1
            self._hole(session)

    def _table(self, state: SessionState) -> None:
        known = self._states.get(state.session)
        if known is None or known.expected < state.expected:
            self._hole(state.session)  # entries between were damaged or dropped
            self._states[state.session] = state

    def _give_up(self, state: SessionState) -> None:
        """Continue a session at `state`, to which no record led: its open episode has no end."""
        # The learner refused the newest steps where fewer were delivered than were written down.
        known, episode = self._states.get(state.session), self.open.get(state.session)
        if episode is not None and known is not None and state.steps < known.steps:
            episode.take_back()
        self._states[state.session] = state
        self._hole(state.session, why="died")

    def _record(self, session: str, actor_id: str, message: Message, place: tuple[int, int, int]) -> None:
        if message.kind == records.STEPS:
            self._steps(session, message, place)
            return
        _, record = records.decode_record(message._replace(arrays={}))
        if isinstance(record, Begin):
            if session in self.open:
                self._close(session, None)
            key = f"{session}/{record.episode_id}"
            if key in self.closed:
                self.counts["twice"] += 1
            else:
                self.open[session] = _Open(record, actor_id, [place])
        elif isinstance(record, Amend):
            self._amend(session, record)
        elif isinstance(record, End):
            episode = self.open.get(session)
            if episode is None or episode.begin.episode_id != record.episode_id:
                return
            if record.length != episode.length:
                self._hole(session)
            else:
                episode.places.append(place)
                self._close(session, record)

    def _steps(self, session: str, message: Message, place: tuple[int, int, int]) -> None:
        episode, steps = self.open.get(session), len(message.arrays["action"])
        if episode is None or episode.begin.episode_id != codec.text(message.header, "episode_id"):
            self.counts["orphans"] += steps
        elif codec.count(message.header, "first_tick") != episode.length:
            self.counts["orphans"] += steps
            self._hole(session)
        else:
            episode.blocks.append(_Block.of(message.arrays))
            episode.places.append(place)
            episode.length += steps

    def _hole(self, session: str, why: str = "cut") -> None:
        """Close the session's episode where records of it are missing: a hole is never closed up."""
        if session in self.open:
            self._cut.add(f"{session}/{self.open[session].begin.episode_id}")
            self._close(session, None, why)

    def _close(self, session: str, end: End | None, why: str = "died") -> None:
        episode = self.open.pop(session)
        name, key = episode.begin.episode_id, f"{session}/{episode.begin.episode_id}"
        if episode.discarded:
            self.counts["discarded"] += 1
        elif not episode.length:
            self.counts["empty"] += 1
        elif episode.begin.demonstration and end is None:  # it never entered the replay, and is sent again
            self.counts["unfinished"] += 1
        else:
            self.counts[why] += end is None
            died = End(name, episode.length, None, False, True, Outcome.UNKNOWN, "learner")
            self.closed[key] = episode.entry(key, end or died, ended=end is not None)

    def _amend(self, session: str, amend: Amend) -> None:
        key, episode = f"{session}/{amend.episode_id}", self.open.get(session)
        if key in self.closed and amend.discard:
            del self.closed[key]
            self.counts["discarded"] += 1
        elif key in self.closed and key not in self._cut:
            old = self.closed[key]
            self.closed[key] = dataclasses.replace(old, amends=(*old.amends, amend))
        elif episode is not None and episode.begin.episode_id == amend.episode_id and amend.discard:
            episode.discarded = True
        else:
            self.counts["amends"] += 1
