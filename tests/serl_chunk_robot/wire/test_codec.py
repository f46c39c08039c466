"""The wire formats: what goes in comes out, msgpack_numpy's bytes are read, and nothing else comes in."""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any
from unittest import mock

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from properties import examples
from transport_mutations import declared_sizes

from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.arrays import DTYPES as KINDS
from serl_chunk_robot.wire.arrays import MAX_DEPTH, pack, unpack
from serl_chunk_robot.wire.codec import DTYPES, Limits, WireError

LIMITS = Limits(1 << 20, 8)


def frames_of(kind, header, arrays, inline=codec.INLINE_BYTES):
    with mock.patch.object(codec, "INLINE_BYTES", inline):
        return [bytes(f) for f in codec.encode(kind, header, arrays)]


def text(min_size=0):
    return st.text("ab/é€\U0001f600\0", min_size=min_size, max_size=8)  # all of unicode takes 15 s to set up


@st.composite
def arrays(draw, dtypes):
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    raw = raw % 2 if dtype.kind == "b" else raw
    return raw.view(dtype).reshape(shape) if size else np.empty(shape, dtype)


def mutate(rng: random.Random, data: bytearray) -> None:
    """Change, insert or delete a byte, or turn a bit around."""
    at = rng.randint(0, len(data))
    match rng.randrange(4) if at < len(data) else 0:
        case 0:
            data.insert(at, rng.randrange(256))
        case 1:
            del data[at]
        case 2:
            data[at] = rng.randrange(256)
        case 3:
            data[at] ^= 1 << rng.randrange(8)


@given(
    st.dictionaries(text(), st.none() | st.integers(-(2**63), 2**64 - 1) | text() | st.binary()),
    st.dictionaries(text(1), arrays(list(DTYPES.values())), max_size=4),
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


def test_layouts_that_are_not_plain_memory():
    numbers = np.arange(6, dtype=np.float32)
    for array in (numbers.reshape(2, 3).T, numbers[::2], np.arange(3, dtype=">i4"), np.asarray(np.float64(2.5))):
        got = codec.decode(frames_of("k", {}, {"a": array}), LIMITS).arrays["a"]
        np.testing.assert_array_equal(got, array)
        assert got.shape == array.shape


def forged(table, *data, header=None):
    return [msgpack.packb(["k", header or {}, table]), *data]


ONE, EIGHT, HUGE = b"1234", b"12345678", 2**39
LIST, ROW = "[kind, fields, table]", "[path, dtype, shape]"


@pytest.mark.parametrize(("frames", "named"), [
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
])  # fmt: skip
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
        match rng.randrange(5):
            case 3:
                frames.append(bytes(rng.randbytes(4)))
            case 4:
                rng.shuffle(frames)
            case _:
                at = rng.randrange(len(frames))
                frame = bytearray(frames[at])
                mutate(rng, frame)
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


LIMIT = 1 << 20
PLAIN = (bool, int, float, str, bytes, type(None))


def leaves():
    plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | text(1) | st.binary(max_size=8)
    of_kinds = arrays([np.dtype(kind) for kind in sorted(KINDS)])
    return plain | of_kinds | of_kinds.filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0])


def messages():
    inner = st.recursive(
        leaves(), lambda v: st.lists(v, max_size=3) | st.dictionaries(text(1), v, max_size=3), max_leaves=6
    )
    return st.dictionaries(text(1), inner, max_size=4)


def same(got: Any, sent: Any) -> bool:
    if isinstance(sent, np.ndarray):
        equal = (got.dtype, got.shape, got.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())
        return equal and not got.flags.writeable
    if isinstance(sent, np.generic):
        sent = sent.item()
    if isinstance(sent, dict):
        return list(got) == list(sent) and all(same(got[k], v) for k, v in sent.items())
    if isinstance(sent, list):
        return len(got) == len(sent) and all(map(same, got, sent))
    return type(got) is type(sent) and (got == sent or (got != got and sent != sent))


@given(messages())
@settings(max_examples=examples(60), deadline=None)
def test_maps_with_arrays_round_trip(values):
    data = pack(values)
    assert same(unpack(data, len(data)), values), "a message may be as large as its limit"
    assert same(unpack(memoryview(data), LIMIT), values)
    with pytest.raises(WireError, match=naming(len(data), len(data) - 1)):
        unpack(data, len(data) - 1)
    assert data == msgpack_numpy.packb(values), "what msgpack_numpy writes, and so what it writes is read"


def safe(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(k) is str and safe(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(safe, value))
    if isinstance(value, np.ndarray):
        return value.dtype.str in KINDS and not value.flags.writeable
    return type(value) in PLAIN


@given(messages(), st.integers(0, 2**32), st.integers(1, 20), st.binary(max_size=64))
@settings(max_examples=examples(100), deadline=None)
def test_mutations_and_any_bytes_are_refused_or_decode_to_plain_values(values, seed, mutations, other):
    rng = random.Random(seed)
    data = bytearray(pack({"q": np.arange(3, dtype=np.float32), **values}))
    for _ in range(mutations):
        mutate(rng, data)
    for each in (bytes(data), other):
        with contextlib.suppress(WireError):
            assert safe(unpack(each, LIMIT))


class Payload:
    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_no_pickle_is_run(tmp_path):
    payload = Payload()
    flag = payload.folder = tmp_path / "ran"
    objects = np.array([payload], dtype=object)
    data = msgpack_numpy.packb({"state": {"q": objects}})
    msgpack_numpy.unpackb(data)
    assert flag.exists()  # the payload works
    flag.rmdir()
    kind = b"\xc4\x04kind\xc4\x01O"
    forged = [data, *(data.replace(kind, other) for other in (b"\xc4\x04kind\xc4\x00", b"\xc4\x04kind\xc4\x01V"))]
    assert len(set(forged)) == 3
    for message in forged:
        with pytest.raises(WireError, match=naming("state.q")):
            unpack(message, LIMIT)
    with pytest.raises(WireError, match=naming("state.q", "object", "float32")):
        pack({"state": {"q": objects}})
    assert not flag.exists()


def array(**changes: Any) -> dict[bytes, Any]:
    """The fields of `float32[1]`; None leaves one out."""
    fields = {"nd": True, "type": "<f4", "kind": b"", "shape": [1], "data": b"1234", **changes}
    return {key.encode(): value for key, value in fields.items() if value is not None}


def number(**changes: Any) -> dict[bytes, Any]:
    return array(**{"nd": False, "kind": None, "shape": None, **changes})


@pytest.mark.parametrize(("value", "named"), [
    *((array(type=text), ("dtype", text)) for text in ("|O", ">f4")), (array(type=b"<f4"), ("dtype", "<f4")),
    (array(type=[["f", "|O"]]), ("dtype", "|O")), (array(kind=b"V", type=[["f", "<f4"]]), ("kind", "V")),
    *((array(**changes), ("fields",)) for changes in ({"nd": 1}, {"more": 1}, {"shape": None})),
    *((array(shape=shape), ("shape", shape)) for shape in ([-1], [True], [1.0])),
    (array(shape=1), ("shape", codec.MAX_DIMS)), (array(shape=[1] * 9), ("shape", codec.MAX_DIMS)),
    (array(shape=[0, 2**39, 2**39]), ("shape", 2**39)), (array(data=b"12345"), ("float32", 4, 5)),
    (array(data="1234"), ("bytes", "str")), (array(type="|b1", data=b"\2"), ("bool", 0, 1)),
    (number(data=b"12345678"), ("float32", 4, 8)), (number(type="|O", data=b"12345678"), ("dtype", "|O")),
    ({b"complex": True, b"data": "1j"}, ("key", "complex")), ({"": 1}, ("key", "''")),
    (msgpack.ExtType(5, b""), ("ExtType",)),
])  # fmt: skip
def test_hostile_values_are_refused_by_name(value, named):
    good = {"ready": True}
    for message, path in [({"q": value}, "q"), ({"state": {**good, "q": [0, value]}}, "state.q[1]")]:
        with pytest.raises(WireError, match=naming(path, *named)) as caught:
            unpack(msgpack.packb(message), LIMIT)
        assert len(str(caught.value)) < 300


def test_hostile_messages_are_refused():
    whole = msgpack.packb({"a": 1})
    others = map(msgpack.packb, ([1], {3: 1}, array(), {"a": msgpack.Timestamp(3)}))
    for data in (b"", b"\x81", b"\x81\xa1a" * 5000, b"\x81\xa1a\xa1\xff", b"\xdf\xff\xff\xff\xff", whole[:-1],
                 whole + b"x", *others):  # fmt: skip
        with pytest.raises(WireError):
            unpack(data, LIMIT)


def test_depth_is_limited_on_both_sides():
    deepest: dict[str, Any] = {}
    for _ in range(MAX_DEPTH - 1):
        deepest = {"a": deepest}
    assert unpack(pack(deepest), LIMIT) == deepest
    too_deep = {"a": deepest}
    for refused in (lambda: pack(too_deep), lambda: unpack(msgpack.packb(too_deep), LIMIT)):
        with pytest.raises(WireError, match=naming("a.a.a", MAX_DEPTH)):
            refused()
    endless: dict[str, Any] = {}
    endless["a"] = [endless]
    with pytest.raises(WireError, match=naming("a[0].a", MAX_DEPTH)):
        pack(endless)


@pytest.mark.parametrize(("value", "named"), [
    (np.zeros(2, np.float16), ("dtype", "float16")), (np.zeros((1,) * 9), ("shape", codec.MAX_DIMS)),
    (2**64, ("64 bits", 2**64)), ("\ud800", ("UTF-8",)), (object(), ("object",)),
])  # fmt: skip
def test_what_cannot_be_sent_is_named(value, named):
    with pytest.raises(WireError, match=naming("command.q[0]", *named)):
        pack({"command": {"q": [value]}})
