"""An arm that follows a leader: bounded velocity and acceleration, also across the seams, and leaders far from it."""

from __future__ import annotations

import numpy as np
import pytest
from human_desk import Clock, Mouse
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.devices.arm_control import LEADER_ACCELERATION, LEADER_FADES, LEADER_SPEED, LeaderArm
from serl_chunk.devices.human import HumanIntervention, Thresholds
from serl_chunk.types import STATE
from serl_chunk_robot.devices.base import Sample

DT = 0.02
LOW, HIGH = np.array([-9.0, -2.0, 0.0]), np.array([9.0, 2.0, 1.0])
ALL = np.arange(3)
CHANGE = LEADER_ACCELERATION * DT


def arm() -> LeaderArm:
    return LeaderArm(ALL, ALL, LOW, HIGH, DT)


def reading(joints: object) -> Sample:
    return Sample(None, np.array(joints, np.float64), (), 0.0, True)


way = st.lists(st.tuples(st.floats(-1.5, 1.5), st.floats(-1.5, 1.5), st.floats(0.1, 0.9)), min_size=1, max_size=6)


@settings(max_examples=examples(50))
@given(way, st.floats(-LEADER_SPEED, LEADER_SPEED), st.integers(1, 30))
def test_velocity_and_acceleration_are_bounded_on_every_tick_wherever_the_leader_jumps(ways, speed, ticks):
    """The first change is from the velocity with which the policy moved the arm, a lost leader's from its own."""
    last = np.array([0.3, 0.0, 0.5])
    before = last - np.array([speed, 0.0, 0.0]) * DT
    velocity = (last - before) / DT
    follows = arm()
    follows.begin(last, before)
    for k in range(ticks * len(ways)):
        target = follows.command(reading(ways[k // ticks]), last, last)
        new = (target - last) / DT
        assert (np.abs(new - velocity) <= CHANGE + 1e-6).all()
        assert (np.abs(new) <= LEADER_SPEED + 1e-6).all()
        last, velocity = target, new
    follows.begin(last, last - velocity * DT)
    for _ in range(10):
        target = follows.command(Sample(np.zeros(6), None, (), 0.0, True), last, last)
        new = (target - last) / DT
        assert (np.abs(new - velocity) <= CHANGE + 1e-6).all()
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


class Leader(Mouse):
    """A leader whose joints a test sets."""

    joints = np.array([1.0, -1.0, 0.5])

    def read(self) -> Sample:
        return Sample(None, self.joints.copy(), (), self._clock.now, self.alive)


class Desk:
    """A leader, its arm, which goes where it is commanded, and the loop that polls."""

    def __init__(self, *, near: bool) -> None:
        self.clock = Clock()
        self.leader = Leader("leader", self.clock)
        self.leader.joints = Leader.joints.copy()
        self.human = HumanIntervention([(self.leader, arm())], Thresholds(near=near), now=lambda: self.clock.now)
        self.last = np.array([0.0, 0.0, 0.5], np.float32)
        self.human.reset(0)

    def poll(self, ticks: int, speed: float = 0.0) -> int:
        """Move the leader's first joint for so many ticks; returns how many of them were the human's."""
        count = 0
        for _ in range(ticks):
            self.clock.now += DT
            self.leader.joints[0] += speed * DT
            command = self.human.poll(0, {STATE: self.last}, False, self.last)
            if command is not None:
                self.last, count = command.action, count + 1
        return count


def test_a_leader_far_from_its_arm_does_nothing_unless_it_may_blend_until_its_arm_has_come_to_it():
    near = Desk(near=True)
    assert near.poll(50) == near.poll(20, speed=0.5) == 0
    desk = Desk(near=False)
    assert desk.poll(20) == 0
    assert desk.poll(10, speed=0.5) > 0
    assert desk.poll(100) == 100, "2 s, in which the leader stands, and its arm has come 0.6 rad of 1"
    assert abs(desk.last[0] - desk.leader.joints[0]) > 0.2
    desk.poll(150)
    np.testing.assert_allclose(desk.last, desk.leader.joints, atol=1e-3)
    assert desk.poll(1) == 0, "then it is let go"


@pytest.mark.parametrize("event", ["restart", "reset", "silence"])
def test_a_blending_leader_that_is_moved_through_a_stop_counts_once_it_was_at_rest(event):
    desk = Desk(near=False)
    desk.poll(20)
    assert desk.poll(10, speed=0.5) > 0
    if event == "silence":
        desk.clock.now += 0.3
    elif event == "restart":
        desk.human.restart()
    else:
        desk.human.reset(1)
    assert desk.poll(100, speed=0.5) == 0
    assert desk.poll(20) == 0
    assert desk.poll(10, speed=0.5) > 0


def test_a_blending_leader_that_is_lost_brakes_its_arm_and_holds_it():
    desk = Desk(near=False)
    desk.poll(20)
    desk.poll(30, speed=0.5)
    desk.leader.alive = False
    desk.poll(6)
    at = desk.last.copy()
    assert desk.poll(20) == 20
    np.testing.assert_array_equal(desk.last, at)
    assert desk.human.lost == ["leader"]
