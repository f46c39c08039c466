"""The learner's records on disk, each as the message that it arrived in, and the state of every session.

An entry's first frame holds the session's state before the message in the other frames. The first entry of every
segment holds the table of sessions: a restarted learner has the next sequence number of each without older segments.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import itertools
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from serl_chunk.transport.storage.journal import Entry, Journal, JournalError
from serl_chunk.transport.storage.segment import Buffer
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.records import Item
from serl_chunk.types import Amend, ConfigError, Record
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, Limits, WireError

log = logging.getLogger(__name__)

TABLE, RECORD, PLACE, RETIRED, CORRECTION = 0, 1, 2, 3, 4  # an entry's kind
_ROOM_BYTES = 64 << 20
_LOGGED = 3  # unreadable entries that are logged one by one
_UNREADABLE = WireError, ValueError, TypeError, LookupError, msgpack.UnpackException


class Verdict(enum.Enum):
    """The relation of an item to a session's state."""

    NEW = "new"  # it comes next, and belongs to the open episode or needs none
    ORPHAN = "orphan"  # it comes next, and its episode is not open
    DUPLICATE = "duplicate"  # all of its numbers have passed
    GAP = "gap"  # numbers before it are missing


class SessionState(NamedTuple):
    """The progress of a session's stream. The fields are a row of the journal, in this order."""

    session: str
    actor_id: str
    incarnation: int
    expected: int  # next sequence number
    steps: int  # delivered
    steps_offset: int  # steps the actor counts and the learner does not
    open_episode: str | None

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> SessionState:
        """Check a row of a journal. Raises TypeError."""
        state = cls(*row)
        texts = (state.session, state.actor_id, state.open_episode or "")
        if not all(type(x) is str for x in texts) or not all(type(x) is int for x in state[2:6]):
            raise TypeError(f"{row} is no state of a session")
        return state

    def judge(self, item: Item) -> Verdict:
        """Compare an item with this state. Of a NEW or ORPHAN one the numbers below `expected` have passed."""
        if item.first > self.expected:
            return Verdict.GAP
        if item.end <= self.expected:
            return Verdict.DUPLICATE
        follows = item.kind not in (records.STEPS, records.END) or item.episode == self.open_episode
        return Verdict.NEW if follows else Verdict.ORPHAN

    def after(self, item: Item, *, delivered: bool) -> SessionState:
        """Return the state behind a NEW or ORPHAN item. `delivered`: False for one that was journalled only."""
        steps, offset, episode = self.steps, self.steps_offset, self.open_episode
        if item.kind == records.STEPS:
            n = item.end - self.expected
            steps, offset = (steps + n, offset) if delivered else (steps, offset + n)
        elif item.kind == records.BEGIN:
            episode = item.episode
        elif item.kind == records.LOST:
            offset, episode = offset + item.lost_steps, None
        elif item.kind == records.END and delivered:
            episode = None
        return SessionState(*self[:3], item.end, steps, offset, episode)

    def resumed(self, known: SessionState | None) -> SessionState:
        """Return this state for a reader that had come to `known`: after a hole no episode is open."""
        whole = known is not None and known.expected == self.expected
        return self._replace(open_episode=known.open_episode if known and whole else None)


_NOWHERE = SessionState("", "", 0, 0, 0, 0, None)


class Stored(NamedTuple):
    """A record read back."""

    number: int  # of its entry
    session: str
    actor_id: str
    first: int  # sequence number
    record: Record | None  # None: the session's open episode, if it has one, ends here without an End
    delivered: bool  # False: of an episode whose earlier records are not all here


class RecordStore:
    """The learner's journal, see Journal. One thread writes, and none before `find_states`; another may `replay`.

    Args:
        min_steps: the newest steps that are kept, as a restarted learner's replay can hold. Segments with records of
            demonstrations are always kept, and their steps are none of these.
        max_bytes: older segments are dropped beyond it, whatever `min_steps`; 0 drops what `min_steps` does not need.
        max_age: seconds after which a segment is dropped where `min_steps` permits; None for never.
        writer: version of the program, noted at the head of every segment.
        fence, taken_over: see `Journal`.
    """

    def __init__(
        self, folder: Path, limits: Limits, *, min_steps: int = 0, max_bytes: int = 0, max_age: float | None = None,
        sync_interval: float = 1.0, segment_bytes: int = 64 << 20, writer: str = "",
        fence: Callable[[], None] | None = None, taken_over: bool = False,
    ) -> None:  # fmt: skip
        self.states: dict[str, SessionState] = {}  # of each session that sent a record and was not retired
        self._found: list[int] | None = None  # segments of previous processes
        self._holed: dict[str, set[str]] = collections.defaultdict(set)  # session -> episodes that lack something
        self._limits, self._min_steps, self._max_bytes, self._max_age = limits, min_steps, max_bytes, max_age
        self._writer = writer
        self._steps: collections.Counter[int] = collections.Counter()  # in each segment, named by its first entry
        self.journal = Journal(
            folder, segment_bytes=segment_bytes, sync_interval=sync_interval, preamble=self._table, fence=fence,
            taken_over=taken_over,
        )  # fmt: skip
        self._demonstrations: set[tuple[str, str]] = set()  # (session, episode)
        self._kept: set[int] = set()  # segments with records of these
        self.unreadable = 0  # entries that are whole and yet no record

    def find_states(self) -> None:
        """Find where every session stands, so that it may go on: in what follows the newest whole table.

        Raises DataError where a segment cannot be read at all.
        """
        segments, entries = [first for first, _, _ in self.journal.segments], list[Iterator[Entry]]()
        self._found = segments
        newest: dict[str, tuple[SessionState, Entry | None, bool]] = {}
        for first in reversed(segments):
            reading = self.journal.read([first])
            head = next(reading, None)
            if head is not None:
                entries.append(itertools.chain([head], reading))
                with contextlib.suppress(*_UNREADABLE):
                    if msgpack.unpackb(head.frames[0])[0] == TABLE:
                        break
        for entry in itertools.chain(*reversed(entries)):
            with contextlib.suppress(*_UNREADABLE):  # `replay` logs it
                tag, *values = msgpack.unpackb(entry.frames[0])
                if tag == RETIRED:
                    newest.pop(values[0], None)
                elif tag in (TABLE, PLACE, RECORD):
                    for row in values[0] if tag == TABLE else values[:1]:
                        state = SessionState.from_row(row)
                        newest[state.session] = state, entry if tag == RECORD else None, tag == RECORD and values[1]
        for session, (state, record, delivered) in newest.items():
            self.states[session] = state
            if record is not None:
                with contextlib.suppress(*_UNREADABLE):
                    _, found = records.decode_record(codec.decode(record.frames[1:], self._limits))
                    self.states[session] = state.after(Item.of(found, state.expected), delivered=bool(delivered))

    def replay(self) -> Iterator[Stored]:
        """Yield every kept record in the order of arrival; `states` has what was found of each session afterwards.

        Where entries are damaged, or were dropped with their segment, the rest of their episode is not `delivered`: a
        hole in an episode is never closed up. Raises DataError where a segment cannot be read at all.
        """
        if self._found is None:
            self.find_states()
        begun, states = dict(self.states), dict[str, SessionState]()
        for entry in self.journal.read(self._found):  # not what is written meanwhile
            try:
                stored = self._read(entry, states)
            except _UNREADABLE as e:
                self.unreadable += 1
                if self.unreadable <= _LOGGED:
                    log.error("entry %d of %s is no record: %s", entry.number, self.journal.folder, e)
                continue
            if stored is not None:
                yield stored
        if self.unreadable > _LOGGED:
            log.error("%d entries of %s are no records", self.unreadable, self.journal.folder)
        for session, state in begun.items():  # what follows of an open episode is of no use where a part is damaged
            if state.open_episode is not None and states.get(session, _NOWHERE).open_episode != state.open_episode:
                self._holed[session].add(state.open_episode)
        for session, state in states.items():
            if self.states.get(session) is begun.get(session):  # nothing more came of it
                self.states[session] = state
        self._found = None

    def _read(self, entry: Entry, states: dict[str, SessionState]) -> Stored | None:
        tag, *values = msgpack.unpackb(entry.frames[0])
        if tag == TABLE:
            for state in [SessionState.from_row(row) for row in values[0]]:
                known = states.get(state.session)
                if known is None or known.expected < state.expected:  # entries between were damaged or dropped
                    self._lose(known)
                    states[state.session] = state._replace(open_episode=None)
            return None
        if tag == RETIRED:
            states.pop(values[0], None)
            return None
        if tag == CORRECTION:
            session, actor_id, amend = read_correction(values, entry.frames[1:], self._limits)
            self._note_correction(session, amend, entry.place.segment)
            kept = amend.discard or amend.episode_id not in self._holed[session]
            return Stored(entry.number, session, actor_id, 0, amend, kept)
        before = SessionState.from_row(values[0])
        session, actor_id, _, first, *_ = before
        known = states.get(session)
        if tag == PLACE:
            self._lose(known)
            states[session] = before
            return Stored(entry.number, session, actor_id, first, None, True)
        if tag != RECORD:
            raise ValueError(f"an entry of kind {tag}: a newer version wrote it")
        delivered = bool(values[1])
        _, record = records.decode_record(codec.decode(entry.frames[1:], self._limits))
        item, place = Item.of(record, first), before.resumed(known)
        if known is not None and known.expected != first:
            self._lose(known)
        states[session] = place.after(item, delivered=delivered)
        if not self._is_kept(session, item, entry.place.segment):
            self._steps[entry.place.segment] += item.steps
        if isinstance(record, Amend):  # a discarded episode is discarded whatever is missing of it
            delivered = delivered and (record.discard or record.episode_id not in self._holed[session])
        return Stored(entry.number, session, actor_id, first, record, delivered and place.judge(item) is Verdict.NEW)

    @property
    def holes(self) -> set[tuple[str, str]]:
        """(session, episode) of what `replay` found damaged."""
        return {(session, episode) for session, episodes in self._holed.items() for episode in episodes}

    def _lose(self, known: SessionState | None) -> None:
        if known is not None and known.open_episode is not None:
            self._holed[known.session].add(known.open_episode)

    def append(self, state: SessionState, item: Item, frames: Iterable[Frame], *, delivered: bool) -> int:
        """Write a record of a session that is at `state` before it. Returns the entry's number. Raises JournalError."""
        tag = msgpack.packb((RECORD, state, delivered))
        place = self.journal.append([tag, *map(codec.buffer_of, frames)])
        after = self.states[state.session] = state.after(item, delivered=delivered)
        if not self._is_kept(state.session, item, place.segment):
            self._steps[place.segment] += after.steps + after.steps_offset - state.steps - state.steps_offset
        return self.journal.next - 1

    def _is_kept(self, session: str, item: Item, segment: int) -> bool:
        """Keep `segment` where `item` belongs to a demonstration, which never leaves the replay."""
        if item.demonstration:
            self._demonstrations.add((session, item.episode))
        if (session, item.episode) not in self._demonstrations:
            return False
        self._kept.add(segment)
        return True

    def _note_correction(self, session: str, amend: Amend, segment: int) -> None:
        self._is_kept(session, Item(records.AMEND, 0, 1, amend.episode_id), segment)

    def correct(self, session: str, actor_id: str, amend: Amend) -> None:
        """Write down a correction that does not come from the session's actor, and takes no number of its stream.

        Raises JournalError.
        """
        tag = msgpack.packb((CORRECTION, session, actor_id))
        place = self.journal.append([tag, *map(codec.buffer_of, records.encode_record(amend, 0))])
        self._note_correction(session, amend, place.segment)

    def settle(self, state: SessionState) -> None:
        """Write down a state that no record led to. Raises JournalError; the next segment's table has it anyway."""
        self.states[state.session] = state
        self.journal.append([msgpack.packb((PLACE, state))])

    def retire(self, state: SessionState) -> None:
        """Forget a session that no process continues. A failed write is logged: the session is kept then."""
        known = self.states.get(state.session)
        if known is None or known.expected != state.expected:
            return  # it never sent a record, or they are not all in the journal
        try:
            self.journal.append([msgpack.packb((RETIRED, state.session))])
        except JournalError as e:
            log.warning("ended session %s is kept in the journal: %s", state.session, e)
            return
        del self.states[state.session]

    def _table(self) -> list[Buffer]:
        return [msgpack.packb((TABLE, list(self.states.values()), self._writer))]

    def trim(self) -> int:
        """Drop the oldest segments that `min_steps` does not need and bytes or age exclude. Returns the bytes freed."""
        segments = self.journal.segments
        total = sum(nbytes for first, nbytes, _ in segments if first not in self._kept)
        steps = sum(n for first, n in self._steps.items() if first not in self._kept)
        dropped: set[int] = set()
        for first, nbytes, at in segments[:-1]:
            if first in self._kept:
                continue
            old = self._max_age is not None and time.time() - at > self._max_age
            # More bytes than the whole replay takes (`check_retention`) are images that it cannot hold.
            over = 0 < self._max_bytes < total
            if not over and (steps - self._steps[first] < self._min_steps or (total <= self._max_bytes and not old)):
                break
            total, steps = total - nbytes, steps - self._steps[first]
            dropped.add(first)
        freed = self.journal.drop(dropped)
        left = {first for first, _, _ in self.journal.segments}
        for first in [first for first in self._steps if first not in left]:
            del self._steps[first]
        return freed

    @property
    def has_room(self) -> bool:
        """Whether a disk that was full is usable again: 64 MiB are free, or a twentieth of a small disk."""
        try:
            disk = shutil.disk_usage(self.journal.folder)
        except OSError:  # the folder is gone, or its mount is
            return False
        return disk.free >= min(_ROOM_BYTES, disk.total // 20)

    def close(self) -> None:
        self.journal.close()


def read_correction(values: Sequence[Any], frames: Sequence[Frame], limits: Limits) -> tuple[str, str, Amend]:
    """Decode an entry that `RecordStore.correct` wrote: session, actor id, correction. Raises ValueError, WireError."""
    session, actor_id = values
    _, amend = records.decode_record(codec.decode(list(frames), limits))
    if type(session) is not str or type(actor_id) is not str or not isinstance(amend, Amend):
        raise ValueError(f"a correction of session {session!r} that is none")
    return session, actor_id, amend


def check_retention(max_bytes: int, needed: int) -> None:
    """Raise ConfigError where a journal of `max_bytes` (0: no such limit) cannot refill a replay of `needed` bytes."""
    if 0 < max_bytes < needed:
        raise ConfigError(
            f"{max_bytes} is less than the full online replay takes on disk ({needed} bytes): it could not be refilled "
            "after a restart. Raise it, set it to 0 to keep what the replay needs, or lower replay.capacity",
            parameter="transport.journal_bytes",
        )
