"""Franka arms behind HIL-SERL's server, alone and under the loop, against a stand-in of it."""

from __future__ import annotations

import contextlib
import importlib
import time

import numpy as np
import pytest
from franka_driver import DT, Clock, Loop, by, newest, wait
from franka_http import START, FrankaServer

from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.drivers.franka_http import JOINT_RESET_EVERY, REPEATS, STUCK, FrankaHttp, Orders, stop_outside
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
STILL = np.append(START, 0.5)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def serves(clock):
    """Start a server's stand-in, and connect a driver to it; both end with the test."""

    def start(place=START, of_arm=None, **options) -> tuple[FrankaServer, FrankaHttp]:
        server = stack.enter_context(FrankaServer(place, clock=clock, **(of_arm or {})))
        driver = stack.enter_context(contextlib.closing(FrankaHttp([server.url], timeout=0.5, **options)))
        driver.connect(clock)
        return server, driver

    with contextlib.ExitStack() as stack:
        yield start


@pytest.fixture
def server(serves) -> FrankaServer:
    server, driver = serves()
    server.driver = driver
    return server


@pytest.fixture
def driver(server) -> FrankaHttp:
    return server.driver


@pytest.fixture
def loop(driver, server, clock) -> Loop:
    return Loop(driver, server, clock)


def test_it_is_stopped_from_outside_the_server(driver, server):
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


def test_a_robot_s_file_makes_it(tmp_path, clock, server):
    path = tmp_path / "robot.toml"
    path.write_text(FILE.format(server.url))
    file = load(path)
    driver = load_driver(file)
    spec = driver.spec()
    assert (spec.targets, spec.rate, spec.tick, sum(size for _, size in spec.state)) == ("poses", 50.0, 0.1, 20)
    driver.connect(clock)
    checked(file, spec, driver.read().q)
    driver.set("params", "precision")
    wait(lambda: ("update_param", {"translational_stiffness": 2000}) in server.requests)
    driver.close()
    path.write_text(FILE.format("ftp://x"))
    with pytest.raises(ConfigError, match="http://HOST:PORT/"):
        load(path)


@pytest.mark.parametrize("axis", [3, 5])
def test_angles_make_no_jump_where_euler_s_do(serves, clock, axis):
    start = START * (np.arange(6) != 5)
    server, driver = serves(start, centre=start[3:])
    place = start.copy()
    for k in range(1, 25):
        place[axis] = start[axis] + 0.1 * k
        server.arm.pose = server.arm.target = np.append(place[:3], (-1) ** k * quat_of_euler(place[3:]))
        clock.now += DT
        np.testing.assert_allclose(newest(driver, server).q[:6], place, atol=1e-9)


def test_the_measured_speed_is_that_of_the_measured_angles(serves, clock):
    """What stops a robot that is too fast reads it."""
    start = np.array([0.5, 0.0, 0.3, 3.0, 0.6, 0.4])
    server, driver = serves(start, {"lag": 0.2})
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


def test_a_repeated_state_is_no_older_than_the_server_may_leave_it(serves, clock):
    server, driver = serves(of_arm={"noise": 0.0})
    clock.now += 0.02
    assert newest(driver, server).stamp == 50.0
    clock.now += 5.0
    assert newest(driver, server).stamp == clock.now - REPEATS


def test_error_recoveries_that_do_not_help_end_in_a_fault(serves, clock):
    server, driver = serves(recoveries=3)
    server.arm.blocked = True
    for _ in range(10):  # it presses on something, or gravity keeps it away
        clock.now += STUCK
        driver.command(STILL + by(0.03), DT)
        newest(driver, server)
    assert len(server.paths("clearerr")) <= 1, "an arm that is kept from a target that stands is left alone"
    for k in range(20):
        clock.now += STUCK
        driver.command(STILL + by(0.02 * (k % 2)), DT)
        reading = newest(driver, server)
        if reading.faults:
            break
    assert "3 error recoveries did not help" in reading.faults[0]
    newest(driver, server)
    assert server.paths("clearerr") == ["clearerr"] * 3
    driver.clear_faults()
    assert newest(driver, server).faults == ()


def test_quantities_are_set_by_a_thread_and_refused_by_name(driver, server, clock):
    load = {"mass": 0.1, "F_x_center_load": [0, 0, 0.1], "load_inertia": [0] * 9}
    for name, value in (("params", {"rotational_Ki": 0}), ("load", load), ("gripper", "activate"), ("recover", True)):
        driver.set(name, value)
    wait(lambda: len(server.requests) == 4)
    assert server.requests == [
        ("update_param", {"rotational_Ki": 0}), ("set_load", load), ("activate_gripper", None), ("clearerr", None),
    ]  # fmt: skip
    for name, value, why in (("params", "soft", "'soft' is none"), ("load", {"mass": 1}, "F_x_center"),
                             ("torque", False, "user stop"), ("gripper", "close", "expected 'activate'")):  # fmt: skip
        with pytest.raises(DriverError, match=why):
            driver.set(name, value)
    server.errs = {"update_param"}
    driver.set("params", {"rotational_Ki": 0})
    wait(lambda: driver.read().faults)
    assert "update_param: HTTP 500" in driver.read().faults[0], "until it is cleared"
    driver.clear_faults()
    assert newest(driver, server).faults == ()
    server.hangs = {"update_param"}
    driver.set("params", {"rotational_Ki": 0})
    clock.now += 0.1
    assert newest(driver, server).stamp == clock.now, "a slow order delays no state"
    server._over.set()


def test_a_stop_is_answered_by_a_later_round_and_a_harder_one_stays(driver, server):
    target = STILL + by(0.05)
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
        assert (driver.spec().arms, driver.spec().grippers) == (((0, 7), (7, 14)), (6, 13))
        driver.connect(clock)
        q = driver.read().q
        np.testing.assert_allclose(q, [*left, 0.5, *right, 0.5], atol=1e-9)
        driver.command(q + np.array([0] * 6 + [0.5] + [0.01] * 3 + [0] * 3 + [-0.5]), DT)
        wait(lambda: a.paths("open_gripper") and b.paths("close_gripper"))
        wait(lambda: b.paths("pose") and a.paths("pose"))
        np.testing.assert_allclose(b.arm.target[:3], right[:3] + 0.01)
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


class Recorded:
    """Takes requests for a server."""

    url = "http://franka/"

    def __init__(self) -> None:
        self.paths: list[str] = []

    def post(self, path: str, body: object = None) -> bytes:
        self.paths.append(path)
        return b""


def test_the_lock_out_lets_one_gripper_request_through_and_then_the_last(clock):
    http = Recorded()
    orders = Orders(http, 0.6)
    orders.clock = clock

    def after(seconds: float, place: float) -> list[str]:
        clock.now += seconds
        orders.aim(place)
        orders.act()
        return http.paths

    assert after(0.0, 0.5) == []
    assert after(0.1, 0.26) == [], "a gripper that is as it is"
    assert after(0.1, 0.0) == ["close_gripper"]
    assert after(0.1, 1.0) == after(0.3, 1.0) == ["close_gripper"]
    assert after(0.3, 0.6) == ["close_gripper", "open_gripper"]
    assert after(0.1, 0.1) == after(0.1, 0.8) == ["close_gripper", "open_gripper"], "it is open again already"
    assert after(0.8, 0.8) == ["close_gripper", "open_gripper"]
    orders.slow = True
    assert after(0.1, 0.1)[2:] == ["close_gripper_slow"]


# Under the loop.


@pytest.mark.parametrize("hangs", [True, False])
def test_a_server_that_hangs_or_repeats_itself_stops_the_robot_and_holds_no_pass_up(loop, server, hangs):
    at = loop.armed()
    server.hangs, server.frozen, loop.slowest = {"getstate"} if hangs else set(), not hangs, 0.0
    for k in range(1, 8):
        status = loop.tick(at + by(0.02 * k * (not hangs)), fresh=not hangs)
        if status.state != "RUN":
            break
    word = loop.run(5, fresh=not hangs).word
    assert "ms old" in word or (not hangs and "repeated" in word)
    assert loop.slowest < 0.05
    server._over.set()
    loop.run(3)
    assert loop.loop.machine.state == "STOPPED"


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ({"errs": {"pose"}}, "pose: HTTP 500"), ({}, "refused"), ({"answer": b"[" * 100_000}, "no state"),
        ({"answer": b'{"pose": [0, 0, 0, 0, 0, 0, 0]}'}, "no state"),
    ],
    ids=["errs", "refuse", "nested", "no state"],
)  # fmt: skip
def test_a_server_that_fails_stops_the_robot_which_goes_on_once_it_is_back(loop, server, fails, why):
    at = loop.armed()
    for name, value in fails.items():
        setattr(server, name, value)
    if not fails:
        server.refuse()
    loop.tick(at, fresh=False)
    assert why in loop.loop.machine.word
    loop.run(10, fresh=False)
    assert loop.loop.machine.state == "STOPPED"
    server.errs, server.answer = set(), None
    if not fails:
        server.start()
    loop.run(5)
    assert loop.cleared().state == "HOLD"
    np.testing.assert_allclose(server.arm.pose[:3], START[:3], atol=2e-3)
    assert server.paths("close_gripper", "open_gripper") == []


def test_an_arm_in_a_reflex_is_recovered_and_counted(loop, server):
    at = loop.armed()
    server.arm.reflex = True
    for k in range(1, 9):
        status = loop.tick(at + by(0.005 * k))
    assert server.paths("clearerr") == ["clearerr"], "one was enough"
    assert status.reading.extra["recoveries"] == [1.0]
    status = loop.tick(at + by(0.04))
    assert status.state == "RUN"
    np.testing.assert_allclose(server.arm.pose[0], at[0] + 0.04, atol=3e-3)


def test_a_joint_reset_stops_the_robot_until_it_is_done(loop, server, clock):
    loop.armed()
    server.hangs = {"jointreset"}
    loop.driver.set("joint_reset", True)
    status = loop.run(2)
    assert (status.state, status.set_point) == ("STOPPED", None)
    assert "a joint reset moves the arm" in status.word
    poses = len(server.paths("pose"))
    loop.run(2)
    assert len(server.paths("pose")) == poses, "nothing is commanded meanwhile"
    server._over.set()
    wait(lambda: not loop.driver.read().faults)
    server.arm.pose = server.arm.target = np.append([0.5, 0, 0.4], quat_of_euler(START[3:]))
    np.testing.assert_allclose(loop.cleared().set_point[:3], [0.5, 0, 0.4], atol=1e-6)
    loop.driver.set("joint_reset", True)
    assert not loop.driver.read().faults, "not twice in ten minutes"
    clock.now += JOINT_RESET_EVERY
    loop.driver.set("joint_reset", True)
    wait(lambda: server.paths("jointreset") == ["jointreset"] * 2)
