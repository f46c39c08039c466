"""Maps with arrays: what goes in comes out, msgpack_numpy's bytes are read, and nothing else comes in."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from properties import examples

from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.arrays import DTYPES, MAX_DEPTH, pack, unpack
from serl_chunk_robot.wire.codec import WireError

LIMIT = 1 << 20
PLAIN = (bool, int, float, str, bytes, type(None))


def names():
    return st.text("abc/é€\U0001f600\0", min_size=1, max_size=8)


def numpy_arrays():
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    return st.sampled_from(sorted(DTYPES)).flatmap(lambda dtype: hnp.arrays(dtype, shapes))


def leaves():
    plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | names() | st.binary(max_size=8)
    return plain | numpy_arrays() | numpy_arrays().filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0])


def messages():
    inner = st.recursive(
        leaves(), lambda v: st.lists(v, max_size=3) | st.dictionaries(names(), v, max_size=3), max_leaves=6
    )
    return st.dictionaries(names(), inner, max_size=4)


def same(got: Any, sent: Any) -> bool:
    """Whether `got` is what `sent` must arrive as."""
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
@settings(max_examples=examples(100), deadline=None)
def test_round_trip(values):
    data = pack(values)
    assert same(unpack(data, LIMIT), values)
    assert same(unpack(memoryview(data), len(data)), values)
    assert data == msgpack_numpy.packb(values), "what msgpack_numpy writes, and so what it writes is read"


def safe(value: Any) -> bool:
    """Whether a decoded value is of the plain types alone."""
    if isinstance(value, dict):
        return all(type(k) is str and safe(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(safe, value))
    if isinstance(value, np.ndarray):
        return value.dtype.str in DTYPES and not value.flags.writeable
    return type(value) in PLAIN


@given(messages(), st.integers(0, 2**32), st.integers(1, 20), st.binary(max_size=64))
@settings(max_examples=examples(150), deadline=None)
def test_mutations_and_any_bytes_are_refused_or_decode_to_plain_values(values, seed, mutations, other):
    rng = random.Random(seed)
    data = bytearray(pack({"q": np.arange(3, dtype=np.float32), **values}))
    for _ in range(mutations):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data.insert(at, rng.randrange(256))
            case 2 if len(data) > 1:
                del data[at]
            case 3:
                data[at] ^= 1 << rng.randrange(8)
    for each in (bytes(data), other):
        with contextlib.suppress(WireError):
            assert safe(unpack(each, LIMIT))


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_no_pickle_is_run(tmp_path):
    flag = tmp_path / "ran"
    objects = np.array([Payload(flag)], dtype=object)
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


@pytest.mark.parametrize(
    ("value", "named"),
    [
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
    ],
)  # fmt: skip
def test_hostile_values_are_refused_by_name(value, named):
    good = {"ready": True}
    for message, path in [({"q": value}, "q"), ({"state": {**good, "q": [0, value]}}, "state.q[1]")]:
        with pytest.raises(WireError, match=naming(path, *named)) as caught:
            unpack(msgpack.packb(message), LIMIT)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "data",
    [b"", b"\x81", b"\x81\xa1a", b"\x81\xa1a" * 5000, b"\x81\xa1a\xa1\xff", b"\xdf\xff\xff\xff\xff",
     msgpack.packb({"a": 1}) + b"x", *map(msgpack.packb, ([1], {3: 1}, array(), {"a": msgpack.Timestamp(3)}))],
)  # fmt: skip
def test_hostile_messages_are_refused(data):
    with pytest.raises(WireError):
        unpack(data, LIMIT)


def test_a_message_may_be_as_large_as_its_limit():
    data = pack({"image": np.zeros((4, 4, 3), np.uint8)})
    unpack(data, len(data))
    with pytest.raises(WireError, match=naming(len(data), len(data) - 1)):
        unpack(data, len(data) - 1)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def test_depth_is_limited_on_both_sides():
    assert unpack(pack(nested(MAX_DEPTH)), LIMIT) == nested(MAX_DEPTH)
    too_deep = nested(MAX_DEPTH + 1)
    for refused in (lambda: pack(too_deep), lambda: unpack(msgpack.packb(too_deep), LIMIT)):
        with pytest.raises(WireError, match=naming("a.a.a", MAX_DEPTH)):
            refused()
    endless: dict[str, Any] = {}
    endless["a"] = [endless]
    with pytest.raises(WireError, match=naming("a[0].a", MAX_DEPTH)):
        pack(endless)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.zeros(2, np.float16), ("dtype", "float16")), (np.zeros((1,) * 9), ("shape", codec.MAX_DIMS)),
        (2**64, ("64 bits", 2**64)), ("\ud800", ("UTF-8",)), (object(), ("object",)),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_named(value, named):
    with pytest.raises(WireError, match=naming("command.q[0]", *named)):
        pack({"command": {"q": [value]}})
