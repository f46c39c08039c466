"""Settings of image encoders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Literal

from serl_chunk.config.fields import CAMERAS, Group, Requirement, acting, needs, require, setting, shaping, widths
from serl_chunk.types import CameraSpec

Kind = Literal["conv", "impala", "resnet10"]
Pooling = Literal["flatten", "mean", "spatial"]

_CHANNELS = needs("agent.encoder.kind", "conv", "impala", note="ResNet-10 has channels of its own")
_STATE = needs("agent.use_state", True)
EMBEDDED = Requirement(
    "cameras in agent.image_keys, agent.language.tokenizer, or agent.encoder.state_latent above 0",
    lambda c: bool(c.agent.image_keys) or c.agent.language.reads or c.agent.encoder.state_latent > 0,
)
_SHIFTED = Requirement(
    "a policy, or a critic, that sees pixels by agent.encoder (pi0 has agent.pi0.augment)",
    lambda c: c.agent.as_pi0 is None or (c.agent.has_critic and c.agent.seen_by_critic == "pixels"),
)
_of_cameras = partial(shaping, requires=CAMERAS)


@dataclasses.dataclass(frozen=True)
class EncoderConfig(Group, path="agent.encoder."):
    """How an observation becomes a feature vector; all but `state_latent` is for cameras.

    docs/algorithms/vision.md gives the purpose of each choice.
    """

    kind: Kind = shaping(
        "conv", "a few convolutions, impala's residual network, or HIL-SERL's ResNet-10 (group norm)", requires=CAMERAS
    )
    features: tuple[int, ...] = widths(
        (16, 32, 32), "channels of conv's stride-2 convolutions, or of impala's sections", requires=(CAMERAS, _CHANNELS)
    )
    pooling: Pooling = shaping(
        "flatten", "all features, their mean, or 8 learned weightings of places (spatial, HIL-SERL's)", requires=CAMERAS
    )
    latent: int = _of_cameras(64, "width of a camera's embedding; HIL-SERL's is 256", least=1)
    share_cameras: bool = _of_cameras(True, "one set of weights for all cameras, or one for each")
    state_latent: int = shaping(
        0, "width of the state's embedding (HIL-SERL's is 64); 0: the state as it is", least=0, off=0, requires=_STATE
    )
    # critic: policies read the features of the critic that acts, without a gradient (HIL-SERL).
    trained_by: Literal["each", "critic"] = shaping(
        "each", "each network's loss trains an encoder of its own, or the critic's one for all", requires=EMBEDDED
    )
    frozen_backbone: bool = _of_cameras(False, "keep resnet10's convolutions; heads train")
    # A frame that is shifted anew each time has no features to keep.
    cache_features: bool = setting(False, "store the frozen backbone's features of each frame in place of pixels")
    weights: str = setting(
        "", ".npz of the backbone's initial weights (`serl-chunk data encoder`); frozen: at the actor, too"
    )
    shift: int = setting(
        4, "random-shift augmentation (DrQ); 0: none", unit="pixels", least=0, requires=(CAMERAS, _SHIFTED)
    )
    frame_size: tuple[int, ...] | None = acting(
        None, "HEIGHT,WIDTH to which frames are letterboxed; none: as the cameras give them", unit="pixels", least=1,
        requires=CAMERAS,
    )  # fmt: skip

    def _check(self) -> None:
        # fmt: off
        require(not self.cache_features or self.frozen_backbone, "agent.encoder.cache_features",
            "must be False while the backbone is trained: its features change with every update. Set "
            "agent.encoder.frozen_backbone=True (with agent.encoder.kind=resnet10).")
        require(not self.cache_features or self.shift == 0, "agent.encoder.cache_features",
            f"True excludes agent.encoder.shift={self.shift}: a stored frame's features are computed once, and a "
            "random shift gives another image every time. Set agent.encoder.shift=0.")
        require(self.frame_size is None or len(self.frame_size) == 2, "agent.encoder.frame_size",
            f"must be none or HEIGHT,WIDTH, got {self.frame_size}. Give two numbers, as 224,224.")
        for name in ("frozen_backbone", "weights"):
            require(not getattr(self, name) or self.kind == "resnet10", f"agent.encoder.{name}",
                f"has no effect on agent.encoder.kind={self.kind!r}, which has no pretrained weights. Set "
                "agent.encoder.kind=resnet10, or leave it out.")


def shown(cameras: Iterable[CameraSpec], frame_size: tuple[int, ...] | None) -> tuple[CameraSpec, ...]:
    """Return `cameras` with the size of the frames that an agent reads, see `EncoderConfig.frame_size`."""
    return tuple(c if frame_size is None else CameraSpec(c.name, *frame_size) for c in cameras)


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
