"""Simulated Dynamixel servos behind a stand-in of the SDK; test_leader.py compares its methods with the SDK's."""

from __future__ import annotations

import math
import struct
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

POSITION = 132  # a register of four bytes


class Servos:
    """Positions by id, as raw numbers of a register. `mute` servos do not answer."""

    def __init__(self, *ids: int) -> None:
        self.raw = dict.fromkeys(ids, 2048)
        self.mute: set[int] = set()
        self.unplugged = False

    def turn(self, servo: int, angle: float) -> None:
        self.raw[servo] = round(angle * 4096 / math.tau)


class PortHandler:
    servos: Servos

    def __init__(self, port_name: str) -> None:
        self.is_open = False

    def setBaudRate(self, baudrate: int) -> bool:
        if self.servos.unplugged:
            raise FileNotFoundError(2, "could not open port")
        self.is_open = baudrate in (57600, 1000000)
        return self.is_open

    def closePort(self) -> None:
        assert self.is_open
        self.is_open = False


class GroupSyncRead:
    def __init__(self, port: PortHandler, packets: object, address: int, length: int) -> None:
        assert (packets, address, length) == ("protocol 2.0", POSITION, 4)
        self._port, self._servos = port, port.servos
        self.data_dict: dict[int, list[int]] = {}

    def addParam(self, servo: int) -> bool:
        self.data_dict[servo] = []
        return True

    def txRxPacket(self) -> int:
        if self._servos.unplugged:
            raise OSError(5, "Input/output error")
        for servo in self.data_dict:
            self.data_dict[servo] = []
            if servo not in self._servos.raw or servo in self._servos.mute:
                return -3001
            self.data_dict[servo] = list(struct.pack("<i", self._servos.raw[servo]))
        return 0

    def getData(self, servo: int, address: int, length: int) -> int:
        return int.from_bytes(bytes(self.data_dict[servo]), "little")


@contextmanager
def stand_in(servos: Servos) -> Iterator[None]:
    """Let `dynamixel_sdk` be imported, with these servos at every port."""
    library: Any = types.ModuleType("dynamixel_sdk")
    library.PortHandler = type("PortHandler", (PortHandler,), {"servos": servos})
    library.PacketHandler = "protocol {}".format
    library.GroupSyncRead, library.COMM_SUCCESS = GroupSyncRead, 0
    with patch.dict(sys.modules, {"dynamixel_sdk": library}):
        yield
