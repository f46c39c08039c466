"""The learner's journal: every record and every session's place comes back, and a hole is never closed up."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import time
import types
from pathlib import Path

import msgpack
import numpy as np
import pytest
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from transport_tools import LIMITS, StoredSession, end, shared, step

from serl_chunk.transport.storage import segment
from serl_chunk.transport.storage.journal import Journal, Losses
from serl_chunk.transport.storage.record_store import RecordStore, Stored, check_retention
from serl_chunk.transport.wire import records
from serl_chunk.types import Amend, Begin, ConfigError, End, Outcome, StepBlock


@contextlib.contextmanager
def opened(folder, **options):
    store = RecordStore(folder, LIMITS, **{"segment_bytes": 4000, "sync_interval": 60.0, **options})
    try:
        yield store
    finally:
        store.close()


def put(store, session, record):
    return session.put(store, record)


def block(episode, first, n):
    """Of every third step a human had a part."""
    steps = [step(t, t) for t in range(first, first + n)]
    return StepBlock.from_steps(episode, [shared(s) if s.tick % 3 == 1 else s for s in steps])


def put_episode(store, session, episode, lengths=(4, 3)):
    numbers, tick = [put(store, session, Begin(episode))], 0
    for n in lengths:
        numbers.append(put(store, session, block(episode, tick, n)))
        tick += n
    return [*numbers, put(store, session, end(episode, tick))]


def _parts(block):
    rows = block.sparse.get("human_dims")
    return None if rows is None else (rows.index.tolist(), rows.values.tolist(), str(rows.values.dtype))


def summary(stored):
    """What a record says of itself, comparable."""
    match stored.record:
        case None:
            what = ("place",)
        case StepBlock() as b:
            what = ("steps", b.episode_id, b.first_tick, b.n, float(b.observation["state"][0, 0]), _parts(b))
        case Begin() | End() as r:
            what = (type(r).__name__, r.episode_id)
        case Amend() as a:
            what = ("Amend", a.episode_id, a.outcome)
    return (stored.session, stored.first, what, stored.delivered)


def standings(store):
    return {s.session: s for s in store.states.values()}


actions = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["begin", "steps", "end", "amend", "orphan", "skip", "reopen"])),
    max_size=40,
)


@given(actions)
@settings(max_examples=examples(30), deadline=None)
def test_records_and_standings_come_back(steps):
    sessions = {name: StoredSession(name) for name in "ab"}
    episodes, ticks = {"a": 0, "b": 0}, {"a": 0, "b": 0}
    written = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder)
        store = stack.enter_context(opened(path, segment_bytes=1500))
        list(store.replay())

        holed = {}

        def keep(session, record):
            # An amendment of an episode that lost its end has nothing to amend when it is read back.
            delivered = session.delivers(record)
            if isinstance(record, Begin):
                holed.pop(session.state.session, None)
            elif isinstance(record, Amend):
                delivered = holed.get(session.state.session) != record.episode_id
            written.append(summary(Stored(0, *session.state[:2], session.state.expected, record, delivered)))
            put(store, session, record)

        for name, action in steps:
            session = sessions[name]
            if action == "begin":
                episodes[name], ticks[name] = episodes[name] + 1, 0
                keep(session, Begin(f"{name}{episodes[name]}"))
            elif action == "steps":
                keep(session, block(f"{name}{episodes[name]}", ticks[name], 3))
                ticks[name] += 3 * (session.state.open_episode is not None)
            elif action == "end":
                keep(session, end(f"{name}{episodes[name]}", ticks[name]))
            elif action == "amend" and session.state.open_episode is None and session.state.expected:
                keep(session, Amend(f"{name}{episodes[name]}", Outcome.FAILURE))
            elif action == "orphan":
                keep(session, block("another", 7, 2))
            elif action == "skip":
                if session.state.open_episode is not None:
                    holed[name] = session.state.open_episode
                session.skip(store, 5, 2)
                written.append(summary(Stored(0, *session.state[:2], session.state.expected, None, True)))
            elif action == "reopen":
                before = standings(store)
                store.close()
                store = stack.enter_context(opened(path, segment_bytes=1500))
                got = [summary(s) for s in store.replay()]
                assert got == written
                after = standings(store)
                assert after == before


def test_arrays_come_back_as_they_were_sent(tmp_path):
    a = StoredSession("a")
    with opened(tmp_path) as store:
        put_episode(store, a, "e")
    with opened(tmp_path) as store:
        got = list(store.replay())
    assert [type(s.record) for s in got] == [Begin, StepBlock, StepBlock, End]
    sent = block("e", 4, 3)
    back = got[2].record
    np.testing.assert_array_equal(back.observation["state"], sent.observation["state"])
    np.testing.assert_array_equal(back.sparse["images/top"].values, sent.sparse["images/top"].values)
    assert _parts(back) == ([0], [[1, 0]], "uint8")
    assert got[2].actor_id == "actor a"
    assert [s.number for s in got] == [1, 2, 3, 4]  # 0 is the table


def test_standings_outlive_the_segments_that_made_them(tmp_path):
    a, b = StoredSession("a"), StoredSession("b")
    with opened(tmp_path, max_bytes=6000) as store:
        put_episode(store, a, "first")
        for i in range(30):
            put_episode(store, b, f"e{i}")
        a.skip(store, 3, 1)
        for i in range(30, 60):
            put_episode(store, b, f"e{i}")
        put(store, b, Begin("open"))
        assert store.trim() > 0
        before = standings(store)
        assert before == {"a": a.state, "b": b.state}
    with opened(tmp_path, max_bytes=6000) as store:
        got = list(store.replay())
        assert {s.session for s in got} == {"b"}
        assert standings(store) == before
        put_episode(store, a, "second")
        assert store.journal.nbytes <= 3 * 6000


def test_every_segment_names_the_program_that_wrote_it(tmp_path):
    session = StoredSession("a")
    with opened(tmp_path, writer="serl_chunk 9.9.9 (commit abc)") as store:
        for i in range(30):
            put_episode(store, session, f"e{i}")
    segments = sorted(tmp_path.glob("*.journal"))
    assert len(segments) > 2
    assert all(b"serl_chunk 9.9.9 (commit abc)" in file.read_bytes() for file in segments)
    with opened(tmp_path) as store:
        assert len(list(store.replay())) == 30 * 4


def test_an_open_episode_whose_beginning_was_dropped_does_not_go_on(tmp_path):
    a = StoredSession("a")
    with opened(tmp_path, max_bytes=5000) as store:
        put(store, a, Begin("long"))
        for i in range(40):
            put(store, a, block("long", 3 * i, 3))
        store.trim()
    with opened(tmp_path) as store:
        got = list(store.replay())
        assert got
        assert not any(s.delivered for s in got)
        (standing,) = store.states.values()
        assert (standing.open_episode, standing.expected, standing.steps) == (None, 121, 120)


def damage(folder, number):
    """Flip a bit in the frames of an entry."""
    journal = Journal(folder)
    place = next(e.place for e in journal.read() if e.number == number)
    journal.close()
    path = folder / f"{place.segment:020d}.journal"
    data = bytearray(path.read_bytes())
    data[place.offset + place.size - 1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("hit", [0, 1, 2])
def test_a_hole_ends_its_episode_and_nothing_else(tmp_path, hit):
    """The rest of the episode is an orphan, so are amendments of it while it is open, but that it be forgotten."""
    a = StoredSession("a")
    with opened(tmp_path) as store:
        put_episode(store, a, "before")
        numbers = put_episode(store, a, "hit", (2, 2, 2))
        put(store, a, Amend("hit", Outcome.FAILURE))
        put(store, a, Amend("hit", discard=True))
        put_episode(store, a, "after")
        last = a.state
    damage(tmp_path, numbers[hit + 1] if hit else numbers[0])
    with opened(tmp_path) as store:
        assert store.journal.losses.damaged == 1
        got = [(s.record.episode_id, s.delivered) for s in store.replay()]
        assert got[:4] == [("before", True)] * 4
        assert got[-4:] == [("after", True)] * 4
        middle = got[4:-4]
        whole = {0: 0, 1: 2, 2: 3}[hit]  # records before the hole
        assert [d for _, d in middle] == [True] * whole + [False] * (4 - whole) + [not whole, True]
        assert list(store.states.values()) == [last]


def test_a_broken_episode_is_not_amended_after_the_next_one_began(tmp_path):
    a = StoredSession("a")
    with opened(tmp_path) as store:
        numbers = put_episode(store, a, "hit", (2, 2, 2))
        put_episode(store, a, "after")
        put(store, a, Amend("hit", Outcome.SUCCESS, terminated=True, reward=1.0))
        put(store, a, Amend("after", Outcome.FAILURE))
        put(store, a, Amend("hit", discard=True))
    damage(tmp_path, numbers[2])
    with opened(tmp_path) as store:
        assert [s.delivered for s in store.replay()][-3:] == [False, True, True]


def test_a_later_table_knows_what_a_damaged_record_was(tmp_path):
    """The session's last record is gone; it is not asked for again, since the actor no longer has it."""
    a, b = StoredSession("a"), StoredSession("b")
    with opened(tmp_path) as store:
        last = put_episode(store, a, "e")[-1]
        for i in range(10):
            put_episode(store, b, f"e{i}")
        assert next(iter(store.states.values())) == a.state
    damage(tmp_path, last)
    with opened(tmp_path) as store:
        list(store.replay())
        assert standings(store) == {"a": a.state, "b": b.state}


def test_a_hole_in_the_open_episode_closes_it(tmp_path):
    a = StoredSession("a")
    with opened(tmp_path) as store:
        put(store, a, Begin("e"))
        for i in range(5):
            number = put(store, a, block("e", i, 1))
    damage(tmp_path, number - 2)
    with opened(tmp_path) as store:
        assert [s.delivered for s in store.replay()] == [True, True, True, False, False]
        (standing,) = store.states.values()
        assert (standing.expected, standing.steps, standing.open_episode) == (6, 5, None)


def test_retention_drops_whole_oldest_segments_only(tmp_path):
    a = StoredSession("a")
    with opened(tmp_path, max_bytes=20_000) as store:
        for i in range(40):
            put_episode(store, a, f"e{i}")
        before = sorted(tmp_path.glob("*.journal"))
        sizes = [p.stat().st_size for p in before]
        freed = store.trim()
        after = sorted(tmp_path.glob("*.journal"))
        assert after == before[-len(after) :]
        assert freed == sum(sizes[: -len(after)]) > 0
        assert (
            store.journal.nbytes == sum(sizes[-len(after) :]) <= 20_000 < store.journal.nbytes + sizes[-len(after) - 1]
        )
        assert store.trim() == 0


def test_retention_keeps_the_steps_a_replay_needs(tmp_path):
    a = StoredSession("a")
    with opened(tmp_path, max_bytes=0, max_age=1e-9, min_steps=100) as store:
        for i in range(60):
            put_episode(store, a, f"e{i}")
        store.trim()
    for _ in range(2):
        with opened(tmp_path, max_bytes=0, min_steps=100) as store:
            kept = sum(s.record.n for s in store.replay() if isinstance(s.record, StepBlock))
            assert 100 <= kept < 200
            assert store.trim() == 0


def test_demonstrations_stay_while_what_is_around_them_goes(tmp_path):
    """Also their corrections, from their session or an operator, and also after a restart."""
    a, demos = StoredSession("a"), StoredSession("demos")
    with opened(tmp_path, max_bytes=0, min_steps=30) as store:
        for i in range(20):
            put_episode(store, a, f"e{i}")
            if i in (3, 9):
                put(store, demos, Begin(f"d{i}", demonstration=True))
                put(store, demos, block(f"d{i}", 0, 5))
                put(store, demos, end(f"d{i}", 5))
            if i == 6:
                put(store, demos, Amend("d3", Outcome.FAILURE))
            if i == 12:
                store.correct("demos", "actor demos", Amend("d9", discard=True))
        assert store.trim() > 0
    for _ in range(2):
        with opened(tmp_path, max_bytes=1, min_steps=30) as store:
            found = list(store.replay())
            of_demos = [s for s in found if s.session == "demos"]
            assert all(s.delivered for s in of_demos)
            assert [type(s.record).__name__ for s in of_demos] == [
                "Begin", "StepBlock", "End", "Amend", "Begin", "StepBlock", "End", "Amend",
            ]  # fmt: skip
            online = [s.record.episode_id for s in found if s.session == "a" and isinstance(s.record, End)]
            assert "e19" in online
            assert not {"e0", "e1", "e10"} & set(online)
            assert store.states["a"].steps == 20 * 7
            store.trim()


def test_a_limit_in_bytes_goes_before_the_steps(tmp_path):
    """Images: a replay holds fewer frames than steps, and the disk is not to be filled with what it would not take."""
    a = StoredSession("a")
    with opened(tmp_path, max_bytes=20_000, min_steps=10**6) as store:
        for i in range(60):
            put_episode(store, a, f"e{i}")
        assert store.journal.nbytes > 30_000
        assert store.trim() > 0
        assert 12_000 < store.journal.nbytes <= 20_000


def test_retention_by_age(tmp_path, monkeypatch):
    a, now = StoredSession("a"), [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    with opened(tmp_path, max_bytes=1 << 40, max_age=100.0) as store:
        for i in range(20):
            put_episode(store, a, f"e{i}")
            now[0] += 10
        assert store.trim() > 0
        got = [s.record.episode_id for s in store.replay() if isinstance(s.record, Begin)]
        assert got[-1] == "e19"
        assert 9 <= len(got) <= 13
        now[0] += 1e6
        store.trim()
        assert len(list(tmp_path.glob("*.journal"))) == 1


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"junk"],
        [msgpack.packb(5)],
        [msgpack.packb((0,))],
        [msgpack.packb((0, [[1, 2]]))],
        [msgpack.packb((0, [["s", "a", 1, "x", 0, 0, None]]))],
        [msgpack.packb((0, [[["s"], "a", 1, 0, 0, 0, None]]))],
        [msgpack.packb((1, ("s", "a", 1, 0, 0, 0, None), True))],
        [msgpack.packb((1, ("s", "a", 1, 0, 0, 0, None), True)), b"\x93\x01"],
        [msgpack.packb((1, (), True)), *records.encode_record(Begin("e"), 0)],
        [msgpack.packb((7, ("s", "a", 1, 0, 0, 0, None), True)), b"x"],
    ],
)
def test_whole_entries_that_are_no_records_are_counted(tmp_path, frames):
    a = StoredSession("a")
    journal = Journal(tmp_path)
    for _ in range(5):
        journal.append(frames)
    journal.close()
    with opened(tmp_path) as store:
        assert list(store.replay()) == []
        assert store.unreadable == 5
        put_episode(store, a, "e")
    with opened(tmp_path) as store:
        assert len(list(store.replay())) == 4
        assert list(store.states.values()) == [a.state]


def test_random_damage_never_raises(tmp_path):
    """Whatever happens to the files: what is read is what was written, in order, and the rest is reported."""
    a = StoredSession("a")
    with opened(tmp_path, segment_bytes=3000) as store:
        for i in range(8):
            put_episode(store, a, f"e{i}")
        written = [summary(s)[:3] for s in store.replay()]
    originals = {p: p.read_bytes() for p in tmp_path.glob("*.journal")}
    assert len(originals) > 3
    rng = random.Random(5)
    for _ in range(150):
        for path in originals:
            path.unlink(missing_ok=True)
        for path, data in originals.items():
            mutated = bytearray(data)
            for _ in range(rng.choice([0, 0, 1, 5])):
                at = rng.randrange(len(mutated) or 1)
                match rng.randrange(5):
                    case 0 if mutated:
                        mutated[at % len(mutated)] ^= 1 << rng.randrange(8)
                    case 1:
                        del mutated[at:]
                    case 2:
                        mutated[at:at] = rng.randbytes(rng.randrange(100))
                    case 3:
                        other = rng.choice(list(originals.values()))
                        mutated[at:at] = other[rng.randrange(len(other)) :]
                    case 4:
                        del mutated[at : at + rng.randrange(100)]
            if rng.random() < 0.95:
                path.write_bytes(mutated)
        with opened(tmp_path, segment_bytes=3000) as store:
            got = [summary(s) for s in store.replay()]
            it = iter(written)
            assert all(any(w == g[:3] for w in it) for g in got)  # a subsequence
            episodes = {}
            for _, _, what, delivered in got:  # and of each episode no more than a beginning counts
                if delivered and what[0] == "Begin":
                    episodes[what[1]] = 0
                elif delivered and what[0] == "steps":
                    assert episodes[what[1]] == what[2]
                    episodes[what[1]] += what[3]
                elif delivered and what[0] == "End":
                    assert episodes[what[1]] == 7
            broken = len(got) < len(written)
            assert not broken or store.journal.losses != Losses() or len(list(tmp_path.iterdir())) <= len(originals)
        for path in tmp_path.glob("*.journal"):
            path.unlink()


def test_one_learner_has_it(tmp_path):
    with opened(tmp_path), pytest.raises(ConfigError, match=naming(tmp_path)), opened(tmp_path):
        pass


def test_a_journal_too_small_for_the_replay_is_refused(tmp_path):
    check_retention(0, 10**12)
    check_retention(100, 100)
    with pytest.raises(ConfigError, match=naming("transport.journal_bytes", 99, 100)):
        check_retention(99, 100)


@pytest.mark.parametrize(
    ("total", "free", "room"),
    [(1 << 40, 63 << 20, False), (1 << 40, 64 << 20, True), (40 << 20, 1 << 20, False), (40 << 20, 2 << 20, True)],
)
def test_a_small_disk_has_room_again_too(tmp_path, monkeypatch, total, free, room):
    store = RecordStore(tmp_path, LIMITS)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(total=total, free=free))
    assert store.has_room is room
    store.close()


def test_a_segment_without_a_record_is_dropped_like_any_other(tmp_path):
    """The disk was full behind a new segment's table: then it holds nothing else."""
    a = StoredSession("a")
    with opened(tmp_path) as store:
        for i in range(10):
            put_episode(store, a, f"e{i}")
        store.journal._begin_segment()
    with opened(tmp_path, max_bytes=1000) as store:
        list(store.replay())
        for i in range(10, 40):
            put_episode(store, a, f"e{i}")
            store.trim()
        assert store.journal.nbytes < 6000 + 2 * segment.HEADER_BYTES


def test_a_segment_that_cannot_be_removed_now_is_removed_later(tmp_path, monkeypatch):
    a, unlink = StoredSession("a"), Path.unlink
    with opened(tmp_path) as store:
        for i in range(30):
            put_episode(store, a, f"e{i}")

        def refuse(self, missing_ok=False):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "unlink", refuse)
        assert store.trim() == 0
        assert store.trim() == 0
        monkeypatch.setattr(Path, "unlink", unlink)
        assert store.trim() > 0


def test_a_retired_session_is_forgotten_and_its_records_are_kept(tmp_path):
    a, b = StoredSession("a"), StoredSession("b")
    with opened(tmp_path) as store:
        put_episode(store, a, "a1")
        put_episode(store, b, "b1")
        store.retire(a.state)
        assert store.states.get("a") is None
        for i in range(10):  # in several segments, whose tables name the sessions
            put_episode(store, b, f"b{i + 2}")
    with opened(tmp_path) as store:
        kept = list(store.replay())
        assert [s.session for s in store.states.values()] == ["b"]
    assert [s.record.episode_id for s in kept if isinstance(s.record, Begin)][:2] == ["a1", "b1"]
    assert all(s.delivered for s in kept)


def test_a_session_with_records_that_are_not_here_is_not_forgotten(tmp_path):
    a = StoredSession("a")
    with opened(tmp_path) as store:
        put_episode(store, a, "a1")
        store.retire(a.state._replace(expected=a.state.expected + 1))
        assert store.states.get("a") == a.state
