"""Arrays from the calls in a pickle of numpy arrays, without calling anything; see `restricted_pickle`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

_BUILTINS = ("bytes", "bytearray", "complex", "set", "frozenset")
KNOWN_GLOBALS: dict[tuple[str, str], str] = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",  # how bytes are written below protocol 3
    **{(f"numpy.{core}.multiarray", "_reconstruct"): "_reconstruct" for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): "scalar" for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): "_frombuffer" for core in ("core", "_core")},
    ("jax._src.array", "_reconstruct_array"): "_reconstruct_array",  # a jax.Array: the numpy array's, and its type
    ("flax.core.frozen_dict", "FrozenDict"): "FrozenDict",
    **{(module, name): name for module in ("builtins", "__builtin__") for name in _BUILTINS},
}
_DTYPES = frozenset(("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"))


class MalformedPickleError(Exception):
    """The bytes are no pickle."""


class DisallowedPickleError(Exception):
    """The pickle names something that is not on the list."""


@dataclasses.dataclass(slots=True, eq=False)
class Global:
    """A class or function on the list, as a name: there is nothing to call."""

    name: str


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


def shortened(text: str) -> str:
    """Return a name from the file in printable characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:80])


def checked_key(value: Any) -> Any:
    """Return `value` if it is text: no file can choose the hash of one, and it is cheap. Raises otherwise."""
    if type(value) is not str and type(value) is not bytes:
        raise DisallowedPickleError(f"has a {type(value).__name__.strip('_')} for a key; keys are texts")
    return value


def call(name: str, arguments: tuple[Any, ...]) -> Any:
    """Return the result of a call of a name on the list. Raises DisallowedPickleError for unusual arguments."""
    types = tuple(type(a) for a in arguments)
    if name == "_reconstruct":
        first = arguments[0] if arguments else None
        if type(first) is Global and first.name == "ndarray" and arguments[1:] == ((0,), b"b"):
            return PendingArray()
    elif name == "_reconstruct_array" and len(arguments) == 4:
        maker = arguments[0]
        if type(maker) is Global and maker.name == "_reconstruct" and type(arguments[1]) is tuple:
            call(maker.name, arguments[1])  # which refuses other arguments
            return array_of(arguments[2])
    elif name == "FrozenDict" and types == (dict,):
        return dict(arguments[0])
    elif name == "dtype" and types[:1] == (str,) and set(types[1:]) <= {bool, int}:
        return PendingDType(_known_code(arguments[0]))
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
    elif name in ("set", "frozenset") and types in ((), (list,)):
        items = map(checked_key, *arguments) if arguments else ()
        return set(items) if name == "set" else frozenset(items)
    raise DisallowedPickleError(f"calls {name} in a way that numpy and Python do not")


def _known_code(code: str) -> str:
    if code not in _DTYPES:
        what = "an array of objects" if code.startswith("O") else f"an array of type {shortened(code)}"
        raise DisallowedPickleError(f"holds {what}")
    return code


def set_order(dtype: PendingDType, state: Any) -> None:
    """Set the byte order from `state`: (3, byte order, None, None, None, -1, -1, 0); the Nones are fields."""
    if type(state) is not tuple or len(state) < 5 or state[2:5] != (None, None, None):
        raise DisallowedPickleError("holds an array of records")
    if state[1] not in ("<", ">", "|"):
        raise DisallowedPickleError("holds an array of unknown byte order")
    dtype.order = state[1]


def array_of(state: Any) -> np.ndarray:
    """Build an array from `state`: (1, shape, dtype, Fortran order, bytes); numpy's oldest pickles lack the 1."""
    if type(state) is tuple and len(state) in (4, 5):
        shape, dtype, fortran, data = state[-4:]
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
