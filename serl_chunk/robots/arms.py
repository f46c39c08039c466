"""Kinematics of arms that take joint targets, for devices whose twists move the tips of arms."""

from __future__ import annotations

import contextlib
import functools

import numpy as np

from serl_chunk.config.robots import AlohaConfig, AlohaSimConfig, FakeAlohaConfig, GymConfig, RobotConfig
from serl_chunk.robots.fake import kinematics as fake
from serl_chunk.robots.gym_adapter import GymAdapter
from serl_chunk_robot.geometry.kinematics import Arms, Chain, Link

_TURN, _PITCH, _ROLL = (0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0)
ARM, ACTIONS = 7, 14  # numbers of an arm, six joints and a gripper, and of both

# ViperX 300 6DOF: waist, shoulder, elbow, forearm roll, wrist angle, wrist rotate (m, from gym-aloha's model).
_VIPERX = (
    Link((0.0, 0.0, 0.079), _TURN), Link((0.0, 0.0, 0.04805), _PITCH), Link((0.05955, 0.0, 0.3), _PITCH),
    Link((0.2, 0.0, 0.0), _ROLL), Link((0.1, 0.0, 0.0), _PITCH), Link((0.069744, 0.0, 0.0), _ROLL),
)  # fmt: skip
_FINGERS = 0.15  # m, from the last joint to between the fingers' tips
_BASE_X, _BASE_Y = 0.469, 0.5  # m, of ALOHA's table in gym-aloha

_FAKE = (
    Link((0.0, 0.0, fake.SHOULDER_Z), _TURN), Link((0.0, 0.0, 0.0), _PITCH),
    Link((fake.UPPER_X, 0.0, fake.UPPER_Z), _PITCH), Link((0.0, 0.0, 0.0), _ROLL),
    Link((fake.FOREARM, 0.0, 0.0), _PITCH), Link((0.0, 0.0, 0.0), _ROLL),
)  # fmt: skip


@functools.cache
def aloha_arms() -> Arms:
    """Return ALOHA's ViperX arms as they stand in gym-aloha: x to the right, y to the far side, z up."""
    bases = ((-_BASE_X, _BASE_Y, 0.0), 0.0), ((_BASE_X, _BASE_Y, 0.0), np.pi)
    return _two([Chain(base, yaw, _VIPERX, (_FINGERS, 0.0, 0.0)) for base, yaw in bases])


@functools.cache
def fake_aloha_arms() -> Arms:
    """Return the arms of the fake ALOHA task (`robots.fake.kinematics`)."""
    bases = ((fake.BASE_X[fake.LEFT], 0.0, 0.0), 0.0), ((fake.BASE_X[fake.RIGHT], 0.0, 0.0), np.pi)
    return _two([Chain(base, yaw, _FAKE, (fake.HAND, 0.0, 0.0)) for base, yaw in bases])


def kinematics_of(config: RobotConfig) -> Arms | None:
    """Return the kinematics of a robot, in the order of its command; None where they are not known.

    A user's environment has them from its method `kinematics()`, also where a robot server moves the robot.
    """
    if isinstance(config, FakeAlohaConfig):
        return fake_aloha_arms()
    if isinstance(config, AlohaSimConfig) or (isinstance(config, AlohaConfig) and config.arms != "trossen"):
        return aloha_arms()  # a real one has the same ViperX arms
    if not isinstance(config, GymConfig):
        return None
    with contextlib.closing(GymAdapter(config, fake_env=True)) as env:
        known = env.env.has_wrapper_attr("kinematics")
        return env.env.get_wrapper_attr("kinematics")() if known else None


def _two(chains: list[Chain]) -> Arms:
    return Arms(chains, [range(6), range(ARM, ARM + 6)], ACTIONS)
