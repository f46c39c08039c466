"""ALOHA's arms: over the stand-in of ROS 2, and behind a real ROS 1 master, with a node of rospy as the arms."""

from __future__ import annotations

import math
import time
import types

import pytest
import ros1
from driver_rigs import AlohaRig, Served, fixture
from hypothesis import given
from hypothesis import strategies as st
from rclpy_stand_in import End
from robot_served import wait
from xs_arm import finger

from serl_chunk_robot.drivers import aloha_arms
from serl_chunk_robot.drivers.aloha_arms import Gripper
from serl_chunk_robot.drivers.aloha_ros1 import aloha_ros1
from serl_chunk_robot.drivers.aloha_ros2 import Ros2, aloha_ros2
from serl_chunk_robot.drivers.base import SUPPORTED, DriverError

FIRST = Gripper(-0.6213, 1.4910)  # of the first ALOHA
SECOND = Gripper(0.6197, 1.6214)  # of ALOHA 2
LEFT = "follower_left"


SYSTEM = [pytest.mark.system, pytest.mark.skipif(bool(ros1.missing()), reason=ros1.missing())]
rig, ros1_rig = fixture("aloha_ros2"), fixture(pytest.param("aloha_ros1", marks=SYSTEM))
either = fixture("aloha_ros2", pytest.param("aloha_ros1", marks=SYSTEM))


@pytest.mark.parametrize(("gripper", "closed", "opened"), [(FIRST, 0.01844, 0.05800), (SECOND, 0.0440, 0.0579)])
def test_the_crank_is_the_one_that_alohas_constants_are_of(gripper, closed, opened):
    """Angles and finger positions of both generations, as their own programs list them."""
    assert (gripper.opening(closed), gripper.opening(opened)) == pytest.approx((0.0, 1.0), abs=0.005)


@given(opening=st.floats(0.0, 1.0), gripper=st.sampled_from([FIRST, SECOND]))
def test_an_opening_that_is_commanded_is_the_one_that_is_measured_and_its_speed_is_its_derivative(opening, gripper):
    angle = gripper.angle(opening)
    measured, ahead, behind = (gripper.opening(finger(angle + h)) for h in (0.0, 1e-6, -1e-6))
    assert measured == pytest.approx(opening, abs=1e-6)
    assert gripper.speed(angle, 2.0) == pytest.approx(2 * (ahead - behind) / 2e-6, abs=1e-4)
    assert gripper.closed - 1e-9 <= angle <= max(gripper.open, math.pi / 2)
    assert gripper.angle(opening - 1.001) == gripper.angle(0.0) == pytest.approx(gripper.closed)
    assert gripper.angle(opening + 1.001) == gripper.angle(1.0)
    assert FIRST.angle(1.0) == pytest.approx(FIRST.open)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mode", {"arm": "pwm", "gripper": "position"}, "its arm is in mode 'pwm', expected 'position'.*sleep pose"),
        ("velocity_profile", [0, 0, 131, 0, 0, 0, 0], "elbow: Profile_Velocity is 131, expected 0"),
        ("upper", [math.pi, 1.99, 1.6, math.pi, 2.23, math.pi], "upper limit of shoulder is 1.990.*leader"),
        ("silent", True, "follower_right/joint_states: no state within"),
    ],
)
def test_an_arm_that_would_not_follow_is_refused_and_left_as_it_is(rig, monkeypatch, name, value, message):
    monkeypatch.setattr(aloha_arms, "FIRST_STATE", 0.3)
    rig.put(1, name, value)
    with pytest.raises(DriverError, match=message):
        rig.connect()
    assert [rig.get(arm, "calls") for arm in (0, 1)] == [[], []]
    assert [rig.get(arm, "group") for arm in (0, 1)] == [[], []]


def test_torque_that_is_off_at_connection_is_reported(rig, monkeypatch, caplog):
    with monkeypatch.context() as patched:
        patched.setattr(Ros2, "call", lambda *_, **__: None)  # an arm without services is used
        rig.connect()
        assert "not checked" in caplog.text
        assert rig.driver.read().torque
        rig.driver.close()
    rig.driver = aloha_ros2()
    rig.put(0, "torque", [True] * 6 + [False])
    rig.connect()
    assert not rig.driver.read().torque
    rig.driver.clear_faults()
    rig.read(lambda reading: reading.torque)
    assert rig.get(0, "calls") == ["torque_enable all True"]
    assert rig.get(1, "calls") == [], "an arm that has torque is left alone"
    for arm in (0, 1):
        rig.put(arm, "simulated", True)  # by Interbotix: such arms have no registers of errors
    time.sleep(0.3)
    assert (rig.driver.read().torque, rig.driver.read().faults) == (True, ())


def reads(rig: AlohaRig, text: str) -> None:
    rig.read(lambda reading: any(text in fault for fault in reading.faults) if text else not reading.faults)


def test_another_publisher_is_a_fault_until_it_ends(rig):
    topic, others = f"/{LEFT}/commands/joint_single", rig.graph.others
    others[topic] = [End("teleop", "/lab/")]
    with pytest.raises(DriverError, match="/lab/teleop publishes commands too"):
        rig.connect()
    others.clear()
    rig.driver = aloha_ros2()
    rig.connect()
    others[topic] = [End("record_episodes", "/")]
    reads(rig, "/record_episodes")
    others.clear()
    reads(rig, "")


GRIPPER = "follower_left/gripper: it has an error, or does not answer. Reboot it"


def test_a_grippers_reboot_is_done_while_the_robot_is_stopped(rig, monkeypatch):
    monkeypatch.setattr(aloha_arms, "BOOTS", 0.3)
    rig.ready()
    for value, message in (
        ("follower_left/elbow", "the arm falls while elbow reboots.*arm_is_supported"),
        ("follower_left/finger", "expected ARM/MOTOR of follower_left, follower_right and waist"),
        ("gripper", "expected ARM/MOTOR"),
        (True, "expected ARM/MOTOR"),
    ):
        with pytest.raises(DriverError, match=message):
            rig.driver.set("reboot", value)
    rig.driver.command(rig.driver.read().q, 0.02)
    with pytest.raises(DriverError, match="Stop the robot, and try again"):
        rig.driver.set("reboot", "follower_left/gripper")
    time.sleep(aloha_arms.IDLE)
    rig.put(0, "errors", [0] * 6 + [1])
    assert not rig.read(lambda reading: reading.faults == (GRIPPER,)).torque
    rig.driver.set("reboot", "follower_left/gripper")
    assert "follower_left/gripper reboots" in rig.driver.read().faults, "from the request on: no clear meanwhile"
    rig.read(lambda reading: not reading.faults and reading.torque)
    assert rig.get(0, "calls") == ["reboot_motors gripper True"]
    assert rig.get(1, "calls") == []
    monkeypatch.setattr(aloha_arms, "BOOTS", 0.0)
    rig.driver.set("reboot", "follower_left/elbow" + SUPPORTED)
    rig.read(lambda reading: not reading.faults)
    assert rig.get(0, "calls")[1:] == ["reboot_motors elbow True"], "alone"
    rig.put(0, "mode", {"arm": "position", "gripper": "pwm"})
    rig.driver.set("reboot", "follower_left/gripper")
    reads(rig, "'pwm'")


@pytest.mark.parametrize(
    ("errors", "alerts", "faults"),
    [
        ([0] * 6 + [32], False, ("follower_left/gripper: overload. Reboot it",)),
        ([0, 0, 4, 0, 0, 0, 32], True, (GRIPPER.replace("gripper", "elbow"), GRIPPER)),
    ],
)
def test_a_motor_with_an_error_is_named_also_where_its_registers_cannot_be_read(rig, errors, alerts, faults):
    rig.ready()
    rig.put(0, "alerts", alerts)
    rig.put(0, "errors", errors)
    rig.read(lambda reading: reading.faults == faults)


def test_a_state_that_is_none_is_an_error_until_the_next(rig):
    rig.ready()
    rig.driver._heard(LEFT, types.SimpleNamespace(name=["waist"], position=[0.0], velocity=[], effort=[]), 0.0)
    rig.put(0, "silent", True)
    with pytest.raises(DriverError, match="follower_left/joint_states: no state of an ALOHA arm"):
        rig.read(lambda reading: False)


def test_an_arm_whose_node_was_launched_again_is_checked_before_it_moves(rig):
    rig.connect()
    profile = rig.get(0, "velocity_profile")
    rig.graph.gone = True
    reads(rig, "follower_left: its node is gone")
    profile[1] = 131
    rig.graph.gone = False
    reads(rig, "follower_left/shoulder: Profile_Velocity is 131, expected 0")
    rig.driver.clear_faults()
    reads(rig, "follower_left: its node is gone, or was launched again and is checked")
    reads(rig, "follower_left/shoulder: Profile_Velocity is 131, expected 0")
    profile[1] = 0
    reads(rig, "")


def test_a_node_that_was_launched_again_between_two_looks_is_noticed(rig, monkeypatch):
    monkeypatch.setattr(aloha_arms, "POLL", 1.0)
    rig.ready()
    time.sleep(0.1)
    rig.put(1, "silent", True)
    time.sleep(2 * aloha_arms.RELAUNCH)
    rig.put(1, "velocity_profile", [0, 0, 7, 0, 0, 0, 0])
    rig.put(1, "silent", False)
    reading = rig.read(lambda reading: "Profile_Velocity is 7" in str(reading.faults))
    assert "follower_right: its node is gone" in str(reading.faults)


def test_a_service_that_hangs_is_a_fault_and_not_a_wait_while_the_other_arm_answers(rig, monkeypatch):
    monkeypatch.setattr("serl_chunk_robot.drivers.aloha_ros2.ANSWERS", 0.05)
    rig.ready()
    rig.put(0, "hangs", True)
    rig.read(lambda reading: bool(reading.faults))
    for _ in range(100):
        assert "follower_left/get_motor_registers: no answer within 0.05 s" in str(rig.driver.read().faults)
        time.sleep(0.005)
    began = time.monotonic()
    rig.driver.set("torque", False)
    assert time.monotonic() - began < 0.04
    rig.put(0, "hangs", False)
    rig.read(lambda reading: not reading.faults)


def test_a_stop_never_targets_a_measured_pose(rig):
    rig.ready()
    target = rig.driver.read().q
    target[1] = -1.9
    rig.driver.command(target, 0.02)
    assert rig.get(0, "group")[-1][1] == -1.9, "an arm that rests a little beyond its limits is held there"
    rig.put(0, "pi", True)
    rig.read(lambda reading: reading.q[0] < -3)
    for level in (0, 1, 2):
        rig.read(lambda reading, level=level: rig.driver.stop("doubtful", level))
    assert [len(rig.get(arm, "group")) for arm in (0, 1)] == [1, 1]


# Behind a real ROS 1.

TELEOP = """
import rospy, time
from interbotix_xs_msgs.msg import JointGroupCommand
rospy.init_node("forgotten_teleoperation", disable_signals=True)
publisher = rospy.Publisher("/puppet_right/commands/joint_group", JointGroupCommand, queue_size=1)
print("ready", flush=True)
time.sleep(60)
"""


def test_killed_arms_take_no_set_point_and_stop_the_robot(either):
    either.connect()
    served, target = Served(either), either.read().q
    served.hold()
    served.passes(5)
    assert served.loop.machine.state == "HOLD"
    either.vanish()
    served.run(lambda: served.loop.machine.state == "STOPPED")
    words = ("ms old", "no node takes commands", "its node is gone")
    assert any(word in served.loop.machine.word for word in words)
    with pytest.raises(DriverError, match="no node takes commands"):
        wait(lambda: either.driver.command(target, 0.02) is not None)
    assert either.read(lambda reading: time.monotonic() - reading.stamp > 0.1)
    assert not either.driver.stop("gone", 1)


def test_a_publisher_of_ros_1_is_named_and_refused_until_it_ends(ros1_rig):
    """One that was killed stays in the master's list, and counts no more."""
    other = ros1.ros().start("-u", "-c", TELEOP)
    assert other.stdout.readline() == "ready\n"
    with pytest.raises(DriverError, match="puppet_right: /forgotten_teleoperation publishes commands too"):
        ros1_rig.connect()
    ros1_rig.driver.close()
    other.kill()
    other.wait(10)
    ros1_rig.driver = aloha_ros1()
    ros1_rig.ready()
    assert ros1_rig.read().faults == ()
