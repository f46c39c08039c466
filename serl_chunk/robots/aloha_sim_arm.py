"""A ViperX arm of aloha_sim: its measures, and the joints that put its wrist somewhere."""

from __future__ import annotations

import numpy as np

# Geometry of an arm (m), from gym-aloha's vx300s_{left,right}.xml.
BASE_X, BASE_Y = 0.469, 0.5  # the left arm stands at -x and looks to +x, the right arm at +x looks to -x
SHOULDER_Z = 0.079 + 0.04805
ELBOW_X, ELBOW_Z = 0.05955, 0.3  # from the shoulder, along the forearm's rest direction and up
FOREARM = 0.2 + 0.1  # elbow to wrist
GRIP = 0.069744 + 0.15  # wrist to the grip point between the finger tips


def shoulder_and_elbow(reach: np.ndarray, height: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The joints (rad, of the inputs' shape) that bring the wrist to `reach` and `height` (m) from the shoulder.

    Both lie in the arm's plane. A place out of reach gives the nearest reachable one on the line from the shoulder.
    """
    upper = np.hypot(ELBOW_X, ELBOW_Z)
    cosine = (reach**2 + height**2 - upper**2 - FOREARM**2) / (2 * upper * FOREARM)
    bend = np.arccos(np.clip(cosine, -1.0, 1.0))  # of the forearm below the upper arm's line
    lift = np.arctan2(height, reach) + np.arctan2(FOREARM * np.sin(bend), upper + FOREARM * np.cos(bend))
    rest = np.arctan2(ELBOW_Z, ELBOW_X)  # of the upper arm at joint zero
    return rest - lift, bend - rest
