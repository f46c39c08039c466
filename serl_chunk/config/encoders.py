"""Settings of image encoders."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.fields import CAMERAS, Group, Requirement, needs, require, setting, shaping

Kind = Literal["conv", "impala", "resnet10"]
Pooling = Literal["flatten", "mean", "spatial"]


@dataclasses.dataclass(frozen=True)
class EncoderConfig(Group, path="agent.encoder."):
    """How an observation becomes a feature vector; all but `state_latent` is for cameras.

    docs/algorithms/vision.md gives the purpose of each choice.
    """

    kind: Kind = shaping(
        "conv",
        "conv: a few convolutions; impala: its residual network; resnet10: with group norm, as HIL-SERL's",
        requires=CAMERAS,
    )
    features: tuple[int, ...] = shaping(
        (16, 32, 32),
        "channels of conv's stride-2 convolutions, or of impala's sections",
        items=1,
        least=1,
        requires=(CAMERAS, needs("agent.encoder.kind", "conv", "impala", note="ResNet-10 has channels of its own")),
    )
    pooling: Pooling = shaping(
        "flatten",
        "of the backbone's features: all, their mean, or spatial: 8 learned weightings of places (HIL-SERL)",
        requires=CAMERAS,
    )
    latent: int = shaping(64, "width of a camera's embedding; HIL-SERL's is 256", least=1, requires=CAMERAS)
    share_cameras: bool = shaping(True, "one set of weights for all cameras, or one for each", requires=CAMERAS)
    state_latent: int = shaping(
        0,
        "width of the state's embedding (HIL-SERL's is 64); 0: the state as it is",
        least=0,
        off=0,
        requires=needs("agent.use_state", True),
    )
    # critic: policies read the features of the critic that acts, without a gradient (HIL-SERL).
    trained_by: Literal["each", "critic"] = shaping(
        "each",
        "each network has an encoder that its loss trains, or the critic's loss alone trains one for all",
        requires=(
            Requirement(
                "cameras in agent.image_keys, or agent.encoder.state_latent above 0",
                lambda c: bool(c.agent.image_keys) or c.agent.encoder.state_latent > 0,
            )
        ),
    )
    frozen_backbone: bool = shaping(False, "keep resnet10's convolutions; heads train", requires=CAMERAS)
    # A frame that is shifted anew each time has no features to keep.
    cache_features: bool = setting(False, "store the frozen backbone's features of each frame in place of pixels")
    weights: str = setting("", ".npz of the backbone's initial weights (`serl-chunk data encoder`), at the learner")
    shift: int = setting(4, "random-shift augmentation (DrQ); 0: none", unit="pixels", least=0, requires=CAMERAS)

    def _check(self) -> None:
        # fmt: off
        require(not self.cache_features or self.frozen_backbone, "agent.encoder.cache_features",
            "must be False while the backbone is trained: its features change with every update. Set "
            "agent.encoder.frozen_backbone=True (with agent.encoder.kind=resnet10).")
        require(not self.cache_features or self.shift == 0, "agent.encoder.cache_features",
            f"True excludes agent.encoder.shift={self.shift}: a stored frame's features are computed once, and a "
            "random shift gives another image every time. Set agent.encoder.shift=0.")
        for name in ("frozen_backbone", "weights"):
            require(not getattr(self, name) or self.kind == "resnet10", f"agent.encoder.{name}",
                f"has no effect on agent.encoder.kind={self.kind!r}, which has no pretrained weights. Set "
                "agent.encoder.kind=resnet10, or leave it out.")


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
