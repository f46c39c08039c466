"""When a device has an arm, and what it commands meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from human_desk import Clock, Mouse

from serl_chunk.devices.arm_control import Gripper, TwistArm
from serl_chunk.devices.human import HumanIntervention, Thresholds
from serl_chunk.types import STATE

DT = 0.02
SIZE = 4  # two arms of an axis and a gripper each
CLOSED, STAYS, OPENED = -1.0, 0.0, 1.0


class Desk:
    """Two mice, an arm each, and the loop that polls them."""

    def __init__(self, mode: str = "hold", **thresholds) -> None:
        self.clock = Clock()
        self.left, self.right = Mouse("left", self.clock), Mouse("right", self.clock)
        arms = []
        for device, first in ((self.left, 0), (self.right, 2)):
            gripper = (first + 1, Gripper(mode, CLOSED, OPENED, STAYS, DT))
            arms.append((device, TwistArm((0,), np.ones(1), np.array([first]), gripper)))
        self.human = HumanIntervention(arms, Thresholds(**thresholds), now=lambda: self.clock.now)
        self.last = np.zeros(SIZE, np.float32)
        self.human.reset(0)

    def poll(self, ticks: int = 1):
        for _ in range(ticks):
            self.clock.now += DT
            command = self.human.poll(0, {STATE: np.zeros(1, np.float32)}, False, self.last)
            self.last = np.zeros(SIZE, np.float32) if command is None else command.action
        return command

    def rested(self) -> Desk:
        assert self.poll(20) is None
        return self


def test_a_push_of_one_device_takes_its_arm_alone():
    desk = Desk().rested()
    desk.left.push = 0.5
    command = desk.poll()
    assert command.action.tolist() == [0.5, 0.0, 0.0, 0.0]
    assert command.dims.tolist() == [True, True, False, False]
    assert not command.idle
    desk.right.push = -1.0
    command = desk.poll()
    assert command.action.tolist() == [0.5, 0.0, -1.0, 0.0]
    assert command.dims is None, "all of it"


@pytest.mark.parametrize(("push", "takes"), [(0.04, False), (0.06, True)])
def test_an_intervention_begins_above_a_threshold(push, takes):
    desk = Desk().rested()
    desk.left.push = push
    assert (desk.poll() is not None) == takes


def test_it_ends_only_after_a_while_at_rest_so_that_it_is_one_segment():
    desk = Desk(hold=0.4).rested()
    desk.left.push = 0.5
    desk.poll()
    desk.left.push = 0.03  # between both thresholds: still pushing
    assert not desk.poll(30).idle
    desk.left.push = 0.0
    assert desk.poll(20).idle
    desk.left.push = 0.5
    assert not desk.poll().idle
    desk.left.push = 0.0
    assert desk.poll(19) is not None
    assert desk.poll(3) is None


def test_a_device_that_is_deflected_at_the_start_commands_nothing_until_it_was_neutral():
    desk = Desk()
    desk.left.push = 0.8
    assert desk.poll(100) is None
    desk.left.push = 0.0
    assert desk.poll(20) is None
    desk.left.push = 0.8
    assert desk.poll() is not None
    desk.human.restart()  # as after a stop and a clear
    assert desk.poll(100) is None


def test_a_lost_device_brakes_its_arm_and_the_policy_does_not_take_over():
    desk = Desk().rested()
    desk.left.push = 0.8
    desk.poll(5)
    desk.left.alive = False
    command = desk.poll()
    assert command.action.tolist() == [0.0] * SIZE
    assert command.dims.tolist() == [True, True, False, False]
    assert command.idle
    assert desk.human.lost == ["left"]
    desk.left.alive = True  # plugged in again, and still deflected
    assert desk.poll(100).action.tolist() == [0.0] * SIZE
    desk.human.resume()
    assert desk.human.lost == []
    assert desk.poll(50) is None, "it counts again once it was neutral"
    desk.left.push = 0.0
    desk.poll(20)
    desk.left.push = 0.3
    assert desk.poll().action[0] == np.float32(0.3)


def test_a_stop_and_a_clear_give_an_arm_of_a_lost_device_to_no_policy():
    desk = Desk().rested()
    desk.right.alive = False  # lost without an arm: it changes nothing
    assert desk.poll(50) is None
    assert desk.human.lost == []
    desk.left.push = 0.8
    desk.poll(5)
    desk.left.alive = False
    desk.poll()
    desk.human.restart()
    assert desk.poll(50).dims.tolist() == [True, True, False, False]
    assert desk.human.lost == ["left"]
    desk.human.reset(1)
    assert desk.human.lost == []
    assert desk.poll(50) is None
    desk.human.close()
    assert desk.left.closed
    assert desk.right.closed


def test_a_dead_man_button_is_needed_where_there_is_one():
    desk = Desk(dead_man=2).rested()
    desk.left.push = 0.8
    assert desk.poll(3) is None
    desk.left.buttons = (False, False, True)
    assert desk.poll().action[0] == np.float32(0.8)
    desk.left.buttons = (False, False, False)
    assert desk.poll().action[0] == 0.0, "it stops at once"
    assert desk.poll(30) is None
    desk = Desk(dead_man=2)  # deflected before the button is held, which is not neutral
    desk.left.push = 0.8
    assert desk.poll(50) is None
    desk.left.buttons = (False, False, True)
    assert desk.poll(50) is None


@pytest.mark.parametrize(("button", "value"), [(0, CLOSED), (1, OPENED)])
def test_buttons_drive_the_gripper_and_count_as_an_intervention(button, value):
    desk = Desk().rested()
    desk.right.buttons = tuple(k == button for k in range(3))
    command = desk.poll()  # a press that begins the intervention counts at once
    assert command.action.tolist() == [0.0, 0.0, 0.0, value]
    desk.right.buttons = (False,) * 3
    assert desk.poll().action.tolist() == [0.0] * SIZE


class Gripped:
    """A gripper that was begun, between 0 and 1."""

    def __init__(self, mode: str) -> None:
        self.gripper = Gripper(mode, 0.0, 1.0, None, DT)
        self.gripper.begin()

    def run(self, last: float, *pressed: tuple[bool, bool], ticks: int = 1) -> float:
        for buttons in pressed:
            for _ in range(ticks):
                last = self.gripper.command(buttons, last)
        return last


CLOSE, OPEN, NONE = (True, False), (False, True), (False, False)


def test_positions_move_while_a_button_is_pressed():
    gripper = Gripped("hold")
    assert gripper.run(0.5, CLOSE, ticks=6) == pytest.approx(0.5 - 6 * DT / 0.6)
    assert gripper.run(0.5, OPEN, ticks=100) == 1.0
    assert gripper.run(0.5, NONE, ticks=10) == 0.5


def test_a_press_goes_all_the_way_at_once_and_stays():
    gripper = Gripped("press")
    assert gripper.run(0.4, NONE, ticks=5) == 0.4
    assert gripper.run(0.4, CLOSE) == 0.0
    assert gripper.run(0.3, NONE, ticks=5) == 0.0, "also where the fingers hold something"
    assert gripper.run(0.0, OPEN, NONE, ticks=2) == 1.0
    gripper.gripper.begin()
    assert gripper.run(0.4, NONE) == 0.4


def test_a_toggle_goes_to_the_other_end_on_each_press_after_the_arm_was_taken_over():
    gripper = Gripped("toggle")
    gripper.run(0.9, NONE)
    last = gripper.run(0.9, CLOSE, ticks=2)
    last = gripper.run(last, NONE, ticks=100)
    assert last == 0.0
    assert gripper.run(last, CLOSE, NONE, ticks=100) == 1.0
    assert Gripped("toggle").run(1.0, CLOSE, ticks=50) == 1.0
