"""A GELLO, over the vendor's SDK on a pseudo-terminal where that is installed, and over a stand-in of it."""

from __future__ import annotations

import importlib.util
import math

import dynamixel_bus
import numpy as np
import pytest
from robot_served import wait

from serl_chunk_robot.devices import polling
from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.gello import Gello

IDS = (1, 2, 7)
OPTIONS = {"ids": IDS, "offsets": (math.pi, 1.0), "signs": (1, -1), "gripper_closed": 2.0, "gripper_open": 3.0}


@pytest.fixture
def servos():
    made = dynamixel_bus.Servos(*IDS)
    made.turn(1, math.pi + 0.5)
    made.turn(2, 1.5)
    made.turn(7, 2.25)
    return made


@pytest.fixture(params=["stand-in", "SDK"])
def port(request, servos):
    if request.param == "SDK" and importlib.util.find_spec("dynamixel_sdk") is None:
        pytest.skip("dynamixel-sdk is not installed")
    bus = dynamixel_bus.on_a_terminal if request.param == "SDK" else dynamixel_bus.stand_in
    with bus(servos) as port:
        yield port


def test_servos_are_joints_and_a_gripper(port, servos, opened):
    device = opened(Gello, port, **OPTIONS)
    reading = device.read()
    np.testing.assert_allclose(reading.joints, [0.5, -0.5, 0.25], atol=2e-3)
    assert (reading.alive, reading.twist, reading.buttons) == (True, None, ())
    servos.turn(1, math.pi - 0.5)
    servos.turn(7, 5.0)
    wait(lambda: device.read().joints[0] < 0 and device.read().joints[2] > 0.9)
    np.testing.assert_allclose(device.read().joints, [-0.5, -0.5, 1.0], atol=2e-3)
    device.close()
    bare = opened(Gello, port, IDS, (math.pi, 1.0, 2.0), (1, -1, 1))  # every servo is a joint
    np.testing.assert_allclose(bare.read().joints, [-0.5, -0.5, 3.0], atol=2e-3)


def test_a_joint_is_continuous_and_full_turns_are_taken_off_at_the_start(port, servos, opened):
    servos.turn(1, math.pi + 0.5 - math.tau)  # the register is signed
    servos.turn(2, 1.5 + math.tau)
    device = opened(Gello, port, **OPTIONS)
    np.testing.assert_allclose(device.read().joints, [0.5, -0.5, 0.25], atol=2e-3)
    servos.turn(2, 1.0 + math.tau - 3.5)
    wait(lambda: device.read().joints[1] > 0)
    np.testing.assert_allclose(device.read().joints, [0.5, 3.5, 0.25], atol=2e-3)
    servos.turn(1, 0.2 + math.pi - math.tau)
    wait(lambda: device.read().joints[0] < 0.4)
    servos.turn(2, -0.2)
    wait(lambda: device.read().joints[1] > 4)
    np.testing.assert_allclose(device.read().joints, [0.2, 1.2 + math.tau, 0.25], atol=2e-3)


def test_a_servo_that_falls_silent_is_a_loss_until_it_answers(port, servos, opened, monkeypatch, caplog):
    device = opened(Gello, port, **OPTIONS)
    wait(lambda: device.read().alive)
    last = device.read().joints
    monkeypatch.setattr(polling, "SILENT", 0.2)
    servos.mute.add(2)
    wait(lambda: not device.read().alive)
    np.testing.assert_array_equal(device.read().joints, last)
    servos.mute.clear()
    wait(lambda: device.read().alive)
    assert not caplog.records  # the line was not opened again
    device.close()
    servos.mute.add(2)
    with pytest.raises(DeviceError, match="no answer of servo 2 at 57600 baud"):
        Gello(port, **OPTIONS)
    servos.unplugged = True
    with pytest.raises(DeviceError):
        Gello(port, **OPTIONS)
