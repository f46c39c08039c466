"""Orientations in their three forms agree, and their rates with differences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk_robot.geometry.rotations import (
    euler_of_matrix,
    euler_rates,
    matrix_of_euler,
    matrix_of_quat,
    quat_of_euler,
    unwrapped,
)

angles = st.tuples(st.floats(-3.14, 3.14), st.floats(-1.5, 1.5), st.floats(-3.14, 3.14)).map(np.array)


def turn(axis: int, angle: float) -> np.ndarray:
    """A turn about an axis of the world."""
    a, b = (axis + 1) % 3, (axis + 2) % 3
    out = np.eye(3)
    out[[a, b], [a, b]] = np.cos(angle)
    out[b, a], out[a, b] = np.sin(angle), -np.sin(angle)
    return out


@given(angles)
def test_angles_are_turns_about_x_then_y_then_z_of_the_world(euler):
    matrix = turn(2, euler[2]) @ turn(1, euler[1]) @ turn(0, euler[0])
    np.testing.assert_allclose(matrix_of_euler(euler), matrix, atol=1e-12)
    np.testing.assert_allclose(euler_of_matrix(matrix), euler, atol=1e-9)
    quat = quat_of_euler(euler)
    for length in (1.0, -1.0, 0.3):
        np.testing.assert_allclose(matrix_of_quat(length * quat), matrix, atol=1e-12)


@given(angles, st.tuples(*[st.floats(-40, 40)] * 3).map(np.array))
def test_unwrapped_angles_are_the_same_and_within_half_a_turn(euler, near):
    out = unwrapped(euler, near)
    assert (np.abs(out - near) <= np.pi + 1e-9).all()
    np.testing.assert_allclose(matrix_of_euler(out), matrix_of_euler(euler), atol=1e-9)


@given(angles, st.tuples(*[st.floats(-2, 2)] * 3).map(np.array))
def test_rates_are_those_of_the_angles_of_a_body_that_turns(euler, omega):
    h = 1e-6
    step = np.array([[0, -omega[2], omega[1]], [omega[2], 0, -omega[0]], [-omega[1], omega[0], 0]]) * h
    after = (np.eye(3) + step + step @ step / 2) @ matrix_of_euler(euler)
    rates = (unwrapped(euler_of_matrix(after), euler) - euler) / h
    np.testing.assert_allclose(euler_rates(euler, omega), rates, rtol=1e-3, atol=1e-2)
