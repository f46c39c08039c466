"""Settings of image encoders that need a camera, and the size of the frames that they read."""

from __future__ import annotations

import pytest
from errors import naming

from serl_chunk.cli.process import load
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.fields import check_unused
from serl_chunk.types import ConfigError

SIZE = ("agent.encoder.frame_size", "24,32")


def test_weights_without_a_camera_are_refused_instead_of_ignored() -> None:
    encoder = EncoderConfig(kind="resnet10", weights="resnet10.npz")
    AcfqlConfig(encoder=encoder, image_keys=("top",))
    with pytest.raises(ConfigError, match=naming("agent.encoder.weights", "resnet10.npz", "agent.image_keys")):
        AcfqlConfig(encoder=encoder)


def test_a_size_is_read_as_two_numbers_or_none() -> None:
    assert load("fake_aloha_images", [SIZE]).agent.encoder.frame_size == (24, 32)
    assert load("fake_aloha_images", [(SIZE[0], "none")]).agent.encoder.frame_size is None
    assert EncoderConfig().frame_size is None


@pytest.mark.parametrize("text", ["24", "24,32,3", "0,32", "", "24x32"])
def test_a_size_is_a_height_and_a_width(text) -> None:
    with pytest.raises(ConfigError) as refused:
        load("fake_aloha_images", [(SIZE[0], text)])
    assert refused.value.parameter == SIZE[0]


def test_a_size_without_a_camera_is_refused() -> None:
    with pytest.raises(ConfigError, match=naming(*SIZE, "agent.image_keys")):
        check_unused(load("fake_aloha", [SIZE]), [SIZE[0]])
