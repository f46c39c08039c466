"""A classifier's folder: what is written is read, and what is damaged is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from errors import naming

from serl_chunk.classifier.files import (
    DESCRIPTION,
    WEIGHTS,
    Description,
    check_free,
    read_classifier,
    read_description,
    save,
)
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.types import CameraSpec, ConfigError

ARRAYS = {"a/kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, np.float32)}


def description() -> Description:
    cameras = (CameraSpec("top", 16, 24), CameraSpec("wrist", 8, 8))
    encoder = EncoderConfig(features=(4, 8), share_cameras=False)
    return Description(cameras, ("failure", "success"), 0.7, 3, encoder, 10, 90, {"auc_by_episode": 0.9}, ("demos",))


@pytest.fixture
def folder(tmp_path):
    check_free(tmp_path / "c")
    save(tmp_path / "c", description(), ARRAYS)
    return tmp_path / "c"


def edit(folder, **changes):
    file = folder / DESCRIPTION
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_is_written_is_read(folder):
    found, arrays = read_classifier(folder)
    assert found == description().__class__(**{**vars(description()), "digest": found.digest})
    assert len(found.digest) == 16
    assert all(np.array_equal(arrays[name], ARRAYS[name]) for name in ARRAYS)
    assert arrays.keys() == ARRAYS.keys()


def test_a_classifier_is_not_overwritten(folder):
    with pytest.raises(ConfigError, match=naming(str(folder))) as refused:
        check_free(folder)
    assert refused.value.parameter == "out"


def test_a_file_is_no_folder_for_it(tmp_path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(ConfigError, match=naming("f")) as refused:
        check_free(tmp_path / "f")
    assert refused.value.parameter == "out"


def test_a_folder_without_one(tmp_path):
    with pytest.raises(ConfigError, match=naming(str(tmp_path), DESCRIPTION)):
        read_description(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 99}, {"format": "one"}, {"threshold": 1.5}, {"threshold": "high"}, {"frames": 0},
        {"classes": ["success"]}, {"cameras": []}, {"cameras": [{"name": "top"}]}, {"encoder": {"kind": "vgg"}},
        {"encoder": {"unknown": 1}}, {"surprise": 1},
    ],
)  # fmt: skip
def test_what_is_no_description_is_refused(folder, changes):
    edit(folder, **changes)
    with pytest.raises(ConfigError, match=naming(DESCRIPTION)):
        read_description(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1, "threshold": NaN}'])
def test_what_is_no_json_is_refused(folder, text):
    (folder / DESCRIPTION).write_text(text)
    with pytest.raises(ConfigError, match=naming(DESCRIPTION)):
        read_description(folder)


def test_weights_of_another_classifier_are_refused(folder, tmp_path):
    save(tmp_path, description(), {"other": np.zeros(2, np.float32)})
    (folder / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes())
    with pytest.raises(ConfigError, match=naming(WEIGHTS, read_description(folder).digest)):
        read_classifier(folder)


def test_missing_weights_are_named(folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=naming(WEIGHTS)):
        read_classifier(folder)
