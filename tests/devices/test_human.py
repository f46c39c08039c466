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
LEFT = [True, True, False, False]


class Desk:
    """Two mice, an arm each, and the loop that polls them."""

    def __init__(self, **thresholds) -> None:
        self.clock = Clock()
        self.left, self.right = Mouse("left", self.clock), Mouse("right", self.clock)
        arms = []
        for device, first in ((self.left, 0), (self.right, 2)):
            gripper = (first + 1, Gripper("hold", CLOSED, OPENED, STAYS, DT))
            arms.append((device, TwistArm((0,), np.ones(1), np.array([first]), gripper)))
        self.human = HumanIntervention(arms, Thresholds(**thresholds), now=lambda: self.clock.now)
        self.last = np.zeros(SIZE, np.float32)
        self.human.reset(0)

    def poll(self, ticks: int = 1, push: float | None = None):
        """The last command of so many ticks, in which the left mouse is pushed."""
        self.left.push = self.left.push if push is None else push
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
    assert desk.poll(push=0.04) is None, "below the threshold"
    command = desk.poll(push=0.06)
    assert command.action.tolist() == [pytest.approx(0.06), 0.0, 0.0, 0.0]
    assert (command.dims.tolist(), command.idle) == (LEFT, False)
    desk.right.push = -1.0
    command = desk.poll(push=0.5)
    assert command.action.tolist() == [0.5, 0.0, -1.0, 0.0]
    assert command.dims is None, "all of it"


def test_it_ends_only_after_a_while_at_rest_so_that_it_is_one_segment():
    desk = Desk(hold=0.4).rested()
    desk.poll(push=0.5)
    assert not desk.poll(30, push=0.03).idle, "between both thresholds: still pushing"
    assert desk.poll(20, push=0.0).idle
    assert not desk.poll(push=0.5).idle
    assert desk.poll(19, push=0.0) is not None
    assert desk.poll(3) is None


def test_a_device_that_is_deflected_at_the_start_commands_nothing_until_it_was_neutral():
    desk = Desk()
    assert desk.poll(100, push=0.8) is None
    assert desk.poll(20, push=0.0) is None
    assert desk.poll(push=0.8) is not None
    desk.human.restart()  # as after a stop and a clear
    assert desk.poll(100) is None


def test_a_lost_device_brakes_its_arm_and_the_policy_does_not_take_over():
    desk = Desk().rested()
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
    desk = Desk().rested()
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
    desk.human.close()
    assert desk.left.closed
    assert desk.right.closed


def test_a_dead_man_button_is_needed_where_there_is_one():
    desk = Desk(dead_man=2).rested()
    assert desk.poll(3, push=0.8) is None
    desk.left.buttons = (False, False, True)
    assert desk.poll().action[0] == np.float32(0.8)
    desk.left.buttons = (False, False, False)
    assert desk.poll().action[0] == 0.0, "it stops at once"
    assert desk.poll(30) is None
    desk = Desk(dead_man=2)  # deflected before the button is held, which is not neutral
    assert desk.poll(50, push=0.8) is None
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


CLOSE, OPEN, NONE = (True, False), (False, True), (False, False)


TAKEN = "the arm is taken over"


@pytest.mark.parametrize(
    ("mode", "last", "steps", "ends"),  # steps: buttons and ticks, or where the fingers are
    [("hold", 0.5, [(CLOSE, 6)], 0.5 - 6 * DT / 0.6), ("hold", 0.5, [(OPEN, 100)], 1.0),
     ("hold", 0.5, [(NONE, 9)], 0.5), ("press", 0.4, [(NONE, 5)], 0.4), ("press", 0.4, [(CLOSE, 1)], 0.0),
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
