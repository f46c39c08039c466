"""Devices of Linux's input layer, by evdev: opened by a path that stays, grabbed, their events read by a thread."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import time
from collections import deque
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, Mapping, Set

from serl_chunk_robot.devices.base import DeviceError, KeyEvent, listed
from serl_chunk_robot.devices.polling import PolledDevice

BY_ID = "/dev/input/by-id"  # links with maker, model and serial number, which udev makes
WAITS = 0.05  # s for an event
LIFTS = 1.0  # s for keys that are down before a grab
KEPT = 1024  # key events that were not fetched yet
SAME = {"KPENTER": "enter", "ESC": "escape", **{f"KP{n}": str(n) for n in range(10)}}  # as a terminal names them


class EvdevDevice(PolledDevice):
    """A base of keyboards, pedals and gamepads.

    The device is grabbed: its events reach no other program, so that a pedal types nothing into a terminal. A key that
    is down at that moment would stay down for the others: the grab waits for 1 s until none is. What was typed before
    the grab is dropped.

    `keys()` has no release of a lost device: a key is up there because `read().alive` is False.

    Args:
        device: a path, or part of the name of one link in /dev/input/by-id.

    Raises:
        DeviceError: no library, no such device, no rights, or grabbed by another program.
    """

    def __init__(self, device: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._device: Any = None
        self._codes: Any = library().ecodes
        self._named = self._names()
        self._held: Set[int] = set()
        self._events: Deque[KeyEvent] = deque(maxlen=KEPT)
        self._dropped = False
        super().__init__(device, clock)

    def keys(self) -> List[KeyEvent]:
        """Return the events of named keys since the last call, oldest first."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _names(self) -> Mapping[int, str]:
        """Return code -> name of the keys whose events `keys` returns."""
        raise NotImplementedError

    def _check(self) -> None:
        """Raise DeviceError if the device, which was opened, is of another kind."""

    def _moved(self, code: int, value: int) -> None:
        """Take in the position of an absolute axis."""

    def _open(self) -> None:
        path = find(self.name)
        try:
            self._device = library().InputDevice(path)
            self._check()
            until = time.monotonic() + LIFTS
            while self._device.active_keys() and time.monotonic() < until:
                time.sleep(0.01)
            self._device.grab()
            with contextlib.suppress(BlockingIOError):  # nothing typed ahead counts
                while True:
                    list(self._device.read())
        except OSError as e:
            raise DeviceError(f"{path}: cannot be opened and grabbed ({e}). Run: sudo fuser -v {path}") from e
        self._dropped = False
        self._held = set(self._device.active_keys())

    def _release(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.close()  # ungrabs it, too

    def _take_events(self) -> None:
        """Wait for events and take in those that are there. Raises OSError if the device is gone."""
        if not select.select([self._device.fileno()], [], [], WAITS)[0]:
            return
        now, codes = self._clock(), self._codes
        with contextlib.suppress(BlockingIOError):
            for event in self._device.read():
                if event.type == codes.EV_SYN and event.code == codes.SYN_DROPPED:
                    self._dropped = True  # the kernel's queue was full: what is in it up to the next report is torn
                elif event.type == codes.EV_SYN and event.code == codes.SYN_REPORT and self._dropped:
                    self._dropped = False
                    self._resume(now)
                elif self._dropped:
                    continue
                elif event.type == codes.EV_KEY and event.value in (0, 1):  # 2: a repetition
                    self._press(event.code, event.value == 1, now)
                elif event.type == codes.EV_ABS:
                    self._moved(event.code, event.value)

    def _resume(self, now: float) -> None:
        """Take over the state of all keys and axes, where events were lost."""
        active = set(self._device.active_keys())
        for code in sorted(active ^ self._held):
            self._press(code, code in active, now)

    def _press(self, code: int, pressed: bool, now: float) -> None:
        self._held = self._held | {code} if pressed else self._held - {code}
        name = self._named.get(code)
        if name is not None:
            self._events.append(KeyEvent(name, pressed, now))


def library() -> Any:
    """Import evdev. Raises DeviceError with the command that installs it."""
    try:
        return importlib.import_module("evdev")
    except ImportError as e:
        raise DeviceError(
            f"evdev cannot be imported ({e}). Run: pip install 'serl-chunk[devices]' (at a robot's PC "
            "'serl-chunk-robot[devices]'; it is compiled: sudo apt install gcc linux-libc-dev)"
        ) from e


def key_codes(codes: Any) -> Dict[str, int]:
    """Return name -> code of a keyboard's keys, with a terminal's names: "a", "1", "space", "enter", "escape", "up".

    The names are those of a US keyboard. The main keys have those that the keypad shares.
    """
    found: Dict[str, int] = {}
    for name, code in codes.ecodes.items():
        if name.startswith("KEY_") and name[4:] not in SAME:
            found[name[4:].lower()] = code
    found["escape"] = codes.ecodes["KEY_ESC"]
    return found


def find(device: str) -> str:
    """Return the path of a device. Raises DeviceError for none, several, or one that may not be read."""
    links = sorted(Path(BY_ID).glob("*-event-*"))
    if "/" in device:
        found = [Path(device)] if Path(device).exists() else []
    else:
        found = [link for link in links if device and device in link.name]
    if len(found) != 1:
        what = f"{len(found)} devices have this in their names" if found else "no such device. Is it plugged in?"
        raise DeviceError(f"{device!r}: {what} (in {BY_ID}: {listed([link.name for link in links])})")
    if not os.access(found[0], os.R_OK):
        raise DeviceError(f"{found[0]}: not permitted. Run: sudo usermod -aG input $USER, and log in anew")
    return str(found[0])
