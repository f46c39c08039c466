"""Finds what is connected to this machine: cameras, serial ports and their rights. It opens no device.

A path is one that names the device, not the order in which it was plugged in, where udev makes one.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import List, NamedTuple, Tuple

INTEL = "8086"  # vendor of RealSense cameras on USB
# Part of a serial port's name -> what it leads to. Interbotix's udev rules make ttyDXL_ARM.
PORTS: Tuple[Tuple[str, str], ...] = (
    ("ttyDXL_puppet_", "an ALOHA follower. --driver aloha_ros1; its ROS node has the port"),
    ("ttyDXL_follower_", "an ALOHA 2 follower. --driver aloha_ros2; its ROS node has the port"),
    ("ttyDXL_", "an arm of Interbotix, perhaps a leader, which no driver moves"),
    ("FTDI", "perhaps Dynamixel motors. --driver aloha_ros1 or aloha_ros2; its ROS node has the port"),
    ("1a86", "perhaps Feetech motors, as of an SO-101. --driver lerobot, in LeRobot's environment"),
)  # fmt: skip


class Camera(NamedTuple):
    """A camera that was found."""

    driver: str  # v4l2 or realsense
    key: str  # the option that names it: device or serial
    value: str  # empty: not known
    note: str  # what is to be done first; or empty

    def __str__(self) -> str:
        return f"{self.driver} camera {self.value}".strip() + (f" ({self.note})" if self.note else "")


class Port(NamedTuple):
    """A serial port that was found."""

    path: str
    note: str  # which driver it suggests, and what is to be done first

    def __str__(self) -> str:
        return f"serial port {self.path}" + (f" ({self.note})" if self.note else "")


def find_ports(root: Path) -> List[Port]:
    """Return the serial ports. `root`: of the file system."""
    paths = sorted([*(root / "dev").glob("ttyDXL_*"), *(root / "dev/serial/by-id").glob("*")])
    found = []
    for path in paths:
        what = next((what for part, what in PORTS if part in path.name), "")
        found.append(Port(str(path), ". ".join(filter(None, [what, rights(path, "dialout")]))))
    return found


def find_cameras(root: Path) -> List[Camera]:
    """Return the cameras: of V4L2 those nodes that give pictures, and RealSenses once each."""
    real = _realsenses(root)
    found = []
    for node in sorted((root / "dev").glob("video*"), key=lambda path: (len(path.name), path.name)):
        of = root / "sys/class/video4linux" / node.name
        # A UVC camera has two nodes: that of its metadata has the index 1.
        if _text(of / "index") not in ("", "0") or (real and _is_realsense(of / "device" / "..")):
            continue
        found.append(Camera("v4l2", "device", _stable(root, node), rights(node, "video")))
    return [*real, *found]


def rights(path: Path, group: str) -> str:
    """Return what lets this user open a device; empty where it may."""
    if os.access(str(path), os.R_OK | os.W_OK):
        return ""
    return f"not permitted. Run: sudo usermod -aG {group} $USER, and log in again"


def _stable(root: Path, node: Path) -> str:
    """A link to a node by its serial number, else by its place on the bus, else the node."""
    for kind in ("by-id", "by-path"):
        for link in sorted((root / "dev/v4l" / kind).glob("*")):
            if os.path.realpath(str(link)) == os.path.realpath(str(node)):
                return str(link)
    return str(node)


def _realsenses(root: Path) -> List[Camera]:
    """RealSense cameras, by their library where it is there, else on USB.

    The serial number on USB is of a part inside: it is not the one on the housing, by which the camera is opened.
    """
    on_usb = sum(map(_is_realsense, (root / "sys/bus/usb/devices").glob("*")))
    try:
        rs = importlib.import_module("pyrealsense2")
        info, there = rs.camera_info.serial_number, rs.context().query_devices()
        found = [Camera("realsense", "serial", str(device.get_info(info)), "") for device in there]
        hint = "librealsense does not find it: install its udev rules, and plug the camera in again"
    except Exception as e:  # of a vendor's library, or a missing one
        found, hint = [], f"its number: rs-enumerate-devices -s. Its library ({e}): pip install pyrealsense2"
    return found or [Camera("realsense", "serial", "", hint)] * on_usb


def _is_realsense(device: Path) -> bool:
    return _text(device / "idVendor") == INTEL and "realsense" in _text(device / "product").lower()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
