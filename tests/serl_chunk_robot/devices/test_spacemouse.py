"""SpaceMice through all of pyspacemouse and easyhid, over a stand-in of hidapi that feeds raw reports."""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path

import numpy as np
import pyspacemouse
import pytest
from fake_hid import PRO_WIRELESS, buttons, motion, rotation, translation
from robot_served import wait

from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.spacemouse import RULE, SpaceMouse, open_mice


def test_at_rest_a_mouse_that_is_silent_is_alive(hid, opened):
    mouse = hid.mouse()
    device = opened(SpaceMouse, mouse.path, silence=0.02)
    time.sleep(0.1)  # longer than the silence
    first = device.read()
    assert (first.buttons, first.joints, first.twist.any()) == ((False, False), None, False)
    wait(lambda: device.read().stamp > first.stamp and device.read().alive)
    mouse.push(translation(y=-3))
    wait(lambda: device.read().twist.any())
    time.sleep(0.1)
    assert device.read().alive, "a mouse that is almost at rest may be silent"
    assert device.read().twist.any()
    device.close()
    assert (mouse.handles, device.read().alive) == ([], False)


def test_axes_are_those_of_ros_and_readings_are_clipped(hid, opened):
    mouse = hid.mouse()
    device = opened(SpaceMouse, mouse.path, silence=math.inf)
    for report, axis, value in (
        (translation(y=-350), 0, 1),  # pushed away from the user: forward
        (translation(x=-350), 1, 1),  # to the left
        (translation(z=-350), 2, 1),  # pulled up
        (translation(z=500), 2, -1),
        (rotation(b=-350), 3, 1),  # right edge down: roll about the way forward
        (rotation(a=-350), 4, 1),  # front edge down: pitch about the left
        (rotation(c=-175), 5, 0.5),  # to the left, seen from above
    ):
        mouse.push(report)
        wait(lambda: device.read().twist.any())
        np.testing.assert_array_equal(device.read().twist, np.where(np.arange(6) == axis, value, 0))
        mouse.push(translation(), rotation())
        wait(lambda: not device.read().twist.any())


SPECS = {name: (vendor, product) for name, vendor, product in pyspacemouse.get_supported_devices()}


@pytest.mark.parametrize("model", sorted(SPECS))
def test_every_supported_model_has_its_axes_and_buttons(hid, opened, model):
    spec = pyspacemouse.loader.get_device_specs()[model]
    mouse = hid.mouse(ids=SPECS[model])
    device = opened(SpaceMouse, silence=math.inf)
    one = spec.mappings["roll"].channel == 1
    mouse.push(*([motion(0, -350, 0, 0, 0, -350)] if one else [translation(y=-350), rotation(c=-350)]))
    wait(lambda: device.read().twist[5] != 0)
    np.testing.assert_array_equal(device.read().twist, [1, 0, 0, 0, 0, 1])
    assert len(device.read().buttons) == len(spec.button_specs) in (0, 2, 15, 21, 22)
    if spec.button_specs:
        last = spec.button_specs[-1]
        mouse.push(buttons(1 << 8 * (last.byte - 1) + last.bit))
        wait(lambda: any(device.read().buttons))
        assert device.read().buttons == (*[False] * (len(spec.button_specs) - 1), True)
        mouse.push(buttons(0))
        wait(lambda: not any(device.read().buttons))


def test_a_deflected_mouse_that_falls_silent_stops_and_is_not_alive(hid, opened, caplog):
    mouse = hid.mouse()
    device = opened(SpaceMouse, mouse.path, silence=0.1)
    wait(lambda: mouse.push(translation(y=-350), rotation()) or device.read().twist[0] == 1.0)
    wait(lambda: not device.read().alive)  # its zeros never come
    assert not device.read().twist.any()
    mouse.push(translation(y=-350))
    wait(lambda: device.read().alive)
    mouse.push(translation(), rotation())
    wait(lambda: device.read().alive and not device.read().twist.any())
    assert [r for r in caplog.records if "deflected and silent" in r.message]


def test_another_mouse_under_the_same_path_is_refused(hid, opened, caplog):
    caplog.set_level(logging.INFO)
    mouse = hid.mouse(serial="A")
    device = opened(SpaceMouse, mouse.path)
    mouse.unplug()
    wait(lambda: not device.read().alive)
    mouse.serial = "B"
    mouse.plug()
    wait(lambda: len(hid.opened) > 2)
    assert not device.read().alive
    wait(lambda: not mouse.handles)  # none is kept
    mouse.serial = "A"
    wait(lambda: device.read().alive)
    assert any("now another mouse" in record.message for record in caplog.records)


def test_two_mice_are_two_devices_and_two_paths_of_one_are_refused(hid, tmp_path):
    left, right = hid.mouse("hidraw3"), hid.mouse("hidraw1")
    paths = [str(tmp_path / name) for name in ("left", "right")]
    for path, mouse in zip(paths, (left, right), strict=True):
        (tmp_path / path).symlink_to(mouse.path)
    mice = open_mice(paths, 2)
    assert [mouse.name for mouse in mice] == paths
    left.push(translation(y=-350))
    wait(lambda: mice[0].read().twist.any())
    time.sleep(0.05)
    assert not mice[1].read().twist.any()
    for mouse in mice:
        mouse.close()
    for path, named in ((paths[1], "one mouse, expected two.*hidraw3"), (str(tmp_path / "hidraw7"), "no such mouse")):
        with pytest.raises(DeviceError, match=named + r".*\(SpaceMouseCompact\)"):
            open_mice([right.path, path], 2)
        assert right.handles == [], "the first one is closed"


def test_the_first_interface_of_a_receiver_that_moves_is_the_mouse(hid, opened, caplog):
    interfaces = hid.receiver(0, "usb-1")
    device = opened(SpaceMouse)
    moving, unrelated = interfaces[3], interfaces[1]
    unrelated.unplug()
    wait(lambda: len(device.interfaces) == 4)
    assert not any("commands nothing" in record.message for record in caplog.records), "it is no loss"
    sample = device.read()
    assert (sample.alive, sample.twist.any(), sample.buttons) == (True, False, (False,) * 15), "at rest until then"
    moving.push(buttons(1), motion(0, -350, 0, 0, 0, 0))
    wait(lambda: device.read().twist[0] == 1.0)
    assert (device.interfaces, device.read().buttons[0]) == ((moving.path,), True)
    assert not any(each.handles for each in interfaces if each is not moving)
    moving.push(motion(*[0] * 6))
    interfaces[0].push(motion(350, 0, 0, 0, 0, 0))
    interfaces[2].unplug()
    wait(lambda: not device.read().twist.any())
    assert device.read().alive
    moving.unplug()
    wait(lambda: not device.read().alive)
    wait(lambda: len([r for r in caplog.records if "lost" in r.message]) == 2)
    time.sleep(0.06)
    assert not device.read().alive, "the receiver alone is no mouse"
    moving.plug()
    wait(lambda: device.read().alive)
    assert device.interfaces == (moving.path,)


def test_receivers_are_told_apart_by_their_place_and_chosen_by_a_path(hid, opened):
    first, second = hid.receiver(0, "usb-1"), hid.receiver(5, "usb-2", axes=(2, 3))
    with pytest.raises(DeviceError, match=r"several.*hidraw4 \(Universal.*hidraw9 \(Universal"):
        open_mice()
    with pytest.raises(DeviceError, match="one mouse, expected two"):
        open_mice([first[0].path, first[1].path], 2)
    device = opened(SpaceMouse, second[0].path)
    assert device.interfaces == (second[2].path, second[3].path), "a keyboard's reports move nothing"
    first[2].push(motion(350, 0, 0, 0, 0, 0))
    second[3].push(motion(0, -350, 0, 0, 0, 0))
    wait(lambda: device.read().twist.any())
    np.testing.assert_array_equal(device.read().twist, [1, 0, 0, 0, 0, 0])


def test_one_mouse_needs_no_path_several_do_and_what_is_no_mouse_is_refused(hid, tmp_path):
    keyboard = hid.mouse("hidraw2", (0x046D, 0xC31C))
    none = r"hidraw2: no mouse that pyspacemouse supports.*Plugged in: none"
    for path, match in ((keyboard.path, none), ("", "none is plugged in"), (str(tmp_path), ": no such mouse")):
        with pytest.raises(DeviceError, match=match):
            SpaceMouse(path)
    first = hid.mouse("hidraw0")
    open_mice()[0].close()
    assert hid.opened == [first.path]
    hid.mouse("hidraw1", PRO_WIRELESS)
    with pytest.raises(DeviceError, match=r"several.*hidraw0 \(SpaceMouseCompact\), .*hidraw1 \(SpaceMouseProWireless"):
        open_mice()


def test_missing_rights_are_named_with_the_line_of_udev(hid, monkeypatch):
    mouse = hid.mouse()
    mouse.denied = True
    rules = r'hidraw0: not permitted.*ATTRS\{idVendor\}=="046d\|256f".*usermod -aG input'
    for permitted, named in ((False, rules), (True, "hidraw0: cannot be opened")):
        monkeypatch.setattr(os, "access", lambda path, mode: permitted)  # noqa: B023
        with pytest.raises(DeviceError, match=named):
            SpaceMouse(mouse.path)
    assert RULE in (Path(__file__).parents[3] / "docs/operator.md").read_text()
    assert {f"{vendor:04x}" for vendor, _ in SPECS.values()} == {"046d", "256f"}, "of every supported mouse"
    assert {f"{product:04x}"[:2] for _, product in SPECS.values()} == {"c6"}
    mouse.denied = False
    monkeypatch.undo()
    monkeypatch.setattr(hid, "hid_read", lambda *_: -1)
    with pytest.raises(DeviceError, match="hidraw0: cannot be read"):
        SpaceMouse(mouse.path)
    assert mouse.handles == []
