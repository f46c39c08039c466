"""Keyboards, pedals and gamepads, with a stand-in of evdev: finding, grabbing, events, losing and opening again."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import types

import evdev_stand_in
import numpy as np
import pytest
from evdev_stand_in import STICKS, XBOX, AbsInfo
from robot_served import wait

from serl_chunk_robot.devices import evdev_device, polling
from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.evdev_device import MOVES, PAD_BUTTONS, FootPedal, Gamepad, Keyboard

PEDAL = "usb-PCsensor_FootSwitch-event-kbd"


@pytest.fixture
def pedal(inputs):
    return inputs.device(PEDAL)


def events(device) -> list[tuple[str, bool]]:
    return [(event.name, event.pressed) for event in device.keys()]


def test_a_device_is_found_by_a_part_of_its_name_and_grabbed(inputs, pedal, opened):
    inputs.device("usb-Logitech_Keyboard-event-kbd")
    device = opened(FootPedal, "FootSwitch")
    assert pedal.grabbed is pedal.handles[0]
    assert (device.name, device.read().alive) == ("FootSwitch", True)
    with pytest.raises(DeviceError, match=f"{PEDAL}: cannot be opened and grabbed.*fuser"):
        FootPedal(str(pedal.path))
    assert len(pedal.handles) == 1
    device.close()
    assert pedal.grabbed is None


@pytest.mark.parametrize(("name", "what"), [("Foot", "2 devices"), ("/dev/input/by-id/none", "no such device")])
def test_a_device_that_is_not_there_or_not_one_is_refused_with_those_that_are(inputs, name, what, monkeypatch):
    for k in (1, 2):
        inputs.device(f"usb-Foot{k}-event-kbd")
    with pytest.raises(DeviceError, match=f"'{name}': {what}.*usb-Foot1-event-kbd, usb-Foot2-event-kbd"):
        FootPedal(name)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DeviceError, match=r"usb-Foot1-event-kbd: not permitted.*usermod -aG input"):
        FootPedal("Foot1")


KBD, JOY = "usb-Foot-event-kbd", "usb-Foot-if01-event-kbd"


@pytest.mark.parametrize("name", ["Foot", KBD])
def test_the_event_nodes_of_one_device_are_one_and_those_that_were_not_used_may_be_lost(
    inputs, opened, caplog, name, tmp_path
):
    caplog.set_level(logging.INFO)
    unused, used = inputs.device(KBD, phys="usb-1/input0", keys="KEY_A"), inputs.device(JOY, phys="usb-1/input1")
    used.keys = unused.keys
    mouse = inputs.device("usb-Foot-event-mouse", phys="usb-1/input2", keys="BTN_SOUTH")
    other = inputs.device("usb-Other-event-kbd", phys="usb-2/input0", keys="KEY_A")
    device = opened(FootPedal, str(unused.path) if name == KBD else name)
    assert [bool(each.grabbed) for each in (unused, used, mouse, other)] == [True, True, False, False]
    used.press("KEY_A")
    wait(lambda: device.read().buttons[0])
    unused.unplug()
    wait(lambda: len(device.nodes) == 1)
    assert (device.read().alive, device.read().buttons[0]) == (True, True)
    used.unplug()
    wait(lambda: not device.read().alive)
    assert sum("It commands nothing" in record.message for record in caplog.records) == 1
    unused.plug()
    wait(lambda: any(f"{JOY} is not there any more" in record.message for record in caplog.records))
    assert not device.read().alive, "not without the node that was used"
    used.plug()
    wait(lambda: device.read().alive)
    device.close()
    inputs.device("usb-Foot2-event-kbd", phys="usb-3/input0", keys="KEY_A")
    with pytest.raises(DeviceError, match="'Foot': 2 devices"):
        FootPedal("Foot")


def test_a_gamepad_is_the_node_with_sticks_and_of_two_at_one_adapter_the_named_one(inputs, opened):
    motion = inputs.device("usb-Pad-event-motion", dict.fromkeys(STICKS, AbsInfo(0, -9, 9)), phys="usb-1/input0")
    pads = [inputs.device(f"usb-Pad-event-joystick{k}", XBOX, phys="usb-1/input0") for k in range(2)]
    motion.keys = None  # as the kernel gives it
    with pytest.raises(DeviceError, match=r"Pad: 2 gamepads are one device.*joystick0, .*joystick1"):
        Gamepad("Pad")
    device = opened(Gamepad, str(pads[1].path))
    for user in (motion, *pads[::-1]):
        user.move("ABS_Y", 9 if user is motion else -32768)
    wait(lambda: device.read().twist.any())
    assert device.nodes == (str(pads[1].path),)


def test_the_grab_waits_until_no_key_is_down_and_what_was_typed_before_is_dropped(pedal, opened):
    pedal.press("KEY_A")

    def lift():
        wait(lambda: bool(pedal.handles))
        assert pedal.grabbed is None
        for key, value in (("KEY_B", 1), ("KEY_B", 0), ("KEY_A", 0)):
            pedal.press(key, value)

    lifting = threading.Thread(target=lift)
    lifting.start()
    device = opened(FootPedal, "Foot")
    lifting.join()
    assert pedal.grabbed is not None
    pedal.press("KEY_C")
    wait(lambda: device.read().buttons == (False, False, True))
    assert events(device) == [("right", True)]


def test_a_key_that_stays_down_is_pressed_from_the_start_and_dropped_events_are_replaced_by_the_state(
    pedal, opened, monkeypatch
):
    monkeypatch.setattr(evdev_device, "LIFTS", 0.02)
    pedal.press("KEY_A")
    device = opened(FootPedal, "Foot")
    assert (device.read().buttons, device.keys()) == ((True, False, False), [])
    pedal.drop(("KEY_A", 0), ("KEY_C", 1))
    wait(lambda: device.read().buttons == (False, False, True))
    assert events(device) == [("left", False), ("right", True)]


def test_a_lost_device_sends_no_release_and_its_handle_is_closed_at_once(pedal, opened, monkeypatch):
    """The kernel gives its number to no other device before: one that is plugged in again would have another path."""
    monkeypatch.setattr(polling, "AGAIN", 3600.0)
    device = opened(FootPedal, "Foot")
    pedal.press("KEY_A")
    wait(lambda: device.read().buttons[0])
    pedal.unplug()
    wait(lambda: not pedal.handles)
    assert events(device) == [("left", True)]


def test_names_of_the_stand_in_are_those_of_evdev():
    if importlib.util.find_spec("evdev") is None:
        pytest.skip("evdev is not installed")
    import evdev

    real = evdev.ecodes
    names = {*real.ecodes, *(name for name in ("EV_SYN", "EV_KEY", "EV_ABS", "SYN_DROPPED") if hasattr(real, name))}
    assert {*evdev_stand_in.CODES} <= names
    for name in ("fileno", "read", "grab", "active_keys", "absinfo", "capabilities", "close"):
        assert callable(getattr(evdev.InputDevice, name))
    ours = types.SimpleNamespace(ecodes=evdev_stand_in.CODES)
    assert {*evdev_device.key_codes(ours)} <= {*evdev_device.key_codes(real)}


def test_a_held_key_moves_until_it_is_let_go_and_opposite_ones_cancel(inputs, opened):
    user = inputs.device("usb-Keyboard-event-kbd")
    device = opened(Keyboard, "Keyboard")
    assert sorted(MOVES.values()) == [(axis, sign) for axis in range(6) for sign in (-1.0, 1.0)]
    for key, (axis, sign) in MOVES.items():
        user.press(f"KEY_{key.upper()}")
        wait(lambda: device.read().twist.any())
        np.testing.assert_array_equal(device.read().twist, np.where(np.arange(6) == axis, sign, 0))
        user.press(f"KEY_{key.upper()}", 2)  # repeated
        user.press(f"KEY_{key.upper()}", 0)
        wait(lambda: not device.read().twist.any())
    for key in ("UP", "DOWN", "LEFT", "V"):
        user.press(f"KEY_{key}")
    wait(lambda: device.read().buttons == (False, True))
    np.testing.assert_array_equal(device.read().twist, [0, 1, 0, 0, 0, 0])
    user.press("KEY_DOWN", 0)
    wait(lambda: device.read().twist[0] == 1.0)
    assert device.keys() == [], "moves and buttons are no events"
    device.close()
    device = opened(Keyboard, "Keyboard", {"w": (0, 1.0), "up": (0, 1.0)}, ("z",))
    for key in ("W", "UP", "Z"):
        user.press(f"KEY_{key}")
    wait(lambda: any(device.read().buttons))
    np.testing.assert_array_equal(device.read().twist, [1, 0, 0, 0, 0, 0], "two keys of one end are no faster")


# Gamepads.


@pytest.fixture
def pad(inputs, opened):
    user = inputs.device("usb-Xbox-event-joystick", XBOX)
    return opened(Gamepad, "Xbox"), user


def test_sticks_triggers_and_cross_move_and_buttons_are_readings_and_events(pad):
    device, user = pad
    for name, value, axis, sign in (
        ("ABS_Y", -32768, 0, 1), ("ABS_X", -32768, 1, 1), ("ABS_RZ", 255, 2, 1), ("ABS_Z", 255, 2, -1),
        ("ABS_HAT0X", 1, 3, 1), ("ABS_RY", -32768, 4, 1), ("ABS_RX", -32768, 5, 1), ("ABS_X", 32767, 1, -1),
    ):  # fmt: skip
        user.move(name, value)
        wait(lambda: device.read().twist.any())
        np.testing.assert_allclose(device.read().twist, np.where(np.arange(6) == axis, sign, 0), atol=1e-4)
        user.move(name, 0)
        wait(lambda: not device.read().twist.any())
    user.press("BTN_TR")
    wait(lambda: any(device.read().buttons))
    assert device.read().buttons == tuple(name == "BTN_TR" for name in PAD_BUTTONS)
    user.press("BTN_TR", 0)
    wait(lambda: not any(device.read().buttons))
    assert events(device) == [("tr", True), ("tr", False)]


def test_a_sticks_dead_zone_is_rest_and_it_moves_from_its_edge_on(pad, inputs, opened):
    device, user = pad
    user.move("ABS_Y", -3200)
    user.move("ABS_X", -18022)  # 0.55
    wait(lambda: device.read().twist.any())
    np.testing.assert_allclose(device.read().twist, [0, 0.5, 0, 0, 0, 0], atol=1e-3)
    user.move("ABS_Y", -3604)  # 0.11
    wait(lambda: device.read().twist[0] > 0)
    assert device.read().twist[0] == pytest.approx(0.01 / 0.9, abs=1e-3)
    sticks = dict.fromkeys(STICKS, AbsInfo(128, 0, 255, flat=32))  # of eight bits, which rest in their middle
    user = inputs.device("usb-Sony-event-joystick", {**XBOX, **sticks})
    device = opened(Gamepad, "Sony", dead_zone=0.0)
    assert not device.read().twist.any()
    user.move("ABS_Y", 150)  # within the pad's own zone
    user.move("ABS_X", 255)
    wait(lambda: device.read().twist.any())
    np.testing.assert_allclose(device.read().twist, [0, -1, 0, 0, 0, 0])
    user.drop(("ABS_X", 128))  # events that were dropped are replaced by the state
    wait(lambda: not device.read().twist.any())
    user = inputs.device("usb-Pad-event-joystick", {name: XBOX[name] for name in ("ABS_X", "ABS_Y")})
    with pytest.raises(DeviceError, match=r"Pad: no gamepad.*lacks ABS_RY, ABS_RX"):
        Gamepad("Pad")
    assert user.handles == []
