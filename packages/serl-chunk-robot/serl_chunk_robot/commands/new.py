"""`robot new`: writes a robot's file with this machine's devices, which loads once what it marks is filled in."""

from __future__ import annotations

import inspect
import os
import socket
from importlib import import_module
from pathlib import Path
from typing import List, Mapping, NamedTuple, Sequence, Tuple

from serl_chunk_robot.commands.hardware import Camera, Port, find_cameras, find_ports
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


class Found(NamedTuple):
    """What is connected to this machine."""

    ports: List[Port]
    cameras: List[Camera]
    ros: str  # ROS_MASTER_URI, or empty
    addresses: List[Tuple[str, str]]  # HOST:PORT, and what happened when it was tried


def find(addresses: Sequence[str] = (), root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> Found:
    """Look for arms and cameras. `root`: of the file system. Raises ConfigError: an address without a port."""
    tried = [(each, _tried(each)) for each in addresses]
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

    Raises:
        ConfigError: the file exists or cannot be written, or no driver has that name.
    """
    if driver not in BUILT_IN and ":" not in driver:
        what = f"unknown driver ({driver!r}, expected a built-in name or FILE.py:Class)"
        raise unknown("--driver", driver, list(BUILT_IN), what)
    name = "".join(c if c.isalnum() else "_" for c in path.stem) or "robot"
    example = EXAMPLES.get(driver)
    hint = f"\n# With resets, limits and cameras: experiments/robots/{example}" if example else ""
    text = TEXT.format(file=path.name, name=name, example=hint, found=_devices(found),
                       driver="\n".join(_driver(driver)), cameras=_cameras(found.cameras))  # fmt: skip
    create(path, text, "FILE")
    try:
        load(path)
    except (ConfigError, ImportError) as e:
        return str(e)
    return ""


def _devices(found: Found) -> str:
    lines = [f"# {port}" for port in found.ports]
    lines += [f"# ROS master: {found.ros}"] if found.ros else []
    lines += [f"# {address} {what}" for address, what in found.addresses]
    return "\n".join(["", "# Found on this machine:", *(lines or ["# no serial port, no ROS_MASTER_URI"]), ""])


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
