"""Orientations as quaternions, matrices and Euler angles, as HIL-SERL's robots have them.

Quaternions are x, y, z, w. Euler angles are turns about the world's x, y and z, in this order (scipy's "xyz"), rad;
they are unique where the second is within +-pi/2. Arrays are float64.
"""

from __future__ import annotations

import numpy as np


def matrix_of_quat(quat: np.ndarray) -> np.ndarray:
    """The rotation, [3, 3], of a quaternion [4] of any length but 0."""
    x, y, z, w = quat / np.linalg.norm(quat)
    return np.array([[1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
                     [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
                     [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)]])  # fmt: skip


def matrix_of_euler(euler: np.ndarray) -> np.ndarray:
    """The rotation, [3, 3], of Euler angles [3]."""
    (sr, sp, sy), (cr, cp, cy) = np.sin(euler), np.cos(euler)
    return np.array([[cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr],
                     [sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr],
                     [-sp, cp * sr, cp * cr]])  # fmt: skip


def euler_of_matrix(matrix: np.ndarray) -> np.ndarray:
    """Euler angles [3] of a rotation [3, 3]: within +-pi, the second within +-pi/2."""
    pitch = np.arctan2(-matrix[2, 0], np.hypot(matrix[2, 1], matrix[2, 2]))
    return np.array([np.arctan2(matrix[2, 1], matrix[2, 2]), pitch, np.arctan2(matrix[1, 0], matrix[0, 0])])


def quat_of_euler(euler: np.ndarray) -> np.ndarray:
    """A quaternion [4] of length 1 of Euler angles [3]."""
    (sr, sp, sy), (cr, cp, cy) = np.sin(0.5 * euler), np.cos(0.5 * euler)
    return np.array([sr * cp * cy - cr * sp * sy, cr * sp * cy + sr * cp * sy,
                     cr * cp * sy - sr * sp * cy, cr * cp * cy + sr * sp * sy])  # fmt: skip


def rotation(turn: np.ndarray) -> np.ndarray:
    """The rotation, [3, 3], about an axis, [3], by its length, rad (Rodrigues' formula)."""
    angle = float(np.linalg.norm(turn))
    if angle < 1e-12:
        return np.eye(3)
    x, y, z = turn / angle
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return np.asarray(np.eye(3) + np.sin(angle) * cross + (1.0 - np.cos(angle)) * (cross @ cross))


def axis_angle(matrix: np.ndarray) -> np.ndarray:
    """The axis of a rotation [3, 3], [3], as long as its angle, rad; the inverse of `rotation` below pi."""
    w = np.array([matrix[2, 1] - matrix[1, 2], matrix[0, 2] - matrix[2, 0], matrix[1, 0] - matrix[0, 1]])
    sine = float(np.linalg.norm(w))
    return np.asarray(w * (np.arctan2(sine, np.trace(matrix) - 1) / sine)) if sine > 1e-12 else np.zeros(3)


def unwrapped(euler: np.ndarray, near: np.ndarray) -> np.ndarray:
    """The same angles, [3], by whole turns as near to `near`, [3], as they get."""
    return euler + 2 * np.pi * np.round((near - euler) / (2 * np.pi))


def euler_rates(euler: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """How fast Euler angles change, [3], at an angular velocity in the world's frame, [3], rad/s."""
    sy, cy = np.sin(euler[2]), np.cos(euler[2])
    roll = (cy * omega[0] + sy * omega[1]) / np.cos(euler[1])
    return np.array([roll, cy * omega[1] - sy * omega[0], omega[2] + np.sin(euler[1]) * roll])
