"""Messages of policy servers: maps in msgpack with openpi-client's layout of arrays.

    arrays            {b"__ndarray__": True, b"data": bytes in C order, b"dtype": "<f4", b"shape": [2, 3]}
    numbers of numpy  {b"__npgeneric__": True, b"data": a plain value, b"dtype": "<f4"}

`unpack` reads strangers' bytes: it builds arrays of the dtypes below alone, and bounds size, depth and number of values
while it parses. Nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import WireError

DTYPES = {
    np.dtype(name).str: name
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
                 "float16", "float32", "float64")
}  # fmt: skip
"""A dtype in a message, little-endian -> its name."""
MAX_DEPTH = 8  # maps and lists within one another, the message included
MAX_VALUES = 1 << 16  # of all maps and lists together; bounds what plain values take in memory
MAX_TEXT = 1 << 16  # bytes of a string
_IS_ARRAY, _IS_NUMBER = b"__ndarray__", b"__npgeneric__"
_ARRAY = {_IS_ARRAY, b"data", b"dtype", b"shape"}
_NUMBER = {_IS_NUMBER, b"data", b"dtype"}
_PLAIN: dict[str, type | tuple[type, ...]] = {"b": bool, "i": int, "u": int, "f": (int, float), "U": str}


def pack(values: dict[str, Any]) -> bytes:
    """Return a map as one message. Tuples arrive as lists.

    Raises WireError, naming the field, for a value that a message cannot hold.
    """
    if not isinstance(values, dict):
        raise WireError(f"a message is a map (got {type(values).__name__}). Send named values")
    message: bytes = msgpack.packb(_encoded(values, "", 1))
    return message


def unpack(data: bytes, max_bytes: int) -> dict[str, Any]:
    """Return the map in a message of at most `max_bytes` bytes. Its arrays are read-only.

    Raises WireError, naming the field, for anything that `pack` does not write.
    """
    if len(data) > max_bytes:
        raise WireError(
            f"the message has {len(data)} bytes (expected {max_bytes} at most). Send the named cameras alone, in the "
            "size that this server names"
        )
    budget = _Budget()
    try:
        values = msgpack.unpackb(
            data, list_hook=budget.of_list, object_pairs_hook=budget.of_map, strict_map_key=True,
            max_ext_len=0, max_str_len=MAX_TEXT, max_array_len=MAX_VALUES, max_map_len=MAX_VALUES,
        )  # fmt: skip
    except WireError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        why = f"{type(error).__name__} {error}".strip()
        raise WireError(f"the message is no msgpack ({why:.200}). Pack it as openpi-client does") from error
    if not isinstance(values, dict) or _IS_ARRAY in values or _IS_NUMBER in values:
        raise WireError("the message is no map of named values. Send a map, such as {'state': ..., 'images': {...}}")
    decoded: dict[str, Any] = _decoded(values, "", 1)
    return decoded


class _Budget:
    """Counts values while msgpack builds them, so that many small ones cannot fill the memory."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def of_list(self, items: list[Any]) -> list[Any]:
        self._take(len(items))
        return items

    def of_map(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self._take(len(pairs))
        values = dict(pairs)
        if len(values) != len(pairs):
            raise WireError("a map has a key twice. Name each value once")
        return values

    def _take(self, count: int) -> None:
        self._left -= 1 + count
        if self._left < 0:
            raise WireError(f"the message has more than {MAX_VALUES} values. Send numbers as arrays, not as lists")


def _encoded(value: Any, path: str, depth: int) -> Any:
    """Return a value as msgpack takes it. Raises WireError."""
    if isinstance(value, np.ndarray | np.generic):
        little = value.dtype.newbyteorder("<")
        if little.str not in DTYPES:
            raise WireError(f"{path}: dtype {value.dtype} cannot be sent (expected {', '.join(DTYPES.values())})")
        if isinstance(value, np.generic):
            return {_IS_NUMBER: True, b"data": value.item(), b"dtype": little.str}
        codec.table_row([path or "array", DTYPES[little.str], list(value.shape)])
        data = value.astype(little, copy=False).tobytes()
        return {_IS_ARRAY: True, b"data": data, b"dtype": little.str, b"shape": list(value.shape)}
    if isinstance(value, dict):
        _check_depth(path, depth)
        return {_key(key, path): _encoded(item, _below(path, key), depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        _check_depth(path, depth)
        return [_encoded(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise WireError(f"{path}: an integer must fit into 64 bits (got {value:.3e})")
    if isinstance(value, str):
        try:
            nbytes = len(value.encode())
        except UnicodeEncodeError as error:
            raise WireError(f"{path}: {value!r:.80} is no valid text ({error.reason})") from error
        if nbytes > MAX_TEXT:
            raise WireError(f"{path}: a string has {nbytes} bytes (expected {MAX_TEXT} at most)")
    elif value is not None and not isinstance(value, int | float | bytes):
        raise WireError(f"{path}: a value of type {type(value).__name__} cannot be sent. Make it a number or an array")
    return value


def _decoded(value: Any, path: str, depth: int) -> Any:
    """Return a value of msgpack with its arrays and numbers built. Raises WireError."""
    if isinstance(value, dict):
        if _IS_ARRAY in value:
            return _array(value, path)
        if _IS_NUMBER in value:
            return _number(value, path)
        _check_depth(path, depth)
        return {_key(key, path): _decoded(item, _below(path, key), depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        _check_depth(path, depth)
        return [_decoded(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise WireError(f"{path}: a value of type {type(value).__name__} is not plain. Send numbers, text and arrays alone")


def _array(value: dict[Any, Any], path: str) -> np.ndarray:
    data, text = value.get(b"data"), value.get(b"dtype")
    if value.keys() != _ARRAY or value[_IS_ARRAY] is not True or type(data) is not bytes:
        raise WireError(f"{path}: not an array. Send __ndarray__ (true), data (bytes), dtype (text) and shape (a list)")
    name = DTYPES.get(text) if isinstance(text, str) else None
    if name is None:
        raise WireError(f"{path}: dtype {text!r:.80} is not read (expected one of {', '.join(DTYPES)})")
    _, dtype, shape = codec.table_row([path, name, value[b"shape"]])
    return codec.view(memoryview(data), path, dtype, shape)


def _number(value: dict[Any, Any], path: str) -> Any:
    """Return the plain value of a number, or text, of numpy."""
    data, text = value.get(b"data"), value.get(b"dtype")
    kind = text[1:2] if isinstance(text, str) else ""
    whole = value.keys() == _NUMBER and value[_IS_NUMBER] is True and kind in _PLAIN
    known = whole and (text in DTYPES or kind == "U")
    if not known or not isinstance(data, _PLAIN[kind]) or (isinstance(data, bool) and kind != "b"):
        raise WireError(f"{path}: dtype {text!r:.80} is no number or text of numpy. Send a plain number or string")
    return data


def _check_depth(path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise WireError(f"{path:.200}: maps and lists are nested deeper than {MAX_DEPTH}. Send a flatter message")


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str) or not 0 < len(key) <= 256:
        raise WireError(f"{path or 'the message'}: a key must be a string of 1 to 256 characters (got {key!r:.80})")
    return key


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
