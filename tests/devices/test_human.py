"""When a device has an arm, and what it commands meanwhile: mice, and leaders that arms follow."""

from __future__ import annotations

import numpy as np
import pytest
from human_desk import Desk, Leader
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.devices.arm_control import LEADER_ACCELERATION, LEADER_FADES, LEADER_SPEED, Gripper, LeaderArm, TwistArm
from serl_chunk.devices.human import Thresholds
from serl_chunk_robot.devices.base import Sample

DT = 0.02
SIZE = 4  # two arms of an axis and a gripper each
CLOSED, STAYS, OPENED = -1.0, 0.0, 1.0
LEFT = [True, True, False, False]


class MiceDesk(Desk):
    def __init__(self, **thresholds) -> None:
        self.left, self.right = self.mice("left", "right")
        arms = []
        for device, first in ((self.left, 0), (self.right, 2)):
            gripper = (first + 1, Gripper("hold", CLOSED, OPENED, STAYS, DT))
            arms.append((device, TwistArm((0,), np.ones(1), np.array([first]), gripper)))
        super().__init__(arms, Thresholds(**thresholds), SIZE)

    def poll(self, ticks: int = 1, push: float | None = None):
        """The last command of so many ticks, in which the left mouse is pushed."""
        self.left.push = self.left.push if push is None else push
        for _ in range(ticks):
            command = self.tick(DT)
            self.last = np.zeros(SIZE, np.float32) if command is None else command.action
        return command

    def rested(self) -> MiceDesk:
        assert self.poll(20) is None
        return self


def test_a_push_of_one_device_takes_its_arm_alone():
    desk = MiceDesk().rested()
    assert desk.poll(push=0.04) is None, "below the threshold"
    command = desk.poll(push=0.06)
    assert command.action.tolist() == [pytest.approx(0.06), 0.0, 0.0, 0.0]
    assert (command.dims.tolist(), command.idle) == (LEFT, False)
    desk.right.push = -1.0
    command = desk.poll(push=0.5)
    assert command.action.tolist() == [0.5, 0.0, -1.0, 0.0]
    assert command.dims is None, "all of it"


def test_it_ends_only_after_a_while_at_rest_so_that_it_is_one_segment():
    desk = MiceDesk(hold=0.4).rested()
    desk.poll(push=0.5)
    assert not desk.poll(30, push=0.03).idle, "between both thresholds: still pushing"
    assert desk.poll(20, push=0.0).idle
    assert not desk.poll(push=0.5).idle
    assert desk.poll(19, push=0.0) is not None
    assert desk.poll(3) is None


def test_a_lost_device_brakes_its_arm_and_the_policy_does_not_take_over():
    desk = MiceDesk().rested()
    desk.poll(5, push=0.8)
    desk.left.alive = False
    command = desk.poll()
    assert command.action.tolist() == [0.0] * SIZE
    assert (command.dims.tolist(), command.idle, desk.human.lost) == (LEFT, True, ["left"])
    desk.left.alive = True  # plugged in again, and still deflected
    assert desk.poll(100).action.tolist() == [0.0] * SIZE
    desk.human.resume()
    assert desk.human.lost == []
    assert desk.poll(50) is None, "it counts again once it was neutral"
    desk.poll(20, push=0.0)
    assert desk.poll(push=0.3).action[0] == np.float32(0.3)


def test_a_stop_and_a_clear_give_an_arm_of_a_lost_device_to_no_policy():
    desk = MiceDesk().rested()
    desk.right.alive = False  # lost without an arm: it changes nothing
    assert desk.poll(50) is None
    assert desk.human.lost == []
    desk.poll(5, push=0.8)
    desk.left.alive = False
    desk.poll()
    desk.human.restart()
    assert desk.poll(50).dims.tolist() == LEFT
    assert desk.human.lost == ["left"]
    desk.human.reset(1)
    assert desk.human.lost == []
    assert desk.poll(50) is None


def test_a_dead_man_button_is_needed_where_there_is_one():
    desk = MiceDesk(dead_man=2).rested()
    assert desk.poll(3, push=0.8) is None
    desk.left.buttons = (False, False, True)
    assert desk.poll().action[0] == np.float32(0.8)
    desk.left.buttons = (False, False, False)
    assert desk.poll().action[0] == 0.0, "it stops at once"
    assert desk.poll(30) is None
    desk = MiceDesk(dead_man=2)  # deflected before the button is held, which is not neutral
    assert desk.poll(50, push=0.8) is None
    desk.left.buttons = (False, False, True)
    assert desk.poll(50) is None


CLOSE, OPEN, NONE, TAKEN = (True, False), (False, True), (False, False), "the arm is taken over"


@pytest.mark.parametrize(
    ("mode", "last", "steps", "ends"),  # steps: buttons and ticks, or where the fingers are
    [("hold", 0.5, [(CLOSE, 6)], 0.5 - 6 * DT / 0.6), ("hold", 0.5, [(OPEN, 100)], 1.0),
     ("hold", 0.5, [(NONE, 9)], 0.5), ("press", 0.4, [(NONE, 5)], 0.4),
     ("press", 0.4, [(CLOSE, 1), 0.3, (NONE, 5)], 0.0),  # also where the fingers hold something
     ("press", 0.0, [(OPEN, 2), (NONE, 2)], 1.0), ("press", 0.4, [(CLOSE, 1), TAKEN, 0.4, (NONE, 1)], 0.4),
     ("toggle", 0.9, [(NONE, 1), (CLOSE, 2), (NONE, 100)], 0.0),
     ("toggle", 0.9, [(NONE, 1), (CLOSE, 2), (NONE, 9), (CLOSE, 100), (NONE, 100)], 1.0),
     ("toggle", 1.0, [(CLOSE, 50)], 1.0)],  # held since before the arm was taken over
)  # fmt: skip
def test_a_gripper_moves_while_a_button_is_pressed_or_all_the_way_at_once_or_to_the_other_end(mode, last, steps, ends):
    gripper = Gripper(mode, 0.0, 1.0, None, DT)
    gripper.begin()
    for step in steps:
        if step == TAKEN:
            gripper.begin()
        elif isinstance(step, float):
            last = step
        else:
            for _ in range(step[1]):
                last = gripper.command(step[0], last)
    assert last == pytest.approx(ends)


# Arms that follow leaders.

LOW, HIGH = np.array([-9.0, -2.0, 0.0]), np.array([9.0, 2.0, 1.0])
CHANGE = LEADER_ACCELERATION * DT


def arm() -> LeaderArm:
    return LeaderArm(np.arange(3), np.arange(3), LOW, HIGH, DT)


def reading(joints: object) -> Sample:
    return Sample(None, np.array(joints, np.float64), (), 0.0, True)


way = st.lists(st.tuples(st.floats(-1.5, 1.5), st.floats(-1.5, 1.5), st.floats(0.1, 0.9)), min_size=1, max_size=6)


@settings(max_examples=examples(50))
@given(way, st.floats(-LEADER_SPEED, LEADER_SPEED), st.integers(1, 30))
def test_velocity_and_acceleration_are_bounded_on_every_tick_wherever_the_leader_jumps(ways, speed, ticks):
    """The first change is from the velocity with which the policy moved the arm, a lost leader's from its own."""
    last, velocity, follows = np.array([0.3, 0.0, 0.5]), np.array([speed, 0.0, 0.0]), arm()
    lost = Sample(np.zeros(6), None, (), 0.0, True)
    for samples in ([reading(at) for at in ways for _ in range(ticks)], [lost] * 10):
        follows.begin(last, last - velocity * DT)
        for sample in samples:
            target = follows.command(sample, last, last)
            new = (target - last) / DT
            assert (np.abs(new - velocity) <= CHANGE + 1e-6).all()
            assert (np.abs(new) <= LEADER_SPEED + 1e-6).all()
            last, velocity = target, new
    assert not velocity.any(), "it stands"


@settings(max_examples=examples(20))
@given(st.tuples(st.floats(-2.0, 2.0), st.floats(-2.0, 2.0), st.floats(0.0, 1.0)))
def test_an_arm_comes_to_a_leader_that_stands_slowly_and_without_passing_it(at):
    leader, last = np.array(at), np.array([0.3, 0.0, 0.5])
    start, follows = last.copy(), arm()
    follows.begin(last, last)
    for _ in range(int(np.abs(leader - start).max() / (LEADER_FADES * DT)) + 30):
        target = follows.command(reading(leader), last, last)
        assert (np.abs(target - last) <= LEADER_FADES * DT + 1e-9).all()
        assert ((target - start) * (target - leader) <= 1e-9).all(), "between both"
        last = target
    np.testing.assert_allclose(last, leader, atol=1e-9)
    assert not follows.approaching


def test_it_follows_what_the_leader_does_meanwhile_and_does_not_pass_one_that_stops():
    leader, last = np.array([1.0, 0.0, 0.5]), np.zeros(3)
    follows = arm()
    follows.begin(last, last)
    for _ in range(25):  # 2 rad/s for 0.5 s
        leader[0] += 2.0 * DT
        last = follows.command(reading(leader), last, last)
    assert follows.approaching
    assert 1.0 < last[0] < 1.2, "2 rad/s and 0.3 rad/s, late by the acceleration"
    passed = [last := follows.command(reading(leader), last, last) for _ in range(200)]
    assert max(p[0] for p in passed) <= 2.0 + 1e-9
    assert last[0] == pytest.approx(2.0)


class LeaderDesk(Desk):
    def __init__(self, *, near: bool) -> None:
        self.leader = Leader("leader", self.clock)
        super().__init__([(self.leader, arm())], Thresholds(near=near), 3)
        self.last[2] = 0.5

    def poll(self, ticks: int, speed: float = 0.0) -> int:
        """Move the leader's first joint for so many ticks; returns how many of them were the human's."""
        count = 0
        for _ in range(ticks):
            self.leader.joints[0] += speed * DT
            command = self.tick(DT)
            if command is not None:
                self.last, count = command.action, count + 1
        return count


def test_a_leader_far_from_its_arm_does_nothing_unless_it_may_blend_until_its_arm_has_come_to_it():
    near = LeaderDesk(near=True)
    assert near.poll(50) == near.poll(20, speed=0.5) == 0
    desk = LeaderDesk(near=False)
    assert desk.poll(20) == 0
    assert desk.poll(10, speed=0.5) > 0
    assert desk.poll(100) == 100, "2 s, in which the leader stands, and its arm has come 0.6 rad of 1"
    assert abs(desk.last[0] - desk.leader.joints[0]) > 0.2
    desk.poll(150)
    np.testing.assert_allclose(desk.last, desk.leader.joints, atol=1e-3)
    assert desk.poll(1) == 0, "then it is let go"


@pytest.mark.parametrize("event", ["restart", "reset", "silence"])
def test_a_blending_leader_that_is_moved_through_a_stop_counts_once_it_was_at_rest(event):
    desk = LeaderDesk(near=False)
    desk.poll(20)
    assert desk.poll(10, speed=0.5) > 0
    if event == "silence":
        desk.clock.now += 0.3
    else:
        desk.human.restart() if event == "restart" else desk.human.reset(1)
    assert desk.poll(100, speed=0.5) == 0
    assert desk.poll(20) == 0
    assert desk.poll(10, speed=0.5) > 0
