"""Settings of image encoders."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.validation import require, require_choices, require_widths

Kind = Literal["conv", "impala", "resnet10"]
Pooling = Literal["flatten", "mean", "spatial"]


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """How an observation becomes a feature vector; all but `state_latent` is for cameras.

    docs/algorithms/vision.md has what each choice is for.
    """

    # A few convolutions of our own; the small residual network of IMPALA; ResNet-10 with group norm, as HIL-SERL's.
    kind: Kind = "conv"
    features: tuple[int, ...] = (16, 32, 32)  # channels: of conv's stride-2 convolutions, of impala's sections
    # Of the backbone's feature map: all of it, its mean, or 8 learned weightings of its places per channel (HIL-SERL).
    pooling: Pooling = "flatten"
    latent: int = 64  # width of each camera's embedding (Dense, LayerNorm, tanh); HIL-SERL's is 256
    share_cameras: bool = True  # one set of weights for all cameras, or one for each
    state_latent: int = 0  # the state through Dense, LayerNorm and tanh of this width (HIL-SERL's is 64); 0: as it is
    # Every network has an encoder of its own, which its own loss trains; or the critic's loss alone trains one, and
    # policies read the features of the critic that acts, without a gradient (HIL-SERL).
    trained_by: Literal["each", "critic"] = "each"
    frozen_backbone: bool = False  # resnet10's convolutions stay as they are, for all networks the same; heads train
    # What the frozen backbone makes of a stored frame is computed once and kept beside it; batches then carry that
    # instead of pixels. Needs shift=0: an image that is shifted anew each time has no features to keep.
    cache_features: bool = False
    weights: str = ""  # .npz of the backbone's weights (`serl-chunk data encoder`), which the learner starts from
    shift: int = 4  # random-shift augmentation in pixels (DrQ); 0 switches it off

    def __post_init__(self) -> None:
        require_choices(self, "agent.encoder.")
        require_widths("agent.encoder.features", self.features)
        require(self.latent >= 1, f"agent.encoder.latent must be at least 1, got {self.latent}")
        require(
            self.state_latent >= 0,
            f"agent.encoder.state_latent must be >= 0 (0 takes the state as it is), got {self.state_latent}",
        )
        require(self.shift >= 0, f"agent.encoder.shift must be >= 0 pixels, got {self.shift}")
        require(
            not self.cache_features or self.frozen_backbone,
            "agent.encoder.cache_features=True keeps what a frozen backbone makes of stored frames, and this one is "
            "trained, so that it changes with every update: set agent.encoder.frozen_backbone=True (with "
            "agent.encoder.kind=resnet10), or agent.encoder.cache_features=False",
        )
        require(
            not self.cache_features or self.shift == 0,
            f"agent.encoder.cache_features=True and agent.encoder.shift={self.shift} exclude each other: a stored "
            "frame's features are computed once, and a random shift shows another image every time. Set "
            "agent.encoder.shift=0, or agent.encoder.cache_features=False",
        )
        for name in ("frozen_backbone", "weights"):
            require(
                not getattr(self, name) or self.kind == "resnet10",
                f"agent.encoder.{name} is for agent.encoder.kind=resnet10, whose weights can be had, and the kind is "
                f"{self.kind!r}: set agent.encoder.kind=resnet10 or leave agent.encoder.{name} out",
            )


def resnet10_leaves() -> dict[str, tuple[int, ...]]:
    """The parameters of the resnet10 backbone, by their paths in a file of weights: float32 of these shapes."""
    leaves: dict[str, tuple[int, ...]] = {"conv_init/kernel": (7, 7, 3, 64)}

    def norm(name: str, width: int) -> None:
        leaves.update({f"{name}/scale": (width,), f"{name}/bias": (width,)})

    norm("norm_init", 64)
    before = 64
    for i, width in enumerate((64, 128, 256, 512)):
        for j, channels in enumerate((before, width)):
            leaves[f"block_{i}/conv_{j}/kernel"] = (3, 3, channels, width)
            norm(f"block_{i}/norm_{j}", width)
        if width != before:
            leaves[f"block_{i}/conv_proj/kernel"] = (1, 1, before, width)
            norm(f"block_{i}/norm_proj", width)
        before = width
    return leaves
