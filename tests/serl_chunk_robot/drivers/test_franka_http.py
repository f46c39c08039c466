"""Franka arms behind HIL-SERL's server: the driver against a stand-in of it. test_conformance.py has more."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator

import numpy as np
import pytest
from franka_driver import DT, Clock, by, newest, wait
from franka_http import START, FrankaServer

from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.drivers.franka_http import REPEATS, STUCK, FrankaHttp
from serl_chunk_robot.drivers.franka_requests import stop_outside
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.geometry.rotations import quat_of_euler
from serl_chunk_robot.robot_file.config import checked, load, load_driver

FILE = """
name = "cell"
start = "evaluating"
driver = {{ name = "franka_http", urls = ["{}"], params.precision = {{ translational_stiffness = 2000 }} }}
[profile.evaluating]
first = [0.1, 0.1, 0.1, 0.5, 0.5, 0.5, 1.0]
"""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock) -> Iterator[FrankaServer]:
    with FrankaServer(clock=clock) as server:
        yield server


@pytest.fixture
def driver(clock, server) -> Iterator[FrankaHttp]:
    """A driver that is connected."""
    driver = FrankaHttp([server.url], timeout=0.5)
    driver.connect(clock)
    yield driver
    driver.close()


def test_it_is_stopped_from_outside_the_server(driver, clock, server):
    driver.command(driver.read().q + 0.1 * (np.arange(7) == 2), DT)
    wait(lambda: server.arm.target[2] > START[2] + 0.05)
    aimed = server.arm.target[2]
    stop_outside({"urls": [server.url]}, "a stop by desk")
    np.testing.assert_allclose(server.arm.target, server.arm.pose, atol=1e-9)
    assert server.arm.target[2] < aimed, "its target is where it was measured"
    module, _, name = driver.spec().stop_outside.partition(":")
    assert getattr(importlib.import_module(module), name) is stop_outside
    with pytest.raises(OSError, match="refused"):
        stop_outside({"urls": ["http://127.0.0.1:9/"]}, "a stop by desk")


@pytest.mark.parametrize("arms", [1, 2])
def test_it_describes_poses(arms):
    driver = FrankaHttp(["http://127.0.0.1:5000/"] * arms)
    spec = driver.spec()
    assert (spec.targets, spec.rate, spec.tick) == ("poses", 50.0, 0.1)
    assert [j for first, last in spec.arms for j in range(first, last)] == list(range(7 * arms))
    assert spec.grippers == (6, 13)[:arms]
    assert sum(size for _, size in spec.state) == 20 * arms
    driver.close()


def test_a_robot_s_file_makes_it(tmp_path, clock, server):
    path = tmp_path / "robot.toml"
    path.write_text(FILE.format(server.url))
    file = load(path)
    driver = load_driver(file)
    driver.connect(clock)
    checked(file, driver.spec(), driver.read().q)
    driver.set("params", "precision")
    wait(lambda: ("update_param", {"translational_stiffness": 2000}) in server.requests)
    driver.close()
    path.write_text(FILE.format("ftp://x"))
    with pytest.raises(ConfigError, match="http://HOST:PORT/"):
        load(path)


def test_it_reads_pose_speed_and_force(driver, server):
    server.arm.vel = np.zeros(6)
    reading = newest(driver, server)
    np.testing.assert_allclose(reading.q, [*START, 0.5], atol=1e-9)
    assert {name: len(x) for name, x in reading.extra.items()} == {
        "vel": 6, "force": 3, "torque": 3, "gripper": 1, "recoveries": 1,
    }  # fmt: skip
    np.testing.assert_array_equal(reading.effort, [*reading.extra["force"], 0, 0, 0, 0])
    assert (reading.faults, reading.torque, len(reading.dq)) == ((), True, 7)
    assert server.requests == [], "reading commands nothing"


@pytest.mark.parametrize("axis", [3, 5])
def test_angles_make_no_jump_where_euler_s_do(clock, axis):
    start = START * (np.arange(6) != 5)
    with FrankaServer(start, clock=clock) as server:
        driver = FrankaHttp([server.url], centre=start[3:])
        driver.connect(clock)
        place = start.copy()
        for k in range(1, 25):
            place[axis] = start[axis] + 0.1 * k
            server.arm.pose = server.arm.target = np.append(place[:3], (-1) ** k * quat_of_euler(place[3:]))
            clock.now += DT
            np.testing.assert_allclose(newest(driver, server).q[:6], place, atol=1e-9)
        driver.close()


def test_the_measured_speed_is_that_of_the_measured_angles(clock):
    """What stops a robot that is too fast reads it."""
    start = np.array([0.5, 0.0, 0.3, 3.0, 0.6, 0.4])
    with FrankaServer(start, clock=clock, lag=0.2) as server:
        driver = FrankaHttp([server.url])
        driver.connect(clock)
        to = start + np.array([0.05, -0.05, 0.02, 0.2, -0.2, 0.3])
        server.arm.target = np.append(to[:3], quat_of_euler(to[3:]))
        before = None
        for _ in range(4):
            clock.now += 0.002
            reading = newest(driver, server)
            if before is not None:
                rates = (reading.q - before.q) / 0.002
                np.testing.assert_allclose((reading.dq + before.dq)[:6] / 2, rates[:6], rtol=0.02, atol=0.01)
            before = reading
        driver.close()


def test_one_request_that_fails_is_no_fault_and_two_are(driver, server):
    driver.close()  # its threads: rounds are the test's
    arm = driver._arms[0]
    server.errs = {"getstate"}
    arm.exchange()
    assert driver.read().faults == ()
    arm.exchange()
    assert "getstate: HTTP 500" in driver.read().faults[0]
    server.errs = set()
    arm.exchange()
    assert driver.read().faults == ()


def test_a_repeated_state_is_no_older_than_the_server_may_leave_it(clock):
    with FrankaServer(clock=clock, noise=0.0) as server:
        driver = FrankaHttp([server.url])
        driver.connect(clock)
        clock.now += 0.02
        assert newest(driver, server).stamp == 50.0
        clock.now += 5.0
        assert newest(driver, server).stamp == clock.now - REPEATS
        driver.close()


def test_error_recoveries_that_do_not_help_end_in_a_fault(clock):
    with FrankaServer(clock=clock) as server:
        driver = FrankaHttp([server.url], recoveries=3)
        driver.connect(clock)
        server.arm.blocked = True
        target = np.append(START, 0.5)
        for k in range(20):
            clock.now += STUCK
            driver.command(target + by(0.02 * (k % 2)), DT)
            reading = newest(driver, server)
            if reading.faults:
                break
        assert "3 error recoveries did not help" in reading.faults[0]
        newest(driver, server)
        assert server.paths("clearerr") == ["clearerr"] * 3
        driver.clear_faults()
        assert newest(driver, server).faults == ()
        driver.close()


def test_an_arm_that_is_kept_from_a_target_that_stands_is_left_alone(driver, server, clock):
    """It presses on something, or gravity keeps it away."""
    server.arm.blocked = True
    for _ in range(10):
        clock.now += STUCK
        driver.command(np.append(START, 0.5) + by(0.03), DT)
        newest(driver, server)
    assert len(server.paths("clearerr")) <= 1


def test_quantities_are_set_by_a_thread_and_refused_by_name(driver, server):
    load = {"mass": 0.1, "F_x_center_load": [0, 0, 0.1], "load_inertia": [0] * 9}
    for name, value in (("params", {"rotational_Ki": 0}), ("load", load), ("gripper", "activate"), ("recover", True)):
        driver.set(name, value)
    wait(lambda: len(server.requests) == 4)
    assert server.requests == [
        ("update_param", {"rotational_Ki": 0}), ("set_load", load), ("activate_gripper", None), ("clearerr", None),
    ]  # fmt: skip
    for name, value, why in (
        ("params", "soft", "'soft' is none"), ("params", 3, "expected a table"), ("load", {"mass": 1}, "F_x_center"),
        ("torque", False, "user stop"), ("gripper", "close", "'close', expected 'activate' or 'reset'"),
        ("slow_gripper", 1, "1, expected true"), ("recover", False, "expected true"),
    ):  # fmt: skip
        with pytest.raises(DriverError, match=why):
            driver.set(name, value)


def test_an_order_that_failed_is_a_fault_until_it_is_cleared(driver, server):
    server.errs = {"update_param"}
    driver.set("params", {"rotational_Ki": 0})
    wait(lambda: driver.read().faults)
    assert "update_param: HTTP 500" in driver.read().faults[0]
    driver.clear_faults()
    assert newest(driver, server).faults == ()


def test_a_slow_order_delays_no_state(driver, server, clock):
    server.hangs = {"update_param"}
    driver.set("params", {"rotational_Ki": 0})
    clock.now += 0.1
    assert newest(driver, server).stamp == clock.now
    server._over.set()


def test_a_stop_is_answered_by_a_later_round_and_a_harder_one_stays(driver, server):
    target = np.append(START, 0.5) + by(0.05)
    driver.command(target, DT)
    newest(driver, server)
    server.hangs = {"getstate"}
    time.sleep(0.05)
    assert not driver.stop("because")
    assert not driver.stop("because")
    assert not driver.stop("because", 1)
    server.hangs = set()
    server._over.set()
    wait(lambda: driver.stop("because", 1))
    np.testing.assert_allclose(server.arm.target, server.arm.pose, atol=0.06)
    assert np.abs(server.arm.target[0] - target[0]) > 0.01, "it stays where it was measured"


def test_two_arms_are_one_robot(clock):
    left, right = START, START + np.array([0.05, -0.1, 0, 0, 0, np.pi / 2 + 3.0])
    with FrankaServer(left, clock=clock) as a, FrankaServer(right, clock=clock) as b:
        driver = FrankaHttp([a.url, b.url], centre=[[np.pi, 0, -1.5], [np.pi, 0, np.pi]], gripper_lock=0.0)
        driver.connect(clock)
        q = driver.read().q
        np.testing.assert_allclose(q, [*left, 0.5, *right, 0.5], atol=1e-9)
        driver.command(q + np.array([0] * 6 + [0.5] + [0.01] * 3 + [0] * 3 + [-0.5]), DT)
        wait(lambda: a.paths("open_gripper") and b.paths("close_gripper"))
        wait(lambda: b.paths("pose") and a.paths("pose"))
        np.testing.assert_allclose(b.arm.target[:3], right[:3] + 0.01)
        driver.set("params", [{"rotational_Ki": 1}, {"rotational_Ki": 2}])
        wait(lambda: ("update_param", {"rotational_Ki": 2}) in b.requests)
        wait(lambda: ("update_param", {"rotational_Ki": 1}) in a.requests)
        clock.now += 0.02
        newest(driver, a)
        newest(driver, b)
        b.hangs = {"getstate"}
        time.sleep(0.05)
        clock.now += 0.02
        newest(driver, a)
        assert driver.read().stamp < clock.now, "the older of the two"
        driver.close()


def test_without_a_server_the_error_names_its_address(clock, server):
    port = server.port
    server.refuse()
    with pytest.raises(DriverError, match=rf"127\.0\.0\.1:{port}/: no state of a robot .*franka_server\.py"):
        FrankaHttp([f"127.0.0.1:{port}"]).connect(clock)
    server.start()
    server.errs = {"getstate"}  # as where it was started without a gripper
    with pytest.raises(DriverError, match="HTTP 500"):
        FrankaHttp([server.url]).connect(clock)


@pytest.mark.parametrize("options", [{"urls": "http://127.0.0.1:5000/"}, {"urls": []}, {"params": {"soft": 3}}])
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises((ValueError, DriverError), match=r"expected|list"):
        FrankaHttp(**options)
