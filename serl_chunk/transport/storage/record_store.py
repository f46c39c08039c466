"""What the learner has received, on disk: every record as the message it came in, and where each session stands.

An entry's first frame says whose message the others are and where that session stood before it; the first entry of
every segment holds the table of sessions, so that a restarted learner knows the next sequence number of each although
older segments are gone.
"""

from __future__ import annotations

import collections
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from serl_chunk.transport.storage import files
from serl_chunk.transport.storage.journal import Entry, Journal, JournalError, Losses
from serl_chunk.transport.storage.segment import Buffer
from serl_chunk.transport.wire import codec, records
from serl_chunk.transport.wire.codec import Frame, Limits, WireError
from serl_chunk.types import Amend, Begin, ConfigError, End, Record, StepBlock

log = logging.getLogger(__name__)

_TABLE, _RECORD, _PLACE, _RETIRED = 0, 1, 2, 3  # an entry's kind
_ROOM_BYTES = 64 << 20
_TOLD = 3  # unreadable entries that are logged one by one


class SessionState(NamedTuple):
    """How far a session's stream has come."""

    session: str
    actor_id: str
    incarnation: int
    expected: int  # next sequence number
    steps: int  # delivered
    steps_offset: int  # steps the actor counts and the learner does not
    open_episode: str | None


class Stored(NamedTuple):
    """A record read back."""

    number: int  # of its entry
    session: str
    actor_id: str
    first: int  # sequence number
    record: Record | None  # None: the session's open episode, if it has one, ends here without its end
    delivered: bool  # False: of an episode whose earlier records are not all here, or never were


class RecordStore:
    """The learner's journal. One thread writes; `replay` comes before the first write.

    Args:
        folder: of the journal.
        limits: of a message that is read back.
        min_steps: the newest that many steps are kept: what a restarted learner's replay can hold.
        max_bytes: older segments are dropped beyond it, whatever `min_steps`; 0 drops what `min_steps` does not need.
        max_age: seconds after which a segment is dropped where `min_steps` permits, None for never.
        sync_interval: see Journal.

    Raises ConfigError where another process has the folder, JournalError where it cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        *,
        min_steps: int = 0,
        max_bytes: int = 0,
        max_age: float | None = None,
        sync_interval: float = 1.0,
        segment_bytes: int = 64 << 20,
    ) -> None:
        self._standings: dict[str, SessionState] = {}
        self._limits, self._min_steps, self._max_bytes, self._max_age = limits, min_steps, max_bytes, max_age
        self._steps: collections.Counter[int] = collections.Counter()  # in each segment, named by its first entry
        self._journal = Journal(
            folder,
            segment_bytes=segment_bytes,
            sync_interval=sync_interval,
            preamble=self._table,
        )
        self.dropped_bytes = 0
        self.unreadable = 0  # entries that are whole and yet no record

    @property
    def losses(self) -> Losses:
        """What opening it could not read."""
        return self._journal.losses

    @property
    def next(self) -> int:
        """Number of the next entry."""
        return self._journal.next

    @property
    def synced(self) -> int:
        """Entries below it survive a power cut."""
        return self._journal.synced

    @property
    def sync_error(self) -> str:
        """Why an fsync has failed since it was opened; then `synced` stays where it was."""
        return self._journal.sync_error

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self._journal.nbytes

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self._journal.folder

    # Reading back.

    def replay(self) -> Iterator[Stored]:
        """Every record kept, in the order of arrival; `session_states` is complete afterwards.

        Where entries are damaged, or were dropped with their segment, the rest of their episode is not `delivered`:
        a hole in an episode is never closed up. Raises DataError where a segment cannot be read at all.
        """
        episodes = _Episodes()
        for entry in self._journal.read():
            try:
                stored = self._read(entry, episodes)
            except (WireError, ValueError, TypeError, LookupError, msgpack.UnpackException) as e:
                self.unreadable += 1
                if self.unreadable <= _TOLD:
                    log.error("entry %d of %s is no record: %s", entry.number, self.folder, e)
                continue
            if stored is not None:
                self._steps[entry.place.segment] += stored.record.n if isinstance(stored.record, StepBlock) else 0
                yield stored
        if self.unreadable > _TOLD:
            log.error("%d entries of %s are no records", self.unreadable, self.folder)

    def _read(self, entry: Entry, episodes: _Episodes) -> Stored | None:
        tag, *values = msgpack.unpackb(entry.frames[0])
        if tag == _TABLE:
            for standing in [_standing(row) for row in values[0]]:
                known = self._standings.get(standing.session)
                if known is None or known.expected < standing.expected:  # entries between were damaged or dropped
                    episodes.hole(standing.session)
                    self._standings[standing.session] = standing._replace(open_episode=None)
            return None
        if tag == _RETIRED:
            self._standings.pop(values[0], None)
            return None
        before = _standing(values[0])
        if tag == _PLACE:
            self._standings[before.session] = before
            episodes.hole(before.session)
            return Stored(entry.number, before.session, before.actor_id, before.expected, None, True)
        if tag != _RECORD:
            raise ValueError(f"an entry of kind {tag}: a newer version wrote it")
        delivered = bool(values[1])
        _, record = records.decode_record(codec.decode(entry.frames[1:], self._limits))
        known, session = self._standings.get(before.session), before.session
        if known is None or known.expected != before.expected:
            episodes.hole(session)
        after = _after(before, record, delivered)
        delivered = delivered and episodes.take(session, record)
        if after.open_episode != episodes.whole.get(session):  # it cannot go on
            after = after._replace(open_episode=None)
        self._standings[session] = after
        return Stored(entry.number, session, before.actor_id, before.expected, record, delivered)

    def session_states(self) -> list[SessionState]:
        """Of every session, as of the last record read or written."""
        return list(self._standings.values())

    # Writing.

    def append(self, standing: SessionState, record: Record, frames: Iterable[Frame], *, delivered: bool) -> int:
        """Write one record of a session that stands where `standing` says (before it); returns the entry's number.

        Raises JournalError; nothing is written then.
        """
        tag = msgpack.packb((_RECORD, tuple(standing), delivered))
        place = self._journal.append([tag, *(_buffer(f) for f in frames)])
        self._steps[place.segment] += record.n if isinstance(record, StepBlock) else 0
        self._standings[standing.session] = _after(standing, record, delivered)
        return self._journal.next - 1

    def settle(self, standing: SessionState) -> None:
        """A session stands at `standing` without a record that led there, and has no episode open.

        Raises JournalError; the next segment's table has it all the same.
        """
        self._standings[standing.session] = standing
        self._journal.append([msgpack.packb((_PLACE, tuple(standing)))])

    def retire(self, standing: SessionState) -> None:
        """Forget a session that no process continues. A failed write is logged: it is then remembered."""
        known = self._standings.get(standing.session)
        if known is None or known.expected != standing.expected:
            return  # it never sent a record, or they are not all in the journal
        try:
            self._journal.append([msgpack.packb((_RETIRED, standing.session))])
        except JournalError as e:
            log.warning("session %s is remembered: %s", standing.session, e)
            return
        del self._standings[standing.session]

    def session_state(self, session: str) -> SessionState | None:
        """Where a session stands; None for one that never sent a record, or was retired."""
        return self._standings.get(session)

    def _table(self) -> list[Buffer]:
        return [msgpack.packb((_TABLE, [tuple(s) for s in self._standings.values()]))]

    def trim(self) -> int:
        """Drop the oldest segments that `min_steps` does not need and bytes or age forbid; returns the bytes freed."""
        segments = self._journal.segments()
        total, steps, keep_from = self._journal.nbytes, self._steps.total(), 0
        for (first, nbytes, at), (following, _, _) in itertools.pairwise(segments):
            old = self._max_age is not None and time.time() - at > self._max_age
            # More bytes than the whole replay takes (`check_retention`) are images that it would not hold.
            over = 0 < self._max_bytes < total
            if not over and (steps - self._steps[first] < self._min_steps or (total <= self._max_bytes and not old)):
                break
            total, steps, keep_from = total - nbytes, steps - self._steps[first], following
        freed = self._journal.drop_before(keep_from)
        for first in [first for first in self._steps if first < self._journal.first]:
            del self._steps[first]
        self.dropped_bytes += freed
        return freed

    @property
    def has_room(self) -> bool:
        """Whether a disk that was full is usable again: 64 MiB are free, or a twentieth of a small one."""
        try:
            return self.free_bytes() >= min(_ROOM_BYTES, files.total_bytes(self.folder) // 20)
        except OSError:  # the folder is gone, or its mount is
            return False

    def free_bytes(self) -> int:
        """Room on the disk."""
        return files.free_bytes(self.folder)

    def close(self) -> None:
        """Sync and release the folder."""
        self._journal.close()


class _Episodes:
    """Which open episodes were read from their beginning on, without a hole."""

    def __init__(self) -> None:
        self.whole: dict[str, str] = {}  # session -> its open episode
        self._broken: dict[str, set[str]] = {}  # session -> episodes that lack something

    def hole(self, session: str) -> None:
        """Records of the session are missing here."""
        if (episode := self.whole.pop(session, None)) is not None:
            self._broken.setdefault(session, set()).add(episode)

    def take(self, session: str, record: Record) -> bool:
        """Whether a record follows what was read of its episode."""
        if isinstance(record, Begin):
            self.whole[session] = record.episode_id
            return True
        if isinstance(record, Amend):  # whatever is missing, an episode that is to be forgotten is not needed
            return record.discard or record.episode_id not in self._broken.get(session, ())
        follows = record.episode_id == self.whole.get(session)
        if follows and isinstance(record, End):
            del self.whole[session]
        return follows


def _after(standing: SessionState, record: Record, delivered: bool) -> SessionState:
    """Where a session stands once it has sent `record`."""
    n = records.count_of(record)
    steps, offset, episode = standing.steps, standing.steps_offset, standing.open_episode
    if isinstance(record, StepBlock):
        steps, offset = (steps + n, offset) if delivered else (steps, offset + n)
    elif isinstance(record, Begin):
        episode = record.episode_id
    elif isinstance(record, End) and delivered:
        episode = None
    return standing._replace(expected=standing.expected + n, steps=steps, steps_offset=offset, open_episode=episode)


def _standing(row: list[Any]) -> SessionState:
    """A row of the table, checked; raises TypeError."""
    standing = SessionState(*row)
    texts = (standing.session, standing.actor_id, standing.open_episode or "")
    if not all(type(x) is str for x in texts) or not all(type(x) is int for x in standing[2:6]):
        raise TypeError(f"{row} is not where a session stands")
    return standing


def _buffer(frame: Frame) -> Buffer:
    return frame if isinstance(frame, bytes | memoryview) else frame.buffer


def check_retention(max_bytes: int, needed: int) -> None:
    """Raise ConfigError where a journal of `max_bytes` (0: no such limit) cannot refill a replay of `needed` bytes."""
    if 0 < max_bytes < needed:
        raise ConfigError(
            f"transport.journal_bytes={max_bytes} is less than the online replay takes when full ({needed} bytes on "
            "disk): after a restart it could not be refilled. Raise journal_bytes, set it to 0 to keep what the replay "
            "needs, or lower replay.capacity"
        )
