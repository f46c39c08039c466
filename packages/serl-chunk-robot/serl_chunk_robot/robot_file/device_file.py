"""Tables [[device]] of a robot's file: input devices that the server hosts."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from serl_chunk_robot.devices import HOSTED
from serl_chunk_robot.drivers.base import DriverSpec
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.loading import Source, maker
from serl_chunk_robot.robot_file.toml_file import Table

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_OF_TABLE = ("name", "driver", "arm")  # keys of [[device]] that are no options of its class


class DeviceFile(NamedTuple):
    """A table [[device]] of a robot's file."""

    name: str
    source: Source
    port: int  # at which its readings are published
    arm: int  # the first arm that it moves, 0: the left one; -1: the one after those of the device before


def read_devices(table: Table, port: int, spec: DriverSpec) -> Tuple[DeviceFile, ...]:
    """Read tables [[device]]; opens nothing.

    Args:
        port: of the first one's readings.
        spec: of the robot.

    Raises:
        ConfigError: with the key and what is valid.
    """
    found: List[DeviceFile] = []
    taken: Dict[str, str] = {}  # serial port -> key that names it
    _take_ports(taken, "driver", table.values.get("driver"))
    for k, each in enumerate(table.tables("device", None)):
        name = each.text("name")
        if not _NAME.fullmatch(name) or name in [device.name for device in found]:
            raise each.wrong("name", "a letter, then letters, digits and '_', that no device before has")
        if port + k > 65535:
            raise table.wrong("port", "one with a free port after it for the state, each camera and device, to 65535")
        source = Source.of(each, _OF_TABLE, HOSTED, "device")
        maker(source, HOSTED)
        _take_ports(taken, each.name, source.options)
        found.append(DeviceFile(name, source, port + k, each.whole("arm", -1, 0, len(spec.arms or (0,)) - 1)
                                if "arm" in each.values else -1))  # fmt: skip
    return tuple(found)


def _take_ports(taken: Dict[str, str], name: str, values: Any) -> None:
    """Note the serial ports in a table, also in those within it.

    Raises:
        ConfigError: a port that another table has. One leader would move two arms, or disturb the robot's own bus.
    """
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if key != "port" or not isinstance(value, str):
            _take_ports(taken, f"{name}.{key}", value)
            continue
        other = taken.setdefault(os.path.realpath(value), f"{name}.{key}")
        if other != f"{name}.{key}":
            what = f"{value!r} is the port of {other} too, expected one of its own. Run: ls -l /dev/serial/by-id"
            raise ConfigError(what, parameter=f"{name}.{key}")
