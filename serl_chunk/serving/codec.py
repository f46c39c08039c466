"""Messages of policy servers: maps in msgpack with openpi-client's layout of arrays.

    arrays            {b"__ndarray__": True, b"data": bytes in C order, b"dtype": "<f4", b"shape": [2, 3]}
    numbers of numpy  {b"__npgeneric__": True, b"data": a plain value, b"dtype": "<f4"}

`unpack` reads strangers' bytes: it builds arrays of `DTYPES` alone, and bounds size, depth and number of values while
it parses. Nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from serl_chunk_robot.wire.arrays import Dialect
from serl_chunk_robot.wire.codec import WireError

MAX_DEPTH = 8  # maps and lists within one another, the message included
MAX_VALUES = 1 << 16  # of all maps and lists together; bounds what plain values take in memory
MAX_TEXT = 1 << 16  # bytes of a string
_IS_ARRAY, _IS_NUMBER = b"__ndarray__", b"__npgeneric__"
_PLAIN: dict[str, type | tuple[type, ...]] = {"b": bool, "i": int, "u": int, "f": (int, float), "U": str}


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


class _Openpi(Dialect):
    marks = frozenset({_IS_ARRAY, _IS_NUMBER})
    depth, key_size, text_size, swaps = MAX_DEPTH, 256, MAX_TEXT, True
    smaller = ". Send the named cameras alone, in the size that this server names"
    form = ". Send a map, such as {'state': ..., 'images': {...}}, packed as openpi-client does"

    def bounds(self) -> dict[str, Any]:
        budget, most = _Budget(), {"max_str_len": MAX_TEXT, "max_array_len": MAX_VALUES, "max_map_len": MAX_VALUES}
        return {"list_hook": budget.of_list, "object_pairs_hook": budget.of_map, **most}

    def written(self, value: Any) -> Any:
        little = value.dtype.newbyteorder("<")
        if isinstance(value, np.generic):
            return {_IS_NUMBER: True, b"data": value.item(), b"dtype": little.str}
        data = value.astype(little, copy=False).tobytes()
        return {_IS_ARRAY: True, b"data": data, b"dtype": little.str, b"shape": list(value.shape)}

    def read(self, form: dict[Any, Any], path: str) -> Any:
        mark = _IS_ARRAY if _IS_ARRAY in form else _IS_NUMBER
        fields = {mark, b"data", b"dtype"} | ({b"shape"} if mark == _IS_ARRAY else set())
        if form.keys() != fields or form[mark] is not True:
            raise WireError(f"{path}: no array. Send __ndarray__ (true), data (bytes), dtype (text) and shape (a list)")
        data, text = form[b"data"], form[b"dtype"]
        if mark == _IS_ARRAY:
            return self.array(text, form[b"shape"], data, path)
        kind = text[1:2] if isinstance(text, str) else ""
        known = kind in _PLAIN and (text in self.dtypes or kind == "U")
        if not known or not isinstance(data, _PLAIN[kind]) or (isinstance(data, bool) and kind != "b"):
            raise WireError(f"{path}: dtype {text!r:.80} is no number or text of numpy. Send a plain number or string")
        return data


OPENPI = _Openpi()
DTYPES, pack, unpack = OPENPI.dtypes, OPENPI.pack, OPENPI.unpack
