"""A classifier's folder: what is written is read, and what is damaged is refused."""

from __future__ import annotations

import dataclasses
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


CAMERAS = (CameraSpec("top", 16, 24), CameraSpec("wrist", 8, 8))
ENCODER = EncoderConfig(features=(4, 8), share_cameras=False)
WRITTEN = Description(
    CAMERAS, ("failure", "success"), 0.7, 3, ENCODER, 10, 90, {"auc_by_episode": 0.9}, ("demos",)
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    check_free(tmp_path / "c")
    save(tmp_path / "c", WRITTEN, ARRAYS)
    return tmp_path / "c"


def test_what_is_written_is_read_and_not_overwritten(folder):
    found, arrays = read_classifier(folder)
    assert found == dataclasses.replace(WRITTEN, digest=found.digest)
    assert len(found.digest) == 16
    assert arrays.keys() == ARRAYS.keys()
    assert all(np.array_equal(arrays[name], ARRAYS[name]) for name in ARRAYS)
    for taken in (folder, folder / DESCRIPTION):
        with pytest.raises(ConfigError, match=naming(taken)) as refused:
            check_free(taken)
        assert refused.value.parameter == "out"


@pytest.mark.parametrize(
    "changes",
    [
        None, "{", "[]", '{"format": 1, "threshold": NaN}',
        {"format": 99}, {"format": "one"}, {"threshold": 1.5}, {"threshold": "high"}, {"frames": 0},
        {"classes": ["success"]}, {"cameras": []}, {"cameras": [{"name": "top"}]}, {"encoder": {"kind": "vgg"}},
        {"encoder": {"unknown": 1}}, {"surprise": 1},
    ],
)  # fmt: skip
def test_what_is_no_description_is_refused(folder, changes):
    file = folder / DESCRIPTION
    if changes is None:
        file.unlink()
    else:
        file.write_text(changes if isinstance(changes, str) else json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=naming(folder, DESCRIPTION)):
        read_description(folder)


def test_weights_that_are_missing_or_of_another_classifier_are_refused(folder, tmp_path):
    save(tmp_path, WRITTEN, {"other": np.zeros(2, np.float32)})
    (folder / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes())
    with pytest.raises(ConfigError, match=naming(WEIGHTS, read_description(folder).digest)):
        read_classifier(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=naming(WEIGHTS)):
        read_classifier(folder)
