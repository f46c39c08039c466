"""The wire format: a msgpack header and raw frames of arrays. Nothing is ever unpickled.

A message is a list of frames. The first is msgpack of `[kind, header, table]`, where `header` is a map of plain
values and `table` has `[path, dtype name, shape]` for each array whose bytes are a frame of their own, in this order,
and `[path, dtype name, shape, bytes]` for a small one: a frame costs more than copying that little. Bytes are in C
order, little-endian. The table is checked against an allow-list and against the exact size of every array's bytes
before a buffer is interpreted, so that no byte that comes from a network can choose a type or a length.
(msgpack_numpy's decoder unpickles, and crashes the process on a forged dtype: it must never see bytes from a socket.)
"""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, Mapping, NamedTuple, Sequence, Union

import msgpack
import numpy as np
import zmq

from serl_chunk_robot.errors import DataError

NAMES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
         "float16", "float32", "float64")  # fmt: skip
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in NAMES}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 1 << 20  # a manifest of 5,000 leaves fits; images never travel in a header
INLINE_BYTES = 4096  # arrays of at most this size travel in the table
_MAX_INLINE_TOTAL = MAX_HEADER_BYTES // 2  # of them together in one message; the next ones are frames
MAX_DIMS = 8
MAX_PATH = 512  # characters

Frame = Union[zmq.Frame, bytes, memoryview]

if sys.byteorder != "little":  # the frames are the arrays' memory
    raise ImportError("serl_chunk_robot needs a little-endian machine")


class WireError(DataError):
    """Bytes that are not a message of this protocol, or a value that cannot be put in one."""


class Limits(NamedTuple):
    """Limits of what a receiver accepts."""

    max_message_bytes: int  # header and arrays together
    max_arrays: int
    max_header_bytes: int = MAX_HEADER_BYTES


class Message(NamedTuple):
    """A decoded message. The arrays are read-only views of the received frames (perhaps unaligned)."""

    kind: str
    header: dict[str, Any]
    arrays: dict[str, np.ndarray]
    nbytes: int


def encode(kind: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> list[Frame]:
    """Return the frames of one message. Large contiguous arrays are not copied and must not change until they are sent.

    Raises WireError for a dtype outside `DTYPES` or a header value that msgpack cannot express.
    """
    table: list[tuple[Any, ...]] = []
    frames: list[Frame] = [b""]
    inlined = 0
    for path, array in (arrays or {}).items():
        name = dtype_name(array.dtype, path)
        if array.nbytes <= INLINE_BYTES and inlined < _MAX_INLINE_TOTAL:
            native = array if array.dtype.isnative else raw_bytes(array)
            table.append((path, name, array.shape, native.tobytes()))
            inlined += array.nbytes
            continue
        table.append((path, name, array.shape))
        # A view by the buffer protocol costs half of numpy's, but has no bfloat16 (of kind V).
        plain = array.flags.c_contiguous and array.dtype.isnative and array.dtype.kind != "V"
        frames.append(array.data.cast("B") if plain and array.size else raw_bytes(array).data)
    try:
        frames[0] = msgpack.packb((kind, header, table))
    except (TypeError, ValueError, OverflowError) as e:
        raise WireError(f"message {kind!r}: its header holds a value that msgpack cannot express: {e}") from e
    return frames


def register_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Allow one more dtype on the wire. Both sides must register it, under the same name.

    Raises ValueError for a dtype that holds objects, and for the name of another dtype.
    """
    if dtype.hasobject or DTYPES.get(name, dtype) != dtype:
        raise ValueError(f"{name!r}: {dtype} cannot be registered. Use a dtype without objects, and a free name.")
    DTYPES[name] = dtype
    _NAMES[dtype] = name


def raw_bytes(array: np.ndarray) -> np.ndarray:
    """Return the memory of `array` as uint8[nbytes], C order, little-endian; a view where the array already is both."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    if not array.flags.c_contiguous:
        array = array.copy(order="C")  # np.ascontiguousarray would turn a scalar into a vector
    return array.reshape(-1).view(np.uint8)


def dtype_name(dtype: np.dtype[Any], path: str = "array") -> str:
    """Return the wire's name of a dtype. Raises WireError listing the valid ones."""
    if (name := _NAMES.get(dtype.newbyteorder("=") if dtype.byteorder == ">" else dtype)) is None:
        raise WireError(f"{path}: dtype {dtype} cannot be sent; valid are {', '.join(DTYPES)}")
    return name


def decode(frames: Sequence[Frame], limits: Limits) -> Message:
    """Return the message in `frames`. Raises WireError for anything else, before any array is built."""
    if not frames:
        raise WireError("a message without frames")
    buffers = [buffer_of(f) for f in frames]
    total = sum(b.nbytes for b in buffers)
    if total > limits.max_message_bytes:
        raise WireError(f"a message of {total} bytes; the limit is {limits.max_message_bytes}")
    if len(frames) - 1 > limits.max_arrays:
        raise WireError(f"a message of {len(frames) - 1} arrays; the limit is {limits.max_arrays}")
    if buffers[0].nbytes > limits.max_header_bytes:
        raise WireError(f"a header of {buffers[0].nbytes} bytes; the limit is {limits.max_header_bytes}")
    kind, header, table = _header(buffers[0])
    if len(table) > limits.max_arrays:
        raise WireError(f"a message of {len(table)} arrays; the limit is {limits.max_arrays}")
    arrays: dict[str, np.ndarray] = {}
    at = 1  # the next frame
    for row in table:
        inline = isinstance(row, list) and len(row) == 4
        path, dtype, shape = table_row(row[:3] if inline else row)
        if path in arrays:
            raise WireError(f"array {path!r} is listed twice")
        if inline:
            if type(row[3]) is not bytes:
                raise WireError(f"{path}: an array in the table is bytes, got {type(row[3]).__name__}")
            buffer = memoryview(row[3])
        else:
            if at == len(buffers):
                raise WireError(f"{path} is a frame of its own, but only {at - 1} frames follow the header")
            buffer, at = buffers[at], at + 1
        arrays[path] = view(buffer, path, dtype, shape)
    if at != len(buffers):
        raise WireError(f"{len(buffers) - 1} frames follow the header, which lists {at - 1}")
    return Message(kind, header, arrays, total)


def _header(buffer: memoryview) -> tuple[str, dict[str, Any], list[Any]]:
    try:
        # Extension types could carry timestamps or ExtType into places that expect plain values.
        values = msgpack.unpackb(buffer, max_ext_len=0, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as e:
        raise WireError(f"the header is not msgpack: {type(e).__name__} {e}") from e
    if not isinstance(values, list) or [type(v) for v in values] != [str, dict, list]:
        raise WireError("the header is not [kind, fields, table]")
    kind, header, table = values
    if not all(isinstance(k, str) for k in header):
        raise WireError("the header has a field whose name is not a string")
    return kind, header, table


def table_row(row: Any) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    """Check `[path, dtype name, shape]`. Raises WireError. The size is bounded by the caller's buffer."""
    if not isinstance(row, list) or len(row) != 3:
        raise WireError("an array is not described by [path, dtype, shape]")
    path, name, shape = row
    if not isinstance(path, str) or not 0 < len(path) <= MAX_PATH:
        raise WireError(f"an array's path must be a string of 1..{MAX_PATH} characters")
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise WireError(f"{path}: dtype {name!r} is not one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise WireError(f"{path}: a shape is a list of at most {MAX_DIMS} integers")
    nbytes = dtype.itemsize
    for n in shape:
        # type() and not isinstance(): True is an int too.
        if type(n) is not int or not 0 <= n < 2**40:
            raise WireError(f"{path}: a shape holds non-negative integers, got {shape}")
        nbytes *= n or 1  # numpy multiplies the non-zero dimensions even of an empty array, and refuses an overflow
    if nbytes >= 2**48:
        raise WireError(f"{path}: shape {shape} is out of any bound")
    return path, dtype, tuple(shape)


def view(buffer: memoryview, path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return `buffer` as an array, read-only and without a copy. Raises WireError unless the size is exact."""
    need = math.prod(shape) * dtype.itemsize
    if buffer.nbytes != need:
        raise WireError(f"{path}: {dtype} {shape} takes {need} bytes, there are {buffer.nbytes}")
    if need == 0:
        array = np.empty(shape, dtype)  # np.frombuffer refuses an empty buffer
    else:
        if dtype.kind == "b" and np.frombuffer(buffer, np.uint8).max() > 1:
            raise WireError(f"{path}: a bool is 0 or 1")
        array = np.frombuffer(buffer, dtype)
        if len(shape) != 1:
            array = array.reshape(shape)
    array.flags.writeable = False
    return array


def buffer_of(frame: Frame) -> memoryview:
    """Return the bytes of a frame, not copied."""
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def size_of(frames: Sequence[Frame]) -> int:
    """Return the bytes of all frames together."""
    return sum(buffer_of(f).nbytes for f in frames)


def field(header: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """Return `header[name]`, which must be of exactly the type(s) given. Raises WireError naming the field."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if name not in header:
        raise WireError(f"field {name!r} is missing")
    value = header[name]
    if type(value) not in kinds:
        wanted = " or ".join("none" if k is type(None) else k.__name__ for k in kinds)
        raise WireError(f"field {name!r} must be {wanted}, got {type(value).__name__}")
    return value


Checks = Mapping[str, Callable[[Mapping[str, Any], str], Any]]  # of a header's fields: what reads each


def fields(header: Mapping[str, Any], checks: Checks) -> dict[str, Any]:
    """Return the fields of a header, each as its check reads it. Raises WireError naming the first that is wrong."""
    return {name: check(header, name) for name, check in checks.items()}


def exactly(*kinds: type) -> Callable[[Mapping[str, Any], str], Any]:
    """Return the check of a field of exactly one of these types."""
    return lambda header, name: field(header, name, kinds)


def count(header: Mapping[str, Any], name: str) -> int:
    """Return `header[name]`, an integer 0 <= n < 2**62. Raises WireError naming the field."""
    value = field(header, name, int)
    if not 0 <= value < 2**62:
        raise WireError(f"field {name!r} must be a non-negative integer, got {value}")
    return value


def text(header: Mapping[str, Any], name: str, limit: int = 4096) -> str:
    """Return `header[name]`, a string of at most `limit` characters. Raises WireError naming the field."""
    value = field(header, name, str)
    if len(value) > limit:
        raise WireError(f"field {name!r} has {len(value)} characters; the limit is {limit}")
    return value


def identifier(header: Mapping[str, Any], name: str, limit: int = 4096) -> str:
    """Return `text` of printable characters alone: it reaches terminals, logs and names of files."""
    value = text(header, name, limit)
    if not value.isprintable():
        raise WireError(f"field {name!r} holds characters that cannot be printed: {value!r}")
    return value


def shown(sentence: str) -> str:
    """Return a peer's sentence for a terminal, with what cannot be printed escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
