"""Targets that follow a twist: where they lead the tip, their bounds, also where control passes or a device is lost."""

from __future__ import annotations

import numpy as np
import pytest
from human_desk import Desk
from robot_limits import HIGH, HOME, LOW, J, viperx
from robot_world import DT as PASS
from robot_world import TICK, World

from serl_chunk.devices.arm_control import LEADER_ACCELERATION, JointArm, LeaderArm
from serl_chunk.devices.human import Thresholds
from serl_chunk.devices.teleoperation import TwistFollower, TwistLimits
from serl_chunk_robot.devices.base import Sample

ARMS = viperx()
GRASPS = np.tile([0.13, -0.39, 0.61, 0.0, 0.83, 0.0, 0.5], 2)  # a hand that points down at the table


class Robot:
    """Joints that follow their targets, by `late` of the way behind, or stand still where something holds them."""

    def __init__(self, start=HOME, late: float = 0.0, arm: int = 0, **limits) -> None:
        self.follow, self.arm = TwistFollower(ARMS, arm, LOW, HIGH, TICK, TwistLimits(**limits)), arm
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


@pytest.mark.parametrize(("arm", "axis"), [(0, 0), (1, 1), (0, 2)])
def test_the_tip_goes_where_it_is_pushed_and_keeps_its_orientation(arm, axis):
    robot = Robot(arm=arm, translation=0.1)
    before, push = robot.tip(), np.eye(6)[axis]
    robot.run(0.5 * push, 50)
    np.testing.assert_allclose(robot.tip()[:3, 3] - before[:3, 3], 0.5 * 0.1 * 50 * TICK * push[:3], atol=2e-3)
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
    assert (robot.tip()[:3, 3] - before) @ push / (0.3 * 25 * TICK * (push @ push)) > 0.8, "of the undisturbed way"


def test_acceleration_is_bounded_when_a_moving_arm_is_taken_over_and_when_it_is_let_go():
    robot = Robot(acceleration=10.0)
    moving = np.array([0.6, 0.0, 0.0, 0.0, -0.4, 0.0])
    robot.commands += [robot.command - np.pad(moving, (0, 8)) * TICK, robot.command]
    robot.follow.begin(moving)
    for twist, ticks in (([0] * 6, 20), ([1, -1, 0.5, 0, 1, 0], 30), ([0] * 6, 30)):
        robot.run(twist, ticks)
    accelerations = np.abs(np.diff(robot.commands, n=2, axis=0) / TICK**2)
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
    assert np.abs(np.diff(robot.commands, axis=0)).max() <= 1.5 * TICK + 1e-9
    robot.run([-1, 0, 0, 0, 0, 0], 150)
    assert np.linalg.norm(robot.tip()[:3, 3] - start) > 0.05, "it gets away"


def test_targets_stay_within_the_joints_limits():
    robot = Robot()
    for twist in ([0, 0, 1, 0, 0, 0], [1, 0, -1, 0, 1, 0], [0, 1, 0, 1, 0, 1]):
        robot.run(twist, 200)
    assert (np.array(robot.commands) >= LOW - 1e-12).all()
    assert (np.array(robot.commands) <= HIGH + 1e-12).all()


# Seams: where control passes between a policy and a human, and where a device is lost.

JOINTS = np.setdiff1d(np.arange(J), [6, 13])
STOPS = 0.15  # rad from a joint's end, in which an arm can stop
PASSES = (4, 5, 3, 4)  # of a server, between two commands of an actor whose clock is another one


class ArmsDesk(Desk):
    """Two mice with an arm each, and the loop of an actor: `command` one, after the `accepted` one before it."""

    def __init__(self) -> None:
        self.both, arms = self.mice("left", "right"), []
        for arm, mouse in enumerate(self.both):
            follower = TwistFollower(ARMS, arm, LOW, HIGH, TICK, TwistLimits())
            arms.append((mouse, JointArm(follower, None, follower.joints, TICK)))
        super().__init__(arms, Thresholds(hold=0.1), J)
        self.last = self.measured = HOME.copy()
        self.by_human = np.zeros(J, bool)

    def command(self, policy: np.ndarray) -> np.ndarray:
        """Return the command of a tick, float64[J], where the policy commands `policy`."""
        human = self.tick(TICK)
        self.by_human = np.zeros(J, bool) if human is None else np.ones(J, bool) if human.dims is None else human.dims
        return policy if human is None else np.where(self.by_human, human.action.astype(np.float64), policy)


class ServedDesk(ArmsDesk):
    """One whose commands a robot server's gate follows. `late`: passes between a state and the command after it."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late
        self.world = World().armed()
        self.status = self.world.run()
        self.sent = self.last

    def command(self, policy: np.ndarray) -> np.ndarray:
        world, status = self.world, self.status
        if world.number:  # as robots.served has it
            follows = status.factor == 1 and not status.reason and status.number == world.number
            self.last = self.sent if follows else np.array(status.set_point)
        self.measured = world.arms.q
        self.sent = super().command(policy)
        for _ in range(self.late):
            world.run()
        assert world.send(self.sent) == ""
        self.status = world.run(PASSES[world.number % len(PASSES)] - self.late)
        return self.sent


@pytest.mark.parametrize("seed", range(2))
def test_without_a_gate_taking_over_and_moving_obey_one_bound(seed: int):
    desk, rng, velocity = ArmsDesk(), np.random.default_rng(seed), np.zeros(J)
    low, high = np.maximum(HOME - 0.5, LOW + STOPS), np.minimum(HOME + 0.5, HIGH - STOPS)
    commands, human = [HOME, HOME], []
    for k in range(320):
        for mouse in desk.both:
            if k > 20 and rng.random() < 0.15:
                mouse.push = 0.0 if mouse.push else float(rng.uniform(-1, 1))
        if rng.random() < 0.1:
            velocity[JOINTS] = rng.uniform(-1.9, 1.9, len(JOINTS))
        desk.measured = desk.last
        walks = np.clip(desk.last + velocity * TICK, np.minimum(low, desk.last), np.maximum(high, desk.last))
        desk.last = desk.command(walks)
        commands.append(desk.last)
        human.append(desk.by_human)
    moves = np.abs(np.diff(commands, n=2, axis=0))
    assert (np.diff(np.array(human), axis=0) != 0).sum() > 20
    bound = TwistLimits().acceleration * TICK**2
    assert moves[np.array(human)].max() <= bound * (1 + 1e-4)  # commands are float32
    assert moves[np.array(human)].max() > 0.9 * bound


@pytest.mark.parametrize(("push", "ticks", "late"), [(0.3, 22, 1), (0.5, 22, 0), (1.0, 30, 1)])
def test_an_arm_whose_device_is_lost_goes_forward_to_a_stop(push: float, ticks: int, late: int):
    desk = ServedDesk(late)
    for k in range(ticks):
        desk.both[0].push = push if k > 16 else 0.0
        desk.command(HOME)
    lost = len(desk.world.arms.sent)
    desk.both[0].alive = False
    for _ in range(25):
        desk.command(HOME)
    points = np.array(desk.world.arms.sent)[lost - 1 :, :6]
    first = points[1] - points[0]
    joint = int(np.abs(first).argmax())
    assert abs(first[joint]) > 0.15 * PASS, "it moved"
    way = (points[:, joint] - points[0, joint]) * np.sign(first[joint])
    assert way.max() - way[-1] < 3e-3, "rad that it goes back"
    assert int(np.argmax(np.diff(way) <= 1e-3 * PASS)) * PASS <= 0.075


def test_an_arm_whose_leader_is_lost_goes_forward_to_a_stop():
    dims = np.arange(7)
    arm = LeaderArm(dims, dims, LOW[:7], HIGH[:7], TICK)
    accepted = HOME.copy()
    arm.begin(accepted, accepted)
    moves = []
    for k in range(20):
        joints = HOME[:7] + 0.6 * TICK * k * (dims == 1)
        sample = Sample(None, joints if k < 10 else None, (), 0.0, k < 10)
        target = arm.command(sample, accepted, HOME)
        moves.append(target[1] - accepted[1])
        accepted[:7] = target - 0.3 * (target - accepted[:7])  # the robot is late
    assert moves[9] > 0.6 * TICK
    assert (np.array(moves[10:]) >= 0).all()
    assert moves[9] - moves[10] < LEADER_ACCELERATION * TICK**2 + 1e-9
    assert np.abs(moves[16:]).max() < 1e-3
