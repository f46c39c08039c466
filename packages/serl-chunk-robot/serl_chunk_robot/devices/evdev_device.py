"""Devices of Linux's input layer, by evdev: opened by a path that stays, grabbed, their events read by a thread."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import time
from collections import deque
from pathlib import Path
from typing import Any, Callable, Collection, Deque, Dict, List, Mapping, NamedTuple, Sequence, Set, Tuple

import numpy as np

from serl_chunk_robot.devices.base import AXES, DeviceError, KeyEvent, Sample, listed
from serl_chunk_robot.devices.polling import PolledDevice
from serl_chunk_robot.drivers.base import linked, vendor

logger = logging.getLogger(__name__)

BY_ID = "/dev/input/by-id"  # links with maker, model and serial number, which udev makes
EVENTS = "*-event-*"
WAITS = 0.05  # s for an event
LIFTS = 1.0  # s for keys that are down before a grab
KEPT = 1024  # key events that were not fetched yet
SAME = {"KPENTER": "enter", "ESC": "escape", **{f"KP{n}": str(n) for n in range(10)}}  # as a terminal names them
# Letters and keys that mean nothing to the console: i and k tilt, j and l turn, o and m roll.
MOVES = {
    "up": (0, 1.0), "down": (0, -1.0), "left": (1, 1.0), "right": (1, -1.0), "pageup": (2, 1.0), "pagedown": (2, -1.0),
    "o": (3, 1.0), "m": (3, -1.0), "i": (4, 1.0), "k": (4, -1.0), "j": (5, 1.0), "l": (5, -1.0),
}  # fmt: skip
BUTTONS = ("z", "v")  # that close and open a gripper
PEDALS = {"left": "a", "middle": "b", "right": "c"}  # as foot switches type, unless another program set them
PAD_BUTTONS = (
    "BTN_SOUTH", "BTN_EAST", "BTN_NORTH", "BTN_WEST", "BTN_TL", "BTN_TR", "BTN_SELECT", "BTN_START", "BTN_MODE",
    "BTN_THUMBL", "BTN_THUMBR",
)  # fmt: skip
PAD_NAMES = tuple(name[4:].lower() for name in PAD_BUTTONS)
STICKS = {"ABS_Y": (0, -1.0), "ABS_X": (1, -1.0), "ABS_RY": (4, -1.0), "ABS_RX": (5, -1.0)}  # up and left are negative
TRIGGERS = {"ABS_RZ": (2, 1.0), "ABS_Z": (2, -1.0)}
CROSS = {"ABS_HAT0X": (3, 1.0)}


class EvdevDevice(PolledDevice):
    """A base of keyboards, pedals and gamepads.

    The device is grabbed: its events reach no other program, so that a pedal types nothing into a terminal. A key that
    is down at that moment would stay down for the others: the grab waits for 1 s until none is. What was typed before
    the grab is dropped.

    A physical device may be several event nodes: all that have keys of ours are read. One that was never used may be
    lost, the others may not.

    `keys()` has no release of a lost device: a key is up there because `read().alive` is False.

    `device`: a path, or part of the name of a link in /dev/input/by-id. Raises DeviceError: no library, no such
    device, no rights, or grabbed by another program.
    """

    def __init__(self, device: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes: Dict[str, Any] = {}  # by path
        self._used: Set[str] = set()  # paths of those that reported a key of ours
        self._codes: Any = library().ecodes
        self._named = self._names()
        self._held: Set[int] = set()
        self._events: Deque[KeyEvent] = deque(maxlen=KEPT)
        self._dropped: Set[str] = set()  # paths
        super().__init__(device, clock)

    @property
    def nodes(self) -> Tuple[str, ...]:
        """Paths that are open."""
        return tuple(self._nodes)

    def keys(self) -> List[KeyEvent]:
        """Return the events of named keys since the last call, oldest first."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _names(self) -> Mapping[int, str]:
        """Return code -> name of the keys whose events `keys` returns."""
        raise NotImplementedError

    def _fits(self, node: Any) -> bool:
        """Return whether a node of the device has what is to be read."""
        return not self._needed().isdisjoint(node.capabilities().get(self._codes.EV_KEY, ()))

    def _needed(self) -> Set[int]:
        """Return codes of which a node that is read has one or more."""
        return set(self._named)

    def _check(self) -> None:
        """Raise DeviceError if the device, which was opened, is of another kind."""

    def _moved(self, code: int, value: int) -> None:
        """Take in the position of an absolute axis."""

    def _open(self) -> None:
        self._nodes = nodes = _nodes_of(self.name)
        fitting = {path for path, node in nodes.items() if self._fits(node)}
        for path in set(nodes) - fitting if fitting else ():
            nodes.pop(path).close()
        if missing := self._used - set(nodes):
            raise DeviceError(f"{self.name}: {listed(sorted(missing))} is not there any more. Plug the device in again")
        self._check()
        until = time.monotonic() + LIFTS
        while self._active_keys() and time.monotonic() < until:
            time.sleep(0.01)
        for path, node in nodes.items():
            try:
                node.grab()
                with contextlib.suppress(BlockingIOError):  # nothing typed ahead counts
                    while True:
                        list(node.read())
            except OSError as e:
                raise _taken(path, e) from e
        self._dropped = set()
        self._held = self._active_keys()

    def _active_keys(self) -> Set[int]:
        return {code for node in self._nodes.values() for code in node.active_keys()}

    def _release(self) -> None:
        nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            with contextlib.suppress(OSError):
                node.close()  # ungrabs it, too

    def _take_events(self) -> None:
        ready = select.select([node.fileno() for node in self._nodes.values()], [], [], WAITS)[0]
        for path, node in [*self._nodes.items()]:
            if node.fileno() not in ready:
                continue
            try:
                self._take(path, node)
            except OSError as e:
                if path in self._used or len(self._nodes) == 1:
                    raise
                logger.warning("%s: %s, which was not used, is lost (%s).", self.name, path, e)
                self._nodes.pop(path).close()

    def _take(self, path: str, node: Any) -> None:
        now, codes = self._clock(), self._codes
        with contextlib.suppress(BlockingIOError):
            for event in node.read():
                if event.type == codes.EV_SYN and event.code == codes.SYN_DROPPED:
                    self._dropped.add(path)  # the kernel's queue was full: what is in it up to the next report is torn
                elif event.type == codes.EV_SYN and event.code == codes.SYN_REPORT and path in self._dropped:
                    self._dropped.remove(path)
                    self._resume(now)
                elif path in self._dropped:
                    continue
                elif event.type == codes.EV_KEY and event.value in (0, 1):  # 2: a repetition
                    if event.code in self._named or event.code in self._needed():
                        self._used.add(path)
                    self._press(event.code, event.value == 1, now)
                elif event.type == codes.EV_ABS:
                    self._moved(event.code, event.value)

    def _resume(self, now: float) -> None:
        active = self._active_keys()
        for code in sorted(active ^ self._held):
            self._press(code, code in active, now)

    def _press(self, code: int, pressed: bool, now: float) -> None:
        self._held = self._held | {code} if pressed else self._held - {code}
        name = self._named.get(code)
        if name is not None:
            self._events.append(KeyEvent(name, pressed, now))


def library() -> Any:
    """Import evdev. Raises DeviceError with the command that installs it."""
    at_robot = "at a robot's PC 'serl-chunk-robot[devices]'; it is compiled: sudo apt install gcc linux-libc-dev"
    return vendor("evdev", DeviceError, f"Run: pip install 'serl-chunk[devices]' ({at_robot})")


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


def _nodes_of(device: str) -> Dict[str, Any]:
    """Open the event nodes of a device, by path; the one that is named comes first.

    Raises DeviceError for no such device, several, or one that may not be opened.
    """
    nodes: Dict[str, Any] = {}
    kept: Dict[str, Any] = {}

    def identity(link: Path) -> object:
        path = str(link)
        if path not in nodes:
            nodes[path] = _opened(path)
        return _physical(nodes[path], path)

    try:
        named = linked(device, BY_ID, EVENTS, "device", DeviceError, identity)
        for link in sorted(Path(BY_ID).glob(EVENTS)):
            with contextlib.suppress(DeviceError):  # of another device, which may not be opened
                if link.resolve() != named.resolve() and identity(link) == identity(named):
                    kept[str(link)] = nodes[str(link)]
        kept = {str(named): nodes[str(named)], **kept}
        return kept
    finally:
        for path in set(nodes) - set(kept):
            nodes[path].close()


def _physical(node: Any, path: str) -> object:
    """Return what all event nodes of one physical device share; the path of one that the kernel says nothing of."""
    place, number = re.sub(r"/input\d+$", "", getattr(node, "phys", "") or ""), getattr(node, "uniq", "") or ""
    info = getattr(node, "info", None)
    model = (info.vendor, info.product) if info is not None else ()
    return (*model, place, number) if place or number else path


def _opened(path: str) -> Any:
    """Open an event node. Raises DeviceError for one that is gone, or may not be read."""
    if not os.access(path, os.R_OK):
        raise DeviceError(f"{path}: not permitted. Run: sudo usermod -aG input $USER, and log in anew")
    try:
        return library().InputDevice(path)
    except OSError as e:
        raise _taken(path, e) from e


def _taken(path: str, error: OSError) -> DeviceError:
    return DeviceError(f"{path}: cannot be opened and grabbed ({error}). Run: sudo fuser -v {path}")


class Keyboard(EvdevDevice):
    """A keyboard whose keys move while they are held, and whose other keys are events.

    It is grabbed: use a second keyboard, as Ctrl-C of the grabbed one reaches no terminal. Keys that move, and those of
    `buttons`, are not among the events of `keys()`, so that no key both moves and means something else.

    Args:
        device: a path, or part of the name of one link in /dev/input/by-id.
        moves: key -> (number of the axis, 1 or -1). Opposite keys add up to 0.
        buttons: keys of the reading's buttons.

    Raises DeviceError: as `EvdevDevice`; an unknown key, or one with two meanings.
    """

    def __init__(
        self, device: str, moves: Mapping[str, Tuple[int, float]] = MOVES, buttons: Sequence[str] = BUTTONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._moves, self._buttons = moves, tuple(buttons)
        super().__init__(device, clock)

    def _names(self) -> Mapping[int, str]:
        codes = key_codes(self._codes)
        wanted = [*self._moves, *self._buttons]
        _check_keys(wanted, codes, "moves, buttons")
        self._axis = {codes[key]: move for key, move in self._moves.items()}
        self._pressed = [codes[key] for key in self._buttons]
        named = {code: name for name, code in codes.items() if name not in wanted}
        keypad = {self._codes.ecodes[f"KEY_{key}"]: name for key, name in SAME.items()}
        return {**named, **{code: name for code, name in keypad.items() if name not in wanted}}

    def _needed(self) -> Set[int]:
        return {*self._axis, *self._pressed}

    def _look(self) -> Sample:
        self._take_events()
        twist = np.zeros(AXES)
        for code in self._held & set(self._axis):
            axis, sign = self._axis[code]
            twist[axis] += sign
        buttons = tuple(code in self._held for code in self._pressed)
        return Sample(np.clip(twist, -1.0, 1.0), None, buttons, self._clock(), True)


class FootPedal(EvdevDevice):
    """Pedals, which the computer takes for keys. They move nothing; the reading's buttons are the pedals in order.

    Args:
        device: a path, or part of the name of one link in /dev/input/by-id.
        pedals: name -> key. The names are those of the events.

    Raises DeviceError: as `EvdevDevice`; an unknown key, or one of two pedals.
    """

    def __init__(
        self, device: str, pedals: Mapping[str, str] = PEDALS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pedals = dict(pedals)
        self.pedals = tuple(self._pedals)
        super().__init__(device, clock)

    def _names(self) -> Mapping[int, str]:
        codes = key_codes(self._codes)
        _check_keys([*self._pedals.values()], codes, "pedals")
        return {codes[key]: name for name, key in self._pedals.items()}

    def _look(self) -> Sample:
        self._take_events()
        return Sample(None, None, tuple(code in self._held for code in self._named), self._clock(), True)


def _check_keys(keys: Sequence[str], codes: Dict[str, int], parameter: str) -> None:
    for key in keys:
        if key not in codes:
            raise DeviceError(f"{key!r}, expected keys of: {listed(sorted(codes))}", parameter=parameter)
        if keys.count(key) > 1:
            raise DeviceError(f"{key!r} has two meanings, expected one. Choose another key", parameter=parameter)


class _Axis(NamedTuple):
    """Where an absolute axis leads."""

    number: int  # of the twist
    sign: float
    rests: int  # its position at rest
    span: float  # from there to the nearer end
    dead: float  # share of the span that counts as rest


class Gamepad(EvdevDevice):
    """A gamepad whose axes and buttons have the kernel's names, as those of Xbox and PlayStation pads.

    Left stick: x forward, y left. Triggers: the right one up, the left one down. Right stick: pitch and yaw. Cross:
    roll. The reading's buttons, and the events of `keys()`: south, east, north, west, tl, tr, select, start, mode,
    thumbl, thumbr. South is A or the cross, tl the left button above the trigger.

    It reports changes alone: a pad whose radio fails silently keeps its last stick. Use a dead man's button.

    Args:
        device: a path, or part of the name of one link in /dev/input/by-id.
        dead_zone: share of a stick's way around its middle that is rest, or the pad's own if that is larger.
        keys: names of buttons that are an operator's keys: events alone, never pressed in the reading.

    Raises DeviceError: as `EvdevDevice`; a device without two sticks, or a dead zone outside [0, 1).
    """

    def __init__(
        self, device: str, dead_zone: float = 0.1, clock: Callable[[], float] = time.monotonic,
        keys: Collection[str] = (),
    ) -> None:  # fmt: skip
        if not 0 <= dead_zone < 1:
            raise DeviceError(f"{dead_zone!r}, expected a share from 0, below 1", parameter="dead_zone")
        self._dead_zone, self._keys = dead_zone, frozenset(keys)
        self._axes: Dict[int, _Axis] = {}
        self._positions: Dict[int, int] = {}
        super().__init__(device, clock)

    def _names(self) -> Mapping[int, str]:
        return {self._codes.ecodes[name]: shown for name, shown in zip(PAD_BUTTONS, PAD_NAMES)}

    @property
    def _node(self) -> Any:
        return next(iter(self._nodes.values()))

    def _fits(self, node: Any) -> bool:
        """Return whether a node has sticks, and keys, which the pad's motion sensors have not."""
        there, codes = node.capabilities(), self._codes
        return codes.EV_KEY in there and {codes.ecodes[name] for name in STICKS} <= {*dict(there.get(codes.EV_ABS, ()))}

    def _check(self) -> None:
        if "/" in self.name:  # of two pads at one adapter, too, the one that is named
            for path in self.nodes[1:]:
                self._nodes.pop(path).close()
        if len(self._nodes) > 1:
            raise DeviceError(f"{self.name}: {len(self._nodes)} gamepads are one device. Name the path of one: "
                              f"{listed(sorted(self._nodes))}")  # fmt: skip
        there = dict(self._node.capabilities().get(self._codes.EV_ABS, ()))
        codes = self._codes.ecodes
        missing = [name for name in STICKS if codes[name] not in there]
        if missing:
            raise DeviceError(
                f"{self.name}: no gamepad with two sticks, it lacks {listed(missing)}. Name another device"
            )
        self._axes, self._positions = {}, {}
        for name, (number, sign) in {**STICKS, **TRIGGERS, **CROSS}.items():
            info = there.get(codes[name])
            if info is None or info.max <= info.min:
                continue
            rests = info.min if name in TRIGGERS else (info.min + info.max) // 2
            span = float(info.max - rests if name in TRIGGERS else min(info.max - rests, rests - info.min))
            dead = max(self._dead_zone, info.flat / span) if name in STICKS else 0.0
            self._axes[codes[name]] = _Axis(number, sign, rests, span, min(dead, 0.9))
        self._read_axes()

    def _read_axes(self) -> None:
        for code in self._axes:
            self._positions[code] = self._node.absinfo(code).value

    def _resume(self, now: float) -> None:
        super()._resume(now)
        self._read_axes()

    def _moved(self, code: int, value: int) -> None:
        if code in self._axes:
            self._positions[code] = value

    def _look(self) -> Sample:
        self._take_events()
        twist = np.zeros(AXES)
        for code, axis in self._axes.items():
            share = (self._positions[code] - axis.rests) / axis.span
            beyond = max(abs(share) - axis.dead, 0.0) / (1.0 - axis.dead)
            twist[axis.number] += axis.sign * np.copysign(beyond, share)
        buttons = tuple(code in self._held and name not in self._keys for code, name in self._named.items())
        return Sample(np.clip(twist, -1.0, 1.0), None, buttons, self._clock(), True)
