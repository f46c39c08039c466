"""A spool on disk does what one in memory does, and goes on where a killed actor stopped."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from errors import naming
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ports import free_port
from properties import examples
from transport_tools import LIMITS, Inbox, end, eventually, linked, send_episode, serving, shared, step

from serl_chunk.transport.storage import segment
from serl_chunk.transport.storage import spool as spool_module
from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.spool import Kept, Spool
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.records import LOST, Item
from serl_chunk.types import Begin, ConfigError, DataError, End, Outcome, StepBlock
from serl_chunk_robot.wire import codec


def opened(folder, **options) -> Spool:
    return Spool(folder, LIMITS, **{"sync_interval": 60.0, "segment_bytes": 2000, **options})


def abandon(spool: Spool) -> None:
    """What a kill leaves: everything written, nothing cleared up, the lock free."""
    spool._journal.close()


def put(spool, record):
    spool.append(Item.of(record, spool.next), records.encode_record(record, spool.next))


def block(episode, first, n):
    """Of every third step a human had a part."""
    steps = [step(t, t) for t in range(first, first + n)]
    return StepBlock.from_steps(episode, [shared(s) if s.tick % 3 == 1 else s for s in steps])


def put_episode(spool, episode, lengths=(4, 3)):
    put(spool, Begin(episode))
    tick = 0
    for n in lengths:
        put(spool, block(episode, tick, n))
        tick += n
    put(spool, end(episode, tick))


def decoded(entry):
    """(first, record) of an entry."""
    return records.decode_record(codec.decode(entry.frames, LIMITS))


def contents(spool, start=None):
    """Kind, first, span and bytes of everything from `start` (what is not acknowledged) on."""
    out, seq = [], spool.acked if start is None else start
    while (entry := spool.at(seq)) is not None:
        out.append((*entry.item[:3], [bytes(memoryview(f)) for f in entry.frames]))
        seq = entry.item.end
    assert seq == spool.next
    return out


class Model:
    """A spool as a list: everything is kept, what is not acknowledged and the open episode count as kept."""

    def __init__(self):
        self.entries, self.acked, self.next, self.steps = [], 0, 0, 0

    def append(self, item, frames):
        self.entries.append(Kept(item, frames, 10))
        self.next, self.steps = item.end, self.steps + item.steps

    def acknowledge(self, seq):
        before = self.acked
        self.acked = max([self.acked, *(e.item.end for e in self.entries if e.item.end <= seq)])
        return self.acked - before

    @property
    def first(self):
        """Where the episode begins that is open at `acked`; `acked` where none is."""
        edges = [e.item for e in self.entries if e.item.end <= self.acked and e.item.kind in ("begin", "end")]
        return edges[-1].first if edges and edges[-1].kind == "begin" else self.acked

    def rewind(self):
        self.acked = self.first

    def at(self, seq):
        return next((e for e in self.entries if e.item.first <= seq < e.item.end), None)


class SameAsMemory(RuleBasedStateMachine):
    """A spool and a model get the same calls; the one on disk is killed and opened again now and then."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.disk, self.memory = opened(self.folder), Model()
        self.episode, self.tick, self.incarnation, self.session = 0, None, 1, self.disk.session

    def both(self, record):
        put(self.disk, record)
        put(self.memory, record)

    @precondition(lambda self: self.tick is None)
    @rule()
    def begin(self):
        self.episode += 1
        self.both(Begin(f"e{self.episode}"))
        self.tick = 0

    @precondition(lambda self: self.tick is not None)
    @rule(n=st.integers(1, 6))
    def steps(self, n):
        self.both(block(f"e{self.episode}", self.tick, n))
        self.tick += n

    @precondition(lambda self: self.tick is not None)
    @rule()
    def end(self):
        self.both(end(f"e{self.episode}", self.tick))
        self.tick = None

    @rule(share=st.floats(0, 1))
    def acknowledge(self, share):
        seq = self.memory.acked + round(share * (self.memory.next - self.memory.acked))
        assert self.disk.acknowledge(seq) == self.memory.acknowledge(seq)

    @rule()
    def rewind(self):
        self.memory.rewind()
        self.disk.rewind()
        assert self.disk.acked == self.disk.first <= self.memory.acked
        self.disk.acknowledge(self.memory.acked)

    @rule()
    def kill(self):
        abandon(self.disk)
        self.disk = opened(self.folder)
        self.incarnation += 1
        if self.tick is not None:
            put(
                self.memory,
                End(f"e{self.episode}", self.tick, None, False, True, Outcome.UNKNOWN, outcome_by="restart"),
            )
            self.tick = None
        assert self.disk.acked == self.disk.first
        assert self.disk.lost == 0
        self.disk.acknowledge(self.memory.acked)

    @invariant()
    def the_same(self):
        disk, memory = self.disk, self.memory
        assert (disk.acked, disk.next, disk.steps) == (memory.acked, memory.next, memory.steps)
        assert (disk.session, disk.incarnation) == (self.session, self.incarnation)
        assert disk.first <= memory.first  # whole segments only
        assert contents(disk) == contents(memory)
        assert contents(disk, memory.first) == contents(memory, memory.first)
        kept = sum(span for kind, _, span, _ in contents(disk, disk.first) if kind == records.STEPS)
        assert disk.steps_before_first + kept == disk.steps
        assert (disk.unacked_bytes == 0) == (memory.acked == memory.next)
        assert memory.at(memory.next) is None
        assert disk.at(disk.next) is None
        assert disk.nbytes == sum(p.stat().st_size for p in self.folder.glob("*.journal"))

    def teardown(self):
        self.disk.close()
        assert self.folder.exists() == (self.disk.acked < self.disk.next)
        shutil.rmtree(self.folder, ignore_errors=True)


TestSameAsMemory = SameAsMemory.TestCase
TestSameAsMemory.settings = settings(max_examples=examples(15), stateful_step_count=25, deadline=None)


def test_a_killed_actors_episode_is_closed(tmp_path):
    spool = opened(tmp_path / "s")
    put_episode(spool, "whole")
    put(spool, Begin("open"))
    put(spool, block("open", 0, 4))
    put(spool, block("open", 4, 2))
    abandon(spool)
    again = opened(tmp_path / "s")
    assert (again.session, again.incarnation, again.next) == (spool.session, 2, spool.next + 1)
    first, last = decoded(again.at(again.next - 1))
    assert first == spool.next
    assert last == End("open", 6, None, False, True, Outcome.UNKNOWN, outcome_by="restart")
    abandon(again)
    third = opened(tmp_path / "s")
    assert (third.incarnation, third.next) == (3, again.next)  # it is closed once
    third.close()


@pytest.mark.parametrize("folder", ["whole", "empty"])
def test_a_spool_that_is_wholly_acknowledged_is_removed(tmp_path, folder):
    spool = opened(tmp_path / folder)
    session = spool.session
    if folder == "whole":
        put_episode(spool, "e")
        spool.acknowledge(spool.next)
    spool.close()
    spool.close()
    assert not (tmp_path / folder).exists()
    again = opened(tmp_path / folder)
    assert again.session != session
    assert (again.incarnation, again.next) == (1, 0)
    again.close()


def test_cut_at_any_byte(tmp_path):
    """A kill in the middle of a write, or a power cut: whole records before the cut remain, the episode is closed."""
    spool = opened(tmp_path / "s", segment_bytes=1500)
    put_episode(spool, "a", (2,))
    put(spool, Begin("b"))
    for tick in range(5):
        put(spool, block("b", tick, 1))
    written = contents(spool, 0)
    abandon(spool)
    path = max((tmp_path / "s").glob("*.journal"))
    data = path.read_bytes()
    assert int(path.stem) > 0
    for size in range(0, len(data), 31):
        shutil.rmtree(tmp_path / "cut", ignore_errors=True)
        shutil.copytree(tmp_path / "s", tmp_path / "cut")
        (tmp_path / "cut" / path.name).write_bytes(data[:size])
        again = opened(tmp_path / "cut")
        got = contents(again, 0)
        assert (again.session, again.lost) == (spool.session, 0)
        _, last = decoded(again.at(again.next - 1))
        if isinstance(last, End) and last.episode_id == "b":
            ticks = sum(span for kind, _, span, _ in got[4:] if kind == records.STEPS)
            assert (last.length, last.outcome_by) == (ticks, "restart")
            got.pop()
        assert got == written[: len(got)]
        assert len(written) - len(got) <= 6
        put_episode(again, "c")
        abandon(again)


def flip(spool: Spool, seq: int, back: int = 1) -> None:
    """Damage the record that holds `seq`, on disk."""
    kept = spool._entries[spool._index(seq)]
    path = spool.folder / f"{kept.place.segment:020d}.journal"
    data = bytearray(path.read_bytes())
    data[kept.place.offset + kept.place.size - back] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("back", [1, -1], ids=["frames", "head"])
def test_a_damaged_record_is_a_hole_of_its_size(tmp_path, back, caplog):
    spool = opened(tmp_path / "s")
    for name in "abc":
        put_episode(spool, name)  # nine numbers each
    written = contents(spool, 0)
    for seq in (1, 15):  # the first block of a, the second of b
        flip(spool, seq, back if back > 0 else spool._entries[spool._index(seq)].place.size - 5)
    abandon(spool)
    with caplog.at_level(logging.ERROR):
        again = opened(tmp_path / "s")
    assert again.lost == 4 + 3
    assert "7 records are lost" in caplog.text
    got = contents(again, 0)
    holes = [(first, span) for kind, first, span, _ in got if kind == LOST]
    assert holes == [(1, 4), (14, 3)]
    assert [e for e in got if e[0] != LOST] == [e for e in written if (e[1], e[2]) not in holes]
    assert again.next == spool.next
    put_episode(again, "d")
    assert again.steps == 28 - 7 + sum(e.item.steps for e in again._entries if e.item.kind == LOST)
    abandon(again)


def test_lost_steps_stay_counted_where_a_later_table_knows_them(tmp_path):
    """The actor's count of steps does not jump when the damaged segment is gone: the learner's offset has them."""
    spool = opened(tmp_path / "s", segment_bytes=1200)
    for name in "abcdef":
        put_episode(spool, name)
    assert len(spool._journal.segments) > 3
    flip(spool, 2)
    abandon(spool)
    again = opened(tmp_path / "s")
    (lost,) = [e.item for e in again._entries if e.item.kind == LOST]
    assert (lost.span, lost.steps, again.steps) == (4, 4, 42)
    header = codec.decode(again.at(2).frames, LIMITS).header
    assert header == {"first": 1, "span": 4, "steps": 4}
    again.acknowledge(40)
    abandon(again)
    third = opened(tmp_path / "s")
    assert (third.lost, third.steps) == (0, 42)
    abandon(third)


def test_the_learner_steps_over_what_is_lost(tmp_path, caplog):
    """Damage in the middle of the second of three episodes: its beginning and the others arrive, and more after it."""
    inbox, port, silent = Inbox(), free_port(), []
    spool = opened(tmp_path / "s", segment_bytes=1500)
    for name in "abc":
        put_episode(spool, name, (3, 3, 3))
    flip(spool, 15)
    abandon(spool)
    allowed = {"n": 0}
    with (
        serving(
            port,
            on_record=inbox,
            on_silent=lambda info, gone: silent.append(gone),
            allowance=lambda session: allowed["n"],
        ) as server,
        linked(port, spools=lambda run: opened(tmp_path / "s")) as link,
    ):
        assert link.flush(10)
        stats = server.stats()
        assert (stats["lost"], stats["refused"], stats["gaps"]) == (3, 0, 0)
        assert inbox.episodes() == {"a": list(range(9)), "b": [0, 1, 2], "c": list(range(9))}
        assert silent == [True]
        assert "3 records were lost on its disk" in caplog.text
        send_episode(link, "d", 5)
        assert link.flush(10)
        assert inbox.episodes()["d"] == list(range(5))
        allowed["n"] = 26  # steps delivered: the actor counts those that were lost or orphaned too
        server.push_allowances()
        assert link.wait_until(lambda: link.allowance == link.steps_recorded, 10)
    assert not (tmp_path / "s").exists()


def test_what_the_disk_stops_giving_back_while_it_runs_is_lost_too(tmp_path, monkeypatch):
    monkeypatch.setattr(spool_module, "_CACHE_BYTES", 0)
    spool = opened(tmp_path / "s")
    put_episode(spool, "a")
    flip(spool, 1)
    entry = spool.at(3)
    assert (*entry.item[:3], spool.lost) == (LOST, 1, 4, 4)
    assert codec.decode(entry.frames, LIMITS).header == {"first": 1, "span": 4, "steps": 4}
    assert spool.at(2).item.kind == LOST
    assert spool.lost == 4  # once
    assert [kind for kind, *_ in contents(spool)] == ["begin", LOST, "steps", "end"]
    assert (spool.acknowledge(spool.next), spool.unacked_bytes) == (9, 0)

    put_episode(spool, "b")
    real = os.pread

    def pread(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(JournalError, match=naming(tmp_path / "s", os.strerror(errno.EMFILE))):
        spool.at(10)  # nothing is lost by that
    monkeypatch.setattr(os, "pread", real)
    assert spool.at(10).item.kind == "steps"
    abandon(spool)


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Frames beyond the cache are read back; what is acknowledged leaves it."""
    monkeypatch.setattr(spool_module, "_CACHE_BYTES", 50_000)
    spool = opened(tmp_path / "s", segment_bytes=1 << 20)
    for i in range(40):
        put_episode(spool, f"e{i}")
    held = [e for e in spool._entries if e.frames is not None]
    assert 40_000 < sum(e.nbytes for e in held) == spool._cached <= 50_000
    assert 0 < len(held) < len(spool._entries)
    for seq, entry in enumerate(contents(spool, 0)):
        assert entry[3], seq
    assert spool._cached <= 50_000
    spool.acknowledge(spool.next // 2)
    assert spool._cached == 0
    put_episode(spool, "new")
    assert spool._cached > 0
    spool.rewind()
    spool.acknowledge(spool.next)
    assert (spool._cached, spool.unacked_bytes) == (0, 0)
    spool.close()


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    spool = opened(tmp_path / "s")
    put_episode(spool, "a")
    before = (spool.next, spool.steps, spool.unacked_bytes, spool._cached, spool.nbytes, contents(spool))

    def full(fd, buffers):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "writev", full)
        with pytest.raises(JournalError, match=naming(tmp_path / "s", os.strerror(errno.ENOSPC))):
            put(spool, Begin("b"))
    assert (spool.next, spool.steps, spool.unacked_bytes, spool._cached, spool.nbytes, contents(spool)) == before
    put_episode(spool, "b")
    abandon(spool)
    again = opened(tmp_path / "s")
    assert again.next == 18
    abandon(again)


def test_a_full_disk_at_the_start_is_named_and_loses_nothing(tmp_path, monkeypatch):
    spool = opened(tmp_path / "s")
    put(spool, Begin("a"))
    put(spool, block("a", 0, 3))
    abandon(spool)

    def full(path, text, *, durable):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(spool_module, "atomic_write", full)
        with pytest.raises(JournalError, match=naming("session.json", os.strerror(errno.ENOSPC))):
            opened(tmp_path / "s")
    again = opened(tmp_path / "s")  # the folder was let go
    assert (again.session, again.incarnation, again.next) == (spool.session, 2, 5)
    abandon(again)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"session": "s", "incarnation": "x"}', "\0\xff"])
def test_a_damaged_identity_is_repaired_from_the_segments(tmp_path, text):
    spool = opened(tmp_path / "s")
    put_episode(spool, "a")
    abandon(spool)
    path = tmp_path / "s" / "session.json"
    path.unlink() if text is None else path.write_text(text)
    again = opened(tmp_path / "s")
    assert (again.session, again.incarnation, again.next) == (spool.session, 2, 9)
    assert json.loads(path.read_text()) == {"session": spool.session, "incarnation": 2}
    abandon(again)


def test_an_identity_that_nothing_tells_is_refused(tmp_path):
    spool = opened(tmp_path / "s", segment_bytes=1 << 20)
    put_episode(spool, "a")
    (table,) = [e for e in spool._journal.read() if e.number == 0]
    path = tmp_path / "s" / f"{0:020d}.journal"
    abandon(spool)
    data = bytearray(path.read_bytes())
    data[table.place.offset + table.place.size - 1] ^= 1
    path.write_bytes(data)
    (tmp_path / "s" / "session.json").write_text("{")
    with pytest.raises(DataError, match=naming(tmp_path / "s", "session.json", "JSONDecodeError")):
        opened(tmp_path / "s")
    (tmp_path / "s" / "session.json").unlink()
    with pytest.raises(DataError, match=naming(tmp_path / "s", "session.json")):
        opened(tmp_path / "s")


def test_a_spool_of_another_format_is_refused(tmp_path):
    spool = opened(tmp_path / "s", segment_bytes=1 << 20)
    put_episode(spool, "a")
    abandon(spool)
    path = tmp_path / "s" / f"{0:020d}.journal"
    path.write_bytes(path.read_bytes().replace(segment.MAGIC, segment.MAGIC[:-1] + b"\x02"))
    with pytest.raises(DataError, match=naming(path, 2, f"expected {segment.FORMAT}", f"move {path.parent} away")):
        opened(tmp_path / "s")


def test_a_spool_of_another_session_is_refused_its_name(tmp_path, caplog):
    """Files of two spools in one folder: the records are what they say they are."""
    a, b = opened(tmp_path / "a"), opened(tmp_path / "b")
    put_episode(a, "x")
    put_episode(b, "y")
    abandon(a)
    abandon(b)
    shutil.copy(tmp_path / "a" / "session.json", tmp_path / "b" / "session.json")
    again = opened(tmp_path / "b")
    assert again.session == b.session
    assert "is repaired" in caplog.text
    abandon(again)


def test_one_actor_has_it(tmp_path):
    spool = opened(tmp_path / "s")
    with pytest.raises(ConfigError, match=naming(tmp_path / "s")):
        opened(tmp_path / "s")
    spool.close()


def test_a_killed_actors_records_arrive_once_at_a_learner_that_has_some(tmp_path):
    """The learner has a part, of which the actor never heard: nothing comes twice, nothing is missing."""
    inbox, port = Inbox(), free_port()
    folder = tmp_path / "s"
    with serving(port, on_record=inbox) as server:
        with linked(port, spools=lambda run: opened(folder)) as link:
            send_episode(link, "a", 20)
            link.begin(Begin("b"))
            for tick in range(7):
                link.step(step(tick, tick))
            assert link.flush(10)
            assert link.stats()["inherited"] == 0
            shutil.copytree(folder, tmp_path / "killed")
        shutil.rmtree(folder, ignore_errors=True)
        (tmp_path / "killed").rename(folder)
        with linked(port, spools=lambda run: opened(folder)) as link:
            send_episode(link, "c", 5)
            assert link.flush(10)
            assert link.stats()["incarnation"] == 2
            assert link.stats()["inherited"] == 1  # the episode's end, though the learner has had it by now
        assert inbox.episodes() == {"a": list(range(20)), "b": list(range(7)), "c": list(range(5))}
        (b,) = [r for r in inbox.records if isinstance(r, End) and r.episode_id == "b"]
        assert (b.length, b.outcome_by, b.final_observation, b.truncated) == (7, "restart", None, True)
        eventually(lambda: not any(s.live for s in server.sessions()))
        assert len(server.sessions()) == 1
    assert not folder.exists()


def seconds_per_entry(folder, n):
    """CPU seconds for each of `n` small entries: appended, read, acknowledged one by one, read from disk."""
    spool = opened(folder, segment_bytes=1 << 16)
    frames = codec.encode(records.BEGIN, {"x": 1})
    start = time.process_time()
    for i in range(n):
        spool.append(Item(records.BEGIN, 2 * i, 1), frames)
        spool.append(Item(records.END, 2 * i + 1, 1), frames)
    for seq in range(0, 2 * n, 50):
        assert spool.at(seq).item.first == seq
    for seq in range(0, 2 * n, 2):
        spool.acknowledge(seq + 2)
    assert len(spool._journal.segments) == 1
    spool.close()
    return (time.process_time() - start) / n


def test_a_backlog_of_many_small_entries_is_not_quadratic(tmp_path):
    small, large = (seconds_per_entry(tmp_path / str(n), n) for n in (2_000, 40_000))
    assert large < 5 * small + 1e-4


def test_a_spool_whose_process_was_killed_after_it_was_retired_begins_a_session_of_its_own(tmp_path):
    """Its learner may have forgotten the session: what is kept would be taken twice."""
    spool = opened(tmp_path / "s")
    put_episode(spool, "a")
    spool.acknowledge(spool.next)
    spool.retire()
    session = spool.session
    abandon(spool)
    again = opened(tmp_path / "s")
    assert again.session != session
    assert (again.first, again.acked, again.next, again.incarnation) == (0, 0, 0, 1)
    again.close()
