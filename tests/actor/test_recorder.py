"""Records leave in order, each decision with its step."""

from __future__ import annotations

import numpy as np
import pytest
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


def test_steps_wait_for_the_decision_on_an_earlier_one_which_is_reported_first_or_given_up():
    sink, told = ListSink(), []
    recorder = EpisodeRecorder(sink, BEGIN, lambda record: told.append((record, len(sink.records))))
    EpisodeRecorder(sink, BEGIN).end(END)
    recorder.expect(0)
    recorder.step(step(0))
    recorder.step(step(1))
    assert sink.records == []  # and none of an episode without steps
    recorder.decided(0, RECORD)
    recorder.step(step(2))
    assert ticks(sink) == [(0, True), (1, False), (2, False)]
    recorder.expect(3)
    recorder.step(step(3))
    recorder.release()
    recorder.expect(4)
    recorder.decided(4, RECORD)  # before its step: inference within the tick
    recorder.step(step(4))
    assert ticks(sink)[3:] == [(3, False), (4, True)]
    assert told == [(RECORD, 0), (RECORD, 5)]
    recorder.expect(5)
    recorder.step(step(5))
    recorder.end(END)  # hands over what waits
    assert [type(r) for r in sink.records] == [Begin, *[Step] * 6, End]


def picture(value, row=0):
    out = np.full((6, 4, 3), value, np.uint8)
    out[-1] = row
    return out


def recorded(pictures, numbers=None):
    """What the sink has of an episode whose camera gave `pictures`, by tick; the last one at the end."""
    sink, seen = ListSink(), {}
    recorder = EpisodeRecorder(sink, BEGIN)
    for tick, image in enumerate(pictures):
        given = {} if numbers is None else {"top": numbers[tick]}
        observation = {"state": np.zeros(1, np.float32), "images/top": image}
        if tick < len(pictures) - 1:
            recorder.step(step(tick)._replace(observation=observation), given)
        else:
            recorder.end(End("e", tick, observation, False, True, Outcome.UNKNOWN), given)
    for record in (*sink.steps, sink.last_end):
        last = isinstance(record, End)
        observation = record.final_observation if last else record.observation
        assert "state" in observation
        image = observation.get("images/top")
        assert (image is None) == (record.repeats is not None)
        seen[record.length if last else record.tick] = record.repeats if image is None else image
    return seen


A, B = picture(1), picture(2)
SAME_ROWS = picture(1, row=9)  # differs from A in its last row alone


@pytest.mark.parametrize(("pictures", "numbers", "named"), [
    ([A, A, A, B, B], None, {1: 0, 2: 0, 4: 3}),  # the same array
    ([A, picture(1), SAME_ROWS, picture(1, row=9)], None, {1: 0, 3: 2}),  # the same bytes
    ([A, B, A, B], None, {}),  # only the newest is named
    ([A, picture(1), B, picture(2)], [5, 5, 6, 6], {1: 0, 3: 2}),
    ([A, picture(1), picture(1)], [5, 6, 6], {2: 1}),  # a new picture that looks the same
    ([A, B, SAME_ROWS], [5, 5, 5], {}),  # numbers that stand still
])  # fmt: skip
def test_a_frame_that_was_recorded_is_named_by_its_tick(pictures, numbers, named):
    seen = recorded(pictures, numbers)
    assert {tick: at["top"] for tick, at in seen.items() if isinstance(at, dict)} == named
    for tick, image in enumerate(pictures):
        np.testing.assert_array_equal(seen[named.get(tick, tick)], image)
