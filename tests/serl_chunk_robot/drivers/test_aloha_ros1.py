"""ALOHA's arms behind a real ROS 1 master, with a node of rospy as the arms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ros1
from driver_rigs import AlohaRig, Served, ros1_arms

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


@pytest.fixture
def rig() -> Iterator[AlohaRig]:
    with ros1_arms() as rig:
        assert isinstance(rig, AlohaRig)
        yield rig
        rig.driver.close()


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
