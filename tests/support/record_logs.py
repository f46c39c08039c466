"""Journals, spools and record stores as logs of numbers, and their files, cut, flipped and on a full disk."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from transport_tools import LIMITS, StoredSession

from serl_chunk.transport.storage.journal import Journal
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.records import Item
from serl_chunk.types import Amend, Record
from serl_chunk_robot.wire import codec

SMALL = {"sync_interval": 60.0, "segment_bytes": 400}


class JournalLog:
    """A journal whose entries have a number each."""

    tables = 0  # at the head of a segment

    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder, **SMALL)

    def put(self, number: int) -> None:
        """Append one."""
        self.journal.append([b"%d" % number, b"", b"x" * 100])

    def read(self) -> list[int]:
        """What is there."""
        return [int(bytes(e.frames[0])) for e in self.journal.read()]


class SpoolLog(JournalLog):
    """A spool of amendments."""

    tables = 1

    def __init__(self, folder: Path) -> None:
        self.spool = Spool(folder, LIMITS, **SMALL)
        self.journal = self.spool._journal

    def put(self, number: int) -> None:
        put(self.spool, Amend(str(number), outcome_by="x" * 40))

    def read(self) -> list[int]:
        kept = contents(self.spool, self.spool.first)
        messages = [codec.decode(frames, LIMITS) for kind, _, _, frames in kept if kind == records.AMEND]
        return [int(records.decode_record(m)[1].episode_id) for m in messages]


class StoreLog(JournalLog):
    """A record store of amendments of one session."""

    tables = 1

    def __init__(self, folder: Path) -> None:
        self.store, self.session = RecordStore(folder, LIMITS, **SMALL), StoredSession("s")
        self.journal = self.store.journal
        self.read()
        self.session.state = self.store.states.get("s", self.session.state)

    def put(self, number: int) -> None:
        self.session.put(self.store, Amend(str(number), outcome_by="x" * 40))

    def read(self) -> list[int]:
        return [int(row.record.episode_id) for row in self.store.replay()]


@contextlib.contextmanager
def closing(make: Callable[..., Any], *args: Any, **options: Any) -> Iterator[Any]:
    """A log, closed at the end as a kill leaves it: everything written, the folder free."""
    log = make(*args, **options)
    try:
        yield log
    finally:
        getattr(log, "journal", log).close()


def put(spool: Spool, *added: Record) -> None:
    """Append records to a spool."""
    for record in added:
        spool.append(Item.of(record, spool.next), records.encode_record(record, spool.next))


def contents(spool: Spool, start: int | None = None) -> list[tuple[str, int, int, list[bytes]]]:
    """Kind, first, span and frames of everything in a spool from `start` (what is not acknowledged) on."""
    out, seq = [], spool.acked if start is None else start
    while (entry := spool.at(seq)) is not None:
        out.append((*entry.item[:3], [bytes(memoryview(f)) for f in entry.frames]))
        seq = entry.item.end
    assert seq == spool.next
    return out


def files(folder: Path) -> list[Path]:
    """Its segments, oldest first."""
    return sorted(folder.glob("*.journal"))


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def flip_entry(folder: Path, number: int) -> None:
    """Flip a bit in the frames of an entry."""
    with closing(Journal, folder) as journal:
        place = next(e.place for e in journal.read() if e.number == number)
    flip(folder / f"{place.segment:020d}.journal", place.offset + place.size - 1)


def spoilt(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    """`data` with bits flipped, parts cut out, and parts of `others` put in."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0 | 1 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 2:
                del out[at:]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(100))
            case 4:
                del out[at : at + rng.randrange(200)]
            case 5:
                other = rng.choice(others)
                out[at:at] = other[rng.randrange(len(other)) :][: rng.randrange(3000)]
    return bytes(out)


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file grows beyond this; Python ignores SIGXFSZ, so a write is partial and then fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
