"""Foot pedals, and a keyboard of its own, without a screen or terminal: both report keys as they go down and up."""

from __future__ import annotations

import time
from typing import Callable, Dict, Mapping, Sequence, Tuple

import numpy as np

from serl_chunk_robot.devices.base import AXES, DeviceError, Sample, listed
from serl_chunk_robot.devices.evdev_device import SAME, EvdevDevice, key_codes

# Letters and keys that mean nothing to the console: i and k tilt, j and l turn, o and m roll.
MOVES = {
    "up": (0, 1.0), "down": (0, -1.0), "left": (1, 1.0), "right": (1, -1.0), "pageup": (2, 1.0), "pagedown": (2, -1.0),
    "o": (3, 1.0), "m": (3, -1.0), "i": (4, 1.0), "k": (4, -1.0), "j": (5, 1.0), "l": (5, -1.0),
}  # fmt: skip
BUTTONS = ("z", "v")  # that close and open a gripper
PEDALS = {"left": "a", "middle": "b", "right": "c"}  # as foot switches type, unless another program set them


class Keyboard(EvdevDevice):
    """A keyboard whose keys move while they are held, and whose other keys are events.

    It is grabbed: use a second keyboard, as Ctrl-C of the grabbed one reaches no terminal. Keys that move, and those of
    `buttons`, are not among the events of `keys()`, so that no key both moves and means something else.

    Args:
        device: a path, or part of the name of one link in /dev/input/by-id.
        moves: key -> (number of the axis, 1 or -1). Opposite keys add up to 0.
        buttons: keys of the reading's buttons.

    Raises:
        DeviceError: as `EvdevDevice`; an unknown key, or one with two meanings.
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

    Raises:
        DeviceError: as `EvdevDevice`; an unknown key, or one of two pedals.
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
