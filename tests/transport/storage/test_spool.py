"""A spool on disk does what one in memory does, and goes on where a killed actor stopped."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from errors import naming
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ports import free_port
from properties import examples
from record_logs import contents, files, flip, flip_entry, put
from transport_tools import LIMITS, Inbox, block, end, eventually, linked, send_episode, serving, step, whole

from serl_chunk.transport.storage import spool as spool_module
from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.spool import Kept, Spool
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.records import LOST
from serl_chunk.types import Begin, DataError, End, Outcome
from serl_chunk.version import version_info
from serl_chunk_robot.wire import codec


def opened(folder, **options) -> Spool:
    return Spool(folder, LIMITS, **{"sync_interval": 60.0, "segment_bytes": 2000, **options})


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
        self.disk = opened(killed(self.disk).folder)
        self.incarnation += 1
        if self.tick is not None:
            ended = End(f"e{self.episode}", self.tick, None, False, True, Outcome.UNKNOWN, outcome_by="restart")
            put(self.memory, ended)
            self.tick = None
        assert (self.disk.acked, self.disk.lost) == (self.disk.first, 0)
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
        assert (disk.steps_before_first + kept, disk.unacked_bytes == 0) == (disk.steps, memory.acked == memory.next)
        assert memory.at(memory.next) is None
        assert disk.at(disk.next) is None
        assert disk.nbytes == sum(p.stat().st_size for p in files(self.folder))

    def teardown(self):
        self.disk.close()
        assert self.folder.exists() == (self.disk.acked < self.disk.next)
        shutil.rmtree(self.folder, ignore_errors=True)


TestSameAsMemory = SameAsMemory.TestCase
TestSameAsMemory.settings = settings(max_examples=examples(15), stateful_step_count=25, deadline=None)


def test_the_learner_steps_over_what_is_lost(spool, caplog):
    """Damage in the middle of the second of three episodes: its beginning and the others arrive, and more after it."""
    inbox, port, silent, allowed = Inbox(), free_port(), [], {"n": 0}
    flip_record(spool, 15)
    options = {"on_silent": lambda info, gone: silent.append(gone), "allowance": lambda session: allowed["n"]}
    with (
        serving(port, on_record=inbox, **options) as server,
        linked(port, spools=lambda run: opened(spool.folder)) as link,
    ):
        assert link.flush(10)
        stats = server.stats()
        assert (stats["lost"], stats["refused"], stats["gaps"]) == (3, 0, 0)
        assert inbox.episodes() == {"a": list(range(7)), "b": [0, 1, 2, 3], "c": list(range(7))}
        assert silent == [True]
        assert "3 records were lost on its disk" in caplog.text
        send_episode(link, "d", 5)
        assert link.flush(10)
        assert inbox.episodes()["d"] == list(range(5))
        allowed["n"] = 23  # steps delivered: the actor counts those that were lost or orphaned too
        server.push_allowances()
        assert link.wait_until(lambda: link.allowance == link.steps_recorded, 10)
    assert not spool.folder.exists()


def _raising(code):
    def fail(*args, **kw):
        raise OSError(code, os.strerror(code))

    return fail


def test_what_the_disk_stops_giving_back_while_it_runs_is_lost_too(spool, reopened, monkeypatch):
    again = reopened()
    flip_record(again, 1)
    for seq in (3, 2):
        entry = again.at(seq)
        assert (*entry.item[:3], again.lost) == (LOST, 1, 4, 4)
        assert codec.decode(entry.frames, LIMITS).header == {"first": 1, "span": 4, "steps": 4}
    assert [kind for kind, *_ in contents(again)][:4] == ["begin", LOST, "steps", "end"]
    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", _raising(errno.EMFILE))
        with pytest.raises(JournalError, match=naming(spool.folder, os.strerror(errno.EMFILE))):
            again.at(10)  # nothing is lost by that
    assert again.at(10).item.kind == "steps"
    assert (again.acknowledge(again.next), again.unacked_bytes, again.lost) == (27, 0, 4)


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Frames beyond the cache are read back; what is acknowledged leaves it."""
    monkeypatch.setattr(spool_module, "_CACHE_BYTES", 20_000)
    spool = opened(tmp_path / "s", segment_bytes=1 << 20)
    for i in range(30):
        put(spool, *whole(f"e{i}"))
    held = [e for e in spool._entries if e.frames is not None]
    assert 15_000 < sum(e.nbytes for e in held) == spool._cached <= 20_000
    assert 0 < len(held) < len(spool._entries)
    assert all(entry[3] for entry in contents(spool, 0))
    assert spool._cached <= 20_000
    spool.acknowledge(spool.next // 2)
    assert spool._cached == 0
    put(spool, *whole("new"))
    assert spool._cached > 0
    spool.rewind()
    spool.acknowledge(spool.next)
    assert (spool._cached, spool.unacked_bytes) == (0, 0)
    spool.close()


def test_a_full_disk_at_the_start_is_named_and_loses_nothing(spool, reopened, monkeypatch):
    with monkeypatch.context() as disk:
        disk.setattr(spool_module, "atomic_write", _raising(errno.ENOSPC))
        with pytest.raises(JournalError, match=naming("session.json", os.strerror(errno.ENOSPC))):
            opened(spool.folder)
    again = reopened()  # the folder was let go
    assert (again.session, again.incarnation, again.next) == (spool.session, 2, 27)


@pytest.mark.parametrize("text", [None, "\0\xff"])
def test_a_damaged_identity_is_repaired_from_the_segments(spool, reopened, text, caplog):
    path = spool.folder / "session.json"
    path.unlink() if text is None else path.write_text(text)
    again = reopened()
    assert (again.session, again.incarnation, again.next) == (spool.session, 2, 27)
    known = json.loads(path.read_text())
    assert known == {"session": spool.session, "incarnation": 2, "version": version_info().version}
    assert ("is repaired" in caplog.text) == (text is not None)


def test_an_identity_that_nothing_tells_is_refused(tmp_path):
    spool, path = opened(tmp_path / "s", segment_bytes=1 << 20), tmp_path / "s" / "session.json"
    put(spool, *whole("a"))
    killed(spool)
    flip_entry(tmp_path / "s", 0)  # the table
    path.write_text("{")
    with pytest.raises(DataError, match=naming(tmp_path / "s", "session.json", "JSONDecodeError")):
        opened(tmp_path / "s")
    path.unlink()
    with pytest.raises(DataError, match=naming(tmp_path / "s", "session.json")):
        opened(tmp_path / "s")


def test_a_killed_actors_records_arrive_once_at_a_learner_that_has_some(tmp_path):
    """The learner has a part, of which the actor never heard: nothing comes twice, nothing is missing."""
    inbox, port, folder = Inbox(), free_port(), tmp_path / "s"
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
            # The episode's end, though the learner has had it by now.
            assert (link.stats()["incarnation"], link.stats()["inherited"]) == (2, 1)
        assert inbox.episodes() == {"a": list(range(20)), "b": list(range(7)), "c": list(range(5))}
        (b,) = [r for r in inbox.records if isinstance(r, End) and r.episode_id == "b"]
        assert (b.length, b.outcome_by, b.final_observation, b.truncated) == (7, "restart", None, True)
        eventually(lambda: not any(s.live for s in server.sessions()))
        assert len(server.sessions()) == 1
    assert not folder.exists()


def test_a_spool_whose_process_was_killed_after_it_was_retired_begins_a_session_of_its_own(spool, reopened):
    """Its learner may have forgotten the session: what is kept would be taken twice."""
    again = reopened()
    again.acknowledge(again.next)
    again.retire()
    killed(again)
    last = reopened()
    assert last.session != spool.session
    assert (last.first, last.acked, last.next, last.incarnation) == (0, 0, 0, 1)


def killed(spool: Spool) -> Spool:
    """What a kill leaves: everything written, nothing cleared up, the lock free."""
    spool._journal.close()
    return spool


@pytest.fixture
def spool(tmp_path):
    """A spool of three episodes of nine numbers each, in several segments; its process was killed."""
    spool = opened(tmp_path / "s", segment_bytes=1200)
    for name in "abc":
        put(spool, *whole(name))
    assert len(spool._journal.segments) > 2
    return killed(spool)


@pytest.fixture
def reopened(spool):
    """Opens it again; what is open at the end is killed."""
    opened_here = []

    def open_again(**options):
        opened_here.append(opened(spool.folder, **options))
        return opened_here[-1]

    yield open_again
    for s in opened_here:
        s._journal.close()


def test_a_killed_actors_episode_is_closed_once(spool, reopened):
    again = reopened()
    put(again, *whole("open", (4, 2))[:-1])
    killed(again)
    ended = End("open", 6, None, False, True, Outcome.UNKNOWN, outcome_by="restart")
    for incarnation in (3, 4):
        last = reopened()
        assert (last.session, last.incarnation, last.next) == (spool.session, incarnation, again.next + 1)
        frames = last.at(last.next - 1).frames
        assert records.decode_record(codec.decode(frames, LIMITS)) == (again.next, ended)
        killed(last)


def flip_record(spool: Spool, seq: int, back: int = 1) -> None:
    """Damage the record that holds `seq`, on disk; its head where `back` is 0."""
    place = spool._entries[spool._index(seq)].place
    flip(spool.folder / f"{place.segment:020d}.journal", place.offset + (place.size - back if back else 5))


@pytest.mark.parametrize("back", [1, 0], ids=["frames", "head"])
def test_a_damaged_record_is_a_hole_of_its_size(spool, reopened, back, caplog):
    """The count of steps does not jump where a later table knows them: the learner's offset has them."""
    written = contents(spool, 0)
    for seq in (1, 15):  # the first block of a, the second of b
        flip_record(spool, seq, back)
    with caplog.at_level(logging.ERROR):
        again = reopened()
    assert (again.lost, again.steps, again.next) == (4 + 3, 21, spool.next)
    assert "7 records are lost" in caplog.text
    got = contents(again, 0)
    holes = [(first, span) for kind, first, span, _ in got if kind == LOST]
    assert holes == [(1, 4), (14, 3)]
    assert [e for e in got if e[0] != LOST] == [e for e in written if (e[1], e[2]) not in holes]
    for seq, item in ((2, {"first": 1, "span": 4, "steps": 4}), (14, {"first": 14, "span": 3, "steps": 3})):
        assert codec.decode(again.at(seq).frames, LIMITS).header == item
    again.acknowledge(18)
    killed(again)
    last = reopened()
    assert (last.lost, last.steps) == (0, 21)
