"""Files of weights are taken whole and exactly, or refused with the first name that does not fit."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

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
    with pytest.raises(ConfigError, match=r"a pickle or something else\); `serl-chunk data encoder .* pickle") as error:
        read_weights(str(tmp_path / "w.npz"), LEAVES)
    assert "unsafely" not in str(error.value)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"b": np.ones(4)}, r"w.npz: lacks 'a/kernel' of shape \(2, 3\); is it of another network"),
        (arrays(b=np.ones(5)), r"'b' is float64\(5,\), floats of shape \(4,\) were expected"),
        (arrays(b=np.ones(4, int)), r"'b' is int64\(4,\), floats of shape"),
        (arrays(b=np.array([1, np.inf, 0, 0])), "'b' holds numbers that are not finite"),
        (arrays(ghost=np.ones(1)), "holds 'ghost', which this network does not have"),
    ],
)
def test_the_first_mismatch_is_named(tmp_path, found, said):
    np.savez(tmp_path / "w.npz", **found)
    with pytest.raises(ConfigError, match=said):
        read_weights(str(tmp_path / "w.npz"), LEAVES)


def test_no_file_and_no_archive_are_told_apart(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file here; the learner reads it"):
        read_weights(str(tmp_path / "none.npz"), LEAVES)
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(ConfigError, match=r"not a \.npz of plain arrays"):
        read_weights(str(tmp_path / "text.npz"), LEAVES)
    np.savez(tmp_path / "objects.npz", b=np.array([{}], dtype=object))
    with pytest.raises(ConfigError, match=r"not a \.npz of plain arrays \(it holds objects\)"):
        read_weights(str(tmp_path / "objects.npz"), LEAVES)
    np.save(tmp_path / "one.npy", np.ones(3))
    with pytest.raises(ConfigError, match="it is a single array"):
        read_weights(str(tmp_path / "one.npy"), LEAVES)
