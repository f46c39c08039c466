"""ALOHA's leader arms: simulated arms as nodes of a stand-in of ROS 2, and of a real ROS 1 where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import rclpy_stand_in
import ros1
from robot_served import wait
from xs_arm import POSE

from serl_chunk_robot.devices import leader
from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.leader import leaders_ros1, leaders_ros2

SHARE = (POSE[6] + 0.0552) / (0.8298 + 0.0552)  # of the gripper's way


@pytest.fixture
def graph(monkeypatch):
    """Two nodes of leaders."""
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
    assert device.read().joints.shape == (14,)


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
