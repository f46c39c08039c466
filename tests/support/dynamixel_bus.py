"""Simulated Dynamixel servos: behind a pseudo-terminal for the real SDK, or behind a stand-in of the SDK."""

from __future__ import annotations

import math
import os
import pty
import select
import struct
import sys
import threading
import tty
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

POSITION = 132
SYNC_READ, STATUS = 0x82, 0x55
HEADER = b"\xff\xff\xfd\x00"


class Servos:
    """Positions by id, as raw numbers of a register. `mute` servos do not answer."""

    def __init__(self, *ids: int) -> None:
        self.raw = dict.fromkeys(ids, 2048)
        self.mute: set[int] = set()
        self.unplugged = False

    def turn(self, servo: int, angle: float) -> None:
        """Turn a servo to an angle, rad."""
        self.raw[servo] = round(angle * 4096 / math.tau)


def crc(data: bytes) -> bytes:
    """Return CRC-16 with the polynomial 0x8005, from 0, as protocol 2.0 sends it."""
    value = 0
    for byte in data:
        value ^= byte << 8
        for _ in range(8):
            value = (value << 1 ^ (0x8005 if value & 0x8000 else 0)) & 0xFFFF
    return struct.pack("<H", value)


def _packet(servo: int, instruction: int, parameters: bytes) -> bytes:
    data = HEADER + struct.pack("<BHB", servo, len(parameters) + 3, instruction) + parameters
    return data + crc(data)


def _answers(servos: Servos, request: bytes) -> bytes:
    """Answer a sync read of positions."""
    assert request[:4] == HEADER
    assert crc(request[:-2]) == request[-2:]
    assert request[7] == SYNC_READ
    assert struct.unpack_from("<HH", request, 8) == (POSITION, 4)
    ids = [servo for servo in request[12:-2] if servo in servos.raw and servo not in servos.mute]
    return b"".join(_packet(servo, STATUS, struct.pack("<Bi", 0, servos.raw[servo])) for servo in ids)


@contextmanager
def on_a_terminal(servos: Servos) -> Iterator[str]:
    """Let servos answer at the end of a serial line; yields the line's path."""
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    ended = threading.Event()

    def run() -> None:
        buffer = b""
        while not ended.is_set():
            if not select.select([ours], [], [], 0.02)[0]:
                continue
            buffer += os.read(ours, 1024)
            while len(buffer) >= 7 and len(buffer) >= 7 + struct.unpack_from("<H", buffer, 5)[0]:
                size = 7 + struct.unpack_from("<H", buffer, 5)[0]
                os.write(ours, _answers(servos, buffer[:size]))
                buffer = buffer[size:]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield os.ttyname(theirs)
    finally:
        ended.set()
        thread.join()
        os.close(ours)
        os.close(theirs)


class _Port:
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


class _Group:
    def __init__(self, port: _Port, packets: object, address: int, length: int) -> None:
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
def stand_in(servos: Servos) -> Iterator[str]:
    """Let `dynamixel_sdk` be imported, with these servos at every port; yields a path."""
    library: Any = types.ModuleType("dynamixel_sdk")
    library.PortHandler = type("PortHandler", (_Port,), {"servos": servos})
    library.PacketHandler = "protocol {}".format
    library.GroupSyncRead, library.COMM_SUCCESS = _Group, 0
    with patch.dict(sys.modules, {"dynamixel_sdk": library}):
        yield "/dev/serial/by-id/usb-FTDI"
