"""Records survive the wire unchanged; a record that is not one is refused with its reason."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from properties import examples
from transport_tools import LIMITS, end, shared, step

from serl_chunk.transport.wire import records
from serl_chunk.types import Amend, Begin, End, Outcome, Source, StepBlock
from serl_chunk_robot.wire import codec


def round_trip(record, first=7):
    message = codec.decode([bytes(f) for f in records.encode_record(record, first)], LIMITS)
    assert message.kind == records.Item.of(record, 0).kind
    got_first, got = records.decode_record(message)
    assert got_first == first
    return got


def assert_equal(a, b):
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        a, b = vars(a), vars(b)
    elif hasattr(a, "_asdict"):
        a, b = a._asdict(), b._asdict()
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b


def block(n=8, first=0):
    return StepBlock.from_steps("e", [step(t, t) for t in range(first, first + n)])


@pytest.mark.parametrize(
    "record",
    [
        Begin("e"),
        Begin("e", "do it", "fake", "abc", "s1", "g1", '{"profile": "p"}'),
        Begin("e", demonstration=True),
        block(),
        block(1, 1),
        block(4, 1000),
        end("e", 8),
        End("e", 0, None, False, True, Outcome.UNKNOWN),
        end("e", 8)._replace(environment=Outcome.FAILURE),
        Amend("e", Outcome.FAILURE, "operator", True, 0.5, True),
        Amend("e"),
        StepBlock.from_steps("e", [step(4), *(step(5 + i)._replace(repeats={"top": 4 * i}) for i in (0, 1))]),
        end("e", 8)._replace(repeats={"top": 7, "side": 0}),
        StepBlock.from_steps("e", [step(4), shared(step(5)), shared(step(6), (True, True))]),
    ],
)
def test_round_trip(record):
    assert_equal(round_trip(record), record)
    if isinstance(record, Amend) and record.reward:
        assert round_trip(record._replace(reward=np.float32(0.5))) == record


def test_messages_without_a_partial_intervention_have_no_trace_of_one():
    frames = [bytes(f) for f in records.encode_record(block(), 0)]
    assert hashlib.sha256(b"".join(frames)).hexdigest()[:16] == "78901c1f21b05152"


# Of each step: the policy's, a human's, or the numbers of the action that a human commanded.
actors = st.lists(st.sampled_from(["policy", "human", (True, False), (False, True), (True, True)]), min_size=1)


def acted(first, actors):
    steps = []
    for s, actor in zip(map(step, range(first, first + len(actors))), actors, strict=True):
        human = s._replace(source=Source.HUMAN, decision_tick=-1)
        steps.append(s if actor == "policy" else human if actor == "human" else shared(s, actor))
    return steps


@settings(max_examples=examples(50), deadline=None)
@given(actors, st.integers(0, 1000), st.data())
def test_partial_interventions_travel_in_any_blocks(actors, first, data):
    steps = acted(first, actors)
    whole = StepBlock.from_steps("e", steps)
    assert_equal(round_trip(whole), whole)
    start = data.draw(st.integers(0, len(steps) - 1))
    stop = data.draw(st.integers(start + 1, len(steps)))
    assert_equal(round_trip(whole.slice(start, stop)), StepBlock.from_steps("e", steps[start:stop]))
    queue, packed = deque(("e", s, records.step_bytes(s)) for s in steps), deque()
    while queue:
        records.pack_steps(queue, packed, data.draw(st.integers(1, 4000)))
    at = 0
    for block, _, n in packed:
        assert_equal(round_trip(block), whole.slice(at, at + n))
        at += n
    assert at == len(steps)
