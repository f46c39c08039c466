"""Reading pickles without running them: what is admitted comes back, all else is refused; pretrained weights."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pickle
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from data_sets import pickled
from errors import naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from properties import examples

from serl_chunk.config.agents.encoder import resnet10_leaves
from serl_chunk.data.encoder_weights import read_resnet10, write_weights
from serl_chunk.data.formats.restricted_pickle import Unread, load_plain
from serl_chunk.main import main
from serl_chunk.types import DataError, Outcome

PROTOCOLS = range(6)
DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", ">u2")


def load(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    return load_plain(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.pkl"


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_admitted_comes_back_and_what_occurs_twice_is_read_once(file: Path, protocol: int) -> None:
    def arrays(dtype: str) -> list[Any]:
        values = np.arange(24).reshape(2, 3, 4).astype(dtype)
        views = [values, np.asfortranarray(values[0]), values.transpose(2, 0, 1), values[:, ::2], values[:0]]
        return [*views, values[0, 0, 1:2].reshape(()), np.broadcast_to(values[0], (2, 3, 4)), values.dtype.type(1)]

    value = {
        **{dtype: arrays(dtype) for dtype in DTYPES},
        "numbers": [0, -1, 255, 65536, -(2**31), 2**100, -(2**2100), 1.5, -0.0, float("inf"), 1 + 2j, True, False],
        "texts": ["", "a\nb\\u0041", "ä€😀", b"", b"\x00\xff", bytearray(), bytearray(b"\xff")],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "containers": [[], {}, set(), {"a", "b"}, frozenset(), frozenset("c")],
        "none": None,
    }
    assert same(load(file, pickle.dumps(value, protocol=protocol)), value)
    array, items = np.arange(3), [1]
    a, b, c, d = load(file, pickle.dumps([array, array, items, items], protocol=protocol))
    assert a is b
    assert c is d
    with pytest.raises(ValueError, match=naming("read-only")):
        a[0] = 1


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
        | hnp.arrays(st.sampled_from(["f4", "u1", "i8", "?"]), hnp.array_shapes(min_dims=0, min_side=0)),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=12,
    ),
    protocol=st.sampled_from(PROTOCOLS),
)  # fmt: skip
def test_anything_admitted_comes_back(file: Path, value: Any, protocol: int) -> None:
    assert same(load(file, pickle.dumps(value, protocol=protocol)), value)


def test_arrays_pickled_by_numpy_1_and_bools_of_other_bytes(file: Path) -> None:
    array = np.arange(6.0).reshape(2, 3)
    data = pickle.dumps([array, np.float32(2)], protocol=2)
    assert b"numpy._core" in data
    assert same(load(file, data.replace(b"numpy._core", b"numpy.core")), [array, np.float32(2)])
    named = pickle.dumps(array, protocol=5)
    old = named.replace(b"\x8c\x13numpy._core.numeric", b"\x8c\x12numpy.core.numeric")
    assert old != named
    assert same(load(file, old.replace(named[3:11], struct.pack("<Q", len(old) - 11))), array)
    data = pickle.dumps(np.array([False, True, True]), protocol=4)
    assert data.count(b"C\x03\x00\x01\x01") == 1
    assert load(file, data.replace(b"C\x03\x00\x01\x01", b"C\x03\x00\x01\x02")).tobytes() == b"\x00\x01\x01"


class Calls:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class Point(NamedTuple):
    x: int


class Words(list):
    """A list of a class, with a state of its own."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("value", "name"), [
    (Calls(os.system, "touch RAN"), "posix.system"), (Calls(eval, "open('RAN', 'w')"), "eval"),
    (Calls(getattr, "", "join"), "getattr"), (Calls(np.save, "RAN", 0), "save"),
    (Calls(functools.partial, eval, "1"), "functools.partial"), (Calls(list, []), "list"),
    (Calls(range, 3), "range"),  # xrange is its name in Python 2
    (os.system, "posix.system"),  # not called, but named
    (np.matrix, "numpy.matrix"), (np.ma.array([1.0]), "numpy.ma"), (np.array([{}, []], object), "O8"),
    (np.array(["a"]), "U1"), (np.str_("a"), "U1"), (np.zeros(2, "f4,i4"), "V8"), (np.datetime64("2020"), "M8"),
    (np.dtype("O"), "O8"), (datetime(2026, 1, 2), "datetime.datetime"), (Path("/a"), "pathlib"), (Point(1), "Point"),
    (Outcome.SUCCESS, "Outcome"), (Words("ab"), "Words"), (deque([1]), "deque"), (Counter("ab"), "Counter"),
])  # fmt: skip
def test_where_another_object_would_stand_there_is_its_name_and_nothing_runs(
    file: Path, monkeypatch: pytest.MonkeyPatch, protocol: int, value: Any, name: str
) -> None:
    """Twice, for the memo; what lies around it is read."""
    monkeypatch.chdir(file.parent)
    first, second, after = load(file, pickle.dumps([{"a": value}, value, [1]], protocol=protocol))
    assert (type(first["a"]), type(second), after) == (Unread, Unread, [1])
    of_old = {"xrange": "range", "copyreg._reconstructor": name, "copy_reg._reconstructor": name}  # protocols 0 and 1
    assert re.search(naming(name), of_old.get(str(second).removeprefix("__builtin__."), str(second)))
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_dicts_of_other_classes_are_dicts_and_keys_that_are_no_texts_are_not_read(file: Path, protocol: int) -> None:
    rows = OrderedDict(a=1, b=OrderedDict()), defaultdict(list, a=[1]), {"a": 1, 3: 2, (4, 5): 6}, {1, "b"}
    ordered, default, keys, members = load(file, pickle.dumps(rows, protocol=protocol))
    assert same(ordered, {"a": 1, "b": {}})
    assert same(default, {"a": [1]})
    assert (keys.pop("a"), [type(key) for key in keys], members > {"b"}) == (1, [Unread], True)


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (b"(\x8c\x05numpy\x8c\x07ndarraytt\x93.", (18, 21, "mark")),
        (b"]\x8c\x07ndarray\x93.", (10, "values")),
        (b"cnumpy\nndarray\n(K\x03tR.", (19, "ndarray")),
        (b"c_codecs\nencode\n(Vx\nVrot13\ntR.", (28, "encode")),
        (b"cbuiltins\nbytes\n(J\xff\xff\xff\x7ftR.", (23, "bytes")),
        (b"cnumpy\ndtype\n(]tR.", (16, "dtype")),
        (b"cnumpy\ndtype\n(Vf4\nI00\nI01\ntR(I3\nV<\nN(Va\ntNtb.", (43, "records")),
        (b"cnumpy\ndtype\n(Vf4\nI00\nI01\ntR(I3\nVx\nNNNtb.", (39, "order")),
        (b"](N)tR.", (5, "function")),
        (b"N]b.", (2, "state")),
        (b"cnumpy\nndarray\n}b.", (16, "state")),
        (b"cnumpy\nndarray\nNa.", (16, "list")),
        (b"]NNs.", (3, "dict")),
        (b"]a.", (1, "empty")),
        (b"K\x012\x30.", (2, "DUP")),
        (b"\x80\x02NN.", (5, 2)),
        (b"\x89HDF\r\n\x1a\n", (8, "opcode")),
        # lengths beyond the file, of bytes, a bytearray, a text and a number, which cost no memory
        (b"\x8e" + struct.pack("<Q", 2**62) + b"abc", (0, 12, 2**62 - 3)),
        (b"B\xff\xff\xff\xff" + b"abc", (0, 8, 2**32 - 4)),
        (b"\x96" + struct.pack("<Q", 2**40) + b"abc", (0, 12, 2**40 - 3)),
        (b"\x8d" + struct.pack("<Q", 2**40) + b"abc", (0, 12, 2**40 - 3)),
        (b"\x8b\xff\xff\xff\x7f" + b"abc", (0, 8, 2**31 - 4)),
    ],
)
def test_programs_that_no_pickler_writes(file: Path, program: bytes, named: tuple[Any, ...]) -> None:
    with pytest.raises(DataError, match=naming("x.pkl", *named)):
        load(file, program)


@pytest.mark.parametrize(("program", "what"), [
    (b"cnumpy\nndarray.__reduce__\n.", "numpy.ndarray.__reduce__"),
    (b"\x8c\x05numpy\x8c\x0dndarray.dumps\x93.", "numpy.ndarray.dumps"),
    (b"cnumpy\ndtype\n(VO8\nI00\nI01\ntR.", "O8"), (b"cnumpy\nndarray\n)\x81.", "object of ndarray"),
    (b"(ios\nsystem\n.", "os system"), (b"(cos\nsystem\nK\x01o.", "os.system"), (b"Pwhere\n.", "outside"),
    (b"K\x01Q.", "class"), (b"\x82\x01.", "registry"), (b"\x97.", "outside"), (b"\x97\x98.", "outside"),
    (b"S'text'\n.", "Python 2"), (b"cos\nsystem\n(K\x01tR)R}bK\x01a.", "os.system"),
])  # fmt: skip
def test_programs_of_other_objects(file: Path, program: bytes, what: str) -> None:
    value = load(file, program)
    assert type(value) is Unread
    assert re.search(naming(what), str(value))


def test_names_without_end_take_no_memory(file: Path) -> None:
    found = load(file, b"(" + b"".join(b"cos\nf%d\n" % i for i in range(2000)) + b"l.")
    assert len(found) == 2000
    assert len(set(map(id, found))) <= 1001
    text = b"\x8d" + struct.pack("<Q", 10**6) + b"x" * 10**6  # named 3,000 times, each in a few bytes
    assert len(load(file, text + b"\x94" + b"0(" + b"h\x00h\x00\x93" * 3_000 + b"l.")) == 3_000


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_array_has_exactly_the_bytes_of_its_shape(file: Path, protocol: int) -> None:
    data = pickle.dumps(np.zeros((2, 3), np.float32), protocol=protocol)
    assert data.count(b"K\x02K\x03\x86") == 1
    for shape, named in (
        (b"K\x02K\x04\x86", ("[2, 4]", "float32", 24)),
        (b"K\x02K\x02\x86", ("[2, 2]", "float32", 24)),
        (b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86", ("[2147483647, 2147483647]", "float32", 24)),
        (b"K\x02J\xff\xff\xff\xff\x86", ("shape", "tuple")),
    ):
        bad = data.replace(b"K\x02K\x03\x86", shape)
        if protocol >= 4:
            bad = bad[:3] + struct.pack("<Q", len(bad) - 11) + bad[11:]
        with pytest.raises(DataError, match=naming(len(bad), *named)):
            load(file, bad)


def test_containers_are_counted_and_what_is_shared_stays_short(file: Path) -> None:
    """Ten lists of ten references each, ten deep, are ten small lists; as keys their hash would take years."""
    assert len(load(file, b"(" + b"}" * 9_000 + b"l.")) == 9_000
    with pytest.raises(DataError, match=naming(35_001, "size")):
        load(file, b"(" + b"}" * 100_000 + b"l.")
    assert len(load(file, pickle.dumps([{"infos": {}} for _ in range(20_000)]))) == 20_000
    value: Any = "ha"
    for _ in range(40):
        value = (value, value)
    assert type(load(file, pickle.dumps([value]))[0]) is tuple
    (key,) = load(file, b"}" + pickle.dumps(value, 2)[2:-1] + b"Ns.")
    assert type(key) is Unread


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_file_cut_anywhere_is_said_to_be_cut_and_a_missing_one_named(file: Path, protocol: int) -> None:
    for path, code in ((file.with_name("missing.pkl"), errno.ENOENT), (file.parent, errno.EISDIR)):
        with pytest.raises(DataError, match=naming(path, os.strerror(code))):
            load_plain(path)
    data = pickle.dumps([{"a": np.arange(4.0), "b": (1, "x", b"y")}] * 2, protocol=protocol)
    for n in range(len(data)):
        with pytest.raises(DataError, match=naming("x.pkl", n)):
            load(file, data[:n])


@pytest.mark.filterwarnings("ignore:invalid escape")
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_never_end_in_another_error(file: Path, data: st.DataObject) -> None:
    whole = pickle.dumps(
        [{"a": np.arange(4, dtype=np.uint8), "b": (1, "x", b"y", 2.5)}], protocol=data.draw(st.sampled_from(PROTOCOLS))
    )
    at = data.draw(st.integers(0, len(whole) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=3))
    with contextlib.suppress(DataError):  # or it reads as something else
        load(file, whole[:at] + damage + whole[at + len(damage) :])


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    """Random weights in the nesting, with the names and shapes of the published file, a classifier included."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    norm = lambda width: {"scale": draw(width), "bias": draw(width)}  # noqa: E731
    tree: dict[str, Any] = {"conv_init": {"kernel": draw(7, 7, 3, 64)}, "norm_init": norm(64)}
    for i, (before, width) in enumerate([(64, 64), (64, 128), (128, 256), (256, 512)]):
        block = tree[f"ResNetBlock_{i}"] = {}
        for j, inner in enumerate((before, width)):
            block |= {f"Conv_{j}": {"kernel": draw(3, 3, inner, width)}, f"MyGroupNorm_{j}": norm(width)}
        if before != width:
            block |= {"conv_proj": {"kernel": draw(1, 1, before, width)}, "norm_proj": norm(width)}
    return tree | {"output_head": {"kernel": draw(512, 10), "bias": draw(10)}}


def test_every_weight_of_the_published_layout_finds_its_place(tmp_path, tree):
    jax = pytest.importorskip("jax")
    from flax.core import freeze

    for stored in (tree, freeze(jax.tree.map(jax.numpy.asarray, tree))):  # arrays of JAX in frozen dicts are read too
        weights, left_out = read_resnet10(pickled(tmp_path / "resnet10_params.pkl", stored))
        assert {k: v.shape for k, v in weights.items()} == resnet10_leaves()
        assert sum(value.size for value in weights.values()) == 4_905_792  # "4.906M" in its log
        assert left_out == ["output_head/bias", "output_head/kernel"]
        places = {"conv_init/kernel": tree["conv_init"]["kernel"]}
        for i in range(4):
            block = tree[f"ResNetBlock_{i}"]
            for j in range(2):
                places[f"block_{i}/conv_{j}/kernel"] = block[f"Conv_{j}"]["kernel"]
                places |= {f"block_{i}/norm_{j}/{n}": v for n, v in block[f"MyGroupNorm_{j}"].items()}
        places["block_2/conv_proj/kernel"] = tree["ResNetBlock_2"]["conv_proj"]["kernel"]
        places["block_3/norm_proj/bias"] = tree["ResNetBlock_3"]["norm_proj"]["bias"]
        for name, value in places.items():
            np.testing.assert_array_equal(weights[name], value)


@pytest.mark.parametrize(
    ("block", "change", "named"),
    [
        ("ResNetBlock_1", {"conv_proj": {}}, ("ResNetBlock_1/conv_proj/kernel",)),
        ("norm_init", {"scale": np.ones(32, np.float32)}, ("norm_init/scale", "float32[32]", "(64,)")),
        ("norm_init", {"bias": np.full(64, np.nan)}, ("norm_init/bias",)),
        ("norm_init", {"bias": "none"}, ("norm_init/bias", "str", "(64,)")),
    ],
)
def test_the_first_weight_that_does_not_fit_is_named(tmp_path, tree, block, change, named):
    with pytest.raises(DataError, match=naming(*named)):
        read_resnet10(pickled(tmp_path / "other.pkl", tree | {block: tree[block] | change}))


def test_what_would_run_is_refused_and_a_jax_array_that_is_made_by_anything_else(tmp_path, capsys):
    from jax._src.array import _reconstruct_array

    forged = Calls(_reconstruct_array, bytes, (), (), {})
    for value, name in ((Calls(print, "run"), "print"), (forged, "_reconstruct_array")):
        with pytest.raises(DataError, match=naming("evil.pkl", name)):
            read_resnet10(pickled(tmp_path / "evil.pkl", {"conv_init": {"kernel": value}}))
    assert "run" not in capsys.readouterr().out
    deep = b"}X\x01\x00\x00\x00a" * 9_000 + b"N" + b"s" * 9_000 + b"."  # dicts in one another
    (tmp_path / "deep.pkl").write_bytes(deep)
    with pytest.raises(DataError, match=naming("deep.pkl", "conv_init/kernel")):
        read_resnet10(tmp_path / "deep.pkl")


def test_the_command_writes_a_file_of_plain_arrays_that_is_the_same_every_time(tmp_path, tree, capsys):
    source = pickled(tmp_path / "resnet10_params.pkl", tree)
    for name in ("a.npz", "b.npz"):
        assert main(["data", "encoder", str(source), str(tmp_path / name)]) == 0
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert {k: file[k].shape for k in file.files} == resnet10_leaves()
    for name in ("a.npz", "a.pkl"):  # is there; another suffix
        assert main(["data", "encoder", str(source), str(tmp_path / name)]) == 2
        assert name.removeprefix("a") in capsys.readouterr().err
    (tmp_path / "c.npz").mkdir()
    with pytest.raises(DataError, match=naming("c.npz", os.strerror(errno.EISDIR))):
        write_weights(tmp_path / "c.npz", {"x": np.ones(3, np.float32)})
    assert sorted(p.name for p in tmp_path.glob("[!r]*")) == ["a.npz", "b.npz", "c.npz"]  # nothing is left behind
