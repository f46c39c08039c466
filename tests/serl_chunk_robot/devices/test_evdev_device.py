"""What keyboards, pedals and gamepads have in common: finding, grabbing, events, losing and opening again."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
import time

import evdev_stand_in
import pytest
from robot_served import wait

from serl_chunk_robot.devices import evdev_device, polling
from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.evdev_keys import FootPedal

PEDAL = "usb-PCsensor_FootSwitch-event-kbd"


def test_a_device_is_found_by_a_part_of_its_name_and_grabbed(inputs, opened):
    pedal = inputs.device(PEDAL)
    inputs.device("usb-Logitech_Keyboard-event-kbd")
    device = opened(FootPedal, "FootSwitch")
    assert pedal.grabbed is pedal.handles[0]
    assert device.name == "FootSwitch"
    assert device.read().alive
    device.close()
    assert pedal.grabbed is None
    assert not device.read().alive


def test_a_device_that_another_program_grabbed_is_refused(inputs, opened):
    pedal = inputs.device(PEDAL)
    opened(FootPedal, str(pedal.path))
    with pytest.raises(DeviceError, match=f"{PEDAL}: cannot be opened and grabbed.*fuser"):
        FootPedal(str(pedal.path))
    assert len(pedal.handles) == 1


@pytest.mark.parametrize("name", ["Foot", "", "/dev/input/by-id/none"])
def test_a_device_that_is_not_there_or_not_one_is_refused_with_those_that_are(inputs, name):
    for k in (1, 2):
        inputs.device(f"usb-Foot{k}-event-kbd")
    what = "2 devices" if name == "Foot" else "no such device"
    with pytest.raises(DeviceError, match=f"'{name}': {what}.*usb-Foot1-event-kbd, usb-Foot2-event-kbd"):
        FootPedal(name)


def test_missing_rights_are_named_with_the_group(inputs, monkeypatch):
    inputs.device(PEDAL)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DeviceError, match=f"{PEDAL}: not permitted.*usermod -aG input"):
        FootPedal("Foot")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "evdev", None)
    with pytest.raises(DeviceError, match=r"serl-chunk\[devices\]"):
        FootPedal("Foot")


def test_the_grab_waits_until_no_key_is_down_and_what_was_typed_before_is_dropped(inputs, opened):
    pedal = inputs.device(PEDAL)
    pedal.press("KEY_A")

    def lift():
        wait(lambda: bool(pedal.handles))
        assert pedal.grabbed is None
        pedal.press("KEY_B")
        pedal.press("KEY_B", 0)
        pedal.press("KEY_A", 0)

    lifting = threading.Thread(target=lift)
    lifting.start()
    device = opened(FootPedal, "Foot")
    lifting.join()
    assert pedal.grabbed is not None
    pedal.press("KEY_C")
    wait(lambda: device.read().buttons == (False, False, True))
    assert [(event.name, event.pressed) for event in device.keys()] == [("right", True)]


def test_a_key_that_stays_down_is_pressed_from_the_start(inputs, opened, monkeypatch):
    monkeypatch.setattr(evdev_device, "LIFTS", 0.02)
    pedal = inputs.device(PEDAL)
    pedal.press("KEY_A")
    device = opened(FootPedal, "Foot")
    assert device.read().buttons == (True, False, False)
    assert device.keys() == []
    pedal.press("KEY_A", 0)
    wait(lambda: not any(device.read().buttons))


def test_a_lost_device_has_nothing_pressed_sends_no_release_and_is_opened_again(inputs, opened, caplog):
    caplog.set_level(logging.INFO)
    pedal = inputs.device(PEDAL)
    device = opened(FootPedal, "Foot")
    pedal.press("KEY_A")
    wait(lambda: device.read().buttons[0])
    pedal.unplug()
    wait(lambda: not device.read().alive)
    assert device.read().buttons == (False, False, False)
    assert [event.pressed for event in device.keys()] == [True]
    wait(lambda: not pedal.handles)
    wait(lambda: any("no such device" in record.message for record in caplog.records))
    time.sleep(0.1)  # several attempts
    pedal.plug()
    wait(lambda: device.read().alive)
    assert pedal.grabbed is not None
    assert device.read().buttons == (False, False, False)
    pedal.press("KEY_B")
    wait(lambda: device.read().buttons[1])
    texts = [record.message for record in caplog.records]
    assert len([t for t in texts if t.startswith("Foot: lost")]) == 1
    assert len([t for t in texts if t == "Foot: connected again."]) == 1
    assert len([t for t in texts if "no such device" in t]) == 1


def test_events_that_the_kernel_dropped_are_replaced_by_the_state(inputs, opened):
    pedal = inputs.device(PEDAL)
    device = opened(FootPedal, "Foot")
    pedal.press("KEY_A")
    wait(lambda: device.read().buttons[0])
    pedal.drop(("KEY_A", 0), ("KEY_C", 1))
    wait(lambda: device.read().buttons == (False, False, True))
    assert [(e.name, e.pressed) for e in device.keys()] == [("left", True), ("left", False), ("right", True)]


def test_codes_of_the_stand_in_are_those_of_evdev():
    if importlib.util.find_spec("evdev") is None:
        pytest.skip("evdev is not installed")
    import evdev

    real = evdev.ecodes
    names = {**real.ecodes, **{name: getattr(real, name) for name in ("EV_SYN", "EV_KEY", "EV_ABS", "SYN_DROPPED")}}
    assert {name: names[name] for name in evdev_stand_in.CODES} == evdev_stand_in.CODES
    for name in ("fileno", "read", "grab", "active_keys", "absinfo", "capabilities", "close"):
        assert callable(getattr(evdev.InputDevice, name))
    assert {*evdev_device.key_codes(evdev_stand_in_codes())} <= {*evdev_device.key_codes(real)}


def evdev_stand_in_codes():
    import types

    return types.SimpleNamespace(ecodes=evdev_stand_in.CODES)


def test_the_handle_of_a_lost_device_is_closed_at_once(inputs, opened, monkeypatch):
    """The kernel gives its number to no other device before: one that is plugged in again would have another path."""
    monkeypatch.setattr(polling, "AGAIN", 3600.0)
    pedal = inputs.device(PEDAL)
    opened(FootPedal, "Foot")
    pedal.unplug()
    wait(lambda: not pedal.handles)
