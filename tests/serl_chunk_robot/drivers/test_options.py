"""Options of drivers of robots and cameras: a robot's file gives them, and those that cannot be are refused."""

from __future__ import annotations

import math
import sys
import time
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import rclpy_stand_in

from serl_chunk_robot.drivers.aloha_ros1 import Ros1, aloha_ros1
from serl_chunk_robot.drivers.aloha_ros2 import Ros2, aloha_ros2
from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.drivers.fake_camera import FakeCamera
from serl_chunk_robot.drivers.franka_http import FrankaHttp
from serl_chunk_robot.drivers.lerobot_robot import LeRobotArms
from serl_chunk_robot.drivers.realsense_camera import RealSenseCamera
from serl_chunk_robot.drivers.trossen import TrossenArms
from serl_chunk_robot.drivers.v4l2_camera import V4L2Camera
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.config import checked, load, load_driver

URL = "http://127.0.0.1:5000/"
LEROBOT: dict[str, Any] = {"type": "so101_follower", "low": -1.6, "high": 1.6, "velocity": 4.0}
REFUSED = [  # what is made, options that are right, those that are not, and what the error says
    *((aloha_ros1, {}, {"arms": each}, "different names") for each in ("puppet_left", ["a", "a"])),
    (aloha_ros2, {}, {"gripper_closed": 1.6, "gripper_open": 0.6}, "gripper_closed"),
    (TrossenArms, {}, {"addresses": ["10.0.0.4", "10.0.0.4"]}, "different addresses"),
    *((LeRobotArms, LEROBOT, {name: value}, name) for name, value in [
        ("joints", ["a", "a"]), ("grippers", ["hand"]), ("low", [0.0] * 5), ("low", 2.0), ("high", math.nan),
        ("velocity", 0.0), ("rate", 30.0), ("scale", 0.0),
    ]),
    *((FrankaHttp, {"urls": [URL]}, x, "expected|list") for x in ({"urls": URL}, {"params": {"a": 3}})),
    (FakeCamera, {}, {"height": 0}, "a picture has"), (V4L2Camera, {"device": ""}, {}, "a camera has a device"),
    (RealSenseCamera, {"serial": 817512070000}, {}, "a camera has a serial number, a text"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "right", "wrong", "named"), REFUSED)
def test_options_that_cannot_be_are_refused(make, right, wrong, named):
    with pytest.raises((ValueError, DriverError), match=named):
        make(**{**right, **wrong})


SO101 = 'name = "lerobot"\ntype = "so101_follower"\nparams = { port = "/dev/ttyACM0" }\n'


def test_a_lerobot_arm_needs_limits_and_the_file_of_an_so101_has_them(tmp_path):
    path = tmp_path / "robot.toml"
    path.write_text(f'name = "cell"\n[driver]\n{SO101}')
    with pytest.raises(ConfigError, match=r"low: missing.*teach"):
        load_driver(load(path))
    file = load(Path(__file__).parents[3] / "experiments" / "robots" / "so101.toml")
    checked(file, load_driver(file).spec())
    assert [camera.name for camera in file.cameras] == ["front"]


def opened(ros: Any) -> Any:
    return lambda: ros().open(["a"], lambda *_: None)


@pytest.mark.parametrize(
    ("connect", "module", "helps"),
    [
        (opened(Ros1), "rosgraph", "sudo apt install ros-noetic-ros-base"),
        (opened(Ros1), "rospy", "sudo apt install ros-noetic-ros-base"),
        (opened(Ros2), "rclpy", "sudo apt install ros-humble-ros-base"),
        (opened(Ros2), "interbotix_xs_msgs", r"Interbotix's ROS 2 packages.*setup\.bash"),
        (lambda: LeRobotArms(**LEROBOT).connect(time.monotonic), "draccus", r"pip install 'lerobot\[feetech"),
        (lambda: TrossenArms().connect(time.monotonic), "trossen_arm", "pip install trossen-arm"),
    ],
)
def test_a_missing_package_is_named_with_what_helps(connect, module, helps):
    there = {"rosgraph": types.ModuleType("rosgraph")} if module == "rospy" else {}
    with (
        rclpy_stand_in.installed(),
        patch.dict(sys.modules, {**there, "lerobot": None, module: None}),
        pytest.raises(DriverError, match=helps) as error,
    ):
        connect()
    assert module in str(error.value)
