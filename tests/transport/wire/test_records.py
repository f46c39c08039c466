"""Records survive the wire unchanged; a record that is not one is refused with its reason."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from properties import examples
from transport_tools import LIMITS, end, shared, step

from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.records import Assembly, decode_part, encode_part
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


@pytest.mark.parametrize("record", [
    Begin("e", "do it", "fake", "abc", "s1", "g1", '{"profile": "p"}'), Begin("e", demonstration=True), block(),
    end("e", 8), End("e", 0, None, False, True, Outcome.UNKNOWN),
    Amend("e", Outcome.FAILURE, "operator", True, 0.5, True),
    StepBlock.from_steps("e", [step(4), *(step(5 + i)._replace(repeats={"top": 4 * i}) for i in (0, 1))]),
    end("e", 8)._replace(repeats={"top": 7, "side": 0}),
    StepBlock.from_steps("e", [step(4), shared(step(5)), shared(step(6), (True, True))]),
])  # fmt: skip
def test_round_trip(record):
    assert_equal(round_trip(record), record)
    if isinstance(record, Amend) and record.reward:
        assert round_trip(record._replace(reward=np.float32(0.5))) == record


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


# -- in parts ---------------------------------------------------------------------------------------------------------


def _large() -> list[bytes]:
    """The frames of a block of steps: its head, and images as a frame of their own."""
    rng = np.random.default_rng(0)
    steps = [step(t) for t in range(24)]
    for s in steps[::3]:
        s.observation["images/top"] = rng.integers(0, 256, (12, 16, 3), np.uint8)
    return [bytes(memoryview(f)) for f in records.encode_record(StepBlock.from_steps("e", steps), 3)]


FRAMES = _large()
TOTAL = codec.size_of(FRAMES)


def part(offset: int, nbytes: int, first: int = 3, frames: list[bytes] = FRAMES):
    sent = [bytes(memoryview(f)) for f in encode_part(first, 24, frames, offset, nbytes)]
    return decode_part(codec.decode(sent, LIMITS), LIMITS)


@given(st.lists(st.integers(1, TOTAL - 1), max_size=8, unique=True))
def test_parts_cut_anywhere_give_the_record_back(cuts):
    edges = [0, *sorted(cuts), TOTAL]
    assembly = Assembly(part(0, edges[1]))
    for start, stop in itertools.pairwise(edges):
        assert assembly.frames() is None
        assert (assembly.first, assembly.received) == (3, start)
        assert assembly.add(part(start, stop - start))
        assert assembly.add(part(start, stop - start))  # a repeated one changes nothing
    frames = assembly.frames()
    assert frames is not None
    assert [bytes(memoryview(f)) for f in frames] == FRAMES
    assert len(FRAMES) > 1
    message = codec.decode(frames, LIMITS)
    assert records.decode_record(message)[0] == 3
    assert not any(a.flags.writeable for a in message.arrays.values())


def test_a_part_that_does_not_go_on_is_not_taken():
    assembly = Assembly(part(0, 100))
    assert assembly.add(part(0, 100))
    assert not assembly.add(part(101, 50))
    assert not assembly.add(part(100, 50, first=4))
    assert not assembly.add(part(100, 50, frames=[*FRAMES, b"x"]))
    assert assembly.received == 100
    assert assembly.add(part(50, 100))  # the half of it that is new
    assert assembly.received == 150
