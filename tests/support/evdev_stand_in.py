"""A stand-in of evdev with the kernel's codes: devices that tests press, pull out and plug in again."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from serl_chunk_robot.devices import evdev_device

CODES = {
    "EV_SYN": 0, "EV_KEY": 1, "EV_ABS": 3, "SYN_REPORT": 0, "SYN_DROPPED": 3, "KEY_ESC": 1, "KEY_BACKSPACE": 14,
    "KEY_ENTER": 28, "KEY_SPACE": 57, "KEY_KP0": 82, "KEY_KPENTER": 96, "KEY_UP": 103, "KEY_PAGEUP": 104,
    "KEY_LEFT": 105, "KEY_RIGHT": 106, "KEY_DOWN": 108, "KEY_PAGEDOWN": 109, "BTN_SOUTH": 304, "BTN_EAST": 305,
    "BTN_NORTH": 307, "BTN_WEST": 308, "BTN_TL": 310, "BTN_TR": 311, "BTN_SELECT": 314, "BTN_START": 315,
    "BTN_MODE": 316, "BTN_THUMBL": 317, "BTN_THUMBR": 318, "ABS_X": 0, "ABS_Y": 1, "ABS_Z": 2, "ABS_RX": 3, "ABS_RY": 4,
    "ABS_RZ": 5, "ABS_HAT0X": 16, "ABS_HAT0Y": 17,
}  # fmt: skip
ROWS = {2: "1234567890", 16: "QWERTYUIOP", 30: "ASDFGHJKL", 44: "ZXCVBNM"}  # of a keyboard, by the first key's code
KEYPAD = {71: "789", 75: "456", 79: "123"}
CODES.update((f"KEY_{key}", first + k) for first, row in ROWS.items() for k, key in enumerate(row))
CODES.update((f"KEY_KP{key}", first + k) for first, row in KEYPAD.items() for k, key in enumerate(row))


class Event(NamedTuple):
    type: int
    code: int
    value: int


SYN = Event(CODES["EV_SYN"], CODES["SYN_REPORT"], 0)


class AbsInfo(NamedTuple):
    value: int
    min: int
    max: int
    fuzz: int = 0
    flat: int = 0
    resolution: int = 0


STICKS = ("ABS_X", "ABS_Y", "ABS_RX", "ABS_RY")
XBOX = {
    **dict.fromkeys(STICKS, AbsInfo(0, -32768, 32767)),
    **dict.fromkeys(("ABS_Z", "ABS_RZ"), AbsInfo(0, 0, 255)),
    **dict.fromkeys(("ABS_HAT0X", "ABS_HAT0Y"), AbsInfo(0, -1, 1)),
}


class Device:
    def __init__(self, path: Path, axes: Mapping[str, AbsInfo]) -> None:
        self.path = path
        self.axes = {CODES[name]: info for name, info in axes.items()}
        self.held: set[int] = set()
        self.handles: list[InputDevice] = []
        self.grabbed: InputDevice | None = None
        self.lock = threading.Lock()
        self.plug()

    def press(self, name: str, value: int = 1) -> None:
        """Press a key: 1 down, 0 up, 2 repeated."""
        with self.lock:
            self._set(name, value)
            self._send(Event(CODES["EV_KEY"], CODES[name], value), SYN)

    def move(self, name: str, value: int) -> None:
        with self.lock:
            self._set(name, value)
            self._send(Event(CODES["EV_ABS"], CODES[name], value), SYN)

    def drop(self, *lost: tuple[str, int]) -> None:
        """Let the queue overflow: state changes whose events are lost."""
        with self.lock:
            self._send(Event(CODES["EV_SYN"], CODES["SYN_DROPPED"], 0))
            for name, value in lost:
                self._set(name, value)
            self._send(Event(CODES["EV_KEY"], CODES["KEY_B"], 1), SYN)  # torn: it counts for nothing

    def unplug(self) -> None:
        with self.lock:
            self.path.unlink()
            self.held, self.grabbed = set(), None
            for handle in self.handles:
                handle.gone = True
            self._send()

    def plug(self) -> None:
        self.path.touch()

    def _set(self, name: str, value: int) -> None:
        code = CODES[name]
        if name.startswith("ABS"):
            self.axes[code] = self.axes[code]._replace(value=value)
        else:
            (self.held.add if value else self.held.discard)(code)

    def _send(self, *events: Event) -> None:
        for handle in self.handles:
            handle.queue += events
            os.eventfd_write(handle.fileno(), 1)


class InputDevice:
    devices: dict[Path, Device]

    def __init__(self, path: str) -> None:
        self._device = self.devices[Path(path).resolve()]
        if not self._device.path.exists():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        self.queue: list[Event] = []
        self.gone, self._file = False, os.eventfd(0)
        self._device.handles.append(self)

    def fileno(self) -> int:
        return self._file

    def read(self) -> Iterator[Event]:
        with self._device.lock:
            if self.gone:
                raise OSError(errno.ENODEV, "No such device")
            events, self.queue = self.queue, []
            if not events:
                raise BlockingIOError
            os.eventfd_read(self._file)
        yield from events

    def grab(self) -> None:
        if self._device.grabbed not in (None, self):
            raise OSError(errno.EBUSY, "Device or resource busy")
        self._device.grabbed = self

    def active_keys(self) -> list[int]:
        with self._device.lock:
            return sorted(self._device.held)

    def absinfo(self, code: int) -> AbsInfo:
        return self._device.axes[code]

    def capabilities(self, absinfo: bool = True) -> dict[int, list[object]]:
        assert absinfo
        return {CODES["EV_KEY"]: [], **({CODES["EV_ABS"]: [*self._device.axes.items()]} if self._device.axes else {})}

    def close(self) -> None:
        with self._device.lock:
            if self in self._device.handles:
                self._device.handles.remove(self)
                os.close(self._file)
            if self._device.grabbed is self:
                self._device.grabbed = None


class Inputs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.devices: dict[Path, Device] = {}

    def device(self, name: str, axes: Mapping[str, AbsInfo] | None = None) -> Device:
        made = Device(self.folder / name, axes or {})
        self.devices[made.path.resolve()] = made
        return made


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[Inputs]:
    """Let evdev be imported, with devices in a folder."""
    library, ecodes, inputs = types.ModuleType("evdev"), types.ModuleType("evdev.ecodes"), Inputs(folder)
    vars(ecodes).update(CODES, ecodes=dict(CODES))
    opens = type("InputDevice", (InputDevice,), {"devices": inputs.devices})
    vars(library).update(ecodes=ecodes, InputDevice=opens)
    with patch.dict(sys.modules, {"evdev": library}), patch.object(evdev_device, "BY_ID", str(folder)):
        yield inputs
