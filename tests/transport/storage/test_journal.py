"""A journal keeps what `append` returned for, over reopening, full disks, damage and the death of its writer."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import pytest
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from record_logs import closing, file_size_limit
from record_logs import files as segments
from transport_tools import eventually

from serl_chunk.transport.storage.journal import Journal, JournalError, Losses, Place, free_bytes
from serl_chunk.transport.storage.segment import HEADER_BYTES
from serl_chunk.types import ConfigError, DataError

WHOLE = Losses()
opened = functools.partial(closing, Journal)


def content(journal):
    return {e.number: [bytes(f) for f in e.frames] for e in journal.read()}


frames = st.binary(max_size=60) | st.sampled_from([b"", b"\0" * 3000, b"\xa5\x5aJE" * 20])
operations = st.lists(st.lists(frames, max_size=4) | st.sampled_from(["reopen", "drop"]), max_size=25)


@given(operations, st.booleans())
@settings(max_examples=examples(30), deadline=None)
def test_what_was_appended_is_read_back(steps, tabled):
    """Over rotation, reopening and dropping; every segment then begins with the preamble."""
    expected: dict[int, list[bytes]] = {}
    places: dict[int, Place] = {}
    options = {"segment_bytes": 300} | ({"preamble": lambda: [b"table"]} if tabled else {})
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        journal = stack.enter_context(opened(Path(folder), **options))
        for step in steps:
            if step == "reopen":
                journal.close()
                journal = stack.enter_context(opened(Path(folder), **options))
                assert journal.losses == WHOLE
            elif step == "drop" and expected:
                journal.drop_before(sorted(expected)[len(expected) // 2])
                expected = {n: e for n, e in expected.items() if n >= journal.first}
            elif isinstance(step, list):
                place = journal.append(step)
                number = journal.next - 1
                assert number not in expected
                expected[number], places[number] = step, place
        kept = content(journal)
        firsts = {first for first, _, _ in journal.segments}
        assert {n: e for n, e in kept.items() if n not in firsts or not tabled} == expected
        assert not tabled or all(kept[n] == [b"table"] for n in firsts)
        assert journal.nbytes == sum(p.stat().st_size for p in segments(Path(folder)))
        for number, entry in expected.items():
            assert [bytes(f) for f in journal.fetch(places[number])] == entry


def filled(folder, n=6) -> list[list[bytes]]:
    """A journal of two segments; returns its entries."""
    entries = [[bytes([65 + i]) * (20 + i), b"", bytes([i])] for i in range(n)]
    with opened(folder, segment_bytes=200) as journal:
        for entry in entries:
            journal.append(entry)
        assert len(journal.segments) == 2
    return entries


def test_no_entry_gets_a_number_that_is_counted_elsewhere(tmp_path):
    with opened(tmp_path, segment_bytes=60) as journal:
        journal.skip_to(7)
        journal.append([b"a" * 60])
        journal.skip_to(5)
        journal.append([b"b" * 60])
        journal.skip_to(40)
        journal.append([b"c"])
        assert (journal.first, sorted(content(journal)), journal.next) == (7, [7, 8, 40], 41)
    with opened(tmp_path) as journal:
        assert (journal.losses, sorted(content(journal)), journal.next) == (WHOLE, [7, 8, 40], 41)


@pytest.mark.parametrize("newest", [True, False])
def test_a_file_that_nothing_can_be_read_of_is_moved_aside_and_numbers_go_on(tmp_path, newest):
    """The other file has a bad first sector: that costs nothing."""
    folder = tmp_path / "journal"
    entries = filled(folder)
    mended, path = segments(folder) if newest else segments(folder)[::-1]
    lost = {n for n in range(len(entries)) if (n >= int(segments(folder)[1].stem)) == newest}
    data, sound = bytes(HEADER_BYTES) + path.read_bytes()[HEADER_BYTES:], mended.read_bytes()
    path.write_bytes(data)
    mended.write_bytes(bytes(4096) + sound[4096:])
    with opened(folder) as journal:
        assert content(journal) == {n: e for n, e in enumerate(entries) if n not in lost}
        (aside,) = journal.losses.aside
        assert (aside.parent, aside.read_bytes()) == (tmp_path / "journal_damaged", data)
        assert (journal.losses.mended, mended.read_bytes()) == ((mended,), sound)
        assert re.match(naming(aside, "lost", mended.name, "mended"), str(journal.losses))
        assert journal.next > len(entries) if newest else journal.next == len(entries)
        number = journal.next
        journal.append([b"more"])
    with opened(folder) as journal:
        assert (journal.losses, content(journal)[number]) == (WHOLE, [b"more"])


def test_no_more_than_one_entry_is_cut_from_the_end(tmp_path):
    """Several damaged entries at the end are no torn tail: they stay, and their numbers are not given again."""
    entries = [[bytes([i]) * 20] for i in range(6)]
    with opened(tmp_path) as journal:
        places = [journal.append(entry) for entry in entries]
    (path,) = segments(tmp_path)
    data = path.read_bytes()[: places[3].offset].ljust(path.stat().st_size, b"\0")
    path.write_bytes(data)
    with opened(tmp_path) as journal:
        assert (journal.losses.torn_bytes, journal.losses.damaged) == (0, 1)
        assert path.read_bytes() == data
        assert journal.next >= len(entries)
        journal.append([b"more"])
        assert list(content(journal).values()) == [*entries[:3], [b"more"]]


WRITER = """
import os, random, sys
from pathlib import Path
from serl_chunk.transport.storage.journal import Journal
rng = random.Random()
journal = Journal(Path(sys.argv[1]), segment_bytes=200_000, sync_interval=0.05, preamble=lambda: [b"table"])
while True:
    size = rng.choice([0, 10, 1000, 60_000, 150_000])
    seed = rng.randrange(256)
    journal.append([b"%d %d" % (size, seed), bytes([seed]) * size, b""])
    os.write(1, b"%d %d %d\\n" % (journal.next - 1, size, seed))
"""


def test_a_killed_writer_leaves_everything_whose_append_returned(tmp_path):
    rng = random.Random(time.time_ns())
    written: dict[int, tuple[int, int]] = {}
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        threading.Timer(rng.uniform(0.0, 0.15), child.kill).start()
        lines += child.stdout.readlines()
        assert child.wait() == -signal.SIGKILL
        for line in lines:
            if line.endswith(b"\n"):
                number, size, seed = map(int, line.split())
                assert number not in written
                written[number] = size, seed
    assert len(written) > 100
    with opened(tmp_path) as journal:
        assert (journal.losses.damaged, journal.next > max(written)) == (0, True)
        kept = {e.number: e.frames for e in journal.read()}
        for number, (size, seed) in written.items():
            head, body, _ = kept.pop(number)
            assert bytes(head) == b"%d %d" % (size, seed)
            assert bytes(body) == bytes([seed]) * size
        # Beside those: tables, and of each killed process the one entry whose number it could not tell any more.
        assert sum(bytes(f[0]) != b"table" for f in kept.values()) <= 6


@pytest.mark.parametrize("room", [0, 90])
def test_a_full_disk_while_a_segment_begins(tmp_path, room):
    """Header or preamble do not fit: no file is left, and there is one as soon as there is room."""
    with opened(tmp_path, segment_bytes=100, preamble=lambda: [b"table" * 10]) as journal:
        journal.append([b"a" * 100])
        before = (journal.next, journal.nbytes, [*journal.segments], sorted(tmp_path.iterdir()))
        with file_size_limit(room), pytest.raises(JournalError):
            journal.append([b"b"])
        assert (journal.next, journal.nbytes, [*journal.segments], sorted(tmp_path.iterdir())) == before
        journal.append([b"b"])
        assert [e[0][:1] for e in content(journal).values()] == [b"t", b"a", b"t", b"b"]


def _refuse(*args, **kw):
    raise PermissionError(errno.EACCES, "Permission denied")


def test_a_part_that_cannot_even_be_cut_off_is_cut_later(tmp_path, monkeypatch):
    with opened(tmp_path) as journal:
        journal.append([b"a"])
        (path,) = segments(tmp_path)
        size = path.stat().st_size
        with monkeypatch.context() as broken:
            broken.setattr(os, "ftruncate", _refuse)
            for _ in range(2):
                with file_size_limit(size + 7), pytest.raises(JournalError):
                    journal.append([b"b" * 100])
        assert path.stat().st_size == size + 7
        journal.append([b"c"])
        assert content(journal) == {0: [b"a"], 1: [b"c"]}


def test_partial_writes_are_completed(tmp_path, monkeypatch):
    """A signal, or a disk that is nearly full, may end a write anywhere; one call takes 1,024 buffers."""
    entry = [bytes([i % 256]) * (i % 3) for i in range(5000)]
    with opened(tmp_path) as journal:
        journal.append(entry)
        with pytest.raises(DataError, match=naming(70000, 65536)):
            journal.append([b""] * 70000)
        real = os.writev
        monkeypatch.setattr(os, "writev", lambda fd, buffers: real(fd, [memoryview(buffers[0])[:3]]))
        journal.append(entry[:9])
        assert list(content(journal).values()) == [entry, entry[:9]]
        monkeypatch.setattr(os, "writev", lambda fd, buffers: 0)
        with pytest.raises(JournalError, match=naming(tmp_path, os.strerror(errno.ENOSPC))):
            journal.append(entry)


def test_removal_leaves_nothing_and_takes_nothing_from_the_next_owner(tmp_path):
    """Owners that come and go: each has the folder to itself, and finds what it wrote there."""
    began = time.monotonic()
    owned, trouble = [0, 0], []
    inside = threading.Lock()

    def work(i):
        while time.monotonic() < began + (1.0 if min(owned) > 3 else 30.0):
            try:
                journal = Journal(tmp_path / "j", sync_interval=0)
            except (ConfigError, JournalError):
                continue
            if not inside.acquire(blocking=False):
                trouble.append("two owners")
            journal.append([b"x"])
            if content(journal) != {journal.next - 1: [b"x"]} or not segments(tmp_path / "j")[-1].exists():
                trouble.append("gone")
            inside.release()
            journal.close(remove=True)
            owned[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert trouble == []
    assert min(owned) > 3
    assert not (tmp_path / "j").exists()


def test_what_is_not_the_journals_is_let_be(tmp_path):
    """Files that others put there, and a descriptor of another file after a second `close`."""
    for name in ("notes.txt", "1.journal", "².journal", "x.journal"):
        (tmp_path / name).write_text("mine")
    with opened(tmp_path) as journal:
        journal.append([b"a"])
        assert content(journal) == {0: [b"a"]}
        journal.close()
        other = os.open(tmp_path / "lock", os.O_RDWR)  # has the lock's descriptor now, perhaps
    os.close(other)
    assert (tmp_path / "1.journal").read_text() == "mine"
    with pytest.raises(JournalError, match=naming("notes.txt/journal", os.strerror(errno.ENOTDIR))):
        Journal(tmp_path / "notes.txt" / "journal")
    assert (free_bytes(tmp_path) > 0, free_bytes(tmp_path / "gone")) == (True, 0)


@pytest.fixture
def disk(monkeypatch):
    """A disk whose fsync fails while `broken` is set."""
    state, real = types.SimpleNamespace(broken=False), os.fsync

    def fsync(fd):
        if state.broken:
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return state


def test_after_a_failed_fsync_what_is_in_doubt_is_written_again(tmp_path, disk, caplog):
    """Except a segment that is dropped meanwhile."""
    with opened(tmp_path, sync_interval=0.02, segment_bytes=100) as journal:
        disk.broken = True
        for _ in range(5):  # a segment each
            journal.append([b"a" * 100])
        with pytest.raises(JournalError, match=naming("fsync", tmp_path, os.strerror(errno.EIO))):
            journal.append([b"a" * 100])  # it does not get arbitrarily far ahead of the disk
        assert journal.next == 5
        eventually(lambda: journal.sync_error == "Input/output error")
        assert journal.synced == 0
        assert sum("fsync" in r.message for r in caplog.records) == 1
        assert journal.drop({0}) > 0
        newest = segments(tmp_path)[-1]
        assert journal.drop({4}) == 0
        assert newest.exists(), "what is written to stays"
        before = {path: path.stat().st_ino for path in segments(tmp_path)}
        disk.broken = False
        place = journal.append([b"b"])  # it can be written to again
        journal.sync()
        assert (journal.synced, journal.sync_error) == (6, "")
        assert all(path.stat().st_ino != inode for path, inode in before.items())  # a later fsync proves nothing
        assert sorted(content(journal)) == [1, 2, 3, 4, 5]
        assert [bytes(f) for f in journal.fetch(place)] == [b"b"]
        journal.append([b"c"])
        eventually(lambda: journal.synced == 7)
    with opened(tmp_path) as journal:
        assert (journal.losses, journal.next, sorted(content(journal))) == (WHOLE, 7, [*range(1, 7)])


@pytest.mark.parametrize("retired", [False, True])
def test_the_newest_segment_is_written_again_once_it_is_left(tmp_path, disk, retired):
    with opened(tmp_path, sync_interval=60) as journal:
        journal.append([b"a"])
        journal.sync()
        disk.broken = True
        journal.append([b"b"])
        for broken in (True, False):  # the system reports it once
            disk.broken = broken
            with pytest.raises(JournalError):
                journal.sync()
        assert (journal.synced, bool(journal.sync_error)) == (1, True)
        journal.retire_doubtful() if retired else journal.append([b"c"])
        journal.sync()
        assert journal.synced == journal.next == (2 if retired else 3)
        journal.append([b"d"])
        journal.sync()
        assert len(journal.segments) == 2
        assert list(content(journal).values()) == [[b"a"], [b"b"], *([] if retired else [[b"c"]]), [b"d"]]


def test_opening_syncs_what_a_killed_process_had_not(tmp_path, monkeypatch):
    filled(tmp_path)
    synced = set()
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    with opened(tmp_path) as journal:
        assert journal.synced == journal.next == 6
        assert synced == {str(p) for p in (tmp_path, *segments(tmp_path))}


def test_a_new_segment_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    """Nor do descriptors of old ones pile up."""
    slow, done, real = threading.Event(), threading.Event(), os.fsync

    def fsync(fd):
        if threading.current_thread() is not threading.main_thread():
            slow.set()
            assert done.wait(10)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with opened(tmp_path, sync_interval=60.0, segment_bytes=100) as journal:
        journal.append([b"a" * 100])
        journal.append([b"b" * 100])  # the first segment is on its way to the disk
        assert slow.wait(10)
        journal.append([b"c" * 100])
        assert (journal.next, journal.synced) == (3, 0)
        done.set()
        eventually(lambda: journal.synced >= 2)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            journal.append([b"d" * 100])
        assert len(os.listdir("/proc/self/fd")) <= before + 6


def test_whole_segments_are_dropped_and_never_the_newest(tmp_path, monkeypatch):
    """One that cannot be removed stays accounted for."""
    with opened(tmp_path, segment_bytes=150) as journal:
        for i in range(9):
            journal.append([bytes([i]) * 50])
        assert [first for first, _, _ in journal.segments] == [0, 2, 4, 6, 8]
        nbytes = journal.nbytes
        with monkeypatch.context() as broken:
            broken.setattr(Path, "unlink", _refuse)
            assert journal.drop_before(3) == 0
        assert (journal.first, journal.nbytes) == (0, nbytes)
        assert journal.drop_before(3) > 0
        assert (journal.first, min(content(journal))) == (2, 2)
        assert journal.drop_before(3) == 0
        journal.drop_before(10**6)
        assert list(content(journal)) == [8]
        assert journal.next == 9
