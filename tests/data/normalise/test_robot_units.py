"""Units of openpi's models for an ALOHA, against recorded numbers of its code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from serl_chunk.data.normalise.robot_units import UNITS, units_fault

ARRAYS = dict(np.load(Path(__file__).parents[1] / "pi0_transforms" / "transforms.npz"))
DIM = 14
EXACT = {"atol": 1e-6, "rtol": 0}


def test_the_grippers_curves_are_openpis():
    x, units = ARRAYS["gripper/x"], UNITS["aloha"]
    rows = np.zeros((len(x), DIM))
    rows[:, 6] = rows[:, 13] = x
    for convert, name in (
        (units.state, "to_angular"),
        (units.command, "from_angular"),
        (units.action, "from_angular_inv"),
    ):
        for gripper in (6, 13):
            np.testing.assert_allclose(convert(rows)[:, gripper], ARRAYS[f"gripper/{name}"], **EXACT)
    np.testing.assert_allclose(units.command(units.action(rows)), rows, atol=1e-12)


def test_joints_keep_their_places_and_change_signs():
    values = np.arange(1.0, DIM + 1)
    signs = np.array([1, -1, -1, 1, 1, 1] * 2)
    joints = np.delete(np.arange(DIM), (6, 13))
    for convert in UNITS["aloha"]:
        np.testing.assert_array_equal(convert(values)[joints], values[joints] * signs)
    np.testing.assert_array_equal(values, np.arange(1.0, DIM + 1))  # the caller's


@pytest.mark.parametrize("robot", UNITS)
def test_units_are_those_of_the_sizes_they_are_for(robot):
    assert units_fault(robot, DIM, DIM) == units_fault(robot, DIM, DIM, (6, 13)) == ""
    for sizes in ((20, DIM, (6, 13)), (DIM, 7, (6,)), (DIM, DIM, ())):
        fault = units_fault(robot, *sizes)
        assert (fault == "") == (robot == "none")
        assert all(str(size) in fault for size in sizes) or not fault


def test_the_robots_own_units_are_passed_on_as_they_are():
    values = np.ones(3, np.float32)
    assert all(convert(values) is values for convert in UNITS["none"])
