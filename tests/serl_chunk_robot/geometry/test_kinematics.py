"""Where the points of arms are, against MuJoCo's model of ALOHA and by hand; joints for a tip's pose; rotations."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from robot_limits import HIGH, HOME, LOW, J, viperx

from serl_chunk_robot.geometry import kinematics
from serl_chunk_robot.geometry.kinematics import along, lifted, polynomial, pose_frame, reach
from serl_chunk_robot.geometry.rotations import (
    axis_angle,
    euler_of_matrix,
    euler_rates,
    matrix_of_euler,
    matrix_of_quat,
    quat_of_euler,
    unwrapped,
)

BODIES = ("shoulder_link", "upper_arm_link", "upper_forearm_link", "lower_forearm_link", "wrist_link", "gripper_link")
JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate")


def test_both_arms_are_as_mujoco_has_them():
    mujoco = pytest.importorskip("mujoco")
    gym_aloha = pytest.importorskip("gym_aloha")
    folder = Path(gym_aloha.__file__).parent / "assets"
    model = mujoco.MjModel.from_xml_path(str(folder / "bimanual_viperx_transfer_cube.xml"))
    data = mujoco.MjData(model)
    arms = viperx(yaw=3.1416)  # as the model file rounds it
    rng = np.random.default_rng(0)
    poses = rng.uniform(-np.pi, np.pi, (50, 14))
    points = arms(poses)
    for k, pose in enumerate(poses):
        for side, joints in zip(("vx300s_left", "vx300s_right"), arms.joints, strict=True):
            for name, joint in zip(JOINTS, joints, strict=True):
                data.joint(f"{side}/{name}").qpos[0] = pose[joint]
        mujoco.mj_kinematics(model, data)
        for arm, side in enumerate(("vx300s_left", "vx300s_right")):
            places = np.array([data.body(f"{side}/{body}").xpos for body in BODIES])
            assert np.abs(points[arm, k, :6] - places).max() < 1e-6
            frame = arms.tip(arm, pose)[0]
            assert np.abs(frame[:3, :3] - data.body(f"{side}/gripper_link").xmat.reshape(3, 3)).max() < 1e-6
            assert np.abs(frame[:3, 3] - points[arm, k, 6]).max() < 1e-12


def test_the_jacobian_is_that_of_the_tips_frame():
    arms, rng = viperx(), np.random.default_rng(2)
    for pose in rng.uniform(-np.pi, np.pi, (20, 14)):
        for arm, joints in enumerate(arms.joints):
            frame, jacobian = arms.tip(arm, pose)
            for column, joint in enumerate(joints):
                ahead, behind = (arms.tip(arm, pose + h * (np.arange(14) == joint))[0] for h in (1e-6, -1e-6))
                turn = (ahead - behind)[:3, :3] @ frame[:3, :3].T / 2e-6
                change = [*(ahead - behind)[:3, 3] / 2e-6, turn[2, 1], turn[0, 2], turn[1, 0]]
                np.testing.assert_allclose(jacobian[:, column], change, atol=1e-8)


def test_no_turn_moves_a_point_further_than_its_lever():
    arms, rng = viperx(), np.random.default_rng(1)
    poses, turns = rng.uniform(-np.pi, np.pi, (300, 14)), rng.uniform(-0.5, 0.5, (300, 14))
    moved = np.linalg.norm(arms(poses + turns) - arms(poses), axis=-1).max(axis=2)
    for arm, joints in enumerate(arms.joints):
        assert (moved[arm] <= np.abs(turns[:, joints]) @ arms.levers[joints] + 1e-12).all()
    assert arms.levers[[6, 13]].tolist() == [0, 0], "grippers move no point"


ARMS = viperx()


def test_poses_of_an_arm_are_found_from_elsewhere():
    rng, missed = np.random.default_rng(0), 0
    for arm in (0, 1) * 40:
        frame = ARMS.tip(arm, np.clip(HOME + rng.uniform(-0.5, 0.5, J), LOW, HIGH))[0]
        found = reach(ARMS, arm, HOME, frame, LOW, HIGH, turned=True)
        if found is None:
            missed += 1
            continue
        at = ARMS.tip(arm, found)[0]
        assert np.linalg.norm(at[:3, 3] - frame[:3, 3]) < kinematics.NEAR
        assert np.linalg.norm(axis_angle(frame[:3, :3] @ at[:3, :3].T)) < kinematics.TURNED
        assert ((found >= LOW) & (found <= HIGH)).all()
        others = np.delete(np.arange(J), ARMS.joints[arm])
        np.testing.assert_array_equal(found[others], HOME[others])
    assert missed <= 7, "of turns of up to 0.5 rad in each joint, some of them onto limits"


def test_what_is_out_of_reach_is_not_found_and_soon():
    far = pose_frame(np.array([3.0, 0, 0.3, 0, 0, 0]))
    began = time.process_time()
    assert reach(ARMS, 0, HOME, far, LOW, HIGH, turned=True) is None
    assert reach(ARMS, 0, HOME, far, LOW, HIGH, turned=False) is None
    assert lifted(ARMS, 0, HOME, 1.5, LOW, HIGH) is None
    assert time.process_time() - began < 0.5


# The last one's wrist cannot make up for the shoulder.
@pytest.mark.parametrize(("arm", "height", "wrist"), [(0, 0.02, 9), (1, 0.1, 9), (0, -0.1, 9), (0, 0.1, 0.02)])
def test_a_lift_is_straight_and_keeps_the_orientation_where_the_arm_can(arm, height, wrist):
    room = np.where(np.arange(J) == 4, wrist, 9)
    way = lifted(ARMS, arm, HOME, height, np.maximum(HOME - room, LOW), np.minimum(HOME + room, HIGH))
    assert way is not None
    path = along(polynomial(way), np.linspace(0, 1, 101))
    frames = np.array([ARMS.tip(arm, pose)[0] for pose in path])
    np.testing.assert_allclose(frames[-1, :3, 3] - frames[0, :3, 3], [0, 0, height], atol=2e-5)
    assert np.linalg.norm(frames[:, :2, 3] - frames[0, :2, 3], axis=1).max() < kinematics.STRAIGHT / 10
    turns = [np.linalg.norm(axis_angle(f[:3, :3] @ frames[0, :3, :3].T)) for f in frames]
    assert max(turns) < 1e-3 if wrist == 9 else turns[-1] > 0.02


# Rotations.

angles = st.tuples(st.floats(-3.14, 3.14), st.floats(-1.5, 1.5), st.floats(-3.14, 3.14)).map(np.array)


def turned(axis: int, angle: float) -> np.ndarray:
    a, b = (axis + 1) % 3, (axis + 2) % 3
    out = np.eye(3)
    out[[a, b], [a, b]] = np.cos(angle)
    out[b, a], out[a, b] = np.sin(angle), -np.sin(angle)
    return out


@given(angles, st.tuples(*[st.floats(-40, 40)] * 3).map(np.array))
def test_angles_are_turns_about_x_then_y_then_z_of_the_world_within_half_a_turn_of_others(euler, near):
    matrix = turned(2, euler[2]) @ turned(1, euler[1]) @ turned(0, euler[0])
    np.testing.assert_allclose(matrix_of_euler(euler), matrix, atol=1e-12)
    np.testing.assert_allclose(euler_of_matrix(matrix), euler, atol=1e-9)
    quat = quat_of_euler(euler)
    for length in (1.0, -1.0, 0.3):
        np.testing.assert_allclose(matrix_of_quat(length * quat), matrix, atol=1e-12)
    out = unwrapped(euler, near)
    assert (np.abs(out - near) <= np.pi + 1e-9).all()
    np.testing.assert_allclose(matrix_of_euler(out), matrix, atol=1e-9)


@given(angles, st.tuples(*[st.floats(-2, 2)] * 3).map(np.array))
def test_rates_are_those_of_the_angles_of_a_body_that_turns(euler, omega):
    h = 1e-6
    step = np.array([[0, -omega[2], omega[1]], [omega[2], 0, -omega[0]], [-omega[1], omega[0], 0]]) * h
    after = (np.eye(3) + step + step @ step / 2) @ matrix_of_euler(euler)
    rates = (unwrapped(euler_of_matrix(after), euler) - euler) / h
    np.testing.assert_allclose(euler_rates(euler, omega), rates, rtol=1e-3, atol=1e-2)
