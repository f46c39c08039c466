"""Builds environments, their specifications and their scripted experts from a robot configuration."""

from __future__ import annotations

import importlib
from typing import Any

from serl_chunk.config import robots as configs
from serl_chunk.config.robots import FrankaConfig, GymConfig, RobotConfig
from serl_chunk.robots.base import Expert, RobotEnv
from serl_chunk.types import ConfigError, RobotSpec

# Specification and environment by configuration, imported on use: the other robots' simulators are not needed.
_ROBOTS: dict[type[RobotConfig], tuple[str, str]] = {
    configs.FakeAlohaConfig: ("fake.spec:fake_aloha_spec", "fake.env:FakeAlohaEnv"),
    configs.FakeSingleArmConfig: ("fake.single_arm:fake_single_arm_spec", "fake.single_arm:FakeSingleArmEnv"),
    configs.AlohaSimConfig: ("aloha_sim.env:aloha_sim_spec", "aloha_sim.env:AlohaSimEnv"),
    configs.OgbenchConfig: ("ogbench:ogbench_spec", "ogbench:OgbenchEnv"),
    configs.RobomimicConfig: ("robomimic:robomimic_spec", "robomimic:RobomimicEnv"),
    configs.LiberoConfig: ("libero:libero_spec", "libero:LiberoEnv"),
    FrankaConfig: ("franka:franka_spec", "franka:FrankaRobot"),
    configs.AlohaConfig: ("aloha:aloha_spec", "served.robot:ServedRobot"),
    GymConfig: ("gym_adapter:gym_spec", "gym_adapter:GymAdapter"),
}


def robot_spec(config: RobotConfig) -> RobotSpec:
    """Return the robot's specification without opening a device or simulator (a GymConfig builds its fake_env)."""
    return _implementation(config, 0)(config)


def make_env(
    config: RobotConfig, *, images: str = "on_request", evaluating: bool = False, name: str = "serl_chunk"
) -> RobotEnv:
    """Return the environment, its devices open; raise ConfigError with the install hint if an extra is missing.

    Args:
        evaluating: its episodes are only evaluated, not trained from; for a GymConfig's `make`.
        name: of this client, where a robot server moves the robot.
    """
    if not config.server and isinstance(config, FrankaConfig | configs.AlohaConfig):
        drivers = {"ros1": "aloha_ros1", "ros2": "aloha_ros2", "trossen": "trossen"}  # of an ALOHA
        raise ConfigError(
            f"empty: this robot is moved by a robot server alone. Serve the driver "
            f"{drivers.get(str(config.arms), 'franka_http')} and name its HOST[:PORT] (docs/robot_server.md)",
            parameter="robot.server",
        )
    if isinstance(config, FrankaConfig):
        return _implementation(config, 1)(config, images=images, name=name)
    if config.server:
        from serl_chunk.robots.served.robot import ServedRobot

        return ServedRobot(config, robot_spec(config), images=images, name=name)
    more = {"evaluating": evaluating} if isinstance(config, GymConfig) else {}
    return _implementation(config, 1)(config, images=images, **more)


def make_expert(env: RobotEnv) -> Expert:
    """Return the scripted demonstrator of `env`, from its `make_expert()`; raise ConfigError if it has none."""
    factory = getattr(env, "make_expert", None)
    if factory is None:
        raise ConfigError(f"robot {env.robot_spec.name!r} has no scripted expert. Record demonstrations by hand")
    return factory()


def _implementation(config: RobotConfig, which: int) -> Any:
    for kind, names in _ROBOTS.items():
        if isinstance(config, kind):
            module, name = names[which].split(":")
            return getattr(importlib.import_module(f"serl_chunk.robots.{module}"), name)
    valid = ", ".join(kind.__name__ for kind in _ROBOTS)
    raise ConfigError(f"unknown configuration {type(config).__name__}, expected one of {valid}", parameter="robot")
