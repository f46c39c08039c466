"""Records survive the wire unchanged; a record that is not one is refused with its reason."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
from errors import naming
from hypothesis import given, settings
from properties import examples
from transport_tools import LIMITS, end, shared, step

from serl_chunk.transport.wire import records
from serl_chunk.types import Amend, Begin, End, Outcome, Source, SparseRows, StepBlock
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Message, WireError


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
        StepBlock.from_steps(
            "e", [step(4), step(5)._replace(repeats={"top": 4}), step(6)._replace(repeats={"top": 0})]
        ),
        end("e", 8)._replace(repeats={"top": 7, "side": 0}),
        StepBlock.from_steps("e", [step(4), shared(step(5)), shared(step(6), (True, True))]),
    ],
)
def test_round_trip(record):
    assert_equal(round_trip(record), record)


def test_numpy_rewards_travel():
    assert round_trip(Amend("e", reward=np.float32(0.5))).reward == 0.5


def test_sparse_arrays_of_a_block():
    got = round_trip(block(7, 2))
    assert sorted(got.sparse) == ["decision/chunk", "images/top"]
    np.testing.assert_array_equal(got.sparse["images/top"].index, [1, 4])
    np.testing.assert_array_equal(got.sparse["decision/chunk"].values[:, 0, 0], [5])


def decode_block(header=None, **arrays):
    """Decode an eight-step block with some arrays replaced ("a.b" stands for "a/b"; None removes)."""
    frames = records.encode_record(block(), 0)
    message = codec.decode(frames, LIMITS)
    values = dict(message.arrays)
    for name, value in arrays.items():
        values[name.replace("__", "/")] = value
    values = {k: v for k, v in values.items() if v is not None}
    return records.decode_record(Message(message.kind, {**message.header, **(header or {})}, values, 0))


def test_the_block_that_the_next_test_breaks_is_sound():
    assert decode_block()[1].n == 8


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"action": None}, ("action",)),
        ({"policy_age": None}, ("policy_age",)),
        ({"lost_ticks": None}, ("lost_ticks",)),
        ({"lost_ticks": np.full(8, -1, np.int32)}, ("lost_ticks", "negative")),
        ({"policy_age": np.zeros(7, np.float32)}, ("policy_age", 8, "(7,)")),
        ({"policy_age": np.zeros(8)}, ("policy_age", "float32", "float64")),
        ({"stamp": None}, ("stamp",)),
        ({"action": np.zeros((8, 2))}, ("action", "float32", "float64")),
        ({"action": np.zeros(8, np.float32)}, ("action", "float32", 2, "(8,)")),
        ({"action": np.zeros((0, 2), np.float32)}, ("steps",)),
        ({"reward": np.zeros(7, np.float32)}, ("reward", 8, "(7,)")),
        ({"reward": np.zeros(8, np.float64)}, ("reward", "float32", "float64")),
        ({"source": np.full(8, 5, np.uint8)}, ("source", "0..4", 5)),
        ({"decision_tick": np.full(8, -2, np.int32)}, ("decision_tick", -1)),
        ({"decision_tick": np.full(8, 1, np.int32)}, ("decision_tick", -1)),
        ({"observation__state": np.zeros((7, 2), np.float32)}, ("observation/state", 8, "(7, 2)")),
        ({"observation__state": np.zeros((8, 2), np.float64)}, ("observation/state", "float32", "float64")),
        ({"observation__x": np.float32(1)}, ("observation/x", 8, "()")),
        ({"other": np.zeros(8, np.float32)}, ("other",)),
        ({"index__images__top": None}, ("['decision/chunk']", "['decision/chunk', 'images/top']")),
        ({"index__images__top": np.array([0, 3, 8], np.int32)}, ("index/images/top", "0..7")),
        ({"index__images__top": np.array([0, 3, 3], np.int32)}, ("index/images/top", "0..7")),
        ({"index__images__top": np.array([-1, 3, 6], np.int32)}, ("index/images/top", "0..7")),
        ({"index__images__top": np.array([0, 3, 6], np.int64)}, ("index/images/top", "int32", "int64")),
        ({"index__images__top": np.array([0, 3], np.int32)}, ("values/images/top", 2, "(3, 12, 16, 3)")),
        ({"values__images__top": np.zeros((3, 4, 4, 3), np.float32)}, ("values/images/top", "uint8", "float32")),
        ({"index__x": np.zeros(1, np.int32), "values__x": np.zeros(1)}, ("x", "images/", "decision/")),
    ],
)
def test_malformed_blocks(arrays, named):
    with pytest.raises(WireError, match=naming(*named)):
        decode_block(**arrays)


@pytest.mark.parametrize("value", [-1, 2**31, 1.0, None, "0"])
def test_malformed_first_tick(value):
    with pytest.raises(WireError, match=naming("first_tick")):
        decode_block({"first_tick": value})


@pytest.mark.parametrize(
    ("record", "change", "named"),
    [
        (Begin("e"), {"task": 3}, ("task", "str", "int")),
        (Begin("e"), {"demonstration": 1}, ("demonstration", "bool", "int")),
        (Begin("e"), {"first": -1}, ("first", -1)),
        (end("e", 3), {"outcome": "won"}, ("outcome", "won", "success")),
        (end("e", 3), {"outcome": None}, ("outcome", "str", "NoneType")),
        (end("e", 3), {"terminated": 1}, ("terminated", "bool", "int")),
        (end("e", 3), {"length": -3}, ("length", -3)),
        (end("e", 3), {"reward": float("nan")}, ("reward", "nan")),
        (end("e", 3), {"reward": 1e300}, ("reward", "float32", "1e+300")),
        (Amend("e"), {"reward": -1e39}, ("reward", "float32", "-1e+39")),
        (end("e", 3), {"episode_id": "e\x1b[2J"}, ("episode_id", "'e\\x1b[2J'")),
        (Begin("e"), {"robot": "a\nb"}, ("robot", "'a\\nb'")),
        (Amend("e"), {"outcome_by": "\x9b2J"}, ("outcome_by", "'\\x9b2J'")),
        (end("e", 3), {"final_observation": False}, ("end", "arrays")),
        (Amend("e"), {"discard": None}, ("discard", "bool", "NoneType")),
        (Amend("e"), {"outcome": "won"}, ("outcome", "won", "success")),
    ],
)
def test_malformed_fields(record, change, named):
    sound = codec.decode(records.encode_record(record, 0), LIMITS)
    with pytest.raises(WireError, match=naming(*named)):
        records.decode_record(sound._replace(header={**sound.header, **change}))


def test_other_kinds_are_no_records():
    with pytest.raises(WireError, match=naming("ping", "begin", "steps", "end", "amend")):
        records.decode_record(Message("ping", {"first": 0}, {}, 0))
    with pytest.raises(WireError, match=naming("begin", "arrays")):
        records.decode_record(Message("begin", {"first": 0}, {"a": np.zeros(1)}, 0))


@pytest.mark.parametrize(
    ("index", "values", "words"),
    [
        ([1], [6], ("values/repeat/top", "before the step's own")),  # its own tick
        ([1], [-1], ("values/repeat/top", "before the step's own")),
        ([0, 1], [3], ("values/repeat/top", 2)),
        ([1], [[3]], ("values/repeat/top", "int32")),
        ([2], [3], ("index/repeat/top", "0..1")),
    ],
)
def test_repeated_frames_name_earlier_ticks(index, values, words):
    whole = StepBlock.from_steps("e", [step(5), step(6)])
    rows = SparseRows(np.array(index, np.int32), np.array(values, np.int32))
    bad = dataclasses.replace(whole, sparse={"repeat/top": rows})
    with pytest.raises(WireError, match=naming(*words)):
        round_trip(bad)


@pytest.mark.parametrize("repeats", [["top"], {"top": 8}, {"top": -1}, {"top": "3"}, {"top": True}, {3: 3}])
def test_a_final_observation_repeats_a_step_s_frame(repeats):
    header = end("e", 8)._asdict() | {"first": 0, "outcome": "unknown", "final_observation": True, "repeats": repeats}
    with pytest.raises(WireError, match="repeats"):
        records.decode_record(Message("end", header, {}, 0))


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


@pytest.mark.parametrize(
    ("index", "values", "words"),
    [
        ([1], [[1.0, 0.0]], ("values/human_dims", "float64[1, 2]", "uint8[1, 2]")),
        ([1], [[True, False]], ("values/human_dims", "bool[1, 2]", "uint8[1, 2]")),
        ([1], np.ones((1, 3), np.uint8), ("values/human_dims", "uint8[1, 3]", "uint8[1, 2]")),
        ([1], np.ones(2, np.uint8), ("values/human_dims", 1, "(2,)")),
        ([1], np.ones((1, 2, 1), np.uint8), ("values/human_dims", "uint8[1, 2, 1]", "uint8[1, 2]")),
        ([1], np.array([[2, 0]], np.uint8), ("values/human_dims", "[2, 0]", 6)),
        ([1], np.zeros((1, 2), np.uint8), ("values/human_dims", "[0, 0]", 6)),
        ([0, 1], np.ones((2, 2), np.uint8), ("values/human_dims", 5, "HUMAN")),  # the policy's step
        ([2], np.ones((1, 2), np.uint8), ("index/human_dims", "0..1")),
        ([1], np.ones((2, 2), np.uint8), ("values/human_dims", 1, "(2, 2)")),
    ],
)
def test_malformed_partial_interventions(index, values, words):
    whole = StepBlock.from_steps("e", [step(5), shared(step(6))])
    rows = SparseRows(np.array(index, np.int32), np.array(values))
    with pytest.raises(WireError, match=naming(*words)):
        round_trip(dataclasses.replace(whole, sparse={"human_dims": rows}))


def test_nothing_else_may_be_called_like_a_partial_intervention():
    whole = StepBlock.from_steps("e", [step(5), shared(step(6))])
    sparse = {"human_dims/top": whole.sparse["human_dims"]}
    with pytest.raises(WireError, match=naming("human_dims/top", "human_dims", "images/")):
        round_trip(dataclasses.replace(whole, sparse=sparse))
