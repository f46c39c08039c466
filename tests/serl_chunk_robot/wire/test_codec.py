"""The wire format: what goes in comes out, and nothing else comes in."""

from __future__ import annotations

import random
from unittest import mock

import msgpack
import numpy as np
import pytest
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from properties import examples
from transport_mutations import declared_sizes

from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import DTYPES, Limits, WireError

LIMITS = Limits(1 << 20, 8)


def frames_of(kind, header, arrays, inline=codec.INLINE_BYTES):
    with mock.patch.object(codec, "INLINE_BYTES", inline):
        return [bytes(f) for f in codec.encode(kind, header, arrays)]


def text(min_size=0):
    return st.text("ab/é€\U0001f600\0", min_size=min_size, max_size=8)  # all of unicode takes 15 s to set up


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    raw = raw % 2 if dtype == "bool" else raw
    return raw.view(DTYPES[dtype]).reshape(shape) if size else np.empty(shape, DTYPES[dtype])


@given(
    st.dictionaries(text(), st.none() | st.integers(-(2**63), 2**64 - 1) | text() | st.binary()),
    st.dictionaries(text(1), arrays(), max_size=4),
    st.sampled_from([-1, 16, codec.INLINE_BYTES]),
)
@settings(max_examples=examples(75), deadline=None)
def test_round_trip(header, values, inline):
    frames = frames_of("k", header, values, inline)
    assert len(frames) == 1 + sum(v.nbytes > inline for v in values.values())
    message = codec.decode(frames, LIMITS)
    assert (message.kind, message.header) == ("k", header)
    assert list(message.arrays) == list(values)
    for path, value in values.items():
        got = message.arrays[path]
        assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes())
        assert not got.flags.writeable


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=np.float32).reshape(2, 3).T, np.arange(6)[::2], np.arange(3, dtype=">i4"), np.float64(2.5)],
    ids=["transposed", "strided", "big-endian", "scalar"],
)
def test_layouts_that_are_not_plain_memory(array):
    got = codec.decode(frames_of("k", {}, {"a": np.asarray(array)}), LIMITS).arrays["a"]
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(array, np.float64))
    assert got.shape == np.shape(array)


def forged(table, *data, header=None):
    return [msgpack.packb(["k", header or {}, table]), *data]


ONE, EIGHT, HUGE = b"1234", b"12345678", 2**39
LIST, ROW = "[kind, fields, table]", "[path, dtype, shape]"


@pytest.mark.parametrize(
    ("frames", "named"),
    [
        ([], ("frames",)), *(([each], ("msgpack",)) for each in (b"", b"\x91" * 5000)),
        *(([msgpack.packb(each)], (LIST,)) for each in (["k", {}], {"kind": "k"}, [3, {}, []])),
        ([msgpack.packb(["k", {}, []]) + b"x"], ("msgpack",)),
        ([msgpack.packb(["k", {b"a": 1}, []])], ("field", "string")),
        ([msgpack.packb(["k", {"a": msgpack.Timestamp(3)}, []])], ("msgpack",)),
        *((forged([["a", dtype, [1]]], EIGHT), ("dtype", dtype)) for dtype in ("|O", [["f", "|O"]])),
        *((forged([["a", "float32", x]], ONE), ("shape", str(x))) for x in ([-1], [-1, -1], [True], [1.0], [2**63])),
        *((forged([["a", "float32", x]], ONE), ("shape", "list", codec.MAX_DIMS)) for x in (1, [1] * 9)),
        (forged([["a", "uint8", [0, HUGE, HUGE]]], b""), ("shape", [0, HUGE, HUGE])),
        (forged([["a", "float32", [1]]], b"123"), ("float32", "(1,)", 4, 3)),
        (forged([["a", "float32", [1], b"12345"]]), ("float32", "(1,)", 4, 5)),
        (forged([["a", "float32", [1]]]), ("a", "frame", 0)), (forged([], b"1"), (1, "frames", 0)),
        (forged([["a", "uint8", [1], "1"]]), ("table", "bytes", "str")),
        (forged([["a", "uint8", [1], b"1", 0]]), (ROW,)), (forged([["a", "uint8"]], b"1"), (ROW,)),
        (forged([["a", "|O", [1], EIGHT]]), ("dtype", "|O")), (forged([["a", "bool", [1]]], b"\x02"), ("bool", 0, 1)),
        (forged([["a", "bool", [1], b"\x02"]]), ("bool", 0, 1)),
        (forged([["a", "uint8", [1], b"1"]] * 9), (9, "arrays", 8)), (forged([], *[b""] * 9), (9, "arrays", 8)),
        (forged([["a", "uint8", [1]]] * 2, b"1", b"1"), ("'a'",)),
        *((forged([[path, "uint8", [1]]], b"1"), ("path", f"1..{codec.MAX_PATH}")) for path in ("", 1)),
        ([b"x" * (1 << 21)], (1 << 21, codec.MAX_HEADER_BYTES)),
        (frames_of("k", {}, {"a": np.zeros(1 << 20, np.uint8)}), ("bytes", 1 << 20)),
    ],
)  # fmt: skip
def test_hostile_frames(frames, named):
    with pytest.raises(WireError, match=naming(*named)):
        codec.decode(frames, Limits(1 << 21, 8) if frames and len(frames[0]) > LIMITS.max_message_bytes else LIMITS)


@given(st.integers(0, 2**32), st.integers(1, 20))
@settings(max_examples=examples(150), deadline=None)
def test_mutations_are_refused_or_decode_to_safe_arrays(seed, mutations):
    """Whatever happens to the bytes: a WireError, or arrays of an allowed dtype whose size is their frame's."""
    rng = random.Random(seed)
    arrays = {"a": np.arange(6, dtype=np.float32), "b": np.zeros((2, 2), np.uint8)}
    frames = frames_of("k", {"first": 3}, arrays, rng.choice([-1, 4, 100]))
    for _ in range(mutations):
        at = rng.randrange(len(frames))
        frame = bytearray(frames[at])
        match rng.randrange(5):
            case 0 if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            case 1:
                frame.insert(rng.randint(0, len(frame)), rng.randrange(256))
            case 2 if frame:
                del frame[rng.randrange(len(frame))]
            case 3:
                frames.append(bytes(rng.randbytes(4)))
            case 4 if len(frames) > 1:
                rng.shuffle(frames)
                continue
        frames[at] = bytes(frame)
    try:
        message = codec.decode(frames, LIMITS)
    except WireError:
        return
    for array, nbytes in zip(message.arrays.values(), declared_sizes(frames), strict=True):
        assert array.dtype in DTYPES.values()
        assert array.nbytes == nbytes


def test_a_dtype_is_sent_once_it_is_registered(monkeypatch):
    for other in (np.array([object()]), np.zeros(2, "f4,O"), np.array(["x"]), np.zeros(2, "c8")):
        with pytest.raises(WireError, match=naming("dtype", other.dtype, "bool")):
            codec.encode("k", {}, {"a": other})
    monkeypatch.setattr(codec, "DTYPES", dict(DTYPES))
    monkeypatch.setattr(codec, "_NAMES", dict(codec._NAMES))
    values = np.ones((40, 64), np.complex64)
    for _ in range(2):
        codec.register_dtype("complex64", values.dtype)
    for sent in (values, values[0]):  # a frame of its own, and one in the table
        got = codec.decode(frames_of("k", {}, {"a": sent}), LIMITS).arrays["a"]
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype
    for name, dtype in [("object", np.dtype(object)), ("pair", np.dtype("f4,O")), ("complex64", np.dtype("c16"))]:
        with pytest.raises(ValueError, match=naming(f"'{name}'", dtype)):
            codec.register_dtype(name, dtype)
