"""SpaceMice through all of pyspacemouse and easyhid, over a stand-in of hidapi that feeds raw reports."""

from __future__ import annotations

import logging
import math
import os
import threading
import time

import fake_hid
import numpy as np
import pyspacemouse
import pytest
from fake_hid import PRO_WIRELESS, buttons, motion, rotation, translation
from robot_served import wait

from serl_chunk_robot.devices import polling
from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.spacemouse import SpaceMouse, connected, open_mice


def held(mouse, *reports: bytes) -> threading.Event:
    """Report again and again, as a mouse that is held, until the event is set."""
    ended = threading.Event()

    def run():
        while not ended.wait(1 / fake_hid.RATE):
            mouse.push(*reports)

    threading.Thread(target=run, daemon=True).start()
    return ended


def test_a_mouse_is_opened_by_its_path_and_at_rest_it_is_alive(hid, opened):
    mouse = hid.mouse()
    device = opened(SpaceMouse, mouse.path, silence=0.02)
    assert (hid.opened, device.name) == ([mouse.path], mouse.path)
    time.sleep(0.1)  # longer than the silence
    first = device.read()
    assert (first.buttons, first.joints, first.twist.any()) == ((False, False), None, False)
    wait(lambda: device.read().stamp > first.stamp and device.read().alive)
    mouse.push(translation(y=-3))
    wait(lambda: device.read().twist.any())
    time.sleep(0.1)
    assert device.read().alive, "a mouse that is almost at rest may be silent"
    assert device.read().twist.any()
    mouse.push(translation(y=-350), buttons(3))
    wait(lambda: all(device.read().buttons))
    device.close()
    reading = device.read()
    assert (reading.alive, reading.buttons, reading.twist.any(), mouse.handles) == (False, (False, False), False, [])
    device.close()


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
        kept = device.read().twist
        np.testing.assert_array_equal(kept, np.where(np.arange(6) == axis, value, 0))
        kept[:] = 9.0
        assert device.read().twist.max() < 9
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
    end = held(mouse, translation(y=-350), rotation())
    wait(lambda: device.read().twist[0] == 1.0 and device.read().alive)
    end.set()  # its zeros never come
    wait(lambda: not device.read().alive)
    assert not device.read().twist.any()
    mouse.push(translation(y=-350))
    wait(lambda: device.read().alive)
    mouse.push(translation(), rotation())
    wait(lambda: device.read().alive and not device.read().twist.any())
    assert [r for r in caplog.records if "deflected and silent" in r.message]


def test_the_zeros_that_a_full_queue_drops_do_not_leave_the_mouse_deflected(hid, opened, monkeypatch):
    mouse = hid.mouse()
    device = opened(SpaceMouse, mouse.path, silence=0.05)
    with mouse.lock:  # the reader waits
        handle = mouse.handles[0]
        handle.queue.extend([translation(y=-350)] * fake_hid.QUEUE)
    mouse.push(translation(), rotation())
    wait(lambda: not handle.queue)
    wait(lambda: not device.read().twist.any())


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


def test_a_reading_of_a_thread_that_hangs_is_not_alive(hid, opened, monkeypatch):
    monkeypatch.setattr(polling, "SILENT", 0.2)
    mouse = hid.mouse()
    device = opened(SpaceMouse, mouse.path)
    mouse.push(translation(y=-350))
    wait(lambda: device.read().twist.any())
    with mouse.lock:  # the library does not return
        wait(lambda: not device.read().alive)
        assert not device.read().twist.any()


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
    hid.opened.clear()
    with pytest.raises(DeviceError, match="one mouse, expected two") as error:
        open_mice([right.path, paths[1]], 2)
    assert error.value.parameter == "paths"
    assert "hidraw3 (SpaceMouseCompact)" in str(error.value)
    assert hid.opened == []
    with pytest.raises(DeviceError, match=r"hidraw7: no such mouse.*hidraw1 \(SpaceMouseCompact\)"):
        open_mice([right.path, str(tmp_path / "hidraw7")], 2)
    assert right.handles == [], "the first one is closed"


def test_one_mouse_needs_no_path_several_do_and_what_is_no_mouse_is_refused(hid, tmp_path):
    keyboard = hid.mouse("hidraw2", (0x046D, 0xC31C))
    (tmp_path / "file").touch()
    for path, match in ((keyboard.path, r"hidraw2: no mouse that pyspacemouse supports.*Plugged in: none"),
                        ("", "none is plugged in"), (str(tmp_path / "file"), "file: no such mouse")):  # fmt: skip
        with pytest.raises(DeviceError, match=match):
            SpaceMouse(path)
    first = hid.mouse("hidraw0")
    (mouse,) = open_mice()
    mouse.close()
    assert hid.opened == [first.path]
    hid.mouse("hidraw1", PRO_WIRELESS)
    with pytest.raises(DeviceError, match=r"several.*hidraw0 \(SpaceMouseCompact\), .*hidraw1 \(SpaceMouseProWireless"):
        open_mice()
    assert len(connected()) == 2


@pytest.mark.parametrize("permitted", [False, True])
def test_missing_rights_are_named_with_the_line_of_udev(hid, monkeypatch, permitted):
    mouse = hid.mouse()
    mouse.denied = True
    monkeypatch.setattr(os, "access", lambda path, mode: permitted)
    with pytest.raises(DeviceError, match="hidraw0: " + ("cannot be opened" if permitted else "not permitted")) as e:
        SpaceMouse(mouse.path)
    assert permitted or ('ATTRS{idVendor}=="046d|256f"' in str(e.value) and "usermod -aG input" in str(e.value))
    assert {f"{vendor:04x}" for vendor, _ in SPECS.values()} == {"046d", "256f"}, "of every supported mouse"
    assert {f"{product:04x}"[:2] for _, product in SPECS.values()} == {"c6"}
    mouse.denied = False
    monkeypatch.undo()
    monkeypatch.setattr(hid, "hid_read", lambda *_: -1)
    with pytest.raises(DeviceError, match="hidraw0: cannot be read"):
        SpaceMouse(mouse.path)
    assert mouse.handles == []
