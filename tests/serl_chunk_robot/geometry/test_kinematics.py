"""Where the points of arms are, against MuJoCo's model of ALOHA and by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from robot_limits import LINKS, viperx

from serl_chunk_robot.geometry.kinematics import Arms, Chain, Link

BODIES = ("shoulder_link", "upper_arm_link", "upper_forearm_link", "lower_forearm_link", "wrist_link", "gripper_link")
JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate")


def test_two_hinges_by_hand():
    chain = Chain((1, 2, 3), np.pi / 2, [Link((0, 0, 1), (0, 0, 1)), Link((1, 0, 0), (0, 1, 0))], (1, 0, 0))
    points = Arms([chain], [[2, 0]], 3)(np.array([[0.0, 9.0, 0.0], [np.pi / 2, 9.0, np.pi / 2]]))
    assert points.shape == (1, 2, 3, 3)
    assert points[0, 0] == pytest.approx(np.array([[1, 2, 4], [1, 3, 4], [1, 4, 4]]))
    assert points[0, 1] == pytest.approx(np.array([[1, 2, 4], [0, 2, 4], [0, 2, 3]]))


def test_both_arms_are_as_mujoco_has_them():
    mujoco = pytest.importorskip("mujoco")
    gym_aloha = pytest.importorskip("gym_aloha")
    folder = Path(gym_aloha.__file__).parent / "assets"
    model = mujoco.MjModel.from_xml_path(str(folder / "bimanual_viperx_transfer_cube.xml"))
    data = mujoco.MjData(model)
    arms = viperx(yaw=3.1416)  # as the model file rounds it
    rng = np.random.default_rng(0)
    poses = rng.uniform(-np.pi, np.pi, (200, 14))
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
    arms = viperx()
    rng = np.random.default_rng(1)
    poses = rng.uniform(-np.pi, np.pi, (300, 14))
    turns = rng.uniform(-0.5, 0.5, (300, 14))
    moved = np.linalg.norm(arms(poses + turns) - arms(poses), axis=-1).max(axis=2)
    for arm, joints in enumerate(arms.joints):
        assert (moved[arm] <= np.abs(turns[:, joints]) @ arms.levers[joints] + 1e-12).all()
    assert arms.levers[[6, 13]].tolist() == [0, 0], "grippers move no point"


def test_chains_that_make_no_sense_are_refused():
    for links, named in (([Link((0, 0, 1), (0, 0, 2))], "length 1"), ([], "needs links")):
        with pytest.raises(ValueError, match=named):
            Chain((0, 0, 0), 0.0, links, (0, 0, 0))
    chain = Chain((0, 0, 0), 0.0, LINKS, (0, 0, 0))
    for joints in ([range(6), range(6, 11)], [range(6)]):
        with pytest.raises(ValueError, match="as many"):
            Arms([chain, chain], joints, 14)
