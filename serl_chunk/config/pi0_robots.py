"""Robots of openpi's checkpoints: cameras, sizes and units as settings of an experiment (openpi commit 15a9616)."""

from __future__ import annotations

from typing import Literal, NamedTuple

from serl_chunk.config.experiment import NormaliserConfig


class Pi0Robot(NamedTuple):
    """What a checkpoint's training knew about a robot."""

    cameras: tuple[str, ...]  # `agent.image_keys`: in the order of `agent.pi0.cameras`, of which the last may be absent
    state_dim: int
    action_dim: int
    delta_mask: tuple[int, ...]  # as `normaliser.delta_mask`
    units: Literal["none", "aloha"]  # as `normaliser.robot`

    def normaliser(self, norm_stats: str, *, pi05: bool = False) -> NormaliserConfig:
        """Return the transforms by the statistics in the file `norm_stats`; those of pi0.5 scale by quantiles."""
        scaling: Literal["z_score", "quantiles"] = "quantiles" if pi05 else "z_score"
        return NormaliserConfig(
            actions="openpi", norm_stats=norm_stats, scaling=scaling, delta_mask=self.delta_mask, robot=self.units
        )


PI0_ROBOTS: dict[str, Pi0Robot] = {
    "aloha": Pi0Robot(("cam_high", "cam_left_wrist", "cam_right_wrist"), 14, 14, (6, -1, 6, -1), "aloha"),
    # gym-aloha's Transfer Cube, whose checkpoint has absolute actions.
    "aloha_sim": Pi0Robot(("top",), 14, 14, (), "aloha"),
    # Actions are differences already. Upstream's first pi0_libero subtracts the state once more: (6, -1).
    "libero": Pi0Robot(("image", "wrist_image"), 8, 7, (), "none"),
    # Joint velocities. A fine-tune on joint positions has (7, -1).
    "droid": Pi0Robot(("exterior_image_1_left", "wrist_image_left"), 8, 8, (), "none"),
}
"""By the names of openpi's policies; each camera has its name there."""
