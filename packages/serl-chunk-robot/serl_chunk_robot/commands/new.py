"""`robot new`: writes a robot's file with this machine's devices, which loads once what it marks is filled in."""

from __future__ import annotations

import inspect
import os
import socket
from importlib import import_module
from pathlib import Path
from typing import List, Mapping, NamedTuple, Sequence, Tuple

from serl_chunk_robot.drivers import BUILT_IN
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.config import load
from serl_chunk_robot.robot_file.toml_file import create, unknown

REACHED = 1.0  # s
EXAMPLES = {  # driver -> files of experiments/robots that are to be copied and filled in
    "aloha_ros1": "aloha_ros1.toml", "aloha_ros2": "aloha_ros2.toml", "trossen": "trossen.toml",
    "franka_http": "franka_ram.toml, franka_usb.toml or franka_handover.toml", "lerobot": "so101.toml",
}  # fmt: skip
TEXT = """\
# A robot's file: serl-chunk robot serve {file}
# Fill in what is marked with FILL IN; packages/serl-chunk-robot/README.md lists every key.{example}
name = "{name}"
start = "first_day"  # the profile after each start: a tenth of what the driver can
# port = 5600
# park = [...]       # FILL IN: the pose in which the arms may lose their torque, a number for each joint
# effort = 9.0       # FILL IN: above it the server's own motions go back, and end
{found}
[driver]
{driver}
# Limits: move the arms by hand without torque (`robot teach`), or write low and high of a profile here.
# [profile.exploring]
# velocity = 1.5     # rad/s
{cameras}
# Where a reset leads. Without a step it moves nothing, or to the driver's home.
# [[reset.step]]
# joints = [...]     # FILL IN
"""
INTEL = "8086"  # vendor of RealSense cameras on USB
# Part of a serial port's name -> what it leads to. Interbotix's udev rules make ttyDXL_ARM.
PORTS: Tuple[Tuple[str, str], ...] = (
    ("ttyDXL_puppet_", "an ALOHA follower. --driver aloha_ros1; its ROS node has the port"),
    ("ttyDXL_follower_", "an ALOHA 2 follower. --driver aloha_ros2; its ROS node has the port"),
    ("ttyDXL_", "an arm of Interbotix, perhaps a leader, which no driver moves"),
    ("FTDI", "perhaps Dynamixel motors. --driver aloha_ros1 or aloha_ros2; its ROS node has the port"),
    ("1a86", "perhaps Feetech motors, as of an SO-101. --driver lerobot, in LeRobot's environment"),
)


class Camera(NamedTuple):
    """A camera that was found."""

    driver: str  # v4l2 or realsense
    key: str  # the option that names it: device or serial
    value: str  # empty: not known
    note: str  # what is to be done first; or empty

    def __str__(self) -> str:
        return f"{self.driver} camera {self.value}".strip() + (f" ({self.note})" if self.note else "")


def find_ports(root: Path) -> List[str]:
    """Return the serial ports, with the drivers that they suggest. `root`: of the file system."""
    found = []
    for path in sorted([*(root / "dev").glob("ttyDXL_*"), *(root / "dev/serial/by-id").glob("*")]):
        what = next((what for part, what in PORTS if part in path.name), "")
        note = ". ".join(filter(None, [what, rights(path, "dialout")]))
        found.append(f"serial port {path}" + (f" ({note})" if note else ""))
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
        rs = import_module("pyrealsense2")
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


class Found(NamedTuple):
    """What is connected to this machine."""

    ports: List[str]
    cameras: List[Camera]
    ros: str  # ROS_MASTER_URI, or empty
    addresses: List[str]  # HOST:PORT, and what happened when it was tried


def find(addresses: Sequence[str] = (), root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> Found:
    """Look for arms and cameras. `root`: of the file system. Raises ConfigError: an address without a port."""
    tried = [f"{each} {_tried(each)}" for each in addresses]
    return Found(find_ports(root), find_cameras(root), env.get("ROS_MASTER_URI", ""), tried)


def _tried(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r}, expected HOST:PORT, as in 192.168.1.2:50051", parameter="--address")
    try:
        with socket.create_connection((host, int(port)), REACHED):
            return "answers"
    except OSError as e:
        return f"does not answer ({e.strerror or e})"


def write_new(path: Path, driver: str, found: Found) -> str:
    """Write a robot's file; returns what keeps it from being loaded, or nothing.

    Raises ConfigError: the file exists or cannot be written, or no driver has that name.
    """
    if driver not in BUILT_IN and ":" not in driver:
        what = f"unknown driver ({driver!r}, expected a built-in name or FILE.py:Class)"
        raise unknown("--driver", driver, list(BUILT_IN), what)
    name = "".join(c if c.isalnum() else "_" for c in path.stem) or "robot"
    example = EXAMPLES.get(driver)
    hint = f"\n# With resets, limits and cameras: experiments/robots/{example}" if example else ""
    ros = [f"ROS master: {found.ros}"] if found.ros else []
    there = [*found.ports, *ros, *found.addresses] or ["no serial port, no ROS_MASTER_URI"]
    there = ["", "# Found on this machine:", *(f"# {each}" for each in there), ""]
    text = TEXT.format(file=path.name, name=name, example=hint, found="\n".join(there),
                       driver="\n".join(_driver(driver)), cameras=_cameras(found.cameras))  # fmt: skip
    create(path, text, "FILE")
    try:
        load(path)
    except (ConfigError, ImportError) as e:
        return str(e)
    return ""


def _driver(driver: str) -> List[str]:
    """Lines of the table [driver]: its name, and a comment for each option."""
    lines = [f'name = "{driver}"' + ("  # FILL IN: simulated arms; your arms' driver" if driver == "fake" else "")]
    if driver not in BUILT_IN:
        return lines
    place, _, name = BUILT_IN[driver].partition(":")
    try:
        parameters = inspect.signature(getattr(import_module(place), name)).parameters.values()
    except Exception:  # of a lab's library, or one that is missing: loading the file says so
        return lines
    for p in parameters:
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            value = "... # FILL IN: required" if p.default is p.empty else _toml(p.default)
            lines.append(f"# {p.name} = {value}")
    return lines


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[{}]".format(", ".join(map(_toml, value)))
    return f'"{value}"' if isinstance(value, str) else str(value)


def _cameras(cameras: Sequence[Camera]) -> str:
    if not cameras:
        return "\n# No camera was found. Tables [[camera]] describe cameras.\n"
    lines = ["", "# Cameras: remove those that your experiment does not read."]
    for k, camera in enumerate(cameras):
        note = camera.note if camera.value else f"FILL IN: {camera.note}"
        value = _toml(camera.value) + (f"  # {note}" if note else "")
        lines += ["[[camera]]", f'name = "camera_{k}"  # FILL IN: as your experiment names it',
                  f'driver = "{camera.driver}"', f"{camera.key} = {value}",
                  "width = 640", "height = 480", ""]  # fmt: skip
    return "\n".join(lines)
