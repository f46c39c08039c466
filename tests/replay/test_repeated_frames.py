"""Frames that a slow camera gives on several ticks are recorded once, and every reader has them whole.

Each picture carries its episode and the tick on which its camera gave it first.
"""

import dataclasses

import numpy as np
import pytest
from actor_helpers import ListSink
from coded_episodes import SPEC, config
from coded_replay import build, coded, read_held
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_runs import LIMITS, Run, assert_equal
from ports import free_port
from properties import examples
from record_logs import flip
from transport_tools import linked, serving, spools

from serl_chunk.actor.recorder import EpisodeRecorder
from serl_chunk.data.frames import with_repeated_frames
from serl_chunk.replay.step_storage import HELD_COLUMNS
from serl_chunk.runs.episodes import JOURNAL, RunSource
from serl_chunk.runs.journal_index import JournalFile
from serl_chunk.transport.storage.record_store import RecordStore, SessionState, Verdict
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.records import Item
from serl_chunk.types import STEP_COLUMNS, Begin, Episode, Source, StepBlock
from serl_chunk_robot.wire import codec

KEYS = ("a", "b")


class Slow:
    """An episode of `length` ticks; camera c gives a new picture on every `every[c]`-th, and the old one else.

    On tick 4 a human had a part of the action.
    """

    def __init__(self, number=0, length=12, every=(3, 2)):
        self.whole, self.every, self.length = coded(number, length, shared={4: (1, 0)}), every, length
        self.whole.source[4:5] = Source.HUMAN

    def observation(self, tick):
        out = self.whole.observation(tick)
        for camera, every in zip(SPEC.cameras, self.every, strict=True):
            key = f"images/{camera.name}"
            out[key] = self.whole.observation(tick - tick % every)[key]
        return out

    def episode(self):
        """With every frame on every tick."""
        steps = [self.whole.step(t)._replace(observation=self.observation(t)) for t in range(self.length)]
        end = self.whole.end_record()._replace(final_observation=self.observation(self.length))
        return Episode(Begin(self.whole.episode_id), StepBlock.from_steps(self.whole.episode_id, steps), end)

    def recorded(self):
        """The records of an actor."""
        sink = ListSink()
        recorder = EpisodeRecorder(sink, Begin(self.whole.episode_id))
        for t in range(self.length):
            recorder.step(self.whole.step(t)._replace(observation=self.observation(t)))
        recorder.end(self.whole.end_record()._replace(final_observation=self.observation(self.length)))
        return sink.records

    def blocks(self, size=4):
        """Begin, blocks of `size` steps, End."""
        begin, *steps, end = self.recorded()
        cut = [steps[i : i + size] for i in range(0, len(steps), size)]
        return [begin, *(StepBlock.from_steps(self.whole.episode_id, part) for part in cut), end]

    @property
    def pictures(self):
        """How many its cameras gave."""
        return sum(self.length // every + 1 for every in self.every)


def same(a, b):
    """Whether two episodes are one; the replay keeps no decisions, no task, no policy versions and no stamps."""
    kept = {name: getattr(a.steps, name) for name in STEP_COLUMNS if name not in HELD_COLUMNS}
    assert_equal(a._replace(begin=b.begin), b._replace(steps=dataclasses.replace(b.steps, **kept)))


def replay_of(*records_of, session="s"):
    replay = build(config(), image_keys=KEYS)
    for record in records_of:
        replay.insert(session, record)
    return replay


def over_the_wire(record, first):
    frames = [bytes(f) for f in records.encode_record(record, first)]
    return records.decode_record(codec.decode(frames, LIMITS))


@settings(max_examples=examples(40), deadline=None)
@given(
    every=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    cuts=st.lists(st.integers(1, 11), max_size=6),
    again=st.lists(st.integers(0, 3), min_size=7, max_size=7),
)
def test_blocks_that_are_split_and_sent_again_anyhow_hold_every_picture_once(every, cuts, again):
    """What a resent block has more than the learner has already is cut off in the middle of repeated frames."""
    slow = Slow(every=every)
    begin, *steps, end = slow.recorded()
    state = SessionState("s", "actor s", 1, 0, 0, 0, None)
    replay = build(config(), image_keys=KEYS)
    edges = [0, *sorted(set(cuts)), 12]
    parts = [(max(0, a - back), b) for a, b, back in zip(edges, edges[1:], again, strict=False)]
    sent = [(0, begin), *((1 + a, StepBlock.from_steps("e0", steps[a:b])) for a, b in parts), (13, end)]
    for first, record in sent:
        number, arrived = over_the_wire(record, first)
        item = Item.of(arrived, number)
        assert state.judge(item) is Verdict.NEW
        if number < state.expected:
            arrived = arrived.slice(state.expected - number, item.span)
        _, new = over_the_wire(arrived, state.expected)  # the journal has it so
        replay.insert("s", new)
        state = state.after(item, delivered=True)
    assert replay.stats()["replay/online_frames"] == slow.pictures
    same(read_held(replay, "s", "e0"), slow.episode())


def test_a_frame_that_is_not_there_shows_no_other_one():
    """The tick that is named has no frame, or not the newest: the step has none, in one block as in several."""
    whole = coded()
    # 0 and 6 have pictures; 1 repeats 0. 3 names 2, which has none; 7 names 3, which is not the newest; 8 names 6.
    names = {1: 0, **dict.fromkeys(range(2, 6), 2), 7: 3, 8: 6, 9: 4, 10: 4, 11: 4}

    def shown(t):
        step = whole.step(t)
        if t not in names:
            return step
        return step._replace(observation={"state": step.observation["state"]}, repeats=dict.fromkeys(KEYS, names[t]))

    end = whole.end_record()._replace(
        final_observation={"state": whole.observation(12)["state"]}, repeats={"a": 6, "b": 5, "none": 6}
    )
    block = StepBlock.from_steps("e0", [shown(t) for t in range(12)])
    for parts in ([block], [block.slice(t, t + 1) for t in range(12)], [block.slice(0, 7), block.slice(7, 12)]):
        read = read_held(replay_of(Begin("e0"), *parts, end), "s", "e0")
        for steps_read, end_read in ((read.steps, read.end), with_repeated_frames(block, end)):
            for key in KEYS:
                rows = steps_read.sparse[f"images/{key}"]
                assert rows.index.tolist() == [0, 1, 6, 8]
                named = [whole.observation(t)[f"images/{key}"] for t in (0, 0, 6, 6)]
                np.testing.assert_array_equal(rows.values, named)
            assert sorted(end_read.final_observation) == ["images/a", "state"]
            np.testing.assert_array_equal(end_read.final_observation["images/a"], whole.observation(6)["images/a"])


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def refilled(run):
    """A replay of what a run's journal has."""
    replay = build(config(), image_keys=KEYS)
    with run.opened():
        for stored in run.store.replay():
            if stored.record is None:
                replay.close_session(stored.session, gone=True)
            elif stored.delivered:
                replay.insert(stored.session, stored.record)
    return replay


@pytest.mark.parametrize("lost", [1, 6])  # entries: the first pictures; new ones of one camera
def test_a_damaged_entry_ends_the_episode_before_frames_that_are_lost(run, lost):
    """Entries of later steps name frames in it; none of them may show another one."""
    slow = Slow(every=(5, 4), length=20)
    with run.opened():
        for record in slow.blocks(size=1):
            run.put("s", record)
    segment, offset, size = RunSource(run.path).about("s/e0").places[lost].tolist()
    flip(JournalFile(run.path / JOURNAL, segment).path, offset + size // 2)
    whole, source, replay = slow.episode().steps.sparse, RunSource(run.path), refilled(run)
    replay.close_session("s", gone=True)
    read = [source.read(key).steps for key in source.keys()]
    assert [steps.n for steps in read] == ([lost - 1] if lost > 1 else [])
    for steps in (*read, *(read_held(replay, *key).steps for key in replay.episodes())):
        assert steps.n == lost - 1
        for key in ("images/a", "images/b"):
            assert steps.sparse[key].index.tolist() == list(range(lost - 1))
            np.testing.assert_array_equal(np.asarray(steps.sparse[key].values), whole[key].values[: lost - 1])


def test_a_learner_that_is_replaced_within_an_episode_has_every_picture(tmp_path):
    """Its journal names frames that the second process read back; a spool sends the rest."""
    port, slow, stored = free_port(), Slow(length=30, every=(7, 4)), []
    begin, *steps, end = slow.recorded()
    with linked(port, connect=False, spools=spools(tmp_path / "spool")) as link:
        for process, part in enumerate((steps[:11], steps[11:])):
            replay = build(config(), image_keys=KEYS)
            store = RecordStore(tmp_path / "journal", LIMITS, min_steps=10**6)
            for row in store.replay():
                replay.insert("s", row.record)
            with serving(port, store=store, on_record=lambda info, r, to=replay: to.insert("s", r)) as server:
                server.resume()
                if process == 0:
                    link.connect(10)
                    link.begin(begin)
                for step in part:
                    link.step(step)
                if process == 1:
                    link.end(end)
                assert link.flush(10)
            store.close()
            stored.append(replay.stats()["replay/online_frames"])
    assert stored == [2 + 3, slow.pictures]
    same(read_held(replay, "s", "e0"), slow.episode())
