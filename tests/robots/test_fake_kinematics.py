import math

import numpy as np
import pytest

from serl_chunk.robots.fake import kinematics as kin

JOINT_SETS = np.random.default_rng(0).uniform(kin.JOINT_LOW, kin.JOINT_HIGH, (50, 6)).tolist()


def _turn(axis: str, angle: float) -> np.ndarray:
    c, s = math.cos(angle), math.sin(angle)
    rows = {
        "x": [[1, 0, 0], [0, c, -s], [0, s, c]],
        "y": [[c, 0, s], [0, 1, 0], [-s, 0, c]],
        "z": [[c, -s, 0], [s, c, 0], [0, 0, 1]],
    }[axis]
    out = np.eye(4)
    out[:3, :3] = rows
    return out


def _shift(x: float, y: float, z: float) -> np.ndarray:
    out = np.eye(4)
    out[:3, 3] = x, y, z
    return out


def _chain(arm: int, q: list[float]) -> dict[str, np.ndarray]:
    """The same arm as a product of homogeneous matrices, link by link."""
    shoulder = (
        _shift(kin.BASE_X[arm], 0, 0) @ _turn("z", math.pi * arm) @ _turn("z", q[0]) @ _shift(0, 0, kin.SHOULDER_Z)
    )
    elbow = shoulder @ _turn("y", q[1]) @ _shift(kin.UPPER_X, 0, kin.UPPER_Z)
    wrist = elbow @ _turn("y", q[2]) @ _turn("x", q[3]) @ _shift(kin.FOREARM, 0, 0)
    hand = wrist @ _turn("y", q[4]) @ _turn("x", q[5])
    return {"shoulder": shoulder, "elbow": elbow, "wrist": wrist, "hand": hand, "grip": hand @ _shift(kin.HAND, 0, 0)}


@pytest.mark.parametrize("arm", [kin.LEFT, kin.RIGHT])
def test_forward_equals_the_product_of_link_matrices(arm):
    for q in JOINT_SETS:
        chain, pose = _chain(arm, q), kin.forward(arm, q)
        for part in ("shoulder", "elbow", "wrist", "grip"):
            np.testing.assert_allclose(getattr(pose, part), chain[part][:3, 3], atol=1e-12)
        axes = np.stack([pose.forward, pose.left, pose.up], axis=1)
        np.testing.assert_allclose(axes, chain["hand"][:3, :3], atol=1e-12)
        np.testing.assert_allclose(kin.grip_point(arm, [9.0, *q], 1), pose.grip, atol=1e-12)


@pytest.mark.parametrize("arm", [kin.LEFT, kin.RIGHT])
def test_inverse_reaches_points_of_the_own_half(arm):
    side = -1 if arm == kin.LEFT else 1
    for x, y, z in np.random.default_rng(1).uniform((-0.05, -0.2, 0.0), (0.3, 0.2, 0.2), (200, 3)).tolist():
        target = (side * x, y, z)
        np.testing.assert_allclose(kin.grip_point(arm, kin.inverse(arm, target)), target, atol=1e-6)


def test_out_of_reach_the_arm_stretches_towards_the_target():
    target = (-0.5, 0.1, 0.4)
    grip = kin.grip_point(kin.RIGHT, kin.inverse(kin.RIGHT, target))
    shoulder = (kin.BASE_X[kin.RIGHT], 0.0, kin.SHOULDER_Z)
    assert math.dist(grip, shoulder) == pytest.approx(kin.REACH, abs=1e-4)
    along = np.subtract(grip, shoulder) / math.dist(grip, shoulder)
    towards = np.subtract(target, shoulder) / math.dist(target, shoulder)
    np.testing.assert_allclose(along, towards, atol=1e-4)


@pytest.mark.parametrize("target", [(0.65, 0.0, 0.127), (0.65, 0.0, 0.2), (0.65, 0.0, 0.0), (-9.0, 9.0, 9.0)])
def test_inverse_stays_finite_and_inside_the_limits_anywhere(target):
    q = kin.inverse(kin.RIGHT, target)
    assert all(lo <= v <= hi for lo, v, hi in zip(kin.JOINT_LOW, q, kin.JOINT_HIGH, strict=True))
