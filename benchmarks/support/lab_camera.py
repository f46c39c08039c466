"""The camera of the rehearsal (`lab.py`): it draws a robot's arms as its server publishes them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from serl_chunk.robots.drawn_camera import DrawnCamera
from serl_chunk.robots.fake.render import FINGER, FINGER_TRAVEL, HAND, PALM, Camera, Rod, draw, point
from support.lab_experiment import TASKS

LINKS = ((60, 60, 70), (105, 70, 45))  # colours of the left and the right arm
GROUND = np.array([196, 180, 150], np.uint8)
EYE, LOOKS_AT = np.array([0.0, -0.1, 0.95]), np.array([0.0, 0.5, 0.3])  # m
FOCAL = 3.4  # in half image widths


def view() -> Camera:
    """Return the camera, which looks down on the arms from the operator's side."""
    ahead = (LOOKS_AT - EYE) / np.linalg.norm(LOOKS_AT - EYE)
    right = np.array([1.0, 0.0, 0.0])
    return Camera(point(EYE), point(right), point(np.cross(ahead, right)), point(ahead), FOCAL)


def picture(name: str, joints: np.ndarray, size: int) -> np.ndarray:
    """Draw the arms of a task, uint8[size, size, 3]. Args: joints and openings, float[J]."""
    task, joints = TASKS[name], np.asarray(joints, np.float64)
    image, rods = np.broadcast_to(GROUND, (size, size, 3)).copy(), []
    for arm, places in enumerate(task.arms(joints[None])[:, 0]):
        frame = task.arms.tip(arm, joints)[0]
        tip, ahead, aside = frame[:3, 3], frame[:3, 0], frame[:3, 1]
        palm = tip - PALM * ahead
        for start, end in itertools.pairwise(places[:-1]):
            rods.append(Rod(point(start), point(end), 0.03, LINKS[arm]))
        rods.append(Rod(point(places[-2]), point(palm), 0.025, HAND[arm]))
        spread = (0.006 + FINGER_TRAVEL * float(joints[task.grippers[arm]])) * aside
        rods += [Rod(point(palm + s), point(tip + s), 0.01, FINGER) for s in (spread, -spread)]
    return draw(image, view(), rods)


class LabCamera(DrawnCamera):
    """See `DrawnCamera`; its views are the tasks."""

    views, extra = TASKS, frozenset()

    def _draw(self, q: np.ndarray, extra: Mapping[str, np.ndarray]) -> np.ndarray:
        return picture(self._view, q, self._size)
