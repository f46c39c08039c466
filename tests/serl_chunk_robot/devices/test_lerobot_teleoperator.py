"""LeRobot's leader arms: a stand-in of its package, and LeRobot itself over simulated motors where it is installed."""

from __future__ import annotations

import inspect
import math
import time

import lerobot_leaders
import numpy as np
import pytest
import real_lerobot
import sts3215_leader
from lerobot_leaders import installed
from lerobot_stand_in import JOINTS, RANGE, START
from robot_served import wait

from serl_chunk_robot.devices import leader_motion, polling
from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.leader_motion import Permission
from serl_chunk_robot.devices.lerobot_teleoperator import LeRobotTeleoperator
from serl_chunk_robot.safety.motion import Limits, Rates

LEFT, RIGHT = "/dev/left", "/dev/right"
STEP = math.tau / 4095  # rad of an encoder's step
MIDDLE = sum(RANGE) / 2
AT = [STEP * (x - MIDDLE) for x in START[:5]] + [(START[5] - RANGE[0]) / (RANGE[1] - RANGE[0])]


@pytest.fixture
def ports():
    with installed(LEFT, RIGHT) as ports:
        yield ports


@pytest.fixture
def leader(opened):
    """Open a leader at the left port; it is closed after the test."""

    def make(**options):
        params = {"port": LEFT, "id": "mine", **options.pop("params", {})}
        return opened(LeRobotTeleoperator, **{"type": "so101_leader", "params": params, **options})

    return make


@pytest.mark.parametrize(
    ("kind", "params"), [("so101_leader", {"use_degrees": True}), ("so101_leader", {}), ("koch_leader", {})]
)
def test_joints_are_in_rad_and_a_gripper_is_a_share_whatever_the_units_of_lerobot(ports, leader, kind, params):
    device = leader(type=kind, params={**params, "gripper_open_pos": 50.0} if kind == "koch_leader" else params)
    reading = device.read()
    np.testing.assert_allclose(reading.joints[:5], AT[:5], atol=1e-9)
    assert (reading.twist, reading.buttons, reading.alive, device.name) == (None, (), True, f"{kind} mine")
    ports[LEFT].at[1] = MIDDLE + 300
    wait(lambda: abs(device.read().joints[1] - 300 * STEP) < 1e-9)
    assert abs(time.monotonic() - device.read().stamp) < 1.0
    kept = device.read()
    kept.joints[:] = 9
    assert device.read().joints[0] == AT[0]


def test_joints_have_the_order_and_scale_of_the_robots_file(ports, leader):
    device = leader(joints=JOINTS[::-1], params={"use_degrees": True})
    np.testing.assert_allclose(device.read().joints, AT[::-1], atol=1e-9)
    device.close()
    scaled = leader(scale=[-0.01] * 5 + [0.02])  # of -100 to 100
    percent = [200 * (x - RANGE[0]) / (RANGE[1] - RANGE[0]) - 100 for x in START[:5]]
    np.testing.assert_allclose(scaled.read().joints, [*(-0.01 * x for x in percent), 1.0], atol=1e-9)


BOTH = {"id": "both", "left_arm_config": {"port": LEFT}, "right_arm_config": {"port": RIGHT}}


def test_nothing_but_a_kochs_gripper_gets_torque_and_close_takes_it(ports, leader):
    leader(params={"port": RIGHT})
    device = leader(type="koch_leader")
    assert device.read().drive is None, "motors whose torque has no limit are not driven"
    assert ports[LEFT].registers["Torque_Enable"] == [0] * 5 + [1]
    assert ports[RIGHT].registers["Torque_Enable"] == [0] * 6
    device.close()
    assert ports[LEFT].registers["Torque_Enable"] == [0] * 6
    assert not ports[LEFT].open
    assert not device.read().alive


def test_an_arm_without_this_calibration_is_refused_with_the_command_and_keeps_its_torque(ports, leader, opened):
    """It may be a follower that holds itself, at a port that was mixed up."""
    port = ports[LEFT]
    port.registers["Torque_Enable"] = [1] * 6
    port.registers["Min_Position_Limit"] = [0] * 6
    command = f"lerobot-calibrate --teleop.type=so101_leader --teleop.port={LEFT} --teleop.id=mine"
    with pytest.raises(DeviceError, match=f"{LEFT}: .*calibration of this id. Run {command}"):
        leader()
    assert port.calls == []
    assert not port.open
    with pytest.raises(DeviceError, match=LEFT):  # no motor is configured before both arms are calibrated
        opened(LeRobotTeleoperator, type="bi_so_leader", params=BOTH)
    assert not ports[RIGHT].calls
    assert not ports[RIGHT].open


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
    get, looks = lerobot_leaders.SOLeader.get_action, []

    def get_action(self):
        looks.append(get(self))
        return {**looks[-1], "elbow_flex.pos": (math.nan, math.inf)[len(looks) % 2]}

    monkeypatch.setattr(lerobot_leaders.SOLeader, "get_action", get_action)
    wait(lambda: len(looks) > 4)
    np.testing.assert_array_equal(device.read().joints, before)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What LeRobot's own leader did with simulated motors."""
    return real_lerobot.run(sts3215_leader.__file__, tmp_path_factory.mktemp("calibration"))


def test_lerobots_own_leader_is_read(real):
    assert "lerobot-calibrate --teleop.type=so101_leader --teleop.port=" in real["uncalibrated"]
    assert real["refused"] == {"torque": [1] * 6, "writes": 0}, "a mixed-up port loses no torque"
    assert "so101_leader" in real["unknown"]
    assert "port" in real["without_port"]
    for units in ("degrees", "percent"):
        np.testing.assert_allclose(real[units], real["expected"], atol=1e-3)
    np.testing.assert_allclose(real["moved"], real["target"], atol=1e-3)
    assert real["rounds"] > 25, "readings within a second"
    assert real["silent"] == {"alive": False, "joints": real["moved"]}
    np.testing.assert_allclose(real["again"], real["moved"], atol=1e-9)
    assert real["torque"] == [0] * 6


def test_lerobots_own_leader_is_driven(real):
    found = real["driven"]
    assert (found["kept"], found["limit"], found["there"]) == ([1] * 6, [500] * 6, [0] * 6)
    np.testing.assert_allclose(found["at"], found["goal"], atol=0.01)
    assert 0.1 < found["speed"] < 0.48
    assert "a hand holds it" in found["hand"]
    assert "no permission" in found["alone"]
    assert found["seconds alone"] < 1.5
    assert found["back"] == [0] * 6


def test_the_stand_in_has_the_parameters_of_lerobot(real):
    for name, parameters in real["signatures"].items():
        kind, _, method = name.partition(".")
        assert list(inspect.signature(getattr(getattr(lerobot_leaders, kind), method)).parameters) == parameters, name


def permits(device, number=1, joints=None, offset=0.0):
    """Permit a drive of all joints by an offset from where the leader is, once, as the server does in each pass."""
    goal = np.array(AT) + offset if joints is None else joints
    size = len(goal)
    low, high, rate = np.full(size, -3.0), np.full(size, 3.0), np.full(size, 4.0)
    still = np.zeros(size)
    limits = Limits(low, high, Rates(rate, 20 * rate, 2000 * rate), still, still, still)
    device.drive.permit(Permission(number, time.monotonic(), goal, limits))


def drives(device, until, number=1, **more):
    """Permit a drive until it comes to a phase."""
    goal = device.read().joints + more.pop("offset", 0.0)
    wait(lambda: permits(device, number, goal) or device.read().drive.phase in until)
    return device.read().drive


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
    wait(lambda: permits(device, joints=goal) or device.read().drive.phase == "keeps")
    assert port.registers["Torque_Enable"] == [1] * 6
    assert port.registers["Torque_Limit"] == [300] * 6
    limited, on = (next(k for k, call in enumerate(port.calls) if call.startswith(name)) for name in
                   ("Torque_Limit", "Torque_Enable"))  # fmt: skip
    assert limited < on
    np.testing.assert_allclose(device.read().joints, goal, atol=0.01)
    device.drive.end(1, "the actor ended it")
    wait(lambda: device.read().drive.phase == "there")
    assert port.registers["Torque_Enable"] == [0] * 6
    assert "two threads" not in port.calls


def test_no_permission_takes_the_torque_and_so_does_a_close_in_motion(ports, leader, quick, monkeypatch):
    monkeypatch.setattr(leader_motion, "FASTEST", 0.3)
    device, port = leader(), ports[LEFT]
    assert drives(device, ("moves",), offset=-0.5).phase == "moves"
    wait(lambda: any(port.registers["Torque_Enable"]))
    wait(lambda: not any(port.registers["Torque_Enable"]), 1.0)
    assert "no permission" in device.read().drive.why
    assert drives(device, ("moves",), number=2, offset=-0.5).phase == "moves"
    wait(lambda: any(port.registers["Torque_Enable"]))
    device.close()
    assert port.registers["Torque_Enable"] == [0] * 6


def test_unplugged_in_motion_it_is_opened_without_torque_and_is_not_driven_on(ports, leader, quick, monkeypatch):
    monkeypatch.setattr(leader_motion, "FASTEST", 0.3)
    monkeypatch.setattr(polling, "AGAIN", 0.02)
    device, port = leader(), ports[LEFT]
    drives(device, ("moves",), offset=-0.5)
    wait(lambda: any(port.registers["Torque_Enable"]))
    port.broken = "device not configured"
    wait(lambda: device.read().drive.phase == "failed")
    assert any(port.registers["Torque_Enable"]), "nothing reaches its motors"
    wait(lambda: not device.read().alive)
    port.broken = ""
    wait(lambda: device.read().alive)
    assert port.registers["Torque_Enable"] == [0] * 6
    for _ in range(20):
        permits(device, joints=np.array(AT))
        time.sleep(0.01)
    assert port.registers["Torque_Enable"] == [0] * 6


def test_a_motor_that_keeps_its_torque_is_a_loss(ports, leader, quick, monkeypatch):
    device, port = leader(), ports[LEFT]
    drives(device, ("keeps",), offset=-0.2)
    bus = device._arms[0].bus
    write = bus.sync_write

    def sync_write(name, values, **more):
        write(name, {**values, "gripper": 1} if name == "Torque_Enable" else values, **more)

    monkeypatch.setattr(bus, "sync_write", sync_write)
    device.drive.end(1, "the actor ended it")
    wait(lambda: device.read().drive.phase == "failed")
    assert "may have torque" in device.read().drive.why
    wait(lambda: not any(port.registers["Torque_Enable"]))  # as it is opened anew


def test_a_motor_that_does_not_answer_leaves_no_other_one_its_torque_at_a_close(ports, leader, quick, monkeypatch):
    device, port = leader(), ports[LEFT]
    drives(device, ("keeps",), offset=-0.2)

    def write(name, motor, *_, **more):
        raise ConnectionError(f"Failed to write '{name}': no answer of {motor}")

    monkeypatch.setattr(device._arms[0].bus, "write", write)
    device.close()
    assert port.registers["Torque_Enable"] == [0] * 6
