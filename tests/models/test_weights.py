"""Files of weights are taken whole and exactly, or refused with the first name that does not fit."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from errors import naming

from serl_chunk.models.resnet import read_weights
from serl_chunk.types import ConfigError

LEAVES = {"a/kernel": (2, 3), "b": (4,)}


def arrays(**changes):
    return {"a/kernel": np.arange(6.0).reshape(2, 3), "b": np.ones(4, np.float16)} | changes


def test_floats_of_any_width_come_as_float32(tmp_path):
    np.savez(tmp_path / "w.npz", **arrays())
    found = read_weights(str(tmp_path / "w.npz"), LEAVES)
    assert list(found) == list(LEAVES)
    assert {v.dtype for v in found.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(found["a/kernel"], np.arange(6).reshape(2, 3))


def test_a_pickle_under_another_name_is_to_be_converted_and_not_to_be_trusted(tmp_path):
    (tmp_path / "w.npz").write_bytes(pickle.dumps(arrays()))
    with pytest.raises(ConfigError, match=naming("agent.encoder.weights", "w.npz", "resnet10_params.pkl")) as error:
        read_weights(str(tmp_path / "w.npz"), LEAVES)
    assert "unsafely" not in str(error.value)


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"b": np.ones(4)}, ("w.npz", "a/kernel", "(2, 3)")),
        (arrays(b=np.ones(5)), ("w.npz", "'b'", "float64(5,)", "(4,)")),
        (arrays(b=np.ones(4, int)), ("w.npz", "'b'", "int64(4,)", "(4,)")),
        (arrays(b=np.array([1, np.inf, 0, 0])), ("w.npz", "'b'")),
        (arrays(ghost=np.ones(1)), ("w.npz", "ghost")),
    ],
)
def test_the_first_mismatch_is_named(tmp_path, found, named):
    np.savez(tmp_path / "w.npz", **found)
    with pytest.raises(ConfigError, match=naming(*named)):
        read_weights(str(tmp_path / "w.npz"), LEAVES)


def test_no_file_and_no_archive_are_told_apart(tmp_path):
    with pytest.raises(ConfigError, match=naming("agent.encoder.weights", "none.npz", "learner", "actor")):
        read_weights(str(tmp_path / "none.npz"), LEAVES)
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(ConfigError, match=naming("agent.encoder.weights", "text.npz", "HIL-SERL", "archive")):
        read_weights(str(tmp_path / "text.npz"), LEAVES)
    np.savez(tmp_path / "objects.npz", b=np.array([{}], dtype=object))
    with pytest.raises(ConfigError, match=naming("agent.encoder.weights", "objects.npz", "HIL-SERL")):
        read_weights(str(tmp_path / "objects.npz"), LEAVES)
    np.save(tmp_path / "one.npy", np.ones(3))
    with pytest.raises(ConfigError, match=naming("agent.encoder.weights", "one.npy", "HIL-SERL", "array")):
        read_weights(str(tmp_path / "one.npy"), LEAVES)
