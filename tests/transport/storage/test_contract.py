"""What a journal, a spool and a record store have in common: what was appended is there, whatever the disk does."""

from __future__ import annotations

import errno
import os
import random

import pytest
from errors import naming
from record_logs import JournalLog, SpoolLog, StoreLog, closing, file_size_limit, files, flip

from serl_chunk.transport.storage import segment
from serl_chunk.transport.storage.journal import JournalError, Losses
from serl_chunk.transport.storage.segment import HEADER_BYTES
from serl_chunk.types import ConfigError, DataError

WHOLE, N = Losses(), 5
pytestmark = pytest.mark.parametrize("kind", [JournalLog, SpoolLog, StoreLog])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Hundreds of openings: none waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def fill(kind, folder):
    """Two segments and more; returns how many entries there are."""
    with closing(kind, folder) as log:
        for i in range(N):
            log.put(i)
        assert len(log.journal.segments) >= 2
        return log.journal.next


def test_cut_anywhere_it_has_what_was_whole_and_is_written_on(kind, tmp_path):
    entries = fill(kind, tmp_path)
    path = files(tmp_path)[-1]
    data, first, step = path.read_bytes(), int(path.stem), 1 if kind is JournalLog else 7
    with closing(kind, tmp_path) as log:
        ends = [e.place.offset + e.place.size for e in log.journal.read() if e.place.segment == first]
    before = N - len(ends) + kind.tables
    for size in (*range(0, HEADER_BYTES, 397), *range(HEADER_BYTES, len(data), step)):
        path.write_bytes(data[:size])
        found = sum(end <= size for end in ends)
        at = max([0 if size < HEADER_BYTES else HEADER_BYTES, *[end for end in ends if end <= size]])
        kept = [*range(before + max(0, found - kind.tables))]
        with closing(kind, tmp_path) as log:
            assert (log.journal.losses, log.read()) == (Losses(0, 0, size - at), kept)
            log.put(99)
            # A power cut may have taken all that was behind a torn entry: no number is given again.
            assert log.journal.next > (first + found if size == at else entries)
        with closing(kind, tmp_path) as log:
            assert (log.journal.losses, log.read()) == (WHOLE, [*kept, 99])
        for left in files(tmp_path):
            if int(left.stem) > first:
                left.unlink()


def test_a_flipped_bit_anywhere_costs_one_record_and_is_reported(kind, tmp_path):
    entries, rng = fill(kind, tmp_path), random.Random(1)
    step = 1 if kind is JournalLog else 7
    for path in files(tmp_path):
        data = path.read_bytes()
        for at in (*range(0, 32, 3), *range(32, HEADER_BYTES, 397), *range(HEADER_BYTES - 32, len(data), step)):
            flip(path, at, rng.randrange(8))
            with closing(kind, tmp_path) as log:
                kept = log.read()
                assert kept == sorted(set(kept) & set(range(N)))
                assert len(kept) >= N - (at >= HEADER_BYTES)
                assert log.journal.losses != WHOLE
                assert log.journal.next >= entries
            path.write_bytes(data)


def test_a_full_disk_changes_nothing(kind, tmp_path):
    with closing(kind, tmp_path) as log:
        log.put(0)
        (path,) = files(tmp_path)
        before = (log.journal.next, log.journal.nbytes, [*log.journal.segments], [0])
        large = naming(path.name, os.strerror(errno.EFBIG))
        for room in (0, 1, 20, 50):
            with file_size_limit(path.stat().st_size + room), pytest.raises(JournalError, match=large):
                log.put(1)
            assert (log.journal.next, log.journal.nbytes, [*log.journal.segments], log.read()) == before
            assert path.stat().st_size == log.journal.nbytes
        log.put(1)
        assert log.read() == [0, 1]
    with closing(kind, tmp_path) as log:
        assert (log.journal.losses, log.read()) == (WHOLE, [0, 1])


@pytest.mark.parametrize(("number", "copies"), [(1, 1), (segment.FORMAT + 1, 2)])
def test_another_format_is_refused_and_stays_as_it_is(kind, tmp_path, number, copies):
    """Format 1 had one copy of the header."""
    fill(kind, tmp_path)
    path = files(tmp_path)[-1]
    data = path.read_bytes().replace(segment.MAGIC, segment.MAGIC[:-1] + bytes([number]))
    path.write_bytes(data if copies == 2 else data[:32] + data[HEADER_BYTES:])
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    expected = naming(path, number, f"expected {segment.FORMAT}", "version of serl_chunk that wrote it", tmp_path)
    with pytest.raises(DataError, match=expected):
        kind(tmp_path)
    with pytest.raises(DataError, match=expected):
        list(segment.scan(path))
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_one_process_has_it(kind, tmp_path):
    folder = tmp_path / "new" / "folder"
    with closing(kind, folder) as log:
        with pytest.raises(ConfigError, match=naming(folder)):
            kind(folder)
        log.put(0)
    with closing(kind, folder) as log:
        assert log.read() == [0]
