"""Keyboards and foot pedals, with a stand-in of evdev."""

from __future__ import annotations

import numpy as np
import pytest
from robot_served import wait

from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.evdev_keys import MOVES, FootPedal, Keyboard

CONSOLE = ("space", "enter", "escape", "x", "c", "s", "1", "f", "0", "backspace", "u", "r", "g", "p", "q")


@pytest.fixture
def typed(inputs, opened):
    """A keyboard: the device, and what its user does."""
    user = inputs.device("usb-Keyboard-event-kbd")
    return opened(Keyboard, "Keyboard"), user


@pytest.mark.parametrize("key", MOVES)
def test_a_held_key_moves_until_it_is_let_go(typed, key):
    device, user = typed
    axis, sign = MOVES[key]
    expected = np.zeros(6)
    expected[axis] = sign
    user.press(f"KEY_{key.upper()}")
    wait(lambda: device.read().twist.any())
    np.testing.assert_array_equal(device.read().twist, expected)
    user.press(f"KEY_{key.upper()}", 2)  # repeated
    user.press(f"KEY_{key.upper()}", 0)
    wait(lambda: not device.read().twist.any())
    assert device.keys() == []


def test_keys_that_move_reach_every_end_of_every_axis():
    assert sorted(MOVES.values()) == [(axis, sign) for axis in range(6) for sign in (-1.0, 1.0)]


def test_opposite_keys_cancel_and_two_axes_add(typed):
    device, user = typed
    for key in ("UP", "DOWN", "LEFT"):
        user.press(f"KEY_{key}")
    wait(lambda: device.read().twist[1] == 1.0)
    np.testing.assert_array_equal(device.read().twist, [0, 1, 0, 0, 0, 0])
    user.press("KEY_DOWN", 0)
    wait(lambda: device.read().twist[0] == 1.0)


def test_two_keys_of_one_end_are_no_faster_than_one(inputs, opened):
    user = inputs.device("usb-Keyboard-event-kbd")
    device = opened(Keyboard, "Keyboard", {"w": (0, 1.0), "up": (0, 1.0)}, ("z",))
    for key in ("W", "UP", "Z"):
        user.press(f"KEY_{key}")
    wait(lambda: any(device.read().buttons))
    np.testing.assert_array_equal(device.read().twist, [1, 0, 0, 0, 0, 0])


def test_other_keys_are_events_with_a_terminals_names(typed):
    device, user = typed
    for key in CONSOLE:
        name = {"escape": "ESC"}.get(key, key.upper())
        user.press(f"KEY_{name}")
        user.press(f"KEY_{name}", 2)
        user.press(f"KEY_{name}", 0)
    user.press("KEY_KPENTER")
    user.press("KEY_KP1")
    events = []
    wait(lambda: events.extend(device.keys()) or len(events) == 2 * len(CONSOLE) + 2)
    assert [event.name for event in events[::2]] == [*CONSOLE, "enter"]
    assert [event.pressed for event in events] == [True, False] * len(CONSOLE) + [True, True]
    assert events[-1].name == "1"
    assert not device.read().twist.any()
    assert sorted(event.stamp for event in events) == [event.stamp for event in events]


def test_buttons_are_no_events(typed):
    device, user = typed
    user.press("KEY_V")
    wait(lambda: device.read().buttons == (False, True))
    assert device.keys() == []


@pytest.mark.parametrize(
    ("options", "parameter", "value"),
    [
        ({"moves": {"hyper": (0, 1.0)}}, "moves, buttons", "'hyper'"),
        ({"buttons": ("z", "up")}, "moves, buttons", "'up'"),
    ],
)
def test_unknown_keys_and_those_with_two_meanings_are_refused(inputs, options, parameter, value):
    inputs.device("usb-Keyboard-event-kbd")
    with pytest.raises(DeviceError, match=value) as error:
        Keyboard("Keyboard", **options)
    assert error.value.parameter == parameter


def test_pedals_are_events_and_buttons_of_their_own_names(inputs, opened):
    user = inputs.device("usb-Foot-event-kbd")
    device = opened(FootPedal, "Foot", {"stop": "b", "go": "1"})
    user.press("KEY_1")
    user.press("KEY_A")
    wait(lambda: device.read().buttons == (False, True))
    user.press("KEY_1", 0)
    wait(lambda: device.read().buttons == (False, False))
    assert [(event.name, event.pressed) for event in device.keys()] == [("go", True), ("go", False)]
    assert device.read().twist is None
    assert device.read().joints is None


@pytest.mark.parametrize("pedals", [{"left": "a", "right": "a"}, {"left": "pedal"}])
def test_wrong_pedals_are_refused(inputs, pedals):
    inputs.device("usb-Foot-event-kbd")
    with pytest.raises(DeviceError, match=repr([*pedals.values()][-1])) as error:
        FootPedal("Foot", pedals)
    assert error.value.parameter == "pedals"
