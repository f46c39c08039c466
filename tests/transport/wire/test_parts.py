"""Parts of a record: every cut gives the record back, and what is no part is refused."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from transport_tools import LIMITS, step

from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.records import Assembly, decode_part, encode_part
from serl_chunk.types import StepBlock
from serl_chunk_robot.wire import codec


def record() -> list[bytes]:
    """The frames of a block of steps: its head, and images as a frame of their own."""
    rng = np.random.default_rng(0)
    steps = [step(t) for t in range(24)]
    for s in steps[::3]:
        s.observation["images/top"] = rng.integers(0, 256, (12, 16, 3), np.uint8)
    return [bytes(memoryview(f)) for f in records.encode_record(StepBlock.from_steps("e", steps), 3)]


FRAMES = record()
TOTAL = codec.size_of(FRAMES)


def part(offset: int, nbytes: int, first: int = 3, frames: list[bytes] = FRAMES):
    sent = [bytes(memoryview(f)) for f in encode_part(first, 24, frames, offset, nbytes)]
    return decode_part(codec.decode(sent, LIMITS), LIMITS)


@given(st.lists(st.integers(1, TOTAL - 1), max_size=8, unique=True))
def test_parts_cut_anywhere_give_the_record_back(cuts):
    edges = [0, *sorted(cuts), TOTAL]
    assembly = Assembly(part(0, edges[1]))
    for start, end in itertools.pairwise(edges):
        assert assembly.frames() is None
        assert (assembly.first, assembly.received) == (3, start)
        assert assembly.add(part(start, end - start))
        assert assembly.add(part(start, end - start))  # a repeated one changes nothing
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
