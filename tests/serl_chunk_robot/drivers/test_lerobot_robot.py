"""LeRobot's arms: a stand-in of its package, and LeRobot itself over simulated motors where it is installed.

The environment's SERL_CHUNK_LEROBOT_PYTHON names an interpreter that has lerobot[feetech].
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import lerobot_stand_in
import numpy as np
import pytest
import sts3215
from driver_rigs import Rig
from lerobot_stand_in import JOINTS, START, Port

from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.drivers.lerobot_robot import LATE, LeRobotArms

PORT = "/dev/ttyACM0"
LIMITS: dict[str, Any] = {"low": -1.6, "high": 1.6, "velocity": 4.0}


def arm(**options: Any) -> LeRobotArms:
    params = {"port": PORT, "id": "follower", **(options.pop("params", None) or {})}
    return LeRobotArms(**{"type": "so101_follower", "params": params, **LIMITS, **options})


@pytest.fixture
def port() -> Iterator[Port]:
    with lerobot_stand_in.installed(PORT) as ports:
        yield ports[PORT]
        assert "two threads" not in ports[PORT].calls


@pytest.fixture
def ready(port):
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Rig:
            rig = Rig(arm(**options))
            stack.callback(rig.driver.close)
            rig.ready()
            return rig

        yield make


def test_lerobots_own_arm_is_driven_and_keeps_its_torque(tmp_path):
    sts3215.run("follower", tmp_path, lerobot_stand_in)


TWO = {"id": "cell", "left_arm_config": {"port": PORT}, "right_arm_config": {"port": PORT}}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"type": "so102"}, r"'so102' is no robot .* so101_follower.*Not imported: broken \(No module"),
        ({"params": {"use_degrees": False}}, r"params\.use_degrees: False.*scale"),
        ({"params": {"disable_torque_on_disconnect": True}}, r"params\.disable_torque_on_disconnect: .*would fall"),
        ({"params": {"num_read_retries": 2}}, r"params\.num_read_retries: 2.*late answer"),
        ({"params": {"port": "/dev/other"}}, r"/dev/other.*lerobot-find-port.*Check power and port"),
        ({"grippers": ["wrist_roll"]}, r"wrist_roll: its unit is degrees\. Write scale"),
    ],
)
def test_options_that_lerobot_or_the_arm_cannot_take_are_named_and_nothing_is_opened(port, options, match):
    with pytest.raises(DriverError, match=match):
        arm(**options).connect(time.monotonic)
    with pytest.raises(DriverError, match=r"wheels: .*no serial bus"):
        LeRobotArms(type="wheels", **LIMITS).connect(time.monotonic)
    falls = {**TWO, "left_arm_config": {"port": PORT, "disable_torque_on_disconnect": True}}
    with pytest.raises(DriverError, match="would fall"):
        LeRobotArms(type="bi_so_follower", params=falls, **LIMITS).connect(time.monotonic)
    assert not port.open


def test_an_arm_that_has_torque_keeps_it_also_where_it_is_not_calibrated(port, ready):
    port.registers["Torque_Enable"], port.registers["Goal_Position"] = [1] * 6, list(START)
    rig = ready()
    rig.driver.close()
    assert (port.calls, port.open) == ([], False), "it is left alone by connect, clear and close"
    rig = ready()
    target = rig.read().q + 0.05
    rig.read(lambda reading: rig.driver.command(target, 0.02) or abs(reading.q[2] - target[2]) < 0.01)  # it is cleared
    port.torque[2] = 0
    fault = rig.read(lambda reading: bool(reading.faults))
    assert fault.faults == ("no torque: elbow_flex. Is a motor overloaded or hot?",)
    rig.driver.clear_faults()
    rig.read(lambda reading: reading.torque and not reading.faults)
    rig.driver.close()
    assert port.calls == ["Torque_Enable elbow_flex 1"], "no other one's is touched"
    port.registers["Min_Position_Limit"] = [0] * 6
    with pytest.raises(DriverError, match=rf"{PORT}: .*--robot.type=so101_follower --robot.port={PORT} --robot.id=fol"):
        arm().connect(time.monotonic)
    with pytest.raises(DriverError, match=rf"--robot.left_arm_config.port={PORT} --robot.right_arm_config.port={PORT}"):
        LeRobotArms(type="bi_so_follower", params=TWO, **LIMITS).connect(time.monotonic)
    assert (port.calls[1:], port.open) == ([], False)


def test_units_and_order_are_those_of_the_robots_file(port, ready):
    rig = ready(joints=tuple(reversed(JOINTS)), grippers=["gripper"])
    q = rig.driver.read().q
    assert q[0] == pytest.approx((START[5] - 1024) / 2048)
    assert q[3] == pytest.approx(2 * math.pi * (START[2] - 2048) / 4095)
    rig.driver.command(np.array([0.25, 0.1, 0.2, 0.3, 0.4, 0.5]), 0.02)
    rig.read(lambda reading: abs(reading.q[5] - 0.5) < 0.01)
    rig.driver.close()
    degrees = [math.degrees(x) for x in (0.5, 0.4, 0.3, 0.2, 0.1)]
    assert port.goals[-1] == pytest.approx(dict(zip(JOINTS, [*degrees, 25.0], strict=True)))


def test_what_lerobot_clamps_is_a_fault_until_it_is_cleared(ready):
    rig = ready(params={"max_relative_target": 5.0})
    rig.driver.command(rig.driver.read().q + np.array([0.5, 0, 0, 0, 0, 0]), 0.02)
    (fault,) = rig.read(lambda reading: bool(reading.faults)).faults
    assert "shoulder_pan.pos: LeRobot sent" in fault
    assert "max_relative_target" in fault
    rig.driver.clear_faults()
    assert not rig.driver.read().faults


def test_a_bus_that_fails_is_a_fault_takes_no_set_points_and_recovers(port, ready):
    rig, dropped = ready(), []
    rig.driver._arms[0].bus.port_handler.ser.reset_input_buffer = lambda: dropped.append(time.monotonic())
    port.broken = "Failed to sync read.\n[TxRxResult] There is no status packet!"
    reading = rig.read(lambda reading: bool(reading.faults))
    assert reading.faults == ("so101_follower: Failed to sync read. [TxRxResult] There is no status packet!",)
    with pytest.raises(DriverError, match="no status packet"):
        rig.driver.command(reading.q, 0.02)
    rig.read(lambda reading: len(dropped) > 3)  # late answers, after each round that failed
    port.broken = ""
    assert rig.read(lambda reading: not reading.faults).stamp > reading.stamp
    rig.driver.command(reading.q, 0.02)


class Moving:
    """An arm whose joints move at 60 degrees a second."""

    def __init__(self) -> None:
        self.now, self.sent = 0.0, 0

    def get_observation(self) -> dict[str, float]:
        return {f"{joint}.pos": 60.0 * self.now for joint in JOINTS}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        self.sent += 1
        return action


@pytest.fixture
def stepped(ready) -> tuple[LeRobotArms, Moving]:
    driver, robot = ready().driver, Moving()
    driver.close()
    driver._robot, driver._clock = robot, lambda: robot.now
    driver._positions.past.clear()
    return driver, robot


def test_speeds_are_those_of_the_positions(stepped):
    driver, robot = stepped
    for k in range(20):
        robot.now = 0.005 * k
        driver._exchange()
    reading = driver.read()
    assert reading.stamp == robot.now
    assert reading.dq[[0, 5]] == pytest.approx([math.radians(60), 0.6])
    assert len(driver._positions.past) < 10
    robot.now = 10.0  # at 600 degrees
    with pytest.raises(DriverError, match=r"shoulder_pan reads 10\.472, which it cannot reach"):
        driver._exchange()
    assert driver.read().stamp == reading.stamp, "it is no state"
    driver._positions.past.clear()
    for robot.now in (0.0, 0.1):
        driver._exchange()
    assert driver.read().dq[0] == pytest.approx(math.radians(60)), "and no speed"


def test_a_set_point_is_sent_once_and_neither_late_nor_without_torque(stepped):
    driver, robot = stepped
    q = driver.read().q * 0.0
    for late, off, sent in ((0.0, (), 1), (2 * LATE, (), 1), (0.0, ("gripper",), 1), (0.0, (), 2)):
        driver._off = ()
        driver.command(q, 0.02)
        robot.now, driver._off = robot.now + late, off
        driver._exchange()
        driver._exchange()
        assert robot.sent == sent, (late, off)
