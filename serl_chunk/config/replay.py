"""Settings of the learner's memory."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal

from serl_chunk.config.fields import CAMERAS, Group, needs, require, setting

_SUCCESSES = needs("agent.bc_on", "+successes")
_DECODED = (CAMERAS, needs("agent.encoder.cache_features", False, note="features stand for decoded frames"))
_bytes = partial(setting, unit="bytes", least=0)


@dataclasses.dataclass(frozen=True)
class ReplayConfig(Group, path="replay."):
    """Stores and sampling (docs/architecture.md, section 4)."""

    capacity: int = setting(200_000, "size of the online ring", unit="steps", least=1)
    demo_capacity: int = setting(100_000, "demonstrations; more is refused, never evicted", unit="steps", least=1)
    human_capacity: int = setting(50_000, "kept of evicted episodes with interventions", unit="steps", least=1)
    image_capacity: int = setting(20_000, "frames per camera and store", unit="frames", least=1, requires=CAMERAS)
    frame_cache_bytes: int = _bytes(
        1 << 30, "decoded frames kept of demonstrations with images in files; 0: none", off=0, requires=_DECODED
    )
    demo_fraction: float | Literal["uniform"] = setting(0.5, "demonstrations in a batch", least=0, most=1)
    positive_fraction: float | None = setting(None, "successes among demonstrations; none: all alike", above=0, below=1)
    terminal_windows: Literal["keep", "drop"] = setting("keep", "windows that reach beyond their episode's end")
    # qc is Q-chunking's published sampler, for comparisons; `valid` marks the ends.
    windows: Literal["episode", "qc"] = setting("episode", "within an episode, or neighbouring rows of any")
    dataset_replace_interval: int = setting(1_000, "between two shards of a data set", unit="updates", least=1)
    # The policy acts with pictures of age 0.
    max_image_age: int = setting(0, "age of a window's picture", unit="ticks", least=0, requires=CAMERAS)
    exclude_before_takeover: float = setting(
        0.8, "part of a success before an intervention that is not imitated", unit="s", least=0, requires=_SUCCESSES
    )
    prefetch: int = setting(2, "batches prepared ahead by a thread; 0: the training thread samples", least=0)

    def _check(self) -> None:
        # fmt: off
        require(self.exclude_before_takeover <= 30, "replay.exclude_before_takeover",
            f"must be at most 30 seconds, got {self.exclude_before_takeover:g}. Divide a number of ticks by the robot's"
            " control_hz.")
        # config.json then holds a float: a whole number there is of a version that counted ticks.
        object.__setattr__(self, "exclude_before_takeover", float(self.exclude_before_takeover))
        require(self.positive_fraction is None or self.demo_fraction not in ("uniform", 0), "replay.positive_fraction",
            f"{self.positive_fraction} has no effect without a part of demonstrations. Set replay.demo_fraction above "
            "0, or set it to none.")
        of_episodes = {"terminal_windows": "drop", "positive_fraction": None}
        for name, value in of_episodes.items():
            require(self.windows == "episode" or getattr(self, name) == value, "replay.windows",
                f"qc needs replay.{name}={value}, got {getattr(self, name)}: its windows belong to no episode")
