"""A stand-in of evdev with the kernel's names: devices that tests press, pull out and plug in again."""

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

KEYS = """ESC BACKSPACE ENTER SPACE UP PAGEUP LEFT RIGHT DOWN PAGEDOWN KP0 KP1 KP2 KP3 KP4 KP5 KP6 KP7 KP8 KP9 KPENTER
1 2 3 4 5 6 7 8 9 0 Q W E R T Y U I O P A S D F G H J K L Z X C V B N M"""
NAMES = {  # by kind, with the first one's code: as in the kernel, codes of keys and of axes are the same numbers
    ("EV", 0): "SYN KEY ABS",
    ("SYN", 0): "REPORT DROPPED",
    ("KEY", 1): KEYS,
    ("BTN", 300): "SOUTH EAST NORTH WEST TL TR SELECT START MODE THUMBL THUMBR",
    ("ABS", 0): "X Y Z RX RY RZ HAT0X HAT0Y",
}
CODES = {f"{k}_{name}": code for (k, first), names in NAMES.items() for code, name in enumerate(names.split(), first)}


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


class Info(NamedTuple):
    vendor: int = 0x0C45
    product: int = 0x7403


class Device:
    def __init__(self, path: Path, axes: Mapping[str, AbsInfo], phys: str, keys: str) -> None:
        self.path, self.phys, self.keys = path, phys, [CODES[name] for name in keys.split()]
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
        self.phys, self.uniq, self.info = self._device.phys, "", Info()
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
        keys, axes = self._device.keys, [*self._device.axes.items()]
        kinds = (("EV_KEY", keys), ("EV_ABS", axes or None))
        return {CODES[kind]: list(known) for kind, known in kinds if known is not None}

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

    def device(
        self, name: str, axes: Mapping[str, AbsInfo] | None = None, phys: str = "", keys: str = ""
    ) -> Device:  # fmt: skip
        """Plug in an event node. `phys`: where, with the number of its input; `keys`: all are its, or some are."""
        made = Device(self.folder / name, axes or {}, phys, keys)
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
