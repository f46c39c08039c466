"""Settings of image encoders."""

from __future__ import annotations

import dataclasses

from serl_chunk.config.validation import require, require_widths


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """One small convolutional encoder, shared by cameras; used only where `image_keys` names some."""

    features: tuple[int, ...] = (16, 32, 32)  # channels of the stride-2 3x3 convolutions
    latent: int = 64  # width of each camera's embedding
    shift: int = 4  # random-shift augmentation in pixels (DrQ); 0 switches it off

    def __post_init__(self) -> None:
        require_widths("agent.encoder.features", self.features)
        require(self.latent >= 1, f"agent.encoder.latent must be at least 1, got {self.latent}")
        require(self.shift >= 0, f"agent.encoder.shift must be >= 0 pixels, got {self.shift}")
