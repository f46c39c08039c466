"""Records leave in order, each decision with its step."""

from __future__ import annotations

import numpy as np
from actor_helpers import ListSink

from serl_chunk.actor.recorder import EpisodeRecorder
from serl_chunk.types import Begin, End, Outcome, Source, Step

BEGIN = Begin("e")
END = End("e", 2, {}, False, True, Outcome.UNKNOWN)
RECORD = {"q": np.float32(1)}


def step(tick):
    return Step(tick, {}, np.zeros(1, np.float32), 0.0, Source.POLICY, 0, 0, 0.0)


def ticks(sink):
    return [(s.tick, s.decision is not None) for s in sink.steps]


def test_steps_wait_for_the_decision_on_an_earlier_one():
    sink = ListSink()
    recorder = EpisodeRecorder(sink, BEGIN)
    recorder.expect(0)
    recorder.step(step(0))
    recorder.step(step(1))
    assert sink.records == []
    recorder.decided(0, RECORD)
    assert ticks(sink) == [(0, True), (1, False)]
    recorder.step(step(2))
    assert ticks(sink)[-1] == (2, False)


def test_a_decision_that_is_given_up_holds_nothing_back():
    sink = ListSink()
    recorder = EpisodeRecorder(sink, BEGIN)
    recorder.expect(0)
    recorder.step(step(0))
    recorder.release()
    recorder.expect(1)
    recorder.decided(1, RECORD)  # before its step: inference within the tick
    recorder.step(step(1))
    assert ticks(sink) == [(0, False), (1, True)]


def test_the_end_hands_over_what_waits():
    sink = ListSink()
    recorder = EpisodeRecorder(sink, BEGIN)
    recorder.expect(0)
    recorder.step(step(0))
    recorder.step(step(1))
    recorder.end(END)
    assert [type(r) for r in sink.records] == [Begin, Step, Step, End]


def test_an_episode_without_steps_leaves_no_record():
    sink = ListSink()
    EpisodeRecorder(sink, BEGIN).end(END)
    assert sink.records == []
