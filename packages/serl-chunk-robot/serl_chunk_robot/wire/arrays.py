"""Maps of plain values and arrays, as the robot server's messages hold them: msgpack with msgpack-numpy's layout.

Keys are strings. Values are None, bools, integers, floats, strings, bytes, lists, maps, and

    arrays            {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2, 3], b"data": bytes, in C order}
    numbers of numpy  {b"nd": False, b"type": "<f4", b"data": bytes}

so that any program with msgpack_numpy can write and read them. Its own decoder unpickles arrays of objects and builds
any dtype: it must never see bytes from a socket. `unpack` reads the same layout with an allow-list of dtypes, and
checks every size before it builds an array.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
from msgpack_numpy import encode

from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, WireError, buffer_of

DTYPES = {
    np.dtype(name).str: name
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
}  # msgpack-numpy's text of a dtype, little-endian -> the codec's name
MAX_DEPTH = 16  # maps and lists within one another, the message included
_ARRAY = {b"nd", b"type", b"kind", b"shape", b"data"}
_NUMBER = {b"nd", b"type", b"data"}


def pack(values: dict[str, Any]) -> bytes:
    """Return a map as one message. Tuples arrive as lists, and numpy's numbers as Python's.

    Raises WireError, naming the field, for a value that a message cannot hold.
    """
    if not isinstance(values, dict):
        raise WireError(f"a message is a map, got {type(values).__name__}")
    _check(values, "", 1)  # also keeps arrays of objects from `encode`, which would pickle them
    message: bytes = msgpack.packb(values, default=encode)
    return message


def unpack(data: Frame, max_bytes: int) -> dict[str, Any]:
    """Return the map in a message of at most `max_bytes` bytes. Its arrays are read-only.

    A hostile message may take some 100 times its size in Python's objects, so `max_bytes` bounds memory too.

    Raises WireError, naming the field, for anything that `pack` does not write.
    """
    buffer = buffer_of(data)
    if buffer.nbytes > max_bytes:
        raise WireError(f"a message of {buffer.nbytes} bytes; the limit is {max_bytes}")
    try:
        # Extension types could carry timestamps or ExtType into places that expect plain values.
        values = msgpack.unpackb(buffer, max_ext_len=0, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as e:
        raise WireError(f"the message is not msgpack: {type(e).__name__} {e}") from e
    if not isinstance(values, dict) or b"nd" in values:
        raise WireError("the message is not a map of named values")
    decoded: dict[str, Any] = _decoded(values, "", 1)
    return decoded


def _check(value: Any, path: str, depth: int) -> None:
    """Raise WireError where `value`, or a value in it, cannot be sent. `depth`: its own, of maps and lists."""
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.str not in DTYPES:
            raise WireError(f"{path}: dtype {value.dtype} cannot be sent; valid are {', '.join(DTYPES.values())}")
        codec.table_row([path, DTYPES[value.dtype.str], list(value.shape)])
    elif isinstance(value, dict):
        _check_depth(path, depth)
        for key, item in value.items():
            _check(item, _below(path, key), depth + 1)
    elif isinstance(value, (list, tuple)):
        _check_depth(path, depth)
        for i, item in enumerate(value):
            _check(item, f"{path}[{i}]", depth + 1)
    elif isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise WireError(f"{path}: an integer must fit into 64 bits, got {value}")
    elif value is not None and not isinstance(value, (float, bytes)):
        raise WireError(f"{path}: a value of type {type(value).__name__} cannot be sent")


def _decoded(value: Any, path: str, depth: int) -> Any:
    """Return a value of msgpack with its arrays and numbers built. Raises WireError."""
    if isinstance(value, dict):
        if b"nd" in value:
            return _array(value, path)
        _check_depth(path, depth)
        return {key: _decoded(item, _below(path, key), depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        _check_depth(path, depth)
        return [_decoded(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    raise WireError(f"{path}: a value of type {type(value).__name__} is not plain")


def _array(value: dict[Any, Any], path: str) -> Any:
    """Return the array or the Python number in a map of msgpack-numpy's layout. Raises WireError."""
    is_array = value[b"nd"]
    if type(is_array) is not bool or value.keys() != (_ARRAY if is_array else _NUMBER):
        raise WireError(f"{path}: neither the fields of an array nor those of a number")
    if is_array and value[b"kind"] != b"":
        raise WireError(f"{path}: arrays of objects and of structures are not read (kind {value[b'kind']!r:.20})")
    text, data = value[b"type"], value[b"data"]
    name = DTYPES.get(text) if isinstance(text, str) else None
    if name is None:
        raise WireError(f"{path}: dtype {text!r:.80} is not one of {', '.join(DTYPES)}")
    if type(data) is not bytes:
        raise WireError(f"{path}: the content of an array is bytes, got {type(data).__name__}")
    _, dtype, shape = codec.table_row([path, name, value[b"shape"] if is_array else []])
    array = codec.view(memoryview(data), path, dtype, shape)
    return array if is_array else array.item()


def _below(path: str, key: Any) -> str:
    """Return the path of a map's value. Raises WireError for a key that is not a string of one character or more."""
    if not isinstance(key, str) or not key:
        raise WireError(f"{path or 'the message'}: a key is a string that is not empty, got {key!r:.80}")
    _check_text(key, path or "the message")
    return f"{path}.{key}" if path else key


def _check_text(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:  # half of a surrogate pair
        raise WireError(f"{path}: {text!r:.80} holds a character that UTF-8 lacks") from e


def _check_depth(path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise WireError(f"{path:.80}: maps and lists within one another are limited to {MAX_DEPTH}")
