"""LeRobot's leader arms: a stand-in of its package, and LeRobot itself over simulated motors where it is installed."""

from __future__ import annotations

import math
import time

import lerobot_stand_in
import numpy as np
import pytest
import sts3215
from lerobot_stand_in import HIGH, JOINTS, LOW, START
from robot_served import wait

from serl_chunk_robot.devices import leader_motion
from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.leader_motion import Permission
from serl_chunk_robot.devices.lerobot_teleoperator import LeRobotTeleoperator
from serl_chunk_robot.safety.motion import Limits, Rates

LEFT, RIGHT = "/dev/left", "/dev/right"
STEP = math.tau / 4095  # rad of an encoder's step
MIDDLE = (LOW + HIGH) / 2
AT = [STEP * (x - MIDDLE) for x in START[:5]] + [(START[5] - LOW) / (HIGH - LOW)]


@pytest.fixture
def ports():
    with lerobot_stand_in.installed(LEFT, RIGHT) as ports:
        yield ports


@pytest.fixture
def leader(opened):

    def make(**options):
        params = {"port": LEFT, "id": "mine", **options.pop("params", {})}
        return opened(LeRobotTeleoperator, **{"type": "so101_leader", "params": params, **options})

    return make


@pytest.mark.parametrize(
    ("kind", "params"), [("so101_leader", {"use_degrees": True}), ("so101_leader", {}), ("koch_leader", {})]
)
def test_joints_are_in_rad_and_a_gripper_is_a_share_whatever_the_units_of_lerobot(ports, leader, kind, params):
    device = leader(type=kind, params=params)
    reading = device.read()
    np.testing.assert_allclose(reading.joints[:5], AT[:5], atol=1e-9)
    assert (reading.twist, reading.buttons, reading.alive, device.name) == (None, (), True, f"{kind} mine")
    ports[LEFT].at[1] = MIDDLE + 300
    wait(lambda: abs(device.read().joints[1] - 300 * STEP) < 1e-9)


def test_joints_have_the_order_and_scale_of_the_robots_file(ports, leader):
    device = leader(joints=JOINTS[::-1], params={"use_degrees": True})
    np.testing.assert_allclose(device.read().joints, AT[::-1], atol=1e-9)
    device.close()
    scaled = leader(scale=[-0.01] * 5 + [0.02])  # of -100 to 100
    percent = [200 * (x - LOW) / (HIGH - LOW) - 100 for x in START[:5]]
    np.testing.assert_allclose(scaled.read().joints, [*(-0.01 * x for x in percent), 1.0], atol=1e-9)


BOTH = {"id": "both", "left_arm_config": {"port": LEFT}, "right_arm_config": {"port": RIGHT}}


def test_nothing_but_a_kochs_gripper_gets_torque_and_close_takes_it(ports, leader):
    leader(params={"port": RIGHT})
    device = leader(type="koch_leader")
    assert device.read().drive is None, "motors whose torque has no limit are not driven"
    assert ports[LEFT].torque == [0] * 5 + [1]
    assert ports[RIGHT].torque == [0] * 6
    device.close()
    assert (ports[LEFT].torque, ports[LEFT].open) == ([0] * 6, False)


def test_an_arm_without_this_calibration_is_refused_with_the_command_and_keeps_its_torque(ports, leader, opened):
    """It may be a follower that holds itself, at a port that was mixed up."""
    ports[LEFT].registers.update(Torque_Enable=[1] * 6, Min_Position_Limit=[0] * 6)
    command = f"lerobot-calibrate --teleop.type=so101_leader --teleop.port={LEFT} --teleop.id=mine"
    with pytest.raises(DeviceError, match=f"{LEFT}: .*calibration of this id. Run {command}"):
        leader()
    with pytest.raises(DeviceError, match=LEFT):  # no motor is configured before both arms are calibrated
        opened(LeRobotTeleoperator, type="bi_so_leader", params=BOTH)
    assert [(port.calls, port.open) for port in ports.values()] == [([], False)] * 2


def test_one_read_that_fails_gives_no_new_reading_and_is_no_loss(ports, leader, caplog):
    device, dropped = leader(), []
    device._arms[0].bus.port_handler.ser.reset_input_buffer = lambda: dropped.append(time.monotonic())
    ports[LEFT].broken = "one status packet is missing"
    wait(lambda: dropped and time.monotonic() - device.read().stamp > 0.05)  # what comes late is dropped
    assert device.read().alive
    ports[LEFT].broken = ""
    wait(lambda: time.monotonic() - device.read().stamp < 0.04)
    assert "lost" not in caplog.text


def test_a_number_that_is_none_is_no_reading(ports, leader, monkeypatch):
    device = leader()
    before = device.read().joints
    get, looks = lerobot_stand_in.SOLeader.get_action, []

    def get_action(self):
        looks.append(get(self))
        return {**looks[-1], "elbow_flex.pos": (math.nan, math.inf)[len(looks) % 2]}

    monkeypatch.setattr(lerobot_stand_in.SOLeader, "get_action", get_action)
    wait(lambda: len(looks) > 4)
    np.testing.assert_array_equal(device.read().joints, before)


def test_lerobots_own_leader_is_read_and_driven(tmp_path):
    sts3215.run("leader", tmp_path, lerobot_stand_in)


def permits(device, goal, number=1):
    """Permit a drive, once, as the server does in each pass."""
    one, still = np.ones(6), np.zeros(6)
    limits = Limits(-3 * one, 3 * one, Rates(4 * one, 80 * one, 8000 * one), still, still, still)
    device.drive.permit(Permission(number, time.monotonic(), goal, limits))


def drives(device, until, number=1, offset=-0.5):
    """Permit a drive until it comes to a phase; one in motion has torque then."""
    goal = device.read().joints + offset
    wait(lambda: permits(device, goal, number) or device.read().drive.phase == until)
    wait(lambda: any(lerobot_stand_in.PORTS[LEFT].torque))


@pytest.fixture
def quick(monkeypatch):
    # VALID: machines that run tests may stand still for longer than robot PCs may.
    for name, seconds in (("STANDS", 0.05), ("FASTEST", 3.0), ("VALID", 0.5)):
        monkeypatch.setattr(leader_motion, name, seconds)


@pytest.mark.parametrize("params", [{}, {"use_degrees": True}])
def test_feetechs_leaders_are_driven_with_limited_torque_and_released(ports, leader, quick, params):
    device, port = leader(params=params, drive_torque=0.3), ports[LEFT]
    assert device.read().drive == (0, "off", "")
    port.calls.clear()
    goal = device.read().joints + np.array([0.3, -0.2, 0.1, 0.2, -0.3, -0.2])
    wait(lambda: permits(device, goal) or device.read().drive.phase == "keeps")
    assert port.torque == [1] * 6
    assert port.registers["Torque_Limit"] == [300] * 6
    limited, on = (
        next(k for k, call in enumerate(port.calls) if call.startswith(name))
        for name in ("Torque_Limit", "Torque_Enable")
    )
    assert limited < on
    np.testing.assert_allclose(device.read().joints, goal, atol=0.01)
    device.drive.end(1, "the actor ended it")
    wait(lambda: device.read().drive.phase == "there")
    assert port.torque == [0] * 6
    assert "two threads" not in port.calls


def test_no_permission_takes_the_torque_and_so_does_a_close_in_motion(ports, leader, quick, monkeypatch):
    monkeypatch.setattr(leader_motion, "FASTEST", 0.3)
    device, port = leader(), ports[LEFT]
    drives(device, "moves")
    wait(lambda: not any(port.torque), 1.0)
    assert "no permission" in device.read().drive.why
    drives(device, "moves", number=2)
    device.close()
    assert port.torque == [0] * 6


def test_unplugged_in_motion_it_is_opened_without_torque_and_is_not_driven_on(ports, leader, quick, monkeypatch):
    monkeypatch.setattr(leader_motion, "FASTEST", 0.3)
    device, port = leader(), ports[LEFT]
    drives(device, "moves")
    port.broken = "device not configured"
    wait(lambda: device.read().drive.phase == "failed")
    assert any(port.torque), "nothing reaches its motors"
    wait(lambda: not device.read().alive)
    port.broken = ""
    wait(lambda: device.read().alive)
    for _ in range(20):
        assert port.torque == [0] * 6
        permits(device, np.array(AT))
        time.sleep(0.01)


def test_a_motor_that_keeps_its_torque_is_a_loss(ports, leader, quick, monkeypatch):
    device = leader()
    drives(device, "keeps", offset=-0.2)
    bus = device._arms[0].bus
    write = bus.sync_write

    def sync_write(name, values, **more):
        write(name, {**values, "gripper": 1} if name == "Torque_Enable" else values, **more)

    monkeypatch.setattr(bus, "sync_write", sync_write)
    device.drive.end(1, "the actor ended it")
    wait(lambda: device.read().drive.phase == "failed")
    assert "may have torque" in device.read().drive.why
    wait(lambda: not any(ports[LEFT].torque))  # as it is opened anew


def test_a_motor_that_does_not_answer_leaves_no_other_one_its_torque_at_a_close(ports, leader, quick, monkeypatch):
    device = leader()
    drives(device, "keeps", offset=-0.2)

    def write(name, motor, *_, **more):
        raise ConnectionError(f"Failed to write '{name}': no answer of {motor}")

    monkeypatch.setattr(device._arms[0].bus, "write", write)
    device.close()
    assert ports[LEFT].torque == [0] * 6
