"""What every driver must do, through its nine methods, with the robot's side of it; stamps, options, packages."""

from __future__ import annotations

import inspect
import itertools
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import rclpy_stand_in
from driver_rigs import POSE, RIGS, Rig, Served, fixture
from hypothesis import given
from hypothesis import strategies as st
from robot_served import wait

from serl_chunk_robot.drivers import BUILT_IN, sample
from serl_chunk_robot.drivers.aloha_ros1 import Ros1, aloha_ros1
from serl_chunk_robot.drivers.aloha_ros2 import Ros2, aloha_ros2
from serl_chunk_robot.drivers.base import Driver, DriverError
from serl_chunk_robot.drivers.fake_camera import FakeCamera
from serl_chunk_robot.drivers.franka_http import FrankaHttp
from serl_chunk_robot.drivers.lerobot_robot import LeRobotArms
from serl_chunk_robot.drivers.realsense_camera import RealSenseCamera
from serl_chunk_robot.drivers.sample import UdpArm
from serl_chunk_robot.drivers.stamps import StampedDriver, StampMap
from serl_chunk_robot.drivers.trossen import TrossenArms
from serl_chunk_robot.drivers.v4l2_camera import V4L2Camera
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.config import checked, load, load_driver
from serl_chunk_robot.safety.gate import Command

METHODS = [name for name in vars(Driver) if not name.startswith("_")]
SLOWEST = 0.02  # s, of the fastest of many calls: a busy machine delays some of them
STEP = 0.05


SLOW = ("aloha_sim", "aloha_ros1")  # their processes take seconds, and both drivers have tests of their own


rig = fixture(*[pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in RIGS])


def fastest(call, times: int = 20) -> float:
    taken = []
    for _ in range(times):
        began = time.monotonic()
        call()
        taken.append(time.monotonic() - began)
    return min(taken)


def moved(rig: Rig, by: float = STEP) -> np.ndarray:
    """A set point near the measured pose; grippers keep an opening that both units have."""
    target = np.array(rig.read().q)
    target[rig.joint] += by
    grippers = list(rig.driver.spec().grippers)
    target[grippers] = np.clip(target[grippers], 0.0, 1.0)
    return target


def test_it_has_the_nine_methods_and_a_consistent_spec(rig):
    assert set(BUILT_IN) <= {*RIGS}
    assert len(METHODS) == 9
    for name in METHODS:
        wanted = list(inspect.signature(getattr(Driver, name)).parameters)[1:]
        assert list(inspect.signature(getattr(rig.driver, name)).parameters) == wanted, name
    spec = rig.driver.spec()
    size = len(spec.low)
    assert all(low < high and v > 0 for low, high, v in zip(spec.low, spec.high, spec.velocity, strict=True))
    assert [j for first, last in spec.arms for j in range(first, last)] == list(range(size))
    assert set(spec.grippers) <= set(range(size))
    assert spec.state[0] == ("q", size)
    assert 50 <= spec.rate <= 500
    assert spec == rig.driver.spec(), "spec() opens nothing, and changes nothing"
    assert {len(spec.acceleration), len(spec.jerk), len(spec.home)} <= {0, size}
    rig.driver.close()  # what was never opened


def test_connecting_moves_nothing_and_changes_no_torque(rig):
    rig.connect()
    before = rig.read()
    torque = rig.has_torque()
    spec = rig.driver.spec()
    assert before.q.shape == before.dq.shape == before.effort.shape == (len(spec.low),)
    assert {a.dtype for a in (before.q, before.dq, before.effort)} == {np.dtype(np.float64)}
    assert (before.q >= np.array(spec.low) - 0.05).all()
    assert (before.q <= np.array(spec.high) + 0.05).all()
    time.sleep(0.1)
    after = rig.read()
    np.testing.assert_allclose(after.q, before.q, atol=0.01)
    assert rig.has_torque() == torque == after.torque
    assert not rig.commands()


def test_reading_waits_for_nothing_and_stamps_do_not_go_back(rig):
    rig.connect()
    began, stamps = time.monotonic(), []
    assert fastest(lambda: stamps.append(rig.driver.read().stamp)) < SLOWEST
    while time.monotonic() - began < 0.2:
        stamps.append(rig.read().stamp)
        assert stamps[-1] <= time.monotonic() + 1e-6, "a stamp of the future"
        time.sleep(0.005)
    # The shortest transit becomes known message by message, and moves stamps back by as much.
    assert np.diff(stamps).min() > -0.02
    assert stamps[-1] > began
    assert rig.read(lambda reading: time.monotonic() - reading.stamp < 0.1)
    if rig.silence is not None:
        rig.silence()
        reading = rig.read(lambda reading: time.monotonic() - reading.stamp > 0.15)
        assert fastest(rig.driver.read, 5) < SLOWEST
        assert abs(rig.driver.read().stamp - reading.stamp) < 0.1


def test_a_set_point_arrives_once_and_whole(rig):
    rig.ready()
    target = moved(rig)
    rig.driver.command(target, 0.02)
    reading = rig.read(lambda reading: abs(reading.q[rig.joint] - target[rig.joint]) < 0.02)
    joints = ~np.isin(np.arange(len(target)), rig.driver.spec().grippers)
    np.testing.assert_allclose(reading.q[joints], target[joints], atol=0.05)
    if rig.commands.__qualname__ != "Rig.commands":
        sent = [target, *(target + 0.001 * k * joints for k in range(20))]
        for each in sent[1:]:
            rig.driver.command(each, 0.02)
            rig.pump()
            time.sleep(0.002)
        until = time.monotonic() + 5
        while not np.allclose(rig.commands()[-1], sent[-1], atol=1e-5) and time.monotonic() < until:
            rig.pump()
        arrived, sent = np.array(rig.commands()), np.array(sent)
        if not rig.each_arrives:  # but whole, and in their order
            sent = sent[np.sort(np.abs(sent[:, None] - arrived).max(axis=2).argmin(axis=0))]
        np.testing.assert_allclose(arrived, sent, atol=1e-5)


def test_what_is_no_set_point_is_refused_and_nothing_is_sent(rig):
    rig.ready()
    target, last = moved(rig), np.arange(len(rig.driver.spec().low)) == len(rig.driver.spec().low) - 1
    wrongs = [(np.where(last, x, target), "Nothing was sent") for x in (np.nan, np.inf)]
    wrongs.append((target[:-1], "Nothing was sent"))
    if rig.beyond is not None:  # no arm moves, also not that within its limits
        joint, place, named = rig.beyond
        wrongs.append((np.where(np.arange(len(target)) == joint, place, target), named))
    for wrong, named in wrongs:
        with pytest.raises(DriverError, match=named):
            rig.driver.command(wrong, 0.02)
    before = rig.read().q
    rig.driver.hold()
    time.sleep(0.05)
    np.testing.assert_allclose(rig.read().q, before, atol=0.01)
    assert not rig.commands()


def test_it_holds_and_answers_stops_of_all_levels_with_torque(rig):
    rig.ready()
    target = moved(rig)
    rig.driver.command(target, 0.02)
    rig.driver.hold()
    rig.read(lambda reading: abs(reading.q[rig.joint] - target[rig.joint]) < 0.02)
    for level in (0, 1, 2):
        assert rig.read(lambda reading, level=level: rig.driver.stop("the test ends", level)).torque
        pose = rig.read().q
        time.sleep(0.02)
        np.testing.assert_allclose(rig.read().q, pose, atol=0.02)
    assert rig.has_torque()


def test_torque_goes_off_and_comes_back_where_the_arms_are(rig):
    rig.ready()
    with pytest.raises(DriverError, match=r"stiffnes: unknown\. Valid: .*torque"):
        rig.driver.set("stiffnes", 1)
    if not rig.torque_off:
        with pytest.raises(DriverError, match="torque"):
            rig.driver.set("torque", False)
        assert rig.has_torque()
        return
    assert fastest(lambda: rig.driver.set("torque", False), 1) < 0.2
    rig.read(lambda reading: not reading.torque)
    assert not rig.has_torque()
    assert fastest(rig.driver.clear_faults, 1) < 0.2
    pose = rig.read(lambda reading: reading.torque and not reading.faults).q
    assert rig.has_torque()
    time.sleep(0.05)
    np.testing.assert_allclose(rig.read().q, pose, atol=0.02)


def test_a_fault_of_the_robot_is_reported_until_it_is_cleared(rig):
    if rig.fault is None:
        pytest.skip("its robot has no faults")
    rig.ready()
    text = rig.fault()
    reading = rig.read(lambda reading: bool(reading.faults))
    assert any(text in fault for fault in reading.faults), reading.faults
    assert all("\n" not in fault for fault in reading.faults)
    rig.repair()
    rig.driver.clear_faults()
    rig.read(lambda reading: reading.torque and not reading.faults)
    rig.driver.command(moved(rig), 0.02)


def test_the_loop_clears_it_drives_it_and_stops_it(rig):
    rig.connect()
    served = Served(rig)
    served.arm()
    target, numbers = moved(rig, 0.02), itertools.count(1)

    def there() -> bool:
        served.loop.command(Command(target, next(numbers), served.loop.machine.generation), time.monotonic())
        return abs(rig.driver.read().q[rig.joint] - target[rig.joint]) < 0.01

    served.run(there)
    assert served.loop.machine.state == "RUN", served.loop.machine.word
    served.loop.request("stop", "any", "B", time.monotonic())
    served.run(lambda: served.loop.machine.state == "STOPPED")
    served.run(lambda: served.loop._stopping.answered)
    assert rig.has_torque()
    rig.driver.close()
    if rig.commands():
        assert rig.has_torque(), "closing leaves torque on"
    rig.driver.close()


# Stamps of another clock become moments of the loop's, whatever is between the two.

HOUR = 3600.0


@given(st.floats(-1e7, 1e7), st.floats(-200e-6, 200e-6), st.integers(0, 1000), st.floats(0.0, 0.05))
def test_clocks_apart_and_drifting_agree_to_two_milliseconds(apart, drift, seed, slowest):
    """Messages at 100 Hz; at least one in half a second has a transit of 0.2 ms."""
    stamps, worst = StampMap(), 0.0
    for k, delay in enumerate(np.random.default_rng(seed).uniform(0.0, slowest, 1000)):
        moment = 0.01 * k
        arrival = moment + (2e-4 if k % 50 == 0 else delay)
        mapped = stamps.moment(apart + moment * (1 + drift), arrival)
        assert mapped <= arrival + 1e-6
        worst = max(worst, abs(mapped - moment))
    assert worst < 0.002


def test_a_repeated_stamp_gets_older_and_a_clock_that_is_set_is_believed_again_after_five_seconds():
    stamps = StampMap()
    ages = [now - stamps.moment(HOUR, now) for now in np.arange(0.0, 2.4, 0.01)]
    np.testing.assert_allclose(ages, np.arange(0.0, 2.4, 0.01), atol=1e-6)
    for now in np.arange(2.4, 10.0, 0.01):
        stamps.moment(HOUR + now, now)
    late = [now - stamps.moment(now, now) for now in np.arange(10.0, 16.0, 0.01)]  # set back by an hour
    assert late[0] == pytest.approx(HOUR)
    assert max(late[-50:]) < 1e-6
    assert 17.0 - stamps.moment(2 * HOUR, 17.0) == pytest.approx(0.0)  # set on


def test_a_stop_is_answered_by_a_state_that_is_newer_than_the_first_report_of_its_level():
    driver = StampedDriver()
    for level, now, stamp, answers in (
        (0, 10.0, 9.99, False), (0, 10.1, 10.0, False), (0, 10.2, 10.01, True), (0, 10.3, 10.01, False),
        (1, 10.4, 10.35, False), (1, 10.5, 10.45, True),
    ):  # fmt: skip
        driver._clock, driver.read = lambda: now, lambda: SimpleNamespace(stamp=stamp)  # noqa: B023
        assert driver.stop("a test", level) == answers


# Options, and packages that are missing.

URL = "http://127.0.0.1:5000/"
LEROBOT: dict[str, Any] = {"type": "so101_follower", "low": -1.6, "high": 1.6, "velocity": 4.0}
REFUSED = [  # what is made, options that are right, those that are not, and what the error says
    (aloha_ros1, {}, {"arms": ["a", "a"]}, "different names"),
    (aloha_ros2, {}, {"gripper_closed": 1.6, "gripper_open": 0.6}, "gripper_closed"),
    (TrossenArms, {}, {"addresses": ["10.0.0.4", "10.0.0.4"]}, "different addresses"),
    *((LeRobotArms, LEROBOT, {name: value}, name) for name, value in [
        ("joints", ["a", "a"]), ("grippers", ["hand"]), ("low", [0.0] * 5), ("low", 2.0), ("velocity", 0.0),
        ("rate", 30.0), ("scale", 0.0),
    ]),
    *((FrankaHttp, {"urls": [URL]}, x, "expected|list") for x in (
        {"urls": URL}, {"urls": ["ftp://x"]}, {"params": {"a": 3}})),
    (FakeCamera, {}, {"height": 0}, "a picture has"), (V4L2Camera, {"device": ""}, {}, "a camera has a device"),
    (RealSenseCamera, {"serial": 817512070000}, {}, "a camera has a serial number, a text"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "right", "wrong", "named"), REFUSED)
def test_options_that_cannot_be_are_refused(make, right, wrong, named):
    with pytest.raises((ValueError, DriverError), match=named):
        make(**{**right, **wrong})


SO101 = 'name = "lerobot"\ntype = "so101_follower"\nparams = { port = "/dev/ttyACM0" }\n'


def test_a_lerobot_arm_needs_limits_and_the_file_of_an_so101_has_them(tmp_path):
    path = tmp_path / "robot.toml"
    path.write_text(f'name = "cell"\n[driver]\n{SO101}')
    with pytest.raises(ConfigError, match=r"low: missing.*teach"):
        load_driver(load(path))
    file = load(Path(__file__).parents[3] / "experiments" / "robots" / "so101.toml")
    checked(file, load_driver(file).spec())
    assert [camera.name for camera in file.cameras] == ["front"]


def opened(ros: Any) -> Any:
    return lambda: ros().open(["a"], lambda *_: None)


@pytest.mark.parametrize(
    ("connect", "module", "helps"),
    [
        (opened(Ros1), "rosgraph", "sudo apt install ros-noetic-ros-base"),
        (opened(Ros1), "rospy", "sudo apt install ros-noetic-ros-base"),
        (opened(Ros2), "rclpy", "sudo apt install ros-humble-ros-base"),
        (opened(Ros2), "interbotix_xs_msgs", r"Interbotix's ROS 2 packages.*setup\.bash"),
        (lambda: LeRobotArms(**LEROBOT).connect(time.monotonic), "draccus", r"pip install 'lerobot\[feetech"),
        (lambda: TrossenArms().connect(time.monotonic), "trossen_arm", "pip install trossen-arm"),
    ],
)
def test_a_missing_package_is_named_with_what_helps(connect, module, helps):
    there = {"rosgraph": types.ModuleType("rosgraph")} if module == "rospy" else {}
    with (
        rclpy_stand_in.installed(),
        patch.dict(sys.modules, {**there, "lerobot": None, module: None}),
        pytest.raises(DriverError, match=helps) as error,
    ):
        connect()
    assert module in str(error.value)


# The driver to copy.

FILE = Path(sample.__file__)
copied = fixture("sample")


def test_a_file_of_less_than_100_lines_next_to_the_robots_makes_it(tmp_path, copied):
    assert len(FILE.read_text().splitlines()) < 100
    (tmp_path / "arm.py").write_text(FILE.read_text())
    path = tmp_path / "robot.toml"
    path.write_text(f'name = "cell"\n[driver]\nname = "arm.py:UdpArm"\nport = {copied.port}\n')
    file = load(path)
    copied.driver = load_driver(file)
    copied.connect()
    checked(file, copied.driver.spec(), copied.driver.read().q)


def test_a_stop_is_answered_by_its_own_number(copied):
    copied.connect()
    driver = copied.driver
    for level, number in ((0, 1), (0, 2), (1, 3)):
        assert not driver.stop("because", level)
        assert copied.take() == {"stop": level, "number": number}
        assert not driver.stop("because", level), "what was not read is not known"
        assert copied.take()["number"] == number
        copied.q = POSE + 0.01 * number
        copied.send()
        wait(lambda: driver.read().q[0] == 0.01 * number)  # noqa: B023
        assert driver.stop("because", level)
        copied.take()
    assert driver.read().faults == ("stopped by its own means",)
    copied.mode, copied.torque = "current", False
    copied.send()
    wait(lambda: not driver.read().torque)
    assert "current" in str(driver.read().faults)


def test_what_is_no_state_is_an_error_and_so_is_an_arm_that_is_gone(copied):
    copied.connect()
    for datagram in (b"{", b"[]", b'{"q": [0]}', b'{"q": "x"}', b"\xff"):
        copied.send(datagram)
        with pytest.raises(DriverError):
            wait(lambda: copied.driver.read() is None)
    copied.socket.close()
    copied.driver.command(POSE, 0.005)  # a refusal comes back
    with pytest.raises(DriverError, match="gone"):
        wait(lambda: copied.driver.read() is None)
    with pytest.raises(DriverError, match=str(copied.port)):
        UdpArm(port=copied.port).connect(time.monotonic)
