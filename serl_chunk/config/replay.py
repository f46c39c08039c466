"""Settings of the learner's memory."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.validation import require, require_choices


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Stores and sampling (docs/architecture.md, section 4)."""

    capacity: int = 200_000  # steps of the online ring
    demo_capacity: int = 100_000  # steps of demonstrations; more is refused, never evicted
    human_capacity: int = 50_000  # steps kept from evicted episodes that hold interventions
    image_capacity: int = 20_000  # frames per camera and store; only for image agents
    frame_cache_bytes: int = 1 << 30  # decoded frames kept of demonstrations whose images stay in their files
    demo_fraction: float | Literal["uniform"] = 0.5
    positive_fraction: float | None = None  # of demonstration windows from successful ones; None: as many as there are
    terminal_windows: Literal["keep", "drop"] = "keep"
    # A window lies within its episode; "qc": as many neighbouring rows of a store, whatever episode they are of,
    # the ends told by `valid` (Q-chunking's published sampler, for comparisons).
    windows: Literal["episode", "qc"] = "episode"
    dataset_replace_interval: int = 1_000  # critic updates between two shards of --dataset_dir
    # Ticks that a window's picture may be older than its state, where frames are not recorded on every tick
    # (actor.frames). The policy acts with pictures of age 0.
    max_image_age: int = 0
    exclude_before_takeover: int = 40  # ticks of a successful episode before an intervention that are not imitated
    # A window that begins before an intervention: on into the human steps, or up to the intervention only.
    intervention_windows: Literal["keep", "cut"] = "keep"
    prefetch: int = 2  # batches prepared ahead by a thread; 0 samples in the training thread

    def __post_init__(self) -> None:
        require_choices(self, "replay.")
        for name in ("capacity", "demo_capacity", "human_capacity", "image_capacity"):
            require(getattr(self, name) >= 1, f"replay.{name} must be at least 1, got {getattr(self, name)}")
        if self.demo_fraction != "uniform":
            require(
                not isinstance(self.demo_fraction, str) and 0 <= self.demo_fraction <= 1,
                f'replay.demo_fraction must be a number in 0..1 or "uniform", got {self.demo_fraction!r}',
            )
        require(
            self.positive_fraction is None or 0 < self.positive_fraction < 1,
            f"replay.positive_fraction must lie between 0 and 1, or be none for uniform, got {self.positive_fraction}",
        )
        require(
            self.positive_fraction is None or self.demo_fraction not in ("uniform", 0),
            "replay.positive_fraction is about the demonstration half, and there is none: set replay.demo_fraction "
            "above 0",
        )
        require(
            self.frame_cache_bytes >= 0,
            f"replay.frame_cache_bytes must be >= 0 (0: nothing stays decoded), got {self.frame_cache_bytes}",
        )
        require(self.max_image_age >= 0, f"replay.max_image_age must be >= 0 ticks, got {self.max_image_age}")
        require(
            self.exclude_before_takeover >= 0,
            f"replay.exclude_before_takeover must be >= 0 ticks, got {self.exclude_before_takeover}",
        )
        require(
            self.dataset_replace_interval >= 1,
            f"replay.dataset_replace_interval must be at least 1 update, got {self.dataset_replace_interval}",
        )
        require(
            self.windows == "episode" or self.terminal_windows == "drop",
            "replay.windows=qc has no terminal windows: set replay.terminal_windows=drop beside it",
        )
        require(
            self.windows == "episode" or self.intervention_windows == "keep",
            "replay.intervention_windows=cut needs windows that know their episode, and those of "
            "replay.windows=qc do not: leave one of them out",
        )
        require(self.prefetch >= 0, f"replay.prefetch must be >= 0, got {self.prefetch}")
