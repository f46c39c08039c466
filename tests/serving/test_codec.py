"""Messages of policy servers: what is written is read, and nothing else is."""

from __future__ import annotations

import contextlib
import math

import msgpack
import numpy as np
import pytest
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from properties import examples

from serl_chunk.serving.codec import DTYPES, MAX_DEPTH, MAX_TEXT, MAX_VALUES, pack, unpack
from serl_chunk_robot.wire.codec import WireError

LIMIT = 1 << 20
TEXT = st.text(max_size=20)
KEYS = st.text(min_size=1, max_size=20)
ARRAYS = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: arrays.arrays(np.dtype(dtype), arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
NUMBERS = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), TEXT)
VALUES = st.recursive(
    NUMBERS | st.binary(max_size=20) | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def packed(values: object) -> bytes:
    """The message; nothing for one that is nested too deep."""
    with contextlib.suppress(WireError):
        return pack(values)
    return b""


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_what_is_packed_is_unpacked(values):
    if message := packed(values):
        assert same(values, unpack(message, LIMIT))


@settings(max_examples=examples(300))
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    with contextlib.suppress(WireError):
        unpack(data, LIMIT)


@settings(max_examples=examples(300))
@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=3), st.data())
def test_a_damaged_message_is_read_or_refused(values, data):
    message = bytearray(packed(values) or b"\x80")
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        unpack(bytes(message[: data.draw(st.integers(0, len(message)))]), LIMIT)


FORM = st.dictionaries(
    st.sampled_from([b"__ndarray__", b"__npgeneric__", b"data", b"dtype", b"shape", b"nd", "data"]),
    st.one_of(NUMBERS, st.binary(max_size=16), st.lists(st.integers(-1, 2**40), max_size=9),
              st.sampled_from(["<f4", "|O", "<U3", "|V8", "<c8", ">f4", "<M8[s]", "|b1", "f4", "<f4, <i4"])),
)  # fmt: skip


@settings(max_examples=examples(500))
@given(FORM)
def test_maps_that_look_like_arrays_are_read_or_refused(form):
    with contextlib.suppress(WireError):
        value = unpack(msgpack.packb({"x": form}), LIMIT)["x"]
        assert not isinstance(value, np.ndarray) or value.dtype.str in DTYPES


def test_arrays_have_openpis_layout_and_are_read_only():
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T  # not in C order
    plain = msgpack.unpackb(pack({"x": array, "n": np.float32(2.5)}))
    assert plain["x"] == {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": "<f4", b"shape": [3, 2]}
    assert plain["n"] == {b"__npgeneric__": True, b"data": 2.5, b"dtype": "<f4"}
    read = unpack(pack({"x": array}), LIMIT)["x"]
    np.testing.assert_array_equal(read, array)
    assert not read.flags.writeable
    generic = {b"__npgeneric__": True, b"data": "pick", b"dtype": "<U4"}
    assert unpack(msgpack.packb({"prompt": generic}), LIMIT) == {"prompt": "pick"}
    assert math.isnan(unpack(pack({"x": math.nan}), LIMIT)["x"])


@pytest.mark.parametrize(
    ("value", "named"),
    [(np.array([object()], object), "object"), ({"deep": {1: 2}}, "x.deep"), (2**64, "x"), ({1, 2}, "set"),
     ("\ud800", "x"), ("a" * (MAX_TEXT + 1), MAX_TEXT)],
)  # fmt: skip
def test_what_no_message_holds_is_named(value, named):
    with pytest.raises(WireError, match=naming("x", named)):
        pack({"x": value})


def extra(code: object) -> bytes:
    return msgpack.packb({"x": code})


@pytest.mark.parametrize(
    ("message", "named"),
    [*((data, ".") for data in (
        b"", b"\xc1", msgpack.packb([1]), b"\x81\xa1x", pack({"x": 1}) + b"\x00")),
     (b"\x82\xa1x\x01\xa1x\x02", "twice"), (extra(msgpack.ExtType(5, b"abcd")), "."),  # timestamps are some of these
     (b"\x00" * (LIMIT + 1), str(LIMIT + 1)),
     (b"\x81\xa1x\xdc\xff\xff" + b"\x90" * 0xFFFF, str(MAX_VALUES)),  # a list of empty lists, a byte each
     (extra([[0] * 1000 for _ in range(100)]), str(MAX_VALUES)), (extra("a" * (MAX_TEXT + 1)), "."),
     *((b"\x81\xa1x" + b"\x91" * depth + b"\x01", ".") for depth in (MAX_DEPTH, 100, 5000)),
     *((extra({b"__npgeneric__": True, b"data": data, b"dtype": dtype}), "x") for dtype, data in (
        ("<f4", "text"), ("<f4", True), ("<M8[s]", 3), ("|b1", 1), ("<U3", 3)))],
)  # fmt: skip
def test_what_is_no_map_or_too_large_or_too_deep_or_no_number_is_refused(message, named):
    with pytest.raises(WireError, match=named):
        unpack(message, LIMIT)


@pytest.mark.parametrize(
    ("change", "named"),
    [({b"dtype": "|O"}, "|O"), ({b"dtype": b"<f4"}, "<f4"), ({b"shape": [3]}, 12), ({b"shape": [-1, 2]}, -1),
     ({b"shape": [2**39, 2**39, 0]}, "shape"), ({b"shape": [True, 2]}, "shape"), ({b"shape": 2}, "shape"),
     ({b"data": "text"}, "data"), ({b"more": 1}, "array"), ({b"__ndarray__": False}, "array")],
)  # fmt: skip
def test_bad_arrays_are_refused_and_named(change, named):
    form = {b"__ndarray__": True, b"data": bytes(8), b"dtype": "<f4", b"shape": [2]} | change
    with pytest.raises(WireError, match=naming("images.front", named)):
        unpack(msgpack.packb({"images": {"front": form}}), LIMIT)
