"""Virtual SpaceMice below pyspacemouse: a stand-in of the C library hidapi, the lowest seam in one process.

All of pyspacemouse and easyhid runs. Each mouse is an empty file in a folder. `push` may be called by any thread.
"""

from __future__ import annotations

import dataclasses
import struct
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import easyhid.easyhid
import pyspacemouse.api

from serl_chunk_robot.devices import spacemouse

QUEUE = 63  # reports of one handle: hidraw's ring of 64 keeps a place free, and drops a report that finds it full
RATE = 125  # Hz, at which a deflected mouse reports
COMPACT = (0x256F, 0xC635)  # vendor and product of a mouse with two buttons and reports of 7 bytes
RECEIVER = (0x256F, 0xC652)  # of wireless mice: five interfaces, of which one is a mouse's
PRO_WIRELESS = (0x256F, 0xC632)  # 15 buttons, all six axes in one report of 13 bytes


def translation(x: int = 0, y: int = 0, z: int = 0) -> bytes:
    """Report 1. Raw numbers: x right, y towards the user, z down; 350 is a full deflection."""
    return struct.pack("<Bhhh", 1, x, y, z)


def rotation(a: int = 0, b: int = 0, c: int = 0) -> bytes:
    """Report 2. Raw numbers: turns about the axes of report 1."""
    return struct.pack("<Bhhh", 2, a, b, c)


def motion(*six: int) -> bytes:
    """Report 1 of a mouse that has all six axes in it."""
    return struct.pack("<Bhhhhhh", 1, *six)


def buttons(mask: int) -> bytes:
    """Report 3: a bit for each button, in the order of its model."""
    return struct.pack("<BQ", 3, mask)


class Report(bytes):
    """A report, and the moment at which the mouse sent it, monotonic s."""

    moment = 0.0


@dataclasses.dataclass(eq=False)
class Handle:
    queue: deque[bytes] = dataclasses.field(default_factory=deque)
    gone: bool = False


class Mouse:
    """One virtual mouse. `denied`: opening it fails, as without rights."""

    def __init__(self, path: Path, ids: tuple[int, int], serial: str) -> None:
        self.path, self.ids, self.serial = str(path), ids, serial
        self.denied = False
        self.plugged = False
        self.handles: list[Handle] = []
        self.lock = threading.Lock()
        self.plug()

    def push(self, *reports: bytes) -> None:
        """Report to every program that has it open. Full queues drop the report."""
        moment = time.monotonic()
        with self.lock:
            for report in map(Report, reports):
                report.moment = moment
                for handle in self.handles:
                    if len(handle.queue) < QUEUE:
                        handle.queue.append(report)

    def unplug(self) -> None:
        with self.lock:
            self.plugged = False
            Path(self.path).unlink()
            for handle in self.handles:
                handle.gone = True
            self.handles = []

    def plug(self) -> None:
        self.plugged = True
        Path(self.path).touch()


class FakeHid:
    """The functions of hidapi that easyhid calls, over mice in a folder.

    `opened`: paths given to `pyspacemouse.open_by_path`; `newest`: the moment of the newest report that was read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.newest = folder, 0.0
        self.mice: list[Mouse] = []
        self.opened: list[str] = []
        self._kept: Any = None  # memory of the last enumeration

    def mouse(self, name: str = "hidraw0", ids: tuple[int, int] = COMPACT, serial: str = "") -> Mouse:
        self.mice.append(Mouse(self.folder / name, ids, serial))
        return self.mice[-1]

    def receiver(self, first: int, place: str, axes: Collection[int] = ()) -> list[Mouse]:
        """Plug in a receiver at a place of the bus. `axes`: interfaces that the kernel knows to be multi-axis."""
        made = []
        for number in range(5):
            made.append(self.mouse(f"hidraw{first + number}", RECEIVER))
            known = self.folder / "sys" / f"hidraw{first + number}" / "device"
            known.mkdir(parents=True)
            (known / "uevent").write_text(f"HID_NAME=3Dconnexion\nHID_PHYS={place}/input{number}\nHID_UNIQ=\n")
            usage = spacemouse.MULTI_AXIS if number in axes else b"\x05\x01\x09\x06"
            (known / "report_descriptor").write_bytes(usage + b"\xa1\x01")
        return made

    def hid_enumerate(self, vendor: int, product: int) -> Any:
        ffi = easyhid.easyhid.ffi
        kept, following = [], ffi.NULL
        for mouse in reversed([m for m in self.mice if m.plugged]):
            path, serial = ffi.new("char[]", mouse.path.encode()), ffi.new("wchar_t[]", mouse.serial)
            word = ffi.new("wchar_t[]", "virtual")
            info = ffi.new("struct hid_device_info *")
            info.path, info.vendor_id, info.product_id = path, *mouse.ids
            info.serial_number, info.manufacturer_string, info.product_string = serial, word, word
            info.next = following
            kept += [path, serial, word, info]
            following = info
        self._kept = kept
        return following

    def hid_free_enumeration(self, devices: Any) -> None:
        """Python frees it."""

    def hid_open_path(self, path: bytes) -> tuple[Mouse, Handle] | None:
        mouse = next((m for m in self.mice if m.path == path.decode() and m.plugged and not m.denied), None)
        if mouse is None:
            return None
        handle = Handle()
        with mouse.lock:
            mouse.handles.append(handle)
        return mouse, handle

    def hid_set_nonblocking(self, opened: tuple[Mouse, Handle], enable: bool) -> int:
        assert enable
        return 0

    def hid_read(self, opened: tuple[Mouse, Handle], data: Any, length: int) -> int:
        mouse, handle = opened
        with mouse.lock:
            if handle.gone:
                return -1
            if not handle.queue:
                return 0
            whole = handle.queue.popleft()
            self.newest, report = getattr(whole, "moment", self.newest), whole[:length]
        easyhid.easyhid.ffi.memmove(data, report, len(report))
        return len(report)

    def hid_close(self, opened: tuple[Mouse, Handle]) -> None:
        mouse, handle = opened
        with mouse.lock:
            mouse.handles = [h for h in mouse.handles if h is not handle]


@contextmanager
def installed(folder: Path) -> Iterator[FakeHid]:
    """Replace hidapi in this process. A second way to a mouse, past `open_by_path`, fails."""
    hid, open_by_path = FakeHid(folder), pyspacemouse.api.open_by_path

    def counted(path: Any, *arguments: Any, **more: Any) -> Any:
        device = open_by_path(path, *arguments, **more)
        hid.opened.append(str(path))
        return device

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a mouse is opened by its path alone")

    with (
        patch.object(easyhid.easyhid, "hidapi", hid),
        patch.object(pyspacemouse, "open_by_path", counted),
        patch.object(pyspacemouse, "open", refused),
        patch.object(spacemouse, "SYSFS", folder / "sys"),
    ):
        yield hid
