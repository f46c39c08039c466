"""Real ALOHAs behind a robot server, with the drivers' own joints and limits."""

from __future__ import annotations

from typing import Any, NoReturn

from serl_chunk.config.robots import AlohaConfig
from serl_chunk.types import CameraSpec, ConfigError, RobotSpec
from serl_chunk_robot.drivers import aloha_arms, trossen

CONTROL_HZ = 50.0
ARMS = 2
_LIMITS = {
    "ros1": (aloha_arms.LOW, aloha_arms.HIGH),
    "ros2": (aloha_arms.LOW, aloha_arms.HIGH),
    "trossen": (trossen.LOW, trossen.HIGH),
}


def aloha_spec(config: AlohaConfig) -> RobotSpec:
    """Return the specification: the joints of the drivers `aloha_ros1`, `aloha_ros2` and `trossen`, rad.

    A gripper's action is its opening, 0 to 1; its measured state may be a little beyond.
    """
    low, high = _LIMITS[config.arms]
    each = len(low)
    size = ARMS * each
    return RobotSpec(
        name=f"{config.kind}_{config.arms}",
        control_hz=CONTROL_HZ,
        state_dim=size,
        action_low=(*low[:-1], 0.0) * ARMS,
        action_high=(*high[:-1], 1.0) * ARMS,
        joint_of_action=tuple(range(size)),
        grippers=tuple(range(each - 1, size, each)),
        cameras=tuple(CameraSpec(name, config.image_size, config.image_size) for name in config.cameras),
        max_episode_steps=config.max_episode_steps,
        arms=tuple((first, first + each) for first in range(0, size, each)),
    )


def without_server(config: AlohaConfig, **unused: Any) -> NoReturn:
    """Raise ConfigError: this process cannot move the arms."""
    driver = "trossen" if config.arms == "trossen" else f"aloha_{config.arms}"
    raise ConfigError(
        f"empty: an ALOHA is moved by a robot server alone. Serve the driver {driver} and name its HOST[:PORT] "
        "(docs/robot_server.md)",
        parameter="robot.server",
    )
