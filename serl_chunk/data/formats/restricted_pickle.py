"""Pickles of plain values and numpy arrays, read without running anything in them.

A pickle is a small program, and Python's unpickler imports and calls the names in it. This module interprets the
program and looks up, imports or calls nothing: arrays are built from the bytes in the calls that a pickle of numpy
arrays makes, and where an object that is not on this list would stand there is an inert `Unread`, with its name.

    values      None, bool, int, float, complex, str, bytes, bytearray
    containers  list, tuple, dict, set, frozenset; OrderedDict and defaultdict, read as a dict; keys and members are str
                or bytes, in place of others there is an `Unread` too
    numpy       ndarray, dtype and scalars of bool, int, uint, float and complex, as numpy 1 and 2 pickle them
    jax, flax   jax.Array, read as the numpy array it holds, and FrozenDict, read as a dict

Protocols 0 to 5. Memory is bounded by the file's size: an array has exactly the bytes that the file holds, and
containers are counted.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickletools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from serl_chunk.data.formats.hdf5_io import file_faults
from serl_chunk.data.validate import check_pointer
from serl_chunk.types import DataError

_KNOWN_NAMES = {  # by module; all are distinct
    **dict.fromkeys(("builtins", "__builtin__"), ("bytes", "bytearray", "complex", "set", "frozenset")),
    "collections": ("OrderedDict", "defaultdict"),
    "numpy": ("ndarray", "dtype"),
    **dict.fromkeys(("numpy.core.multiarray", "numpy._core.multiarray"), ("_reconstruct", "scalar")),
    **dict.fromkeys(("numpy.core.numeric", "numpy._core.numeric"), ("_frombuffer",)),
    "_codecs": ("encode",),  # how bytes are written below protocol 3
    "jax._src.array": ("_reconstruct_array",),  # a jax.Array: the numpy array's, and its type
    "flax.core.frozen_dict": ("FrozenDict",),
}
ADMITTED = "only numbers, texts, lists, tuples, dicts and numpy arrays of numbers are read"
_NAMES = 1000  # of objects that are not read
_DTYPES = frozenset(("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"))


class MalformedPickleError(Exception):
    """The bytes are no pickle."""


class DisallowedPickleError(Exception):
    """The pickle does what no pickler writes, or needs more memory than a file of its size."""


class Global(str):
    """A class or function on the list, as a name: there is nothing to call."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """Stands where an object would that is not on the list. It holds nothing of the file but a name."""

    what: str  # such as "posix.system"

    def __str__(self) -> str:
        return self.what


@dataclasses.dataclass(slots=True, eq=False)
class PendingDType:
    """A numpy dtype under construction: its code, and the byte order that follows in a BUILD."""

    code: str
    order: str = "="

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.code).newbyteorder("=" if self.order == "|" else self.order)  # type: ignore[arg-type]


@dataclasses.dataclass(slots=True, eq=False)
class PendingArray:
    """A numpy array under construction, without shape or dtype before its BUILD."""

    memo: list[int] = dataclasses.field(default_factory=list)  # where the memo holds it, to be replaced by the array


_UNREAD_KEY = Unread("key that is no text")


def kind_of(value: Any) -> str:
    """Return what a loaded `value` is, for messages of those who cannot use it."""
    if type(value) in (Unread, Global):
        return f"{value}, which is not read: {ADMITTED}"
    return f"{value.dtype}{[*value.shape]}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _shortened(text: str) -> str:
    text = text[:80]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _key(value: Any) -> Any:
    """`value` if it is text, else an `Unread`: no file can choose the hash of either, and both are cheap."""
    return value if type(value) in (str, bytes) else _UNREAD_KEY


def _call(name: str, arguments: tuple[Any, ...]) -> Any:
    """The result of a call of a name on the list, `Unread` where an argument is.

    Raises DisallowedPickleError for arguments that numpy and Python do not pass.
    """
    types = tuple(type(a) for a in arguments)
    if name == "defaultdict" and len(arguments) < 2:  # of any factory: it is not called
        return {}
    if (unread := next((a for a in arguments if type(a) is Unread), None)) is not None:
        return unread
    if name == "_reconstruct":
        first = arguments[0] if arguments else None
        if type(first) is Global and first == "ndarray" and arguments[1:] == ((0,), b"b"):
            return PendingArray()
    elif name == "_reconstruct_array" and len(arguments) == 4:
        maker = arguments[0]
        if type(maker) is Global and maker == "_reconstruct" and type(arguments[1]) is tuple:
            _call(maker, arguments[1])  # which refuses other arguments
            return _array_of(arguments[2])
    elif name == "FrozenDict" and types == (dict,):
        return dict(arguments[0])
    elif name == "dtype" and types[:1] == (str,) and set(types[1:]) <= {bool, int}:
        if (code := arguments[0]) not in _DTYPES:
            return Unread(f"numpy.dtype {_shortened(code)}")
        return PendingDType(code)
    elif name == "scalar" and types == (PendingDType, bytes):
        return _array((), arguments[0], arguments[1])[()]
    elif name == "_frombuffer" and types[:1] in ((bytes,), (bytearray,)) and types[1:4] == (PendingDType, tuple, str):
        return _from_buffer(*arguments)
    elif name in ("encode", "bytearray") and types == (str, str) and arguments[1] in ("latin1", "latin-1"):
        data = arguments[0].encode("latin1")
        return data if name == "encode" else bytearray(data)
    elif name == "bytes" and not arguments:
        return b""
    elif name == "bytearray" and types in ((), (bytes,)):
        return bytearray(*arguments)
    elif name == "complex" and types == (float, float):
        return complex(*arguments)
    elif name == "OrderedDict" and not arguments:
        return {}
    elif name in ("set", "frozenset") and types in ((), (list,)):
        items = map(_key, *arguments) if arguments else ()
        return set(items) if name == "set" else frozenset(items)
    raise DisallowedPickleError(f"calls {name} in a way that numpy and Python do not")


def _set_order(dtype: PendingDType, state: Any) -> None:
    """Set the byte order from `state`: (3, byte order, None, None, None, -1, -1, 0); the Nones are fields."""
    if type(state) is not tuple or len(state) < 5 or state[2:5] != (None, None, None):
        raise DisallowedPickleError("holds an array of records")
    if state[1] not in ("<", ">", "|"):
        raise DisallowedPickleError("holds an array of unknown byte order")
    dtype.order = state[1]


def _array_of(state: Any) -> np.ndarray | Unread:
    """Build an array from `state`: (1, shape, dtype, Fortran order, bytes); numpy's oldest pickles lack the 1.

    One of a dtype that is not on the list is `Unread`.
    """
    if type(state) is tuple and len(state) in (4, 5):
        shape, dtype, fortran, data = state[-4:]
        if type(dtype) is Unread:
            return dtype
        if type(dtype) is PendingDType and type(data) is bytes:
            return _array(shape, dtype, data, "F" if fortran else "C")
    raise DisallowedPickleError("sets an array's state in a way that numpy does not")


def _from_buffer(data: Any, dtype: PendingDType, shape: Any, order: str, axes: Any = None) -> np.ndarray:
    if order in ("C", "F"):
        return _array(shape, dtype, data, order)
    if order != "K" or type(axes) is not tuple or any(type(a) is not int for a in axes):
        raise DisallowedPickleError("orders the axes of an array in a way that numpy does not")
    return _array(shape, dtype, data).transpose(axes)


def _array(shape: Any, kind: PendingDType, data: Any, order: str = "C") -> np.ndarray:
    """The array whose values `data` holds, all of them and no more; a view of `data`."""
    if type(shape) is not tuple or len(shape) > 32 or any(type(n) is not int or not 0 <= n < 2**48 for n in shape):
        raise MalformedPickleError("an array's shape is no tuple of lengths")
    dtype = kind.dtype()
    if math.prod(shape) * dtype.itemsize != len(data):
        raise MalformedPickleError(f"an array of shape {[*shape]} and type {dtype} cannot have {len(data)} bytes")
    if not data:
        return np.zeros(shape, dtype)
    flat = np.frombuffer(data, dtype)
    if dtype.kind == "b":
        flat = flat.view(np.uint8) != 0  # numpy takes a bool's byte for 0 or 1 without looking
    flat.flags.writeable = False
    return flat.reshape(shape, order=order)  # type: ignore[call-overload]


def load_plain(path: Path) -> Any:
    """Return the value pickled at `path`, its arrays read-only, and `Unread` for what this module's list lacks.

    Who uses a value refuses an `Unread`, with its place. Raises DataError for a file that is no whole pickle, or one
    that no pickler writes.
    """
    check_pointer(path)
    with file_faults(path, "cannot read the file", errors=OSError), path.open("rb") as file:
        return _Machine(path, file, os.fstat(file.fileno()).st_size).run()


class _Bounded:
    """A file that refuses reads beyond its size before memory is set aside for them."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self._at = file, size, 0

    def read(self, n: int) -> bytes:
        if n > self._size - self._at:
            raise MalformedPickleError(f"it ends {n - (self._size - self._at)} bytes too early")
        data = self._file.read(n)
        self._at += len(data)
        return data

    def readline(self) -> bytes:
        data = self._file.readline()
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at


class _Machine:
    """Interprets the opcodes of one file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._size = path, size
        self._file = _Bounded(file, size)
        self._stack: list[Any] = []  # the values behind the last mark
        self._below: list[list[Any]] = []  # those before each mark
        self._memo: list[Any] = []
        # An empty dict takes 64 times the byte that makes it; transitions hold a container in 10 bytes or more.
        self._containers = 10_000 + size // 4
        self._unread: dict[str, Unread] = {}  # one for each name, so that they take no memory
        self._at = 0

    def run(self) -> Any:
        try:
            for opcode, argument, at in pickletools.genops(self._file):  # type: ignore[arg-type]
                self._at = at or 0
                name = opcode.name
                if name == "STOP":
                    return self._result()
                operation = _OPERATIONS.get(name)
                if operation is None:
                    raise DisallowedPickleError(f"uses {name}, which no pickler writes")
                operation(self, argument)
            raise MalformedPickleError("it has no end")
        except DisallowedPickleError as error:
            raise DataError(
                f"{self._path}: at byte {self._at} the pickle {error}; it was not run, and nothing of this file is "
                f"used: {ADMITTED}. Do not open the file with another program unless you trust its author"
            ) from None
        except (MalformedPickleError, ValueError, IndexError, TypeError, OverflowError, MemoryError) as error:
            raise DataError(
                f"{self._path}: not a whole pickle, at byte {self._at} of {self._size} "
                f"({error or type(error).__name__}). Copy the file again"
            ) from None

    def _result(self) -> Any:
        if len(self._stack) != 1 or self._below:
            raise MalformedPickleError(f"{len(self._stack)} values are left at its end")
        if self._file.tell() != self._size:
            raise MalformedPickleError(
                f"{self._size - self._file.tell()} bytes follow its end; several pickles in a file are not read"
            )
        return self._stack[0]

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        self._top()
        return self._stack.pop()

    def pop_n(self, n: int) -> list[Any]:
        return [self.pop() for _ in range(n)][::-1]

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop_mark(self) -> list[Any]:
        if not self._below:
            raise MalformedPickleError("a mark is missing")
        items, self._stack = self._stack, self._below.pop()
        return items

    def _top(self) -> Any:
        if not self._stack:
            raise MalformedPickleError("its stack is empty")
        return self._stack[-1]

    def contain(self, container: Any) -> None:
        self._containers -= 1
        if self._containers < 0:
            raise DisallowedPickleError("makes more lists, tuples and dicts than a file of its size needs")
        self._stack.append(container)

    def memoize(self) -> None:
        top = self._top()
        if type(top) is PendingArray:
            top.memo.append(len(self._memo))
        self._memo.append(top)

    def put(self, index: int) -> None:
        if index != len(self._memo):  # every pickler counts; a hole would only cost memory
            raise MalformedPickleError(f"memo {index} follows memo {len(self._memo) - 1}")
        self.memoize()

    def get(self, index: int) -> None:
        if not 0 <= index < len(self._memo):
            raise MalformedPickleError(f"there is no memo {index}")
        self._stack.append(self._memo[index])

    def unread(self, what: str) -> None:
        """Put an `Unread` on the stack: the same one for one name, and few names, so that they take no memory."""
        what = what if what in self._unread or len(self._unread) < _NAMES else "another object"
        self._stack.append(self._unread.setdefault(what, Unread(what)))

    def of_class(self, values: list[Any]) -> None:
        """Put an object of the class that the first of `values` names in their place."""
        first = values[0] if values else None
        named = type(first) in (Unread, Global)
        self.unread(f"object of {first}" if named else "object of a class")

    def extend(self, kind: type, items: Iterable[Any]) -> None:
        if type(self._top()) is Unread:
            return
        if type(self._top()) is not kind:
            raise DisallowedPickleError(f"adds items to something that is no {kind.__name__}")
        top = self._stack[-1]
        (top.extend if kind is list else top.update)(items)

    def name(self, argument: Any) -> None:
        if argument is None:
            module, name = self.pop_n(2)
            if type(name) is not str or type(module) is not str:
                raise DisallowedPickleError("names something by values that are no texts")
        else:
            module, _, name = argument.partition(" ")
        if name in _KNOWN_NAMES.get(module, ()):
            self._stack.append(Global(name))
        else:
            self.unread(f"{_shortened(module)}.{_shortened(name)}")

    def reduce(self) -> None:
        function, arguments = self.pop_n(2)
        if type(function) is Unread:
            self._stack.append(function)
        elif type(function) is not Global or type(arguments) is not tuple:
            raise DisallowedPickleError("calls something that is no function")
        else:
            self.contain(_call(function, arguments))

    def build(self) -> None:
        state, target = self.pop(), self._top()
        if type(target) is PendingDType:
            _set_order(target, state)
        elif type(target) is PendingArray:
            array = self._stack[-1] = _array_of(state)
            for index in target.memo:
                self._memo[index] = array
        elif type(target) is not Unread:
            raise DisallowedPickleError("sets the state of an object that is no array")


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    if len(items) % 2:
        raise MalformedPickleError("a key has no value")
    yield from zip(map(_key, items[::2]), items[1::2], strict=True)


_OPERATIONS: dict[str, Callable[[_Machine, Any], Any]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda m, a: None),
    "MARK": lambda m, a: m.mark(),
    "POP": lambda m, a: m.pop() if m._stack else m.pop_mark(),
    "POP_MARK": lambda m, a: m.pop_mark(),
    "NONE": lambda m, a: m.push(None),
    "NEWTRUE": lambda m, a: m.push(True),
    "NEWFALSE": lambda m, a: m.push(False),
    **dict.fromkeys(("INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2"), _Machine.push),
    **dict.fromkeys(("FLOAT", "BINFLOAT", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _Machine.push),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _Machine.push),
    "BYTEARRAY8": _Machine.contain,
    "EMPTY_LIST": lambda m, a: m.contain([]),
    "LIST": lambda m, a: m.contain(m.pop_mark()),
    "APPEND": lambda m, a: m.extend(list, m.pop_n(1)),
    "APPENDS": lambda m, a: m.extend(list, m.pop_mark()),
    "EMPTY_TUPLE": lambda m, a: m.push(()),
    "TUPLE": lambda m, a: m.contain(tuple(m.pop_mark())),
    "TUPLE1": lambda m, a: m.contain(tuple(m.pop_n(1))),
    "TUPLE2": lambda m, a: m.contain(tuple(m.pop_n(2))),
    "TUPLE3": lambda m, a: m.contain(tuple(m.pop_n(3))),
    "EMPTY_DICT": lambda m, a: m.contain({}),
    "DICT": lambda m, a: m.contain(dict(_pairs(m.pop_mark()))),
    "SETITEM": lambda m, a: m.extend(dict, _pairs(m.pop_n(2))),
    "SETITEMS": lambda m, a: m.extend(dict, _pairs(m.pop_mark())),
    "EMPTY_SET": lambda m, a: m.contain(set()),
    "ADDITEMS": lambda m, a: m.extend(set, map(_key, m.pop_mark())),
    "FROZENSET": lambda m, a: m.contain(frozenset(map(_key, m.pop_mark()))),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    "MEMOIZE": lambda m, a: m.memoize(),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), _Machine.name),
    "REDUCE": lambda m, a: m.reduce(),
    "BUILD": lambda m, a: m.build(),
    "PERSID": lambda m, a: m.unread("object outside the file"),
    "BINPERSID": lambda m, a: m.of_class(m.pop_n(1)),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), lambda m, a: m.unread("class by its number in a registry")),
    "NEXT_BUFFER": lambda m, a: m.unread("array outside the file"),
    "READONLY_BUFFER": lambda m, a: None,
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), lambda m, a: m.unread("text of Python 2")),
    "INST": lambda m, a: m.of_class([Unread(_shortened(a)), *m.pop_mark()]),
    "OBJ": lambda m, a: m.of_class(m.pop_mark()),
    "NEWOBJ": lambda m, a: m.of_class(m.pop_n(2)),
    "NEWOBJ_EX": lambda m, a: m.of_class(m.pop_n(3)),
}
