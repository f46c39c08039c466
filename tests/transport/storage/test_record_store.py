"""The learner's journal: every record and every session's place comes back, and a hole is never closed up."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from pathlib import Path

import msgpack
import pytest
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from record_logs import closing, files, flip_entry, spoilt
from transport_tools import LIMITS, StoredSession, block, end, whole

from serl_chunk.transport.storage.journal import Journal, Losses
from serl_chunk.transport.storage.record_store import RecordStore, SessionState, Stored, Verdict, check_retention
from serl_chunk.transport.wire.records import AMEND, BEGIN, END, LOST, STEPS, Item
from serl_chunk.types import Amend, Begin, ConfigError, DataError, End, Outcome, StepBlock


def summary(stored):
    """What a record says of itself, comparable."""
    match stored.record:
        case None:
            what = ("place",)
        case StepBlock() as steps:
            parts, images = steps.sparse.get("human_dims"), steps.sparse.get("images/top")
            parts = None if parts is None else (parts.index.tolist(), parts.values.tolist(), str(parts.values.dtype))
            images = None if images is None else (images.index.tolist(), images.values.tobytes())
            state = steps.observation["state"].tobytes()
            what = ("steps", steps.episode_id, steps.first_tick, steps.n, state, parts, images)
        case Begin() | End() as r:
            what = (type(r).__name__, r.episode_id)
        case Amend() as amend:
            what = ("Amend", amend.episode_id, amend.outcome)
    return (stored.session, stored.actor_id, stored.first, what, stored.delivered)


actions = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["begin", "steps", "end", "amend", "orphan", "skip", "reopen"])),
    max_size=40,
)


@given(actions)
@settings(max_examples=examples(30), deadline=None)
def test_records_and_standings_come_back(steps):
    sessions = {name: StoredSession(name) for name in "ab"}
    episodes, ticks, written, holed = {"a": 0, "b": 0}, {"a": 0, "b": 0}, [], {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder)
        store = stack.enter_context(opened(path, segment_bytes=1500))
        list(store.replay())

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
                before = store.states.copy()
                store.close()
                store = stack.enter_context(opened(path, segment_bytes=1500))
                assert [summary(s) for s in store.replay()] == written
                assert store.states == before


def test_standings_outlive_the_segments_that_made_them(tmp_path, a, b):
    """Every segment names the program that wrote it."""
    with opened(tmp_path, max_bytes=6000, writer="serl_chunk 9.9.9 (commit abc)") as store:
        put(store, a, *whole("first"))
        put_episodes(store, b, 30)
        a.skip(store, 3, 1)
        put_episodes(store, b, 30, 30)
        put(store, b, Begin("open"))
        assert all(b"serl_chunk 9.9.9 (commit abc)" in file.read_bytes() for file in files(tmp_path))
        assert store.trim() > 0
        before = store.states.copy()
        assert before == {"a": a.state, "b": b.state}
    with opened(tmp_path, max_bytes=6000) as store:
        assert {s.session for s in store.replay()} == {"b"}
        assert store.states == before
        put(store, a, *whole("second"))
        assert store.journal.nbytes <= 3 * 6000


@pytest.mark.parametrize("hit", [0, 1, 2])
def test_a_hole_ends_its_episode_and_nothing_else(tmp_path, a, hit):
    """The rest of the episode is an orphan, so are amendments of it while it is open, but that it be forgotten."""
    with opened(tmp_path) as store:
        put(store, a, *whole("before"))
        numbers = put(store, a, *whole("hit", (2, 2, 2)))
        put(store, a, Amend("hit", Outcome.FAILURE), Amend("hit", discard=True), *whole("after"))
        last = a.state
    flip_entry(tmp_path, numbers[hit + 1] if hit else numbers[0])
    with opened(tmp_path) as store:
        assert store.journal.losses.damaged == 1
        got = [(s.record.episode_id, s.delivered) for s in store.replay()]
        assert (got[:4], got[-4:]) == ([("before", True)] * 4, [("after", True)] * 4)
        before = {0: 0, 1: 2, 2: 3}[hit]  # records before the hole
        assert [d for _, d in got[4:-4]] == [True] * before + [False] * (4 - before) + [not before, True]
        assert store.states == {"a": last}


def test_a_broken_episode_is_not_amended_after_the_next_one_began(tmp_path, a):
    with opened(tmp_path) as store:
        numbers = put(store, a, *whole("hit", (2, 2, 2)), *whole("after"))
        put(store, a, Amend("hit", Outcome.SUCCESS, terminated=True, reward=1.0), Amend("after", Outcome.FAILURE))
        put(store, a, Amend("hit", discard=True))
    flip_entry(tmp_path, numbers[2])
    with opened(tmp_path) as store:
        assert [s.delivered for s in store.replay()][-3:] == [False, True, True]


def test_demonstrations_stay_while_what_is_around_them_goes(tmp_path, a):
    """Also their corrections, from their session or an operator, and also after a restart."""
    demos = StoredSession("demos")
    with opened(tmp_path, min_steps=30) as store:
        for i in range(20):
            put_episodes(store, a, 1, i)
            if i in (3, 9):
                put(store, demos, Begin(f"d{i}", demonstration=True), block(f"d{i}", 0, 5), end(f"d{i}", 5))
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
            assert [type(s.record) for s in of_demos] == [Begin, StepBlock, End, Amend] * 2
            online = [s.record.episode_id for s in found if s.session == "a" and isinstance(s.record, End)]
            assert "e19" in online
            assert not {"e0", "e1", "e8"} & set(online)
            assert store.states["a"].steps == 20 * 7
            store.trim()


def test_a_limit_in_bytes_goes_before_the_steps(tmp_path, a):
    """Images: a replay holds fewer frames than steps, and the disk is not to be filled with what it would not take."""
    with opened(tmp_path, max_bytes=20_000, min_steps=10**6) as store:
        put_episodes(store, a, 60)
        assert store.journal.nbytes > 30_000
        oldest = [*store.journal.segments]
        assert store.trim() > 0
        assert store.journal.nbytes <= 20_000 < store.journal.nbytes + oldest[-len(store.journal.segments) - 1][1]
        assert store.trim() == 0


@pytest.mark.parametrize("frames", [
    [], [b""], [msgpack.packb((0, [[1, 2]]))], [msgpack.packb((1, ("s", "a", 1, 0, 0, 0, None), True)), b"\x93\x01"],
    [msgpack.packb((7, ("s", "a", 1, 0, 0, 0, None), True)), b"x"],
])  # fmt: skip
def test_whole_entries_that_are_no_records_are_counted(tmp_path, a, frames):
    with closing(Journal, tmp_path) as journal:
        for _ in range(5):
            journal.append(frames)
    with opened(tmp_path) as store:
        assert list(store.replay()) == []
        assert store.unreadable == 5
        put(store, a, *whole("e"))
    with opened(tmp_path) as store:
        assert len(list(store.replay())) == 4
        assert store.states["a"] == a.state


def test_sessions_stand_where_they_stood_before_the_records_are_read(tmp_path, a, b):
    """By the newest whole table and what follows; what is written meanwhile is not read back."""
    with opened(tmp_path, segment_bytes=3000) as store:
        put_episodes(store, a, 8)
        put(store, b, *whole("e")[:2])
        put_episodes(store, a, 8)
        a.skip(store, 3, 2)
        put(store, b, whole("e")[2])
    with opened(tmp_path) as store:
        store.find_states()
        assert store.states == {"a": a.state, "b": b.state}
        assert b.state.open_episode == "e"
        reading = store.replay()
        found = [next(reading)]
        put(store, a, *whole("later"))
        found += list(reading)
        assert "later" not in [s.record.episode_id for s in found if s.record is not None]
        assert store.states == {"a": a.state, "b": b.state}
    newest = files(tmp_path)[-1]
    content = bytearray(newest.read_bytes())
    content[content.index(b"\x93\x00")] ^= 1  # its table
    newest.write_bytes(content)
    with opened(tmp_path) as store:
        store.find_states()
        assert store.states == {"a": a.state, "b": b.state}


def test_random_damage_is_read_as_far_as_it_goes(tmp_path, monkeypatch, a):
    """Whatever happens to the files: what is read is what was written, in order, and the rest is reported."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    with opened(tmp_path, segment_bytes=3000) as store:
        put_episodes(store, a, 8)
        written = [summary(s)[:4] for s in store.replay()]
    originals = {p: p.read_bytes() for p in files(tmp_path)}
    assert len(originals) > 3
    rng, refused = random.Random(5), []

    def read_back():
        with opened(tmp_path, segment_bytes=3000) as store:
            got = [summary(s) for s in store.replay()]
            it = iter(written)
            assert all(any(w == g[:4] for w in it) for g in got)  # a subsequence
            episodes = {}
            for *_, what, delivered in got:  # and of each episode no more than a beginning counts
                if delivered and what[0] == "Begin":
                    episodes[what[1]] = 0
                elif delivered and what[0] == "steps":
                    assert episodes[what[1]] == what[2]
                    episodes[what[1]] += what[3]
                elif delivered and what[0] == "End":
                    assert episodes[what[1]] == 7
            broken = len(got) < len(written)
            assert not broken or store.journal.losses != Losses() or len(list(tmp_path.iterdir())) <= len(originals)

    for _ in range(150):
        for path, data in originals.items():
            path.unlink(missing_ok=True)
            if rng.random() < 0.95:
                path.write_bytes(spoilt(rng, data, list(originals.values())) if rng.random() < 0.6 else data)
        try:
            read_back()
        except DataError as e:
            refused.append(str(e))
        for path in files(tmp_path):
            path.unlink()
    assert len(refused) < 5
    assert all(
        "journal format" in reason for reason in refused
    )  # the format's byte is changed in what is left of the header


def test_a_journal_too_small_for_the_replay_is_refused(tmp_path):
    check_retention(0, 10**12)
    check_retention(100, 100)
    with pytest.raises(ConfigError, match=naming("transport.journal_bytes", 99, 100)):
        check_retention(99, 100)


def test_a_retired_session_is_forgotten_and_its_records_are_kept(tmp_path, a, b):
    with opened(tmp_path) as store:
        put(store, a, *whole("a1"))
        put(store, b, *whole("b1"))
        store.retire(a.state._replace(expected=a.state.expected + 1))  # there are records that are not here
        assert store.states.get("a") == a.state
        store.retire(a.state)
        assert store.states.get("a") is None
        put_episodes(store, b, 10)  # in several segments, whose tables name the sessions
    with opened(tmp_path) as store:
        kept = list(store.replay())
        assert set(store.states) == {"b"}
    assert [s.record.episode_id for s in kept if isinstance(s.record, Begin)][:2] == ["a1", "b1"]
    assert all(s.delivered for s in kept)


@contextlib.contextmanager
def opened(folder, **options):
    with closing(RecordStore, folder, LIMITS, **{"segment_bytes": 4000, "sync_interval": 60.0, **options}) as store:
        yield store


def put(store, session, *added):
    return [session.put(store, record) for record in added]


def put_episodes(store, session, n, first=0):
    for i in range(first, first + n):
        put(store, session, *whole(f"e{i}"))


@pytest.fixture
def a():
    return StoredSession("a")


@pytest.fixture
def b():
    return StoredSession("b")


def test_a_damaged_last_record_is_known_to_a_later_table_and_closes_the_episode(tmp_path, a, b):
    """It is not asked for again, since the actor no longer has it."""
    with opened(tmp_path) as store:
        last = put(store, a, *whole("e"), Begin("f"), *(block("f", i, 1) for i in range(3)))
        put_episodes(store, b, 10)
        assert next(iter(store.states.values())) == a.state
    flip_entry(tmp_path, last[-2])
    flip_entry(tmp_path, last[-1])
    with opened(tmp_path) as store:
        assert [s.delivered for s in store.replay()][:6] == [True] * 6
        assert store.states == {"a": a.state._replace(open_episode=None), "b": b.state}
        assert store.holes == {("a", "f")}


def test_retention_keeps_the_steps_a_replay_needs_in_the_newest_segments(tmp_path, a):
    with opened(tmp_path, max_age=1e-9, min_steps=100) as store:
        put_episodes(store, a, 60)
        before = files(tmp_path)
        sizes = [p.stat().st_size for p in before]
        freed, after = store.trim(), files(tmp_path)
        assert after == before[-len(after) :]
        assert freed == sum(sizes[: -len(after)]) > 0
        assert store.journal.nbytes == sum(sizes[-len(after) :])
    for _ in range(2):
        with opened(tmp_path, min_steps=100) as store:
            kept = sum(s.record.n for s in store.replay() if isinstance(s.record, StepBlock))
            assert 100 <= kept < 200
            assert store.trim() == 0


# -- the state machine of a stream against a plain model: what was sent is delivered once and in order --------------

START = SessionState("s", "a", 1, 0, 0, 0, None)


@st.composite
def streams(draw):
    """A stream as an actor numbers it: episodes, corrections, and numbers that its disk lost."""
    items, first, episode, name = [], 0, None, 0
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from([BEGIN, STEPS, STEPS, STEPS, END, AMEND, LOST]))
        if kind == BEGIN:
            name, episode = name + 1, f"e{name + 1}"
        span = draw(st.integers(1, 5)) if kind in (STEPS, LOST) else 1
        lost = draw(st.integers(0, span)) if kind == LOST else 0
        items.append(Item(kind, first, span, draw(st.sampled_from([episode or "none", "other"])), lost))
        first += span
        episode = None if kind in (END, LOST) else episode
    return items


class Model:
    """What a reader has of each number, by the rules in words."""

    def __init__(self, items):
        self.owner = [i for i in items for _ in range(i.span)]
        self.next, self.open = 0, None
        self.delivered, self.dropped = 0, 0  # steps

    def verdict(self, item):
        if item.first > self.next:
            return Verdict.GAP
        if all(n < self.next for n in range(item.first, item.end)):
            return Verdict.DUPLICATE
        return Verdict.ORPHAN if item.kind in (STEPS, END) and item.episode != self.open else Verdict.NEW

    def take(self, item, delivered):
        new = [n for n in range(item.first, item.end) if n >= self.next]
        self.next = new[-1] + 1
        if item.kind == STEPS:
            self.delivered += delivered * len(new)
            self.dropped += (not delivered) * len(new)
        if item.kind == BEGIN:
            self.open = item.episode
        if item.kind == LOST:
            self.dropped += item.lost_steps
        if item.kind == LOST or (item.kind == END and delivered):
            self.open = None


@settings(max_examples=examples(80), deadline=None)
@given(items=streams(), data=st.data())
def test_whatever_is_sent_again_cut_or_left_out_each_number_passes_once(items, data):
    model, state, passed = Model(items), START, []
    sent = 0
    while model.next < len(model.owner):
        i = data.draw(st.integers(max(0, sent - 4), min(sent + 1, len(items) - 1)))  # again, next, or too early
        item = items[i]
        if item.kind == STEPS and item.span > 1 and data.draw(st.booleans()):  # blocks are cut anew by a successor
            cut = data.draw(st.integers(1, item.span - 1))
            item = data.draw(
                st.sampled_from([item._replace(span=cut), item._replace(first=item.first + cut, span=item.span - cut)])
            )
        verdict = state.judge(item)
        assert verdict is model.verdict(item)
        if verdict in (Verdict.NEW, Verdict.ORPHAN):
            passed += range(state.expected, item.end)
            delivered = verdict is Verdict.NEW and data.draw(st.booleans() if item.kind == END else st.just(True))
            state = state.after(item, delivered=delivered)
            model.take(item, delivered)
            sent = max(sent, i)
        elif data.draw(st.booleans()):  # progress
            sent = next(k for k, other in enumerate(items) if other.end > state.expected)
        assert (state.expected, state.open_episode) == (model.next, model.open)
        assert (state.steps, state.steps_offset) == (model.delivered, model.dropped)
        assert SessionState.from_row(list(state)) == state
    assert passed == list(range(len(model.owner)))
