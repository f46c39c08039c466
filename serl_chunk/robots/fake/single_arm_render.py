"""Small pictures of the fake single arm, by the fake ALOHA's painter: a camera beside the table, one on the wrist."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serl_chunk.robots.fake import single_arm_spec as task
from serl_chunk.robots.fake.kinematics import Point
from serl_chunk.robots.fake.render import Camera, Colour, Rod, background, draw

if TYPE_CHECKING:
    from serl_chunk.robots.fake.single_arm_env import FakeSingleArmEnv

_BLOCK: Colour = (210, 40, 40)
_HAND: Colour = (120, 120, 170)
_FINGER: Colour = (15, 15, 15)
_PALM = 0.06  # m from the palm to the fingertips
_FINGER_TRAVEL = 0.035  # m of each finger from the middle, fully open


def render(name: str, env: FakeSingleArmEnv) -> np.ndarray:
    """What camera `name` (`side` or `wrist`) of the environment sees now: `uint8[size, size, 3]`, RGB."""
    forward, finger = env.rotation[:, 2], env.rotation[:, 1]
    if name == "wrist":
        eye = env.position - 0.16 * forward + 0.07 * env.rotation[:, 0]
        camera = _looking(eye, env.position - eye, env.rotation[:, 1], 1.2)
    else:
        eye = np.array([1.15, 0.0, 0.5])
        camera = _looking(eye, np.array([0.5, 0.0, 0.05]) - eye, np.array([0.0, 1.0, 0.0]), 1.9)
    palm = env.position - _PALM * forward
    rods = [Rod(_point(palm - 0.12 * forward), _point(palm), 0.03, _HAND)]
    for side in (-1.0, 1.0):
        spread = side * (0.006 + _FINGER_TRAVEL * env.opening) * finger
        rods.append(Rod(_point(palm + spread), _point(env.position + spread), 0.007, _FINGER))
    half = (task.BLOCK_LENGTH - task.BLOCK_WIDTH) / 2 * np.array([np.cos(env.yaw), np.sin(env.yaw), 0.0])
    rods.append(Rod(_point(env.block - half), _point(env.block + half), task.BLOCK_WIDTH / 2, _BLOCK))
    return draw(background(camera, env.config.image_size, task.PLACE), camera, rods)


def _looking(eye: np.ndarray, ahead: np.ndarray, right: np.ndarray, focal: float) -> Camera:
    """A camera at `eye` whose image's x axis is nearest to `right`."""
    ahead = ahead / np.linalg.norm(ahead)
    right = right - (right @ ahead) * ahead
    right = right / np.linalg.norm(right)
    return Camera(_point(eye), _point(right), _point(np.cross(ahead, right)), _point(ahead), focal)


def _point(v: np.ndarray) -> Point:
    return float(v[0]), float(v[1]), float(v[2])
