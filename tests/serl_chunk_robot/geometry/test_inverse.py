"""Joints for a tip's pose: found again, within the limits, with the position first, and straight up."""

from __future__ import annotations

import time

import numpy as np
import pytest
from robot_limits import HIGH, HOME, LOW, J, viperx

from serl_chunk_robot.geometry.kinematics import (
    NEAR,
    STRAIGHT,
    TURNED,
    along,
    lifted,
    polynomial,
    pose_frame,
    reach,
)
from serl_chunk_robot.geometry.rotations import axis_angle

ARMS = viperx()


@pytest.mark.parametrize("arm", [0, 1])
def test_poses_of_an_arm_are_found_from_elsewhere(arm):
    rng, missed = np.random.default_rng(arm), 0
    for _ in range(100):
        there = HOME + rng.uniform(-0.5, 0.5, J)
        there = np.clip(there, LOW, HIGH)
        frame = ARMS.tip(arm, there)[0]
        found = reach(ARMS, arm, HOME, frame, LOW, HIGH, turned=True)
        if found is None:
            missed += 1
            continue
        at = ARMS.tip(arm, found)[0]
        assert np.linalg.norm(at[:3, 3] - frame[:3, 3]) < NEAR
        assert np.linalg.norm(axis_angle(frame[:3, :3] @ at[:3, :3].T)) < TURNED
        assert ((found >= LOW) & (found <= HIGH)).all()
        others = np.delete(np.arange(J), ARMS.joints[arm])
        np.testing.assert_array_equal(found[others], HOME[others])
    assert missed <= 8, "of turns of up to 0.5 rad in each joint, some of them onto limits"


def test_what_is_out_of_reach_is_not_found_and_soon():
    far = pose_frame(np.array([3.0, 0, 0.3, 0, 0, 0]))
    began = time.process_time()
    assert reach(ARMS, 0, HOME, far, LOW, HIGH, turned=True) is None
    assert reach(ARMS, 0, HOME, far, LOW, HIGH, turned=False) is None
    assert lifted(ARMS, 0, HOME, 1.5, LOW, HIGH) is None
    assert time.process_time() - began < 0.5


def test_angles_turn_about_the_worlds_axes_in_their_order():
    frame = pose_frame(np.array([1, 2, 3, 0.3, -0.4, 0.5]))
    x, y, z = np.eye(3)
    turns = [pose_frame(np.array([0, 0, 0, *angles]))[:3, :3] for angles in ((0.3, 0, 0), (0, -0.4, 0), (0, 0, 0.5))]
    np.testing.assert_allclose(frame[:3, :3], turns[2] @ turns[1] @ turns[0])
    np.testing.assert_allclose([axis_angle(turn) for turn in turns], [0.3 * x, -0.4 * y, 0.5 * z], atol=1e-12)
    np.testing.assert_array_equal(frame[:3, 3], [1, 2, 3])


@pytest.mark.parametrize("arm", [0, 1])
@pytest.mark.parametrize("height", [0.02, 0.1, -0.1])
def test_a_lift_is_straight_and_keeps_the_orientation_where_the_arm_can(arm, height):
    way = lifted(ARMS, arm, HOME, height, LOW, HIGH)
    assert way is not None
    path = along(polynomial(way), np.linspace(0, 1, 101))
    frames = np.array([ARMS.tip(arm, pose)[0] for pose in path])
    np.testing.assert_allclose(frames[-1, :3, 3] - frames[0, :3, 3], [0, 0, height], atol=2e-5)
    assert np.linalg.norm(frames[:, :2, 3] - frames[0, :2, 3], axis=1).max() < STRAIGHT / 10
    assert max(np.linalg.norm(axis_angle(f[:3, :3] @ frames[0, :3, :3].T)) for f in frames) < 1e-3


def test_a_lift_turns_the_tip_where_it_must():
    low = np.where(np.arange(J) == 4, HOME - 0.02, LOW)  # the wrist cannot make up for the shoulder
    high = np.where(np.arange(J) == 4, HOME + 0.02, HIGH)
    way = lifted(ARMS, 0, HOME, 0.1, low, high)
    assert way is not None
    frames = [ARMS.tip(0, pose)[0] for pose in way[[0, -1]]]
    np.testing.assert_allclose(frames[1][:3, 3] - frames[0][:3, 3], [0, 0, 0.1], atol=2e-5)
    assert np.linalg.norm(axis_angle(frames[1][:3, :3] @ frames[0][:3, :3].T)) > 0.02
