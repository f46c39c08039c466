"""HIL-SERL's space of actions and states of a Franka, as functions of one arm. Arrays are float64.

A place is a tip's x, y, z (m) and Euler angles (rad, by `geometry.rotations`), in the frame of the arm's base. An
action is a twist of six numbers of about 1, in the frame of the tip; its rotation includes what its translation makes
of the base's origin, as HIL-SERL's does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from serl_chunk_robot.geometry.rotations import euler_of_matrix, matrix_of_euler, unwrapped


class Box(NamedTuple):
    """Where a target may be, float64[6] each.

    Of angles in `mirrored` the magnitude is clipped and the sign kept, so that a box around pi has no gap there.
    """

    low: np.ndarray
    high: np.ndarray
    mirrored: tuple[int, ...] = (0,)

    def clip(self, place: np.ndarray) -> np.ndarray:
        """The place in the box that belongs to `place`, whose angles are within +-pi."""
        out = np.clip(place, self.low, self.high)
        for angle in (3 + m for m in self.mirrored):
            size = np.clip(abs(place[angle]), self.low[angle], self.high[angle])
            out[angle] = np.sign(place[angle]) * size
        return out

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """The least and the largest numbers of places in the box, with angles that are unwrapped around its middle."""
        low, high = self.low.copy(), self.high.copy()
        for angle in (3 + m for m in self.mirrored):
            around_pi = self.high[angle] >= np.pi
            low[angle] = self.low[angle] if around_pi else -self.high[angle]
            high[angle] = 2 * np.pi - self.low[angle] if around_pi else self.high[angle]
        return low, high


def target(place: np.ndarray, action: np.ndarray, scale: np.ndarray, box: Box) -> np.ndarray:
    """The place, [6], that an action leads to from a measured place, with its angles near the measured ones.

    Args:
        scale: m and rad of an action of 1, [2].
    """
    turn = matrix_of_euler(place[3:])
    twist = np.clip(_adjoint(place, turn) @ action, -1.0, 1.0)
    after = matrix_of_euler(scale[1] * twist[3:]) @ turn
    clipped = box.clip(np.concatenate([place[:3] + scale[0] * twist[:3], euler_of_matrix(after)]))
    return np.concatenate([clipped[:3], unwrapped(clipped[3:], place[3:])])


def action_of(place: np.ndarray, reached: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The action, [6], that leads from a measured place to `reached`; beyond +-1 where that is further away."""
    turn = matrix_of_euler(reached[3:]) @ matrix_of_euler(place[3:]).T
    return in_tip_frame(place, np.concatenate([(reached[:3] - place[:3]) / scale[0], euler_of_matrix(turn) / scale[1]]))


def in_tip_frame(place: np.ndarray, twist: np.ndarray) -> np.ndarray:
    """A twist in the base's frame, [6], such as a speed or a SpaceMouse's command, as one in that of the tip."""
    return np.linalg.solve(_adjoint(place, matrix_of_euler(place[3:])), twist)


def relative(place: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """A place, [6], in the frame of another one, with angles within +-pi."""
    turn = matrix_of_euler(origin[3:]).T
    return np.concatenate([turn @ (place[:3] - origin[:3]), euler_of_matrix(turn @ matrix_of_euler(place[3:]))])


def _adjoint(place: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """What makes a twist in the base's frame of one in the tip's, [6, 6]."""
    x, y, z = place[:3]
    out = np.zeros((6, 6))
    out[:3, :3] = out[3:, 3:] = turn
    out[3:, :3] = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ turn
    return out
