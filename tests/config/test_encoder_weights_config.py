"""Pretrained weights of image encoders need a camera."""

from __future__ import annotations

import pytest
from errors import naming

from serl_chunk.config.agents import AcfqlConfig
from serl_chunk.config.encoders import EncoderConfig
from serl_chunk.types import ConfigError


def test_weights_without_a_camera_are_refused_instead_of_ignored() -> None:
    encoder = EncoderConfig(kind="resnet10", weights="resnet10.npz")
    AcfqlConfig(encoder=encoder, image_keys=("top",))
    with pytest.raises(ConfigError, match=naming("agent.encoder.weights", "resnet10.npz", "agent.image_keys")):
        AcfqlConfig(encoder=encoder)
