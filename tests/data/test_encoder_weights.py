"""HIL-SERL's pickle of pretrained weights becomes a file that the learner takes; other files are refused by name."""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np
import pytest
from data_sets import pickled
from errors import naming

from serl_chunk.config.agents.encoder import resnet10_leaves
from serl_chunk.data.encoder_weights import read_resnet10, write_weights
from serl_chunk.main import main
from serl_chunk.types import DataError


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
        ("norm_init", {"scale": np.ones(32, np.float32)}, ("norm_init/scale", "float32(32,)", "(64,)")),
        ("norm_init", {"bias": np.ones(64, np.int32)}, ("norm_init/bias", "int32(64,)")),
        ("norm_init", {"bias": np.full(64, np.nan)}, ("norm_init/bias",)),
        ("norm_init", {"bias": "none"}, ("norm_init/bias", "str", "(64,)")),
    ],
)
def test_the_first_weight_that_does_not_fit_is_named(tmp_path, tree, block, change, named):
    with pytest.raises(DataError, match=naming(*named)):
        read_resnet10(pickled(tmp_path / "other.pkl", tree | {block: tree[block] | change}))


class Call:
    """Pickles as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def test_what_would_run_is_refused_and_a_jax_array_that_is_made_by_anything_else(tmp_path, capsys):
    from jax._src.array import _reconstruct_array

    forged = Call(_reconstruct_array, (bytes, (), (), {}))
    for value, name in ((Call(print, ("run",)), "builtins.print"), (forged, "_reconstruct_array")):
        with pytest.raises(DataError, match=naming("evil.pkl", name)):
            read_resnet10(pickled(tmp_path / "evil.pkl", {"conv_init": {"kernel": value}}))
    assert "run" not in capsys.readouterr().out


def test_the_command_writes_a_file_of_plain_arrays_that_is_the_same_every_time(tmp_path, tree, capsys):
    source = pickled(tmp_path / "resnet10_params.pkl", tree)
    for name in ("a.npz", "b.npz"):
        assert main(["data", "encoder", str(source), str(tmp_path / name)]) == 0
    assert "4.906 million weights" in capsys.readouterr().out
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert {k: file[k].shape for k in file.files} == resnet10_leaves()
    assert main(["data", "encoder", str(source), str(tmp_path / "a.npz")]) == 2
    assert "a.npz exists" in capsys.readouterr().err
    assert main(["data", "encoder", str(source), str(tmp_path / "a.pkl")]) == 2
    assert "weights are written as .npz" in capsys.readouterr().err
    (tmp_path / "c.npz").mkdir()
    with pytest.raises(DataError, match=naming("c.npz", os.strerror(errno.EISDIR))):
        write_weights(tmp_path / "c.npz", {"x": np.ones(3, np.float32)})
    assert sorted(p.name for p in tmp_path.glob("[!r]*")) == ["a.npz", "b.npz", "c.npz"]  # nothing is left behind
