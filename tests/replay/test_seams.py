"""Accelerations of commanded joints where control passes between policy and human, from the steps of an episode."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from serl_chunk.replay.episode import accelerations
from serl_chunk.types import RobotSpec

DT = 0.1
SPEC = RobotSpec(
    "r", 1 / DT, 3, (-9.0,) * 3, (9.0,) * 3, joint_of_action=(0, -1, 2), grippers=(2,), cameras=(), max_episode_steps=99
)


def actions(*jumps: tuple[int, int, float]) -> np.ndarray:
    """A joint that moves steadily and, from each tick on, by a jump's rad from where it was: (tick, dimension, rad)."""
    out = np.outer(0.01 * np.arange(20), [1, 0, 0]).astype(np.float32)
    for tick, k, way in jumps:
        out[tick:, k] += way
    return out


@pytest.mark.parametrize(
    ("jumps", "gaps", "seam", "others"),
    [
        ([(5, 0, 0.2)], [], 20.0, 0.0),  # it is taken over
        ([(12, 0, -0.3)], [], 30.0, 0.0),  # and handed back
        ([(5, 0, 0.1), (15, 0, 0.4)], [], 10.0, 40.0),
        ([(5, 1, 0.2), (5, 2, 0.2)], [], 0.0, 0.0),  # a velocity, and a gripper
        ([(5, 0, 0.2)], [5], 0.0, 0.0),  # in the middle of a gap
    ],
)
def test_the_largest_change_of_speed_at_seams_and_elsewhere(jumps, gaps, seam, others):
    found = accelerations(actions(*jumps), np.array([[5, 12]]), np.array(gaps, np.int64), SPEC)
    assert found == pytest.approx((seam, others), abs=1e-3)


def test_without_seams_or_joints_there_is_nothing_to_report():
    none = np.empty(0, np.int64)
    assert accelerations(actions((5, 0, 0.1)), none.reshape(0, 2), none, SPEC) == pytest.approx((None, 10.0))
    twists = dataclasses.replace(SPEC, joint_of_action=(-1,) * 3)
    assert accelerations(actions(), np.array([[5, 12]]), none, twists) == (None, None)
    assert accelerations(actions()[:2], np.array([[0, 1]]), none, SPEC) == (None, None)
