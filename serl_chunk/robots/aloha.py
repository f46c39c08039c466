"""Real ALOHAs behind a robot server, with the drivers' own joints and limits."""

from __future__ import annotations

from serl_chunk.config.robots import AlohaConfig
from serl_chunk.robots.base import joints_spec
from serl_chunk.types import RobotSpec
from serl_chunk_robot.drivers import aloha_arms, trossen

CONTROL_HZ = 50.0


def aloha_spec(config: AlohaConfig) -> RobotSpec:
    """Return the specification: the joints of the drivers `aloha_ros1`, `aloha_ros2` and `trossen`, rad.

    A gripper's action is its opening, 0 to 1; its measured state may be a little beyond.
    """
    driver = trossen if config.arms == "trossen" else aloha_arms
    frames = config.cameras, config.image_size, config.max_episode_steps
    name = f"{config.kind}_{config.arms}"
    return joints_spec(name, CONTROL_HZ, 2 * len(driver.LOW), driver.LOW[:-1], driver.HIGH[:-1], *frames)
