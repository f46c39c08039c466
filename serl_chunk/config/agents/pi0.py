"""Settings of pi0 and pi0.5 (Black et al. 2024, 2025): every size, what is trained, and presets."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

from serl_chunk.config.agents.base import Optimiser
from serl_chunk.config.agents.language import VOCABULARY
from serl_chunk.config.fields import (
    ABSENT,
    CAMERAS,
    NOT_CONSTANT,
    Group,
    Requirement,
    acting,
    needs,
    not_by,
    require,
    setting,
    shaping,
    value_at,
)

DType = Literal["bfloat16", "float32"]
Trainable = Literal["full", "expert", "lora", "lora_expert", "none"]
LoraInit = Literal["zero", "openpi"]

_size = partial(shaping, least=1)
_rank = partial(shaping, least=0, off=0)
_OF_TRAINING: dict[str, Any] = {"requires": NOT_CONSTANT, "off": 0}  # small actors have optimisers of their own


@dataclasses.dataclass(frozen=True)
class SiglipConfig(Group, path="agent.pi0.siglip."):
    """The image tower: a vision transformer of which each patch becomes a token."""

    width: int = _size(1152, "numbers of a token")
    depth: int = _size(27, "layers")
    mlp: int = _size(4304, "hidden units of a layer")
    heads: int = _size(16, "attention heads, of width / heads numbers each")
    patch: int = _size(14, "side of a patch", unit="pixels")

    def _check(self) -> None:
        valid = f"must divide agent.pi0.siglip.width={self.width}, got {self.heads}"
        require(self.width % self.heads == 0, "agent.pi0.siglip.heads", valid)


@dataclasses.dataclass(frozen=True)
class TransformerConfig(Group):
    """One expert of the language model: its widths, and the ranks of its low-rank additions (LoRA)."""

    width: int = _size(2048, "numbers of a token")
    mlp: int = _size(16384, "hidden units of a layer")
    attention_rank: int = _rank(0, "rank of LoRA in the attention's products; 0: none")
    attention_alpha: float = 16.0
    # openpi multiplies this one by nothing, whatever its alpha is.
    mlp_rank: int = _rank(0, "rank of LoRA in the MLP's products; 0: none")

    @property
    def has_lora(self) -> bool:
        return self.attention_rank > 0 or self.mlp_rank > 0


def _alpha(default: float, who: str) -> float:
    rank = f"agent.pi0.{who}.attention_rank"
    requires = Requirement(f"{rank} above 0", lambda c: value_at(c, rank) not in (0, ABSENT))
    return acting(default, "the attention's LoRA counts alpha / rank times", above=0, requires=requires)


@dataclasses.dataclass(frozen=True)
class VlmConfig(TransformerConfig, path="agent.pi0.vlm."):
    """The expert that reads images and text (PaliGemma's language model)."""

    attention_alpha: float = _alpha(16.0, "vlm")


@dataclasses.dataclass(frozen=True)
class ExpertConfig(TransformerConfig, path="agent.pi0.expert."):
    """The expert that reads the state and the noisy chunk, and gives the velocity."""

    width: int = 1024
    mlp: int = 4096
    attention_alpha: float = _alpha(32.0, "expert")


_LORA = Requirement(
    "low-rank additions: agent.pi0.vlm or agent.pi0.expert with attention_rank or mlp_rank above 0",
    lambda c: c.agent.pi0.vlm.has_lora or c.agent.pi0.expert.has_lora,
)


@dataclasses.dataclass(frozen=True)
class Pi0Config(Group, path="agent.pi0."):
    """Sizes and number formats of one model. The defaults are those of the released pi0.

    The horizon is no size of the model: no parameter depends on it. Velocities do, because action tokens attend to each
    other: keep the one that a checkpoint was trained with.
    """

    pi05: bool = acting(False, "pi0.5: time enters through the norms, and the state only through the prompt")
    state_in_prompt: bool = acting(
        True,
        "pi0.5's prompt holds the state in bins; False: the model reads no state, and its prompt is pi0's (openpi's "
        "pi05_libero)",
        requires=needs("agent.pi0.pi05", True),
    )
    state_dims: int | None = acting(
        None,
        "first numbers of the state that the model reads; those behind them, a tracker's say, are the critic's alone; "
        "none: all",
        least=1,
        requires=needs("agent.pi0.pi05", False),
    )
    cameras: tuple[str, ...] = acting(
        ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"),
        "cameras in the order of their tokens; an observation may lack some",
        items=1,
    )
    image_size: tuple[int, int] = shaping((224, 224), "height and width of an image", unit="pixels", least=1)
    action_dim: int = _size(32, "numbers of an action and of the state, zeros behind the robot's own included")
    vocabulary: int = _size(257152, "different tokens of the text")
    depth: int = _size(18, "layers of both experts")
    heads: int = _size(8, "query heads of both experts")
    kv_heads: int = _size(1, "key and value heads of both experts")
    head_dim: int = _size(256, "numbers of a head, even")
    siglip: SiglipConfig = setting(SiglipConfig, "the image tower")
    vlm: VlmConfig = setting(VlmConfig, "the expert of images and text")
    expert: ExpertConfig = setting(ExpertConfig, "the expert of actions")
    steps: int = acting(10, "Euler steps of a sample", least=1)
    weights: str = setting(
        "", ".npz of the first parameters (`serl-chunk pi0 import`); of those that stay at the actor, too"
    )
    feature_grid: int = _size(2, "critics read means over this many by this many fields of each camera's tokens")
    dtype: DType = acting(
        "bfloat16", "numbers that are computed with; the patches, norms, RoPE and softmax use float32"
    )
    trainable: Trainable = setting(
        "full",
        "what is trained: everything; the action expert; LoRA of both experts (an expert without it in full); LoRA of "
        "the action expert; nothing. The projections of actions, state and time are trained with all but none",
    )
    frozen_dtype: DType = setting("bfloat16", "numbers in which parameters that are not trained are kept")
    lora_init: LoraInit = setting(
        "zero", "a new LoRA changes nothing (zero), or a little, as openpi's does at its first step", requires=_LORA
    )
    remat: bool = setting(
        True, "recompute activations of layers, and of a sample's steps, for the gradient, which saves memory"
    )
    lr_warmup: int = setting(
        0, "its own gradient steps in which the rate rises to agent.lr", unit="updates", least=0, **_OF_TRAINING
    )
    lr_cosine: int = setting(
        0,
        "its own gradient steps after which the rate has fallen to a tenth, by a cosine; 0: it stays",
        unit="updates",
        least=0,
        **_OF_TRAINING,
    )
    weight_decay: float = setting(0.0, "AdamW's; 0: Adam", least=0, **_OF_TRAINING)
    grad_clip: float = setting(
        0.0, "global norm to which gradients are clipped; 0: no clipping", least=0, **_OF_TRAINING
    )
    published: bool = acting(
        False,
        "as openpi: absent cameras and empty slots of prompts are computed as well, and the loss is of all numbers and "
        "steps of a chunk (`--compat openpi`)",
    )
    flow_draws: int = setting(
        1, "draws of noise and time of a window in its loss, behind one prefix", least=1, requires=NOT_CONSTANT
    )
    augment: bool = setting(
        True,
        "train on images that are cropped, rotated and coloured at random, as openpi",
        requires=(CAMERAS, NOT_CONSTANT, not_by("q_gradient")),
        off=False,
    )

    def _check(self) -> None:
        # fmt: off
        require(not self.lr_cosine or self.lr_cosine > self.lr_warmup, "agent.pi0.lr_cosine",
            f"must be above agent.pi0.lr_warmup={self.lr_warmup}, or 0 for a rate that stays, got {self.lr_cosine}")
        require(self.head_dim % 2 == 0, "agent.pi0.head_dim", f"must be even, got {self.head_dim}")
        require(self.heads % self.kv_heads == 0, "agent.pi0.kv_heads",
            f"must divide agent.pi0.heads={self.heads}, got {self.kv_heads}")
        require(self.expert.width % 2 == 0, "agent.pi0.expert.width",
            f"must be even (half of the time's features are sines), got {self.expert.width}")
        require(len(set(self.cameras)) == len(self.cameras), "agent.pi0.cameras",
            f"must be different names, got {', '.join(self.cameras)}")
        require(len(self.image_size) == 2 and min(self.image_size) >= self.siglip.patch, "agent.pi0.image_size",
            f"must be a height and a width of at least agent.pi0.siglip.patch={self.siglip.patch}, got "
            f"{self.image_size}")
        require(all(side % self.feature_grid == 0 for side in self.token_grid), "agent.pi0.feature_grid",
            f"must divide the rows and columns of a camera's tokens, {self.token_grid}, got {self.feature_grid}")
        for trainable, has, who in (
            ("lora", self.vlm.has_lora, "vlm"), ("lora_expert", self.expert.has_lora, "expert")
        ):
            require(self.trainable != trainable or has, "agent.pi0.trainable",
                f"{trainable} needs agent.pi0.{who}.attention_rank or agent.pi0.{who}.mlp_rank above 0. Set one, or "
                "another trainable.")

    def schedule(self, optimiser: Optimiser) -> Optimiser:
        """Return the optimiser with this model's schedule, decay and clipping; Adam's 0.95 is openpi's."""
        return optimiser._replace(
            lr_warmup=self.lr_warmup, lr_cosine=self.lr_cosine, weight_decay=self.weight_decay,
            grad_clip=self.grad_clip, b2=0.95 if self.published else 0.999,
        )  # fmt: skip

    @property
    def reads_bins(self) -> bool:
        """Whether the state is read as bins of [-1, 1] in the prompt."""
        return self.pi05 and self.state_in_prompt

    @property
    def token_grid(self) -> tuple[int, int]:
        """Rows and columns of a camera's tokens; pixels that fill no patch are not read."""
        height, width = self.image_size
        return height // self.siglip.patch, width // self.siglip.patch

    @property
    def camera_tokens(self) -> int:
        rows, columns = self.token_grid
        return rows * columns


def _lora(vlm: int = 0, expert: int = 0) -> Pi0Config:
    """The released pi0 with LoRA of these ranks, alpha equal to the rank, trained."""
    return Pi0Config(
        vlm=VlmConfig(attention_rank=vlm, attention_alpha=float(vlm), mlp_rank=vlm),
        expert=ExpertConfig(attention_rank=expert, attention_alpha=float(expert or 32), mlp_rank=expert),
        trainable="lora",
    )


PI0_PRESETS: dict[str, Pi0Config] = {
    "pi0": Pi0Config(),
    "pi05": Pi0Config(pi05=True),
    "pi0_lora": _lora(vlm=16),
    "pi0_lora_both": _lora(vlm=16, expert=32),
    "tiny": Pi0Config(
        image_size=(48, 48),
        vocabulary=VOCABULARY["bytes"],
        depth=4,
        heads=4,
        head_dim=16,
        siglip=SiglipConfig(width=64, depth=3, mlp=128, heads=4, patch=12),
        vlm=VlmConfig(width=64, mlp=128),
        expert=ExpertConfig(width=64, mlp=128),
        dtype="float32",
        frozen_dtype="float32",
    ),
}
"""The released sizes, LoRA of the VLM with the whole expert and of both, and a model to train from nothing."""
