"""Gamepads with two sticks, by evdev."""

from __future__ import annotations

import time
from typing import Callable, Collection, Dict, Mapping, NamedTuple

import numpy as np

from serl_chunk_robot.devices.base import AXES, DeviceError, Sample, listed
from serl_chunk_robot.devices.evdev_device import EvdevDevice

BUTTONS = (
    "BTN_SOUTH", "BTN_EAST", "BTN_NORTH", "BTN_WEST", "BTN_TL", "BTN_TR", "BTN_SELECT", "BTN_START", "BTN_MODE",
    "BTN_THUMBL", "BTN_THUMBR",
)  # fmt: skip
NAMES = tuple(name[4:].lower() for name in BUTTONS)
STICKS = {"ABS_Y": (0, -1.0), "ABS_X": (1, -1.0), "ABS_RY": (4, -1.0), "ABS_RX": (5, -1.0)}  # up and left are negative
TRIGGERS = {"ABS_RZ": (2, 1.0), "ABS_Z": (2, -1.0)}
CROSS = {"ABS_HAT0X": (3, 1.0)}


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

    Raises:
        DeviceError: as `EvdevDevice`; a device without two sticks, or a dead zone outside [0, 1).
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
        return {self._codes.ecodes[name]: shown for name, shown in zip(BUTTONS, NAMES)}

    def _check(self) -> None:
        there = dict(self._device.capabilities(absinfo=True).get(self._codes.EV_ABS, ()))
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
            self._positions[code] = self._device.absinfo(code).value

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
