"""Maps of plain values and arrays as messages in msgpack, and the dialect of robot servers: msgpack-numpy's layout.

    arrays            {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2, 3], b"data": bytes, in C order}
    numbers of numpy  {b"nd": False, b"type": "<f4", b"data": bytes}

so that any program with msgpack_numpy can write and read them. Its own decoder unpickles arrays of objects and builds
any dtype: it must never see bytes from a socket. `Dialect.unpack` has an allow-list of dtypes, and checks every size
before it builds an array.
"""

from __future__ import annotations

from typing import Any, ClassVar, Dict, FrozenSet

import msgpack
import numpy as np

from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, WireError, buffer_of


class Dialect:
    """How a map of named values is one message. A subclass writes and reads the maps that stand for arrays.

    Keys are strings. Values are None, bools, integers, floats, strings, bytes, lists, maps, and arrays and numbers of
    numpy.
    """

    dtypes: ClassVar[Dict[str, str]] = {np.dtype(name).str: name for name in codec.NAMES}
    """A dtype in a message, little-endian -> the codec's name."""
    marks: ClassVar[FrozenSet[bytes]]  # keys of the maps that stand for arrays and numbers
    depth = 16  # maps and lists within one another, the message included
    swaps = False  # whether big-endian arrays are sent, as little-endian ones
    key_size = codec.MAX_PATH  # characters of a key
    text_size = 1 << 32  # bytes of a string
    smaller = ""  # the remedy for a message that is too large
    form = ""  # the remedy for bytes that are no message

    def pack(self, values: dict[str, Any]) -> bytes:
        """Return a map as one message. Tuples arrive as lists.

        Raises WireError, naming the field, for a value that a message cannot hold.
        """
        if not isinstance(values, dict):
            raise WireError(f"a message is a map, got {type(values).__name__}. Send named values")
        self._check(values, "", 1)
        return msgpack.packb(values, default=self.written)  # type: ignore[no-any-return]

    def unpack(self, data: Frame, max_bytes: int) -> dict[str, Any]:
        """Return the map in a message of at most `max_bytes` bytes. Its arrays are read-only.

        A hostile message may take some 100 times its size in Python's objects, so `max_bytes` bounds memory too.

        Raises WireError, naming the field, for anything that `pack` does not write.
        """
        buffer = buffer_of(data)
        if buffer.nbytes > max_bytes:
            raise WireError(f"a message of {buffer.nbytes} bytes; the limit is {max_bytes}{self.smaller}")
        try:
            # Extension types could carry timestamps or ExtType into places that expect plain values.
            values = msgpack.unpackb(buffer, max_ext_len=0, strict_map_key=True, **self.bounds())
        except WireError:
            raise
        except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as e:
            raise WireError(f"the message is not msgpack: {type(e).__name__} {e!s:.200}{self.form}") from e
        if not isinstance(values, dict) or self.marks & values.keys():
            raise WireError(f"the message is not a map of named values{self.form}")
        return self._decoded(values, "", 1)  # type: ignore[no-any-return]

    def bounds(self) -> Dict[str, Any]:
        """Return more arguments of msgpack's decoder."""
        return {}

    def written(self, value: Any) -> Any:
        """Return the map of an array or number of numpy that was checked; a float64 number is Python's to msgpack."""
        raise NotImplementedError

    def read(self, form: dict[Any, Any], path: str) -> Any:
        """Return the array or number of a map with one of `marks`. Raises WireError."""
        raise NotImplementedError

    def array(self, text: Any, shape: Any, data: Any, path: str) -> np.ndarray:
        """Build an array. Raises WireError."""
        name = self.dtypes.get(text) if isinstance(text, str) else None
        if name is None:
            raise WireError(f"{path}: dtype {text!r:.80} is not one of {', '.join(self.dtypes)}")
        if type(data) is not bytes:
            raise WireError(f"{path}: the data of an array are bytes, got {type(data).__name__}")
        _, dtype, shape = codec.table_row([path, name, shape])
        return codec.view(memoryview(data), path, dtype, shape)

    def _check(self, value: Any, path: str, depth: int) -> None:
        """Raise WireError where `value`, or a value in it, cannot be sent. `depth`: its own, of maps and lists."""
        if isinstance(value, (np.ndarray, np.generic)):
            text = (value.dtype.newbyteorder("<") if self.swaps else value.dtype).str
            if text not in self.dtypes:
                valid = ", ".join(self.dtypes.values())
                raise WireError(f"{path}: dtype {value.dtype} cannot be sent; valid are {valid}")
            codec.table_row([path, self.dtypes[text], list(value.shape)])
        elif isinstance(value, dict):
            self._check_depth(path, depth)
            for key, item in value.items():
                self._check(item, self._below(path, key), depth + 1)
        elif isinstance(value, (list, tuple)):
            self._check_depth(path, depth)
            for i, item in enumerate(value):
                self._check(item, f"{path}[{i}]", depth + 1)
        elif isinstance(value, str):
            self._check_text(value, path)
        elif isinstance(value, int):
            if not -(2**63) <= value < 2**64:
                raise WireError(f"{path}: an integer must fit into 64 bits, got {value}")
        elif value is not None and not isinstance(value, (float, bytes)):
            raise WireError(f"{path}: a value of type {type(value).__name__} cannot be sent. Make it an array")

    def _decoded(self, value: Any, path: str, depth: int) -> Any:
        """Return a value of msgpack with its arrays and numbers built. Raises WireError."""
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        if isinstance(value, dict):
            if not self.marks.isdisjoint(value):
                return self.read(value, path)
            self._check_depth(path, depth)
            return {key: self._decoded(item, self._below(path, key), depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            self._check_depth(path, depth)
            return [self._decoded(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        raise WireError(f"{path}: a value of type {type(value).__name__} is no number, text or array")

    def _below(self, path: str, key: Any) -> str:
        """Return the path of a map's value. Raises WireError for what is no name."""
        where = path or "the message"
        if not isinstance(key, str) or not 0 < len(key) <= self.key_size:
            raise WireError(f"{where}: a key is a string of 1 to {self.key_size} characters, got {key!r:.80}")
        self._check_text(key, where)
        return f"{path}.{key}" if path else key

    def _check_text(self, text: str, path: str) -> None:
        if text.isascii() and len(text) <= self.key_size:  # nearly all, and each pass of a robot's loop has many
            return
        try:
            size = len(text.encode())
        except UnicodeEncodeError as e:  # half of a surrogate pair
            raise WireError(f"{path}: {text!r:.80} holds a character that UTF-8 lacks") from e
        if size > self.text_size:
            raise WireError(f"{path}: a string of {size} bytes; the limit is {self.text_size}")

    def _check_depth(self, path: str, depth: int) -> None:
        if depth > self.depth:
            raise WireError(f"{path:.80}: maps and lists within one another are limited to {self.depth}")


class _MsgpackNumpy(Dialect):
    dtypes: ClassVar[Dict[str, str]] = {np.dtype(name).str: name for name in codec.NAMES if name != "float16"}
    marks = frozenset({b"nd"})
    _fields: ClassVar[Dict[bool, FrozenSet[bytes]]] = {
        True: frozenset({b"nd", b"type", b"kind", b"shape", b"data"}),
        False: frozenset({b"nd", b"type", b"data"}),
    }

    def written(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return {b"nd": False, b"type": value.dtype.str, b"data": value.data}
        data = value.data if value.flags.c_contiguous else value.tobytes()
        return {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape, b"data": data}

    def read(self, form: dict[Any, Any], path: str) -> Any:
        is_array = form[b"nd"]
        if type(is_array) is not bool or form.keys() != self._fields[is_array]:
            raise WireError(f"{path}: neither the fields of an array nor those of a number")
        if is_array and form[b"kind"] != b"":
            raise WireError(f"{path}: arrays of objects and of structures are not read (kind {form[b'kind']!r:.20})")
        array = self.array(form[b"type"], form[b"shape"] if is_array else [], form[b"data"], path)
        return array if is_array else array.item()


ROBOT = _MsgpackNumpy()
DTYPES, MAX_DEPTH, pack, unpack = ROBOT.dtypes, ROBOT.depth, ROBOT.pack, ROBOT.unpack
