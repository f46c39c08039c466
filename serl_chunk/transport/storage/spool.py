"""The records that an actor keeps on disk until the learner has them, in a folder for each run and actor.

A new process continues the session under a higher incarnation number, which shuts the old process out.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import json
import logging
import re
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.io import atomic_write
from serl_chunk.transport.storage.journal import DAMAGED, SUFFIX, Journal, JournalError, Place
from serl_chunk.transport.storage.segment import Buffer
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.handshake import MAX_ARRAYS
from serl_chunk.transport.wire.records import LOST, Item
from serl_chunk.types import Amend, Begin, ConfigError, DataError, End, Outcome, Record, RobotSpec, StepBlock
from serl_chunk.version import version_info
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, Limits, WireError

log = logging.getLogger(__name__)

IDENTITY = "session.json"
DISCARD = "discard.json"  # see `Spool.note_discard`
_SEGMENT_BYTES = 16 << 20
_CACHE_BYTES = 64 << 20  # of frames kept in memory until they are acknowledged; the rest is read back
_RECORD = b""  # first frame of a record's entry; a segment's first entry has a table instead
DEFAULT_ROOT = Path("runs") / "spool"
_MESSAGE_BYTES = 2048  # of a step beside its arrays


@dataclasses.dataclass(slots=True)
class Entry:
    """One encoded record, or (LOST) the numbers of some that a damaged disk took."""

    item: Item
    number: int  # of the journal's entry
    place: Place | None
    frames: list[Frame] | None  # None: on disk alone
    nbytes: int  # on disk


class Kept(NamedTuple):
    """An item with its message."""

    item: Item
    frames: list[Frame]
    nbytes: int  # on disk


class Spool:
    """A session's records, in order, from `first` (kept) over `acked` (the learner has all below) to `next`.

    Used by the network thread, except for the byte counts. Acknowledged records are kept until their segment and
    episode are complete: a learner that lost everything receives the open episode whole. `close` removes `folder` once
    all is acknowledged and no discard is noted; `sync_interval`: seconds between fsyncs.

    Raises ConfigError where another process has the folder, JournalError where it cannot be written, DataError where it
    cannot be read, or lacks the session of its records.
    """

    def __init__(
        self, folder: Path, limits: Limits, *, sync_interval: float = 1.0, segment_bytes: int = _SEGMENT_BYTES
    ) -> None:
        self.folder = folder
        self.session, self.incarnation = "", 0  # names the stream, and the process that continues it
        self.first = self.acked = self.next = 0
        self.unacked_bytes = 0
        self.steps = 0  # of the session, below `next`
        self.steps_before_first = 0  # of these, no longer kept
        self.lost = 0  # sequence numbers that a damaged disk took
        self.noted = ""  # id of the episode whose discard is noted
        self._unnoted = False  # the last note could not be written
        self._limits = limits
        self._entries: list[Entry] = []
        self._cached = 0  # bytes of frames in memory
        self._open_at: int | None = None  # first number of the episode that is open at `acked`
        open_journal = functools.partial(
            Journal, folder, segment_bytes=segment_bytes, sync_interval=sync_interval, preamble=self._preamble
        )
        self._journal = open_journal()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # `_identify` reports what is wrong
            if json.loads((self.folder / IDENTITY).read_text()).get("retired", False):
                self._journal.close(remove=True)  # its process was killed before it removed the folder
                self._journal = open_journal()
        try:
            unfinished = self._recover()
            self._identify()
            if unfinished is not None:
                self._add(unfinished)
            if self.noted:  # the process before was killed before it was final
                self._add(Amend(self.noted, discard=True))
                self.note_discard("")
        except BaseException:
            self._journal.close()
            raise
        if self.next > self.first:
            log.info("%s holds %d records, up to %d", self.folder, self.next - self.first, self.next)

    def _identify(self) -> None:
        path = self.folder / IDENTITY
        session, incarnation = self.session, self.incarnation  # as the tables of the segments have it
        try:
            if path.exists():
                known = json.loads(path.read_text())
                session, incarnation = str(known["session"]), max(incarnation, int(known["incarnation"]))
            if self.session not in ("", session):
                raise ValueError(f"it names session {session}, the records are of {self.session}")
        except (OSError, ValueError, KeyError, TypeError) as e:
            if not self.session:
                what = f"{path} cannot be read ({type(e).__name__}: {e})"
                raise DataError(f"{what}. Move {self.folder} away to continue without its records") from e
            log.warning("%s is repaired: %s", path, e)
            session = self.session
        if not session and self._entries:
            raise DataError(f"{path} is missing. Move {self.folder} away to continue without its records")
        self.session, self.incarnation = session or uuid.uuid4().hex, incarnation + 1
        self._write_identity(retired=False)

    def _write_identity(self, *, retired: bool) -> None:
        path = self.folder / IDENTITY
        try:
            identity = {"session": self.session, "incarnation": self.incarnation, "version": version_info().version}
            atomic_write(path, json.dumps(identity | {"retired": True} if retired else identity), durable=True)
        except OSError as e:
            raise JournalError(f"{path} cannot be written: {e.strerror}") from e

    def note_discard(self, episode: str) -> None:
        """Let the next process discard an episode, where this one is killed; an empty id takes that back.

        `noted` is what the disk has. A failed write is logged once, and tried again at the next call.
        """
        if episode == self.noted:
            return
        path = self.folder / DISCARD
        try:
            if episode:
                atomic_write(path, json.dumps({"episode": episode}), durable=True)
            else:
                path.unlink(missing_ok=True)
        except OSError as e:
            if not self._unnoted:
                log.warning("%s cannot be written: %s", path, e.strerror)
            self._unnoted = True
            return
        self.noted, self._unnoted = episode, False

    def _add(self, record: Record) -> None:
        item = Item.of(record, self.next)
        self.append(item, records.encode_record(record, item.first))

    def _recover(self) -> End | None:
        """Index the entries of all segments. Returns the End of an episode that lacks one."""
        episode, length, unreadable = "", 0, 0
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # there is none
            self.noted = str(json.loads((self.folder / DISCARD).read_text())["episode"])
        for entry in self._journal.read():
            try:
                if entry.frames[0].nbytes:
                    self._begin_segment(entry.number, msgpack.unpackb(entry.frames[0]))
                    continue
                first, record = records.decode_record(codec.decode(entry.frames[1:], self._limits))
                self._reach(first, entry.number)
            except (WireError, ValueError, TypeError, LookupError, msgpack.UnpackException) as e:
                unreadable += 1
                log.error("entry %d of %s is no record: %s", entry.number, self.folder, e)
                continue
            self._keep(Item.of(record, first), entry.number, entry.place, None)
            if isinstance(record, Begin):
                episode, length = record.episode_id, 0
            elif isinstance(record, StepBlock) and record.episode_id == episode:
                length = record.first_tick + record.n
            elif isinstance(record, End):
                episode = ""
        losses = self._journal.losses
        if losses.damaged or losses.aside or self.lost or unreadable:
            log.error("%s: %s; %d records are lost", self.folder, losses, self.lost)
        elif any(losses):
            log.warning("%s: %s", self.folder, losses)
        return End(episode, length, None, False, True, Outcome.UNKNOWN, outcome_by="restart") if episode else None

    def _begin_segment(self, number: int, table: dict[str, Any]) -> None:
        """Read a segment's first entry, the stream's state then. Raises LookupError, TypeError, ValueError."""
        session, first, steps = str(table["session"]), int(table["next"]), int(table["steps"])
        if self.session not in ("", session):
            raise ValueError(f"it is of session {session}, others are of {self.session}")
        self.session, self.incarnation = session, max(self.incarnation, int(table["incarnation"]))
        self._reach(first, number)
        missing = steps - self.steps  # counted by the process that had them
        if missing > 0:
            self.steps = steps
            lost = next((e for e in reversed(self._entries) if e.item.kind == LOST), None)
            if lost is None:
                self.steps_before_first += missing
            else:
                lost.item = lost.item._replace(lost_steps=lost.item.lost_steps + missing)

    def _reach(self, seq: int, number: int) -> None:
        """Continue the stream at `seq` with entry `number`, LOST items before it. Raises ValueError where it passed."""
        if not self._entries and self.next == 0:
            self.first = self.acked = self.next = seq
        elif seq > self.next:
            self.lost += seq - self.next
            self._keep(Item(LOST, self.next, seq - self.next), number, None, None)
        elif seq < self.next:
            raise ValueError(f"it is numbered {seq}, and comes after {self.next - 1}")

    @property
    def nbytes(self) -> int:
        return self._journal.nbytes

    def append(self, item: Item, frames: list[Frame]) -> None:
        """Keep one message, numbered from `next`. Raises JournalError, and has changed nothing then."""
        place = self._journal.append([_RECORD, *map(codec.buffer_of, frames)])
        cache = self._cached + place.size <= _CACHE_BYTES
        self._keep(item, self._journal.next - 1, place, frames if cache else None)

    def _keep(self, item: Item, number: int, place: Place | None, frames: list[Frame] | None) -> None:
        entry = Entry(item, number, place, frames, place.size if place is not None else 0)
        self._entries.append(entry)
        self.next, self.steps = item.end, self.steps + item.steps
        self.unacked_bytes += entry.nbytes
        self._cached += entry.nbytes if frames is not None else 0

    def _preamble(self) -> Sequence[Buffer]:
        table = {"next": self.next, "steps": self.steps, "session": self.session, "incarnation": self.incarnation}
        return [msgpack.packb(table)]

    def acknowledge(self, seq: int) -> int:
        """Count everything below `seq`, whole blocks only, as received by the learner. Returns how many are new."""
        before = self.acked
        for i in range(self._index(self.acked), len(self._entries)):
            entry, item = self._entries[i], self._entries[i].item
            if (end := item.end) > seq:
                break
            self.acked = end
            self.unacked_bytes -= entry.nbytes
            if entry.frames is not None:
                entry.frames, self._cached = None, self._cached - entry.nbytes
            if item.kind == records.BEGIN:
                self._open_at = item.first
            elif item.kind in (records.END, LOST):
                self._open_at = None
        if self.acked > before:
            self._trim()
        return self.acked - before

    def _trim(self) -> None:
        keep = self.acked if self._open_at is None else self._open_at
        i = self._index(keep)
        number = self._entries[i].number if i < len(self._entries) else self._journal.next
        if not self._journal.drop_before(number):
            return
        first = bisect.bisect_left(self._entries, self._journal.first, key=lambda e: e.number)
        self.steps_before_first += sum(e.item.steps for e in self._entries[:first])
        del self._entries[:first]
        self.first = self._entries[0].item.first if self._entries else self.next

    def rewind(self) -> None:
        """Count everything kept as unacknowledged again: the learner does not have this session."""
        self.acked = self.first
        self.unacked_bytes = sum(e.nbytes for e in self._entries)
        self._open_at = None

    def at(self, seq: int) -> Kept | None:
        """Return the item that holds `seq`, LOST where the disk lost it; None at `next`. Raises JournalError."""
        if (i := self._index(seq)) == len(self._entries):
            return None
        entry = self._entries[i]
        frames = entry.frames
        if frames is None and entry.place is not None:
            try:
                frames = list(self._journal.fetch(entry.place)[1:])
            except DataError as e:
                log.error("%s: %d records are lost", e, entry.item.span)
                self.lost += entry.item.span
                entry.item, entry.place = entry.item._replace(kind=LOST, lost_steps=entry.item.steps), None
        item = entry.item
        if frames is None:
            frames = codec.encode(LOST, {"first": item.first, "span": item.span, "steps": item.steps})
        return Kept(item, frames, entry.nbytes)

    def _index(self, seq: int) -> int:
        i = bisect.bisect_right(self._entries, seq, key=lambda e: e.item.first) - 1
        return i if i >= 0 and seq < self._entries[i].item.end else len(self._entries)

    def retire(self) -> bool:
        """Mark a wholly acknowledged session as ended: the next process begins another. False after a failed write."""
        try:
            self._write_identity(retired=True)
        except JournalError as e:
            log.warning("session %s is not marked as ended: %s", self.session, e)
            return False
        return True

    def close(self) -> None:
        self._journal.close(remove=self.acked == self.next and not self.noted)


def unsent_of(folder: Path) -> list[tuple[Path, int, str]]:
    """Return the spools in an actor's folder that hold something; see `SpoolFolders.unsent`."""
    found = []
    for spool in sorted(folder.glob("*")):
        nbytes, version = 0, "of an unknown version"
        for file in spool.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # a process of this actor id may have it open
                nbytes += file.stat().st_size
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            known = json.loads((spool / IDENTITY).read_text())
            version, nbytes = str(known["version"]), 0 if known.get("retired", False) else nbytes
        if nbytes and not spool.name.endswith(DAMAGED):  # those moved aside wait for no learner
            found.append((spool, nbytes, version))
    return found


class SpoolFolders:
    """The spools of one actor, `root/<experiment>/<actor id>/<run>`; raises ConfigError for an unsuitable actor id."""

    def __init__(self, config: ExperimentConfig, actor_id: str, root: Path | None = None) -> None:
        if not re.fullmatch(r"[\w.-]{1,100}", actor_id) or actor_id.startswith("."):
            valid = "1 to 100 letters, digits, '_', '-' and '.', not with '.' first"
            raise ConfigError(f"cannot name a folder, got {actor_id!r}. Use {valid}.", parameter="actor_id")
        self.folder = (root or DEFAULT_ROOT) / config.name / actor_id
        self._transport, self._run = config.transport, ""

    def open(self, run: str) -> Spool:
        """Open the spool of a run, whose content is sent first; raises ConfigError where another actor has it."""
        if not re.fullmatch(r"[\w-]{1,64}", run):  # it came over the network and becomes a folder
            raise DataError(f"the learner calls its run {run!r}, which cannot name a folder")
        self._run, t = run, self._transport
        try:
            return Spool(self.folder / run, Limits(t.max_message_bytes, MAX_ARRAYS), sync_interval=t.heartbeat)
        except ConfigError as e:
            text = f"an actor {self.folder.name!r} runs already: {e}. Stop it, or give this one another name."
            raise ConfigError(text, parameter="actor_id") from e

    def unsent(self, *, but_open: bool = False) -> list[tuple[Path, int, str]]:
        """Return the spools that hold something, with their bytes and the version that wrote them.

        `but_open`: of other runs than the newest that was opened here, whose files go while they are counted.
        """
        found = unsent_of(self.folder) if self.folder.is_dir() else []
        return [each for each in found if not (but_open and each[0].name == self._run)]


def largest_episode_bytes(spec: RobotSpec, config: ExperimentConfig, cameras: Iterable[str] = ()) -> int:
    """Return the most bytes of one episode in a spool: the longest, with a frame of every used camera on every tick.

    `cameras`: recorded in addition to those of the agent.
    """
    images = sum(c.height * c.width * 3 for c in map(spec.camera, {*config.agent.image_keys, *cameras}))
    return spec.max_episode_steps * (_MESSAGE_BYTES + 4 * (spec.state_dim + spec.action_dim) + images)
