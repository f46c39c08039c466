"""Small pictures of the fake ALOHA: three pinhole cameras and a painter's algorithm, numpy only."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from serl_chunk.robots.fake.kinematics import LEFT, RIGHT, ArmPose, Point, forward, plus
from serl_chunk.robots.fake.spec import ARM_DIM, CUBE_SIZE, PLACE

Colour = tuple[int, int, int]

_TABLE = np.array([[196, 180, 150], [182, 166, 136]], np.uint8)  # checkers of _CHECKER metres
_CHECKER = 0.1
_TABLE_HALF = (0.75, 0.45)  # metres in x and y
_FLOOR = np.array([70, 70, 75], np.uint8)
_SKY = np.array([150, 160, 170], np.uint8)
_TARGET = np.array([40, 90, 220], np.uint8)
_TARGET_RADIUS = 0.04  # metres
RED: Colour = (210, 40, 40)  # of a cube or block
_CUBE_HELD: Colour = (40, 190, 70)
_ARM: tuple[Colour, Colour] = ((60, 60, 70), (105, 70, 45))
HAND: tuple[Colour, Colour] = ((120, 120, 170), (190, 130, 70))
FINGER: Colour = (15, 15, 15)

PALM = 0.06  # metres from the palm to the fingertips
FINGER_TRAVEL = 0.035  # metres of each finger from the middle, fully open
_NEAR = 0.02  # metres in front of a camera at which parts are cut off


class Camera(NamedTuple):
    """A pinhole: its place, unit vectors of its image axes, focal length in half image widths."""

    eye: Point
    right: Point
    down: Point
    ahead: Point
    focal: float


class Rod(NamedTuple):
    """A thick line from `start` to `end` (metres): the one shape that everything here is made of."""

    start: Point
    end: Point
    radius: float
    colour: Colour


_TOP = Camera((0.0, 0.0, 1.3), (1.0, 0.0, 0.0), (0.0, -1.0, 0.0), (0.0, 0.0, -1.0), 3.1)


def render(name: str, size: int, joints: Sequence[float], cube: Point, held: bool) -> np.ndarray:
    """Draw what camera `name` (`top`, `left_wrist` or `right_wrist`) sees: `uint8[size, size, 3]`, RGB.

    `joints` are the 14 measured joints, `cube` its centre in metres; `held` shows in the cube's colour.
    """
    poses = tuple(forward(arm, joints[arm * ARM_DIM : arm * ARM_DIM + 6]) for arm in (LEFT, RIGHT))
    if name == "top":
        camera, image = _TOP, _top_background(size).copy()
    else:
        camera = _wrist_camera(poses[LEFT if name == "left_wrist" else RIGHT])
        image = background(camera, size)
    rods = [rod for arm in (LEFT, RIGHT) for rod in _arm_rods(arm, poses[arm], joints[arm * ARM_DIM + 6])]
    half = CUBE_SIZE / 4  # a short upright rod of the cube's width and height
    low, high = (cube[0], cube[1], cube[2] - half), (cube[0], cube[1], cube[2] + half)
    rods.append(Rod(low, high, CUBE_SIZE / 2, _CUBE_HELD if held else RED))
    return draw(image, camera, rods)


def draw(image: np.ndarray, camera: Camera, rods: Sequence[Rod]) -> np.ndarray:
    """Paint `rods` over `image` (`uint8[size, size, 3]`, changed and returned), the farthest first."""
    seen = [(_in_camera(camera, rod.start), _in_camera(camera, rod.end), rod) for rod in rods]
    for start, end, rod in sorted(seen, key=lambda s: -(s[0][2] + s[1][2])):
        _paint(image, camera.focal, start, end, rod)
    return image


def _wrist_camera(pose: ArmPose) -> Camera:
    """Return a camera above the wrist that looks at the grip point and turns with the hand."""
    eye = plus(pose.wrist, 0.08, pose.up)
    aim = np.subtract(pose.grip, eye)
    ahead, right = aim / math.sqrt(_dot(aim, aim)), np.negative(pose.left)
    return Camera(eye, point(right), point(np.cross(ahead, right)), point(ahead), 1.2)


def _arm_rods(arm: int, pose: ArmPose, opening: float) -> list[Rod]:
    palm = plus(pose.grip, -PALM, pose.forward)
    rods = [
        Rod(pose.shoulder, pose.elbow, 0.035, _ARM[arm]),
        Rod(pose.elbow, pose.wrist, 0.03, _ARM[arm]),
        Rod(pose.wrist, palm, 0.025, HAND[arm]),
    ]
    for side in (-1.0, 1.0):
        spread = side * (0.006 + FINGER_TRAVEL * opening)
        rods.append(Rod(plus(palm, spread, pose.left), plus(pose.grip, spread, pose.left), 0.007, FINGER))
    return rods


@functools.cache
def _top_background(size: int) -> np.ndarray:
    return background(_TOP, size)


@functools.cache
def _pixels(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return centres of the pixels in half image widths, x to the right and y down, each `float32[size, size]`."""
    centres = ((np.arange(size) + 0.5) * (2.0 / size) - 1.0).astype(np.float32)
    x, y = np.meshgrid(centres, centres)
    return x, y


def background(camera: Camera, size: int, place: Point = PLACE) -> np.ndarray:
    """Draw table, target at `place`, floor and sky, `uint8[size, size, 3]`, by every pixel's ray to the table."""
    x, y = _pixels(size)
    ray = [x * camera.right[i] + y * camera.down[i] + camera.focal * camera.ahead[i] for i in range(3)]
    below = ray[2] < -1e-3
    reach = camera.eye[2] / np.where(below, -ray[2], 1.0)
    hit_x, hit_y = camera.eye[0] + reach * ray[0], camera.eye[1] + reach * ray[1]
    checker = (np.floor(hit_x / _CHECKER) + np.floor(hit_y / _CHECKER)).astype(np.int32) & 1
    image = _TABLE[checker]
    image[(hit_x - place[0]) ** 2 + (hit_y - place[1]) ** 2 < _TARGET_RADIUS**2] = _TARGET
    image[(np.abs(hit_x) > _TABLE_HALF[0]) | (np.abs(hit_y) > _TABLE_HALF[1])] = _FLOOR
    # A camera under the table (an arm may reach there: the table has no collisions) looks at its dark side.
    image[~below] = _SKY if camera.eye[2] > 0 else _FLOOR
    return image


def _in_camera(camera: Camera, place: Point) -> Point:
    """Return `place` in the camera's axes: right, down, ahead (depth), metres."""
    d = plus(place, -1.0, camera.eye)
    return _dot(d, camera.right), _dot(d, camera.down), _dot(d, camera.ahead)


def _paint(image: np.ndarray, focal: float, start: Point, end: Point, rod: Rod) -> None:
    """Draw one rod whose ends are given in camera axes; only the pixels of its bounding box are touched."""
    if start[2] < end[2]:
        start, end = end, start
    if start[2] <= _NEAR:
        return
    if end[2] < _NEAR:
        share = (start[2] - _NEAR) / (start[2] - end[2])
        end = (start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]), _NEAR)
    size = image.shape[0]
    scale = focal * size / 2
    u0, v0 = scale * start[0] / start[2] + size / 2, scale * start[1] / start[2] + size / 2
    u1, v1 = scale * end[0] / end[2] + size / 2, scale * end[1] / end[2] + size / 2
    # At least 0.7 pixels, so that thin parts far away do not vanish between pixel centres.
    r0, r1 = max(scale * rod.radius / start[2], 0.7), max(scale * rod.radius / end[2], 0.7)
    left, right = max(math.floor(min(u0 - r0, u1 - r1)), 0), min(math.ceil(max(u0 + r0, u1 + r1)), size)
    top, bottom = max(math.floor(min(v0 - r0, v1 - r1)), 0), min(math.ceil(max(v0 + r0, v1 + r1)), size)
    if left >= right or top >= bottom:
        return
    u = np.arange(left, right, dtype=np.float32)[None] + 0.5 - u0
    v = np.arange(top, bottom, dtype=np.float32)[:, None] + 0.5 - v0
    du, dv = u1 - u0, v1 - v0
    along = np.clip((u * du + v * dv) / max(du * du + dv * dv, 1e-9), 0.0, 1.0)
    inside = (u - along * du) ** 2 + (v - along * dv) ** 2 <= (r0 + along * (r1 - r0)) ** 2
    image[top:bottom, left:right][inside] = rod.colour


def point(v: np.ndarray) -> Point:
    """Return `float64[3]` as Python's floats, which leave float32 images in their type."""
    return float(v[0]), float(v[1]), float(v[2])


def _dot(a: Point | np.ndarray, b: Point | np.ndarray) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
