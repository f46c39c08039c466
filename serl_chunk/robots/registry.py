"""Builds environments, their specifications and their scripted experts from a robot configuration.

Implementations are imported on use, so that a learner that needs spaces only imports no simulator.
"""

from __future__ import annotations

from serl_chunk.config.robots import (
    AlohaSimConfig,
    FakeAlohaConfig,
    FakeSingleArmConfig,
    GymConfig,
    OgbenchConfig,
    RobomimicConfig,
    RobotConfig,
)
from serl_chunk.robots.base import Expert, RobotEnv
from serl_chunk.types import ConfigError, RobotSpec


def robot_spec(config: RobotConfig) -> RobotSpec:
    """The robot's specification; opens no device and imports no simulator (a GymConfig builds its fake_env)."""
    if isinstance(config, FakeAlohaConfig):
        from serl_chunk.robots.fake.spec import fake_aloha_spec

        return fake_aloha_spec(config)
    if isinstance(config, FakeSingleArmConfig):
        from serl_chunk.robots.fake.single_arm_spec import fake_single_arm_spec

        return fake_single_arm_spec(config)
    if isinstance(config, AlohaSimConfig):
        from serl_chunk.robots.aloha_sim.scene import aloha_sim_spec

        return aloha_sim_spec(config)
    if isinstance(config, OgbenchConfig):
        from serl_chunk.robots.ogbench import ogbench_spec

        return ogbench_spec(config)
    if isinstance(config, RobomimicConfig):
        from serl_chunk.robots.robomimic import robomimic_spec

        return robomimic_spec(config)
    if isinstance(config, GymConfig):
        from serl_chunk.robots.gym_adapter import GymAdapter

        env = GymAdapter(config, fake_env=True)
        env.close()
        return env.robot_spec
    raise _unknown(config)


def make_env(config: RobotConfig, *, images: str = "on_request", evaluating: bool = False) -> RobotEnv:
    """Return the environment, its devices open; raise ConfigError with the install hint where an extra is missing.

    `evaluating`: its episodes are only evaluated, not trained from; for a GymConfig's `make`.
    """
    if isinstance(config, FakeAlohaConfig):
        from serl_chunk.robots.fake.env import FakeAlohaEnv

        return FakeAlohaEnv(config, images=images)
    if isinstance(config, FakeSingleArmConfig):
        from serl_chunk.robots.fake.single_arm_env import FakeSingleArmEnv

        return FakeSingleArmEnv(config, images=images)
    if isinstance(config, AlohaSimConfig):
        from serl_chunk.robots.aloha_sim.env import AlohaSimEnv

        return AlohaSimEnv(config, images=images)
    if isinstance(config, OgbenchConfig):
        from serl_chunk.robots.ogbench import OgbenchEnv

        return OgbenchEnv(config, images=images)
    if isinstance(config, RobomimicConfig):
        from serl_chunk.robots.robomimic import RobomimicEnv

        return RobomimicEnv(config, images=images)
    if isinstance(config, GymConfig):
        from serl_chunk.robots.gym_adapter import GymAdapter

        return GymAdapter(config, images=images, evaluating=evaluating)
    raise _unknown(config)


def make_expert(env: RobotEnv) -> Expert:
    """The scripted demonstrator of `env`, from its `make_expert()`; raises ConfigError where there is none."""
    factory = getattr(env, "make_expert", None)
    if factory is None:
        raise ConfigError(
            f"robot {env.robot_spec.name!r} has no scripted expert; record demonstrations by hand instead"
        )
    return factory()


def _unknown(config: RobotConfig) -> ConfigError:
    return ConfigError(
        f"unknown robot configuration {type(config).__name__}; valid: FakeAloha, FakeSingleArm, AlohaSim, Ogbench, "
        "Robomimic, Gym (…Config)"
    )
