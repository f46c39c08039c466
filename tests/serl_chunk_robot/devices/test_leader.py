"""Leader arms that are not LeRobot's: GELLO's, and ALOHA's as nodes of ROS, also of a real ROS 1 where there is one."""

from __future__ import annotations

import inspect
import math

import dynamixel_bus
import numpy as np
import pytest
import rclpy_stand_in
import ros1
from robot_served import wait
from xs_arm import POSE

from serl_chunk_robot.devices import leader, polling
from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.gello import Gello
from serl_chunk_robot.devices.leader import leaders_ros1, leaders_ros2

PORT, IDS = "/dev/serial/by-id/usb-FTDI", (1, 2, 7)
OPTIONS = dict(port=PORT, ids=IDS, offsets=(math.pi, 1.0), signs=(1, -1), gripper_closed=2.0, gripper_open=3.0)


@pytest.fixture
def servos():
    made = dynamixel_bus.Servos(*IDS)
    made.turn(1, math.pi + 0.5)
    made.turn(2, 1.5)
    made.turn(7, 2.25)
    with dynamixel_bus.stand_in(made):
        yield made


def test_the_stand_in_has_the_parameters_of_the_sdk():
    sdk = pytest.importorskip("dynamixel_sdk")
    for name in ("PortHandler", "GroupSyncRead"):
        for method, function in vars(getattr(dynamixel_bus, name)).items():
            if inspect.isfunction(function):
                theirs = inspect.signature(getattr(getattr(sdk, name), method)).parameters
                assert len(inspect.signature(function).parameters) == len(theirs), method


def test_servos_are_joints_and_a_gripper(servos, opened):
    device = opened(Gello, **OPTIONS)
    reading = device.read()
    np.testing.assert_allclose(reading.joints, [0.5, -0.5, 0.25], atol=2e-3)
    assert (reading.alive, reading.twist, reading.buttons) == (True, None, ())
    servos.turn(1, math.pi - 0.5)
    servos.turn(7, 5.0)
    wait(lambda: device.read().joints[0] < 0 and device.read().joints[2] > 0.9)
    np.testing.assert_allclose(device.read().joints, [-0.5, -0.5, 1.0], atol=2e-3)
    device.close()
    bare = opened(Gello, PORT, IDS, (math.pi, 1.0, 2.0), (1, -1, 1))  # every servo is a joint
    np.testing.assert_allclose(bare.read().joints, [-0.5, -0.5, 3.0], atol=2e-3)


def test_a_joint_is_continuous_and_full_turns_are_taken_off_at_the_start(servos, opened):
    servos.turn(1, math.pi + 0.5 - math.tau)  # the register is signed
    servos.turn(2, 1.5 + math.tau)
    device = opened(Gello, **OPTIONS)
    np.testing.assert_allclose(device.read().joints, [0.5, -0.5, 0.25], atol=2e-3)
    servos.turn(2, 1.0 + math.tau - 3.5)
    wait(lambda: device.read().joints[1] > 0)
    np.testing.assert_allclose(device.read().joints, [0.5, 3.5, 0.25], atol=2e-3)
    servos.turn(1, 0.2 + math.pi - math.tau)
    wait(lambda: device.read().joints[0] < 0.4)
    servos.turn(2, -0.2)
    wait(lambda: device.read().joints[1] > 4)
    np.testing.assert_allclose(device.read().joints, [0.2, 1.2 + math.tau, 0.25], atol=2e-3)


def test_a_servo_that_falls_silent_is_a_loss_until_it_answers(servos, opened, monkeypatch, caplog):
    device = opened(Gello, **OPTIONS)
    wait(lambda: device.read().alive)
    monkeypatch.setattr(polling, "SILENT", 0.2)
    servos.mute.add(2)
    wait(lambda: not device.read().alive)
    servos.mute.clear()
    wait(lambda: device.read().alive)
    assert not caplog.records  # the line was not opened again
    device.close()
    servos.mute.add(2)
    with pytest.raises(DeviceError, match="no answer of servo 2 at 57600 baud"):
        Gello(**OPTIONS)


# ALOHA's.

SHARE = (POSE[6] + 0.0552) / (0.8298 + 0.0552)  # of the gripper's way


@pytest.fixture
def graph(monkeypatch):
    monkeypatch.setattr(rclpy_stand_in, "NAMES", ("leader_left", "leader_right"))
    with rclpy_stand_in.installed() as graph:
        yield graph


def test_joints_and_shares_of_the_grippers_are_read(graph, opened):
    device = opened(leaders_ros2)
    reading = device.read()
    np.testing.assert_allclose(reading.joints, [*POSE[:6], SHARE] * 2)
    assert (reading.alive, reading.twist, reading.buttons, device.name) == (True, None, (), "leader_left leader_right")
    graph.arms["leader_right"].target = [0.1] * 6 + [5.0]
    wait(lambda: abs(device.read().joints[7] - 0.1) < 1e-6)
    np.testing.assert_allclose(device.read().joints, [*POSE[:6], SHARE, *[0.1] * 6, 1.0], atol=1e-5)
    assert graph.arms["leader_right"].group == []  # nothing is commanded


def test_an_arm_without_newer_states_is_not_alive_until_one_comes(graph, opened):
    device = opened(leaders_ros2)
    for fault in ("silent", "frozen_stamp", "pi"):
        wait(lambda: device.read().alive)
        last = device.read().joints
        setattr(graph.arms["leader_right"], fault, True)
        wait(lambda: not device.read().alive)
        np.testing.assert_allclose(device.read().joints, last, atol=1e-9)
        setattr(graph.arms["leader_right"], fault, False)
    graph.up = False
    assert not device.read().alive
    graph.up = True
    wait(lambda: device.read().alive)
    device.close()
    assert not device.read().alive


@pytest.mark.parametrize(("fault", "why"), [("silent", "no state within"), ("pi", "motors do not answer")])
def test_an_arm_without_a_state_is_refused(graph, monkeypatch, fault, why):
    monkeypatch.setattr(leader, "FIRST_STATE", 0.1)
    setattr(graph.arms["leader_right"], fault, True)
    with pytest.raises(DeviceError, match=f"/leader_right/joint_states: .*{why}"):
        leaders_ros2()
    assert graph.heard == []  # it left the graph
    monkeypatch.setattr(graph.arms["leader_left"], "step", lambda: {"name": ["wheel"], "position": [0.0]})
    with pytest.raises(DeviceError, match=r"/leader_left/joint_states: no state of an ALOHA arm.*waist"):
        leaders_ros2()


@pytest.mark.system
@pytest.mark.skipif(bool(ros1.missing()), reason=ros1.missing())
def test_arms_of_a_real_ros_1_are_read(opened):
    ros1.ros().need_arms()
    device = opened(leaders_ros1, arms=("puppet_left", "puppet_right"), gripper_closed=0.0, gripper_open=1.2)
    np.testing.assert_allclose(device.read().joints, [*POSE[:6], 0.5] * 2, atol=1e-6)
    ros1.ros().put(0, "target", [0.3] * 6 + [0.0])
    wait(lambda: abs(device.read().joints[0] - 0.3) < 1e-3)
    assert ros1.ros().get(0, "group") == []
    ros1.ros().kill_arms()
    wait(lambda: not device.read().alive)
