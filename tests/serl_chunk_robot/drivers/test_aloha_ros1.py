"""ALOHA's arms behind a real ROS 1 master, with a node of rospy as the arms."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ros1
from driver_rigs import DT, AlohaRig, Served, ros1_arms

from serl_chunk_robot.drivers.aloha_ros1 import aloha_ros1
from serl_chunk_robot.drivers.base import DriverError

pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(ros1.missing()), reason=ros1.missing())]

TELEOP = """
import rospy, time
from interbotix_xs_msgs.msg import JointGroupCommand
rospy.init_node("forgotten_teleoperation", disable_signals=True)
publisher = rospy.Publisher("/puppet_right/commands/joint_group", JointGroupCommand, queue_size=1)
print("ready", flush=True)
time.sleep(60)
"""

LOGS = """
import logging, sys, rospy
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s %(message)s")
from serl_chunk_robot.drivers.aloha_ros1 import Ros1
Ros1().open([], print)
logging.getLogger("serl_chunk_robot.server.serve").info("serving")
logging.getLogger("rospy.internal").info("of ROS")
rospy.logwarn("a warning")
"""


@pytest.fixture
def rig() -> Iterator[AlohaRig]:
    with ros1_arms() as rig:
        assert isinstance(rig, AlohaRig)
        yield rig
        rig.driver.close()


@pytest.mark.parametrize("n", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_commands_at_50_hz_arrive_at_both_arms_once_and_in_order(rig, n):
    rig.ready()
    start = rig.read().q
    wave = np.where(np.arange(14) % 7 == 6, 0.2, 0.1)
    sent, ages, due = [], [], time.monotonic()
    for k in range(n):
        sent.append(start + wave * np.sin(k / 20))
        rig.driver.command(sent[-1], DT)
        ages.append(time.monotonic() - rig.driver.read().stamp)
        due += DT
        time.sleep(max(due - time.monotonic(), 0.0))
    until = time.monotonic() + 2
    while len(rig.get(1, "single")) < n and time.monotonic() < until:
        time.sleep(0.01)
    assert [len(rig.get(arm, topic)) for arm in (0, 1) for topic in ("group", "single")] == [n] * 4
    np.testing.assert_allclose(rig.commands(), sent, atol=1e-6)
    assert np.median(ages) < 0.02
    np.testing.assert_allclose(rig.read(lambda r: np.abs(r.q - sent[-1]).max() < 1e-3).q, sent[-1], atol=1e-3)


def test_killed_arms_stop_the_robot(rig):
    rig.connect()
    served = Served(rig)
    served.hold()
    served.passes(5)
    assert served.loop.machine.state == "HOLD"
    ros1.ros().kill_arms()
    served.run(lambda: served.loop.machine.state == "STOPPED")
    words = ("ms old", "no node takes commands", "its node is gone")
    assert any(word in served.loop.machine.word for word in words)


def test_another_publisher_is_named_and_refused_until_it_ends(rig):
    """One that was killed stays in the master's list, and counts no more."""
    other = ros1.ros().start("-u", "-c", TELEOP)
    assert other.stdout is not None
    assert other.stdout.readline() == "ready\n"
    with pytest.raises(DriverError, match="puppet_right: /forgotten_teleoperation publishes commands too"):
        rig.connect()
    rig.driver.close()
    other.kill()
    other.wait(10)
    rig.driver = aloha_ros1()
    rig.ready()
    assert rig.read().faults == ()


def test_no_master_is_an_error_at_once_and_arms_that_are_not_launched_are_named(rig, monkeypatch):
    monkeypatch.setattr("serl_chunk_robot.drivers.aloha_arms.FIRST_STATE", 0.2)
    driver = aloha_ros1(arms=["follower_left"])
    with pytest.raises(DriverError, match="/follower_left/joint_states: no state within"):
        driver.connect(time.monotonic)
    driver.close()
    monkeypatch.setitem(os.environ, "ROS_MASTER_URI", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(DriverError, match=r"http://127.0.0.1:9: no ROS master answers\. Start roscore"):
        rig.connect()
    assert time.monotonic() - began < 2.0


def test_a_service_that_hangs_ends_in_time(rig, monkeypatch):
    monkeypatch.setattr("serl_chunk_robot.drivers.aloha_ros1.ANSWERS", 0.3)
    rig.put(0, "hangs", True)
    with pytest.raises(DriverError, match=r"/puppet_left/get_robot_info: no answer within 0\.3 s"):
        rig.connect()
    rig.put(0, "hangs", False)


def test_the_server_s_log_stays_where_it_was():
    """ROS sets the logging of the whole process up; its own lines go to its own files."""
    process = ros1.ros().start("-u", "-c", LOGS)
    out, _ = process.communicate(timeout=20)
    lines = [line for line in out.splitlines() if "of ROS" in line or "serving" in line]
    assert lines == ["serl_chunk_robot.server.serve serving"]
    logs = "".join(file.read_text() for file in Path(ros1.ros().folder).rglob("*.log"))
    assert "of ROS" in logs
    assert "serving" not in logs
