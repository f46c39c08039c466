"""Devices that cannot be opened: options that cannot be, and libraries that are missing, each named with what helps."""

from __future__ import annotations

import math
import sys

import dynamixel_bus
import lerobot_leaders
import pytest

from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.evdev_device import FootPedal, Gamepad, Keyboard
from serl_chunk_robot.devices.gello import Gello
from serl_chunk_robot.devices.leader import leaders_ros2
from serl_chunk_robot.devices.lerobot_teleoperator import LeRobotTeleoperator
from serl_chunk_robot.devices.spacemouse import SpaceMouse, open_mice

PORT = "/dev/left"
GELLO = {"port": PORT, "ids": (1, 2, 7), "offsets": (math.pi, 1.0), "signs": (1, -1), "gripper_closed": 2.0,
         "gripper_open": 3.0}  # fmt: skip
LEROBOT = {"type": "so101_leader", "params": {"port": PORT, "id": "mine"}}
KEYS, PEDAL = {"device": "Keyboard"}, {"device": "Foot"}
PARAMS = "so101_leader: .*"
REFUSED = [  # what is made, options that are right, those that are not, what the error names, and its parameter
    (Keyboard, KEYS, {"moves": {"hyper": (0, 1.0)}}, "'hyper'", "moves, buttons"),
    (Keyboard, KEYS, {"buttons": ("z", "up")}, "'up'", "moves, buttons"),
    (FootPedal, PEDAL, {"pedals": {"left": "a", "right": "a"}}, "'a'", "pedals"),
    (FootPedal, PEDAL, {"pedals": {"left": "pedal"}}, "'pedal'", "pedals"),
    (Gamepad, {"device": "Pad"}, {"dead_zone": math.nan}, "nan", "dead_zone"),
    *((Gello, GELLO, {name: value}, repr(list(value)), name) for name, value in (
        ("ids", (1, 1, 7)), ("ids", (1, 2, 254)), ("offsets", (0.0,)), ("signs", (1, 0)))),
    *((Gello, GELLO, {name: value}, repr(value), name) for name, value in (
        ("baud", 12345), ("gripper_open", None), ("gripper_open", 2.0))),
    (leaders_ros2, {}, {"arms": ("a", "a")}, "", "arms"),
    (leaders_ros2, {}, {"gripper_open": -0.0552}, "", "gripper_closed, gripper_open"),
    *((open_mice, {}, {"paths": paths, "count": count}, "expected a list", "paths") for paths, count in (
        (["a"], 2), ("ab", 2), (["a"] * 3, 3))),
    *((LeRobotTeleoperator, LEROBOT, options, match, None) for options, match in (
        ({"type": "so102_leader"}, r"type: 'so102_leader' is no teleoperator .*koch_leader.*Not imported: broken"),
        ({"type": "gamepad", "params": None}, r"gamepad: .*no serial bus.*no joint positions.*so101_leader"),
        ({"params": {"prt": 1}}, PARAMS + r"`prt`.*valid: .*port"),
        ({"params": {"port": "/dev/none"}}, r"so101_leader /dev/none: .*lerobot-find-port.*Check power and port"),
        ({"joints": ["a", "b"]}, r"joints: a, b, but LeRobot's so101_leader has shoulder_pan"),
        ({"grippers": ["wrist_roll"]}, r"wrist_roll: its unit is range_m100_100\. Write scale"),
        ({"scale": [1.0]}, r"scale: \[1\.0\], expected one number, or 6"),
        ({"drive_torque": 1.5}, "drive_torque"))),
]  # fmt: skip


@pytest.fixture
def plugged(inputs, hid):
    """A keyboard, a pedal, and a port whose motors are those of LeRobot's leaders and, at another bus, of a GELLO."""
    for name in ("Keyboard", "Foot"):
        inputs.device(f"usb-{name}-event-kbd")
    with dynamixel_bus.stand_in(dynamixel_bus.Servos(1, 2, 7)), lerobot_leaders.installed(PORT) as ports:
        yield ports[PORT]


@pytest.mark.parametrize(("make", "right", "wrong", "match", "parameter"), REFUSED)
def test_options_that_cannot_be_are_named_and_no_motor_is_written_to(plugged, make, right, wrong, match, parameter):
    with pytest.raises(DeviceError) as error:
        make(**{**right, **wrong})
    error.match(match) if make is LeRobotTeleoperator else None
    assert make is LeRobotTeleoperator or match in str(error.value)
    assert parameter is None or parameter in error.value.parameter
    assert not plugged.calls
    assert not plugged.open


MISSING = [  # the modules that cannot be imported, what is opened, and what helps
    (("evdev",), lambda: FootPedal("Foot"), r"serl-chunk\[devices\]"),
    (("dynamixel_sdk",), lambda: Gello(**GELLO), "pip install dynamixel-sdk"),
    (("rosgraph", "rclpy"), leaders_ros2, r"cannot be imported.*interbotix_ws"),
    (("draccus", "lerobot"), lambda: LeRobotTeleoperator(**LEROBOT), r"draccus .*pip install 'lerobot\[feetech"),
    (("pyspacemouse",), lambda: SpaceMouse("/dev/hidraw0"), r"pip install 'pyspacemouse>=2\.1'"),
]


@pytest.mark.parametrize(("modules", "make", "helps"), MISSING)
def test_a_missing_library_is_named_with_what_helps(monkeypatch, modules, make, helps):
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DeviceError, match=helps):
        make()
