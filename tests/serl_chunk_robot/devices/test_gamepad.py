"""Gamepads, with a stand-in of evdev."""

from __future__ import annotations

import numpy as np
import pytest
from evdev_stand_in import AbsInfo
from robot_served import wait

from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.gamepad import BUTTONS, Gamepad

STICK, TRIGGER, CROSS = AbsInfo(0, -32768, 32767), AbsInfo(0, 0, 255), AbsInfo(0, -1, 1)
XBOX = {**dict.fromkeys(("ABS_X", "ABS_Y", "ABS_RX", "ABS_RY"), STICK), **dict.fromkeys(("ABS_Z", "ABS_RZ"), TRIGGER),
        "ABS_HAT0X": CROSS, "ABS_HAT0Y": CROSS}  # fmt: skip


@pytest.fixture
def pad(inputs, opened):
    """A pad: the device, and what its user does."""
    user = inputs.device("usb-Xbox-event-joystick", XBOX)
    return opened(Gamepad, "Xbox"), user


@pytest.mark.parametrize(
    ("name", "value", "axis", "sign"),
    [
        ("ABS_Y", -32768, 0, 1), ("ABS_X", -32768, 1, 1), ("ABS_RZ", 255, 2, 1), ("ABS_Z", 255, 2, -1),
        ("ABS_HAT0X", 1, 3, 1), ("ABS_RY", -32768, 4, 1), ("ABS_RX", -32768, 5, 1), ("ABS_X", 32767, 1, -1),
    ],
)  # fmt: skip
def test_sticks_triggers_and_cross_move(pad, name, value, axis, sign):
    device, user = pad
    expected = np.zeros(6)
    expected[axis] = sign
    user.move(name, value)
    wait(lambda: device.read().twist.any())
    np.testing.assert_allclose(device.read().twist, expected, atol=1e-4)
    user.move(name, 0)
    wait(lambda: not device.read().twist.any())


def test_a_sticks_dead_zone_is_rest_and_it_moves_from_its_edge_on(pad):
    device, user = pad
    user.move("ABS_Y", -3200)
    user.move("ABS_X", -18022)  # 0.55
    wait(lambda: device.read().twist.any())
    np.testing.assert_allclose(device.read().twist, [0, 0.5, 0, 0, 0, 0], atol=1e-3)
    user.move("ABS_Y", -3604)  # 0.11
    wait(lambda: device.read().twist[0] > 0)
    assert device.read().twist[0] == pytest.approx(0.01 / 0.9, abs=1e-3)


def test_sticks_of_eight_bits_rest_in_their_middle(inputs, opened):
    sticks = AbsInfo(128, 0, 255, flat=32)
    user = inputs.device(
        "usb-Sony-event-joystick", {**XBOX, **dict.fromkeys(("ABS_X", "ABS_Y", "ABS_RX", "ABS_RY"), sticks)}
    )
    device = opened(Gamepad, "Sony", dead_zone=0.0)
    assert not device.read().twist.any()
    user.move("ABS_Y", 150)  # within the pad's own zone
    user.move("ABS_X", 255)
    wait(lambda: device.read().twist.any())
    np.testing.assert_allclose(device.read().twist, [0, -1, 0, 0, 0, 0])


def test_buttons_are_readings_and_events(pad):
    device, user = pad
    user.press("BTN_TR")
    wait(lambda: any(device.read().buttons))
    assert device.read().buttons == tuple(name == "BTN_TR" for name in BUTTONS)
    user.press("BTN_TR", 0)
    wait(lambda: not any(device.read().buttons))
    assert [(event.name, event.pressed) for event in device.keys()] == [("tr", True), ("tr", False)]


def test_a_lost_pad_rests_and_comes_back_as_its_sticks_are(pad):
    device, user = pad
    user.move("ABS_Y", -32768)
    wait(lambda: device.read().twist[0] == 1.0)
    user.unplug()
    wait(lambda: not device.read().alive)
    assert not device.read().twist.any()
    user.move("ABS_X", -32768)
    user.plug()
    wait(lambda: device.read().alive)
    np.testing.assert_allclose(device.read().twist, [1, 1, 0, 0, 0, 0], atol=1e-4)


def test_axes_that_the_kernel_dropped_are_read_anew(pad):
    device, user = pad
    user.move("ABS_Y", -32768)
    wait(lambda: device.read().twist[0] == 1.0)
    user.drop(("ABS_Y", 0))
    wait(lambda: not device.read().twist.any())


def test_a_device_without_two_sticks_is_refused(inputs):
    user = inputs.device("usb-Pad-event-joystick", {"ABS_X": STICK, "ABS_Y": STICK})
    with pytest.raises(DeviceError, match=r"Pad: no gamepad.*lacks ABS_RY, ABS_RX"):
        Gamepad("Pad")
    assert user.handles == []


@pytest.mark.parametrize("zone", [1.0, -0.1, float("nan")])
def test_a_wrong_dead_zone_is_refused(inputs, zone):
    with pytest.raises(DeviceError, match=repr(zone)) as error:
        Gamepad("Pad", zone)
    assert error.value.parameter == "dead_zone"
