"""What every device must do: one that is lost rests and is not alive, and it comes back under its name."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from typing import Any, NamedTuple

import dynamixel_bus
import evdev_stand_in
import fake_hid
import lerobot_leaders
import numpy as np
import pytest
from evdev_stand_in import AbsInfo
from robot_served import wait

from serl_chunk_robot.devices import lerobot_teleoperator
from serl_chunk_robot.devices.evdev_device import FootPedal, Gamepad
from serl_chunk_robot.devices.gello import Gello
from serl_chunk_robot.devices.lerobot_teleoperator import LeRobotTeleoperator
from serl_chunk_robot.devices.spacemouse import SpaceMouse

XBOX = {name: AbsInfo(0, -32768, 32767) for name in ("ABS_X", "ABS_Y", "ABS_Z", "ABS_RX", "ABS_RY", "ABS_RZ",
                                                     "ABS_HAT0X", "ABS_HAT0Y")}  # fmt: skip


class Rig(NamedTuple):
    """A device, and what its user does."""

    device: Any
    deflect: Any
    lose: Any
    give_back: Any


def pedal(stack, folder):
    user = stack.enter_context(evdev_stand_in.installed(folder)).device("usb-Foot-event-kbd")
    return Rig(FootPedal("Foot"), lambda: user.press("KEY_A"), user.unplug, user.plug)


def gamepad(stack, folder):
    user = stack.enter_context(evdev_stand_in.installed(folder)).device("usb-Pad-event-joystick", XBOX)
    return Rig(Gamepad("Pad"), lambda: user.move("ABS_Y", -32768), user.unplug, user.plug)


def spacemouse(stack, folder):
    mouse = stack.enter_context(fake_hid.installed(folder)).mouse()
    deflect = lambda: mouse.push(fake_hid.translation(y=-350), fake_hid.buttons(1))  # noqa: E731
    return Rig(SpaceMouse(mouse.path, silence=math.inf), deflect, mouse.unplug, mouse.plug)


def gello(stack, folder):
    servos = dynamixel_bus.Servos(1, 2)
    port = stack.enter_context(dynamixel_bus.stand_in(servos))
    unplugged = lambda value: lambda: setattr(servos, "unplugged", value)  # noqa: E731
    device = Gello(port, (1, 2), (math.pi, math.pi), (1, 1))
    return Rig(device, lambda: servos.turn(1, 4.0), unplugged(True), unplugged(False))


def lerobot(stack, folder):
    port = stack.enter_context(lerobot_leaders.installed("/dev/left"))["/dev/left"]
    broken = lambda text: lambda: setattr(port, "broken", text)  # noqa: E731
    device = LeRobotTeleoperator(type="so101_leader", params={"port": "/dev/left", "id": "mine"})
    return Rig(device, lambda: port.at.__setitem__(0, 2500), broken("There is no status packet!"), broken(""))


@pytest.fixture(params=[pedal, gamepad, spacemouse, gello, lerobot])
def rig(request, tmp_path, monkeypatch):
    monkeypatch.setattr(lerobot_teleoperator, "SILENT", 0.05)
    with contextlib.ExitStack() as stack:
        rig = request.param(stack, tmp_path)
        stack.callback(rig.device.close)
        yield rig


def places(reading) -> list[float]:
    return [*(reading.buttons or ()), *(() if reading.twist is None else reading.twist),
            *(() if reading.joints is None else reading.joints)]  # fmt: skip


def test_a_lost_device_rests_and_is_opened_again_by_its_name(rig, caplog):
    caplog.set_level(logging.INFO)
    device, first = rig.device, rig.device.read()
    rig.deflect()
    wait(lambda: device.read().alive and places(device.read()) != places(first))
    moved = device.read()
    rig.lose()
    wait(lambda: not device.read().alive)
    lost = device.read()
    assert not any(lost.buttons or ())
    assert lost.twist is None or not lost.twist.any()
    if lost.joints is not None:
        np.testing.assert_allclose(lost.joints, moved.joints, atol=1e-9)
    time.sleep(0.1)  # several attempts
    assert not device.read().alive
    rig.give_back()
    wait(lambda: device.read().alive)
    messages = [record.message for record in caplog.records]
    assert len([m for m in messages if m.startswith(f"{device.name}: lost")]) == 1
    assert messages.count(f"{device.name}: connected again.") == 1
    device.close()
    assert not device.read().alive
    device.close()
