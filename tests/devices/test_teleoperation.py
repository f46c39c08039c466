"""Targets that follow a twist: where they lead the tip, and what bounds them."""

from __future__ import annotations

import numpy as np
import pytest
from robot_limits import HIGH, HOME, LOW, viperx

from serl_chunk.devices.teleoperation import TwistFollower, TwistLimits

DT = 0.02
ARMS = viperx()
GRASPS = np.tile([0.13, -0.39, 0.61, 0.0, 0.83, 0.0, 0.5], 2)  # a hand that points down at the table


class Robot:
    """Joints that follow their targets, by `late` of the way behind, or stand still where something holds them."""

    def __init__(self, start=HOME, late: float = 0.0, arm: int = 0, **limits) -> None:
        self.follow, self.arm = TwistFollower(ARMS, arm, LOW, HIGH, DT, TwistLimits(**limits)), arm
        self.command, self.late = np.array(start, np.float64), late
        self.measured = self.command
        self.held: np.ndarray | None = None
        self.commands: list[np.ndarray] = []

    def run(self, twist, ticks: int) -> None:
        for _ in range(ticks):
            self.measured = self.late * self.measured + (1 - self.late) * self.command
            measured = (self.measured if self.held is None else self.held)[self.follow.joints]
            self.command = self.command.copy()
            self.command[self.follow.joints] = self.follow.follow(np.array(twist, float), self.command, measured)
            self.commands.append(self.command)

    def tip(self) -> np.ndarray:
        return ARMS.tip(self.arm, self.command)[0]


@pytest.mark.parametrize(("arm", "axis"), [(0, 0), (1, 1), (0, 2), (1, 0)])
def test_the_tip_goes_where_it_is_pushed_and_keeps_its_orientation(arm, axis):
    robot = Robot(arm=arm, translation=0.1)
    before, push = robot.tip(), np.eye(6)[axis]
    robot.run(0.5 * push, 50)
    np.testing.assert_allclose(robot.tip()[:3, 3] - before[:3, 3], 0.5 * 0.1 * 50 * DT * push[:3], atol=2e-3)
    np.testing.assert_allclose(robot.tip()[:3, :3], before[:3, :3], atol=0.01)
    other = np.setdiff1d(np.arange(14), robot.follow.joints)
    assert (robot.command[other] == HOME[other]).all()


def test_a_turn_keeps_the_place_of_the_tip_and_axes_that_do_not_act_stay():
    robot = Robot(rotation=0.5)
    before = robot.tip()
    robot.run([0, 0, 0, 0, 0, 0.5], 50)
    np.testing.assert_allclose(robot.tip()[:3, 3], before[:3, 3], atol=6e-3)  # of a wrist that is nearly singular
    turned = robot.tip()[:3, :3] @ before[:3, :3].T
    assert np.arctan2(turned[1, 0], turned[0, 0]) == pytest.approx(0.25, abs=0.01)
    still = Robot(scale=(1, 1, 1, 0, 0, 0))
    still.run([0, 0, 0, 1, 1, 1], 30)
    np.testing.assert_allclose(still.tip(), before, atol=1e-9)


def test_in_the_tools_frame_forward_is_along_the_hand():
    robot = Robot(frame="tool", translation=0.1)
    before = robot.tip()
    robot.run([1, 0, 0, 0, 0, 0], 40)
    way = robot.tip()[:3, 3] - before[:3, 3]
    assert way @ before[:3, 0] > 0.99 * np.linalg.norm(way) > 0.01


@pytest.mark.parametrize(
    ("late", "turn", "twist"),
    [(0.7, 0, [1, 0.4, 0.6, 0, -1, 0]), (0.7, 0, [0.5, 0, 0.5, 1, -1, 1]), (0.0, 120, [0, 0, 0.5, 0, -1, 0])],
)
def test_a_fast_turn_of_a_late_wrist_or_of_one_at_its_end_does_not_pull_the_tip_aside(late, turn, twist):
    robot, push = Robot(GRASPS, late=late, translation=0.3, rotation=1.5), np.array(twist[:3])
    robot.run([0, 0, 0, 0, -1, 0], turn)
    assert robot.command[4] == pytest.approx(LOW[4], abs=1e-3) or not turn
    before = robot.tip()[:3, 3]
    robot.run(twist, 25)
    assert (robot.tip()[:3, 3] - before) @ push / (0.3 * 25 * DT * (push @ push)) > 0.8, "of the undisturbed way"


def test_acceleration_is_bounded_when_a_moving_arm_is_taken_over_and_when_it_is_let_go():
    robot = Robot(acceleration=10.0)
    moving = np.array([0.6, 0.0, 0.0, 0.0, -0.4, 0.0])
    robot.commands += [robot.command - np.pad(moving, (0, 8)) * DT, robot.command]
    robot.follow.begin(moving)
    for twist, ticks in (([0] * 6, 20), ([1, -1, 0.5, 0, 1, 0], 30), ([0] * 6, 30)):
        robot.run(twist, ticks)
    accelerations = np.abs(np.diff(robot.commands, n=2, axis=0) / DT**2)
    assert 9.0 < accelerations.max() <= 10.0 * (1 + 1e-9)
    assert (robot.commands[-1] == robot.commands[-2]).all()


def test_targets_do_not_run_away_from_an_arm_in_contact_and_one_that_hangs_behind_is_not_pulled_back():
    robot = Robot(lead=0.1, translation=0.3)
    robot.held = robot.command.copy()
    robot.run([1, 0, 0, 0, 0, 0], 200)
    assert np.abs(robot.command - robot.held).max() == pytest.approx(0.1)
    pressed = robot.command.copy()
    robot.run([-1, 0, 0, 0, 0, 0], 3)
    assert np.abs(robot.command - pressed).max() > 0.01, "it comes back at once"
    robot = Robot(lead=0.05)
    robot.held = robot.command - np.pad([0.2], (1, 12))
    robot.run(np.zeros(6), 10)
    np.testing.assert_array_equal(robot.command, HOME)


@pytest.mark.parametrize("stretched", [0.0, 1e-3, 0.05])
def test_near_a_singular_pose_it_is_slow_but_not_stuck(stretched):
    pose = HOME.copy()
    pose[[1, 2, 4]] = 0.0, -0.197 + stretched, 0.0  # the arm at full stretch
    robot = Robot(pose, velocity=1.5)
    start = robot.tip()[:3, 3]
    robot.run([1, 0, 0, 0, 0, 0], 50)
    assert np.abs(np.diff(robot.commands, axis=0)).max() <= 1.5 * DT + 1e-9
    robot.run([-1, 0, 0, 0, 0, 0], 150)
    assert np.linalg.norm(robot.tip()[:3, 3] - start) > 0.05, "it gets away"


def test_targets_stay_within_the_joints_limits():
    robot = Robot()
    for twist in ([0, 0, 1, 0, 0, 0], [1, 0, -1, 0, 1, 0], [0, 1, 0, 1, 0, 1]):
        robot.run(twist, 200)
    assert (np.array(robot.commands) >= LOW - 1e-12).all()
    assert (np.array(robot.commands) <= HIGH + 1e-12).all()
