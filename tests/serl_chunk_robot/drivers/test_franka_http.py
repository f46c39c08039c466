"""Franka arms behind HIL-SERL's server, alone and under the loop, against a stand-in of it."""

from __future__ import annotations

import contextlib
import importlib
import time
import types
from functools import cached_property

import numpy as np
import pytest
from driver_rigs import DT, loop_of
from franka_http import START, FrankaServer
from robot_served import wait

from serl_chunk_robot.control.loop import Refused, RobotLoop, Status
from serl_chunk_robot.drivers.base import DriverError, Reading
from serl_chunk_robot.drivers.franka_http import JOINT_RESET_EVERY, REPEATS, STUCK, FrankaHttp, Orders, stop_outside
from serl_chunk_robot.geometry.rotations import quat_of_euler
from serl_chunk_robot.safety.gate import Command

STILL = np.append(START, 0.5)


def by(*numbers: float) -> np.ndarray:
    return np.array(numbers + (0.0,) * (7 - len(numbers)))


class Cell:
    """A driver that is connected to one server, or to one an arm, and the loop, in a time that tests set."""

    now = 50.0

    def __init__(self, stack: contextlib.ExitStack, *places: np.ndarray, **options) -> None:
        self.servers = [stack.enter_context(FrankaServer(place, clock=self.clock)) for place in places or (START,)]
        self.server = self.servers[0]
        driver = FrankaHttp([server.url for server in self.servers], timeout=0.5, **options)
        self.driver = stack.enter_context(contextlib.closing(driver))
        self.driver.connect(self.clock)
        self.slowest, self.number = 0.0, 0

    def clock(self) -> float:
        return self.now

    @cached_property
    def loop(self) -> RobotLoop:
        return loop_of(self.driver, 0.1, self.clock, np.array([0.3] * 6 + [1.0]))

    def newest(self, after: float = 0.0, servers: slice = slice(None)) -> Reading:
        """What is read once two more states were asked for: what was commanded before has been sent then."""
        self.now += after
        for server in self.servers[servers]:
            wanted = server.states + 3
            wait(lambda: server.states >= wanted)  # noqa: B023
        return self.driver.read()

    def run(self, passes: int, fresh: bool = True) -> Status:
        """Passes with a newer state before each; without `fresh`, after a time in which one would have come."""
        for _ in range(passes):
            self.now += DT
            self.newest() if fresh else time.sleep(0.03)
            began = time.monotonic()
            status = self.loop.run_pass(self.now)
            self.slowest = max(self.slowest, time.monotonic() - began)
        return status

    def cleared(self) -> Status:
        """Clear the robot, which may take some attempts; returns the status after it."""
        for _ in range(4):
            self.run(5)
            with contextlib.suppress(Refused):
                self.loop.request("clear", "operator", "K", self.now)
                break
        return self.run(1)

    def armed(self) -> np.ndarray:
        self.cleared()
        self.loop.request("arm", "controller", "A", self.now)
        return self.run(1).set_point

    def tick(self, target: np.ndarray, fresh: bool = True) -> Status:
        self.number += 1
        assert self.loop.command(Command(target, self.number, self.loop.machine.generation), self.now) == ""
        return self.run(5, fresh)


@pytest.fixture
def made():
    with contextlib.ExitStack() as stack:
        yield lambda *places, **options: Cell(stack, *places, **options)


@pytest.fixture
def cell(made) -> Cell:
    return made(params={"precision": {"translational_stiffness": 2000}})


def test_it_is_stopped_from_outside_the_server(cell):
    server = cell.server
    cell.driver.command(STILL + by(0, 0, 0.1), DT)
    wait(lambda: server.arm.target[2] > START[2] + 0.05)
    aimed = server.arm.target[2]
    stop_outside({"urls": [server.url]}, "a stop by desk")
    np.testing.assert_allclose(server.arm.target, server.arm.pose, atol=1e-9)
    assert server.arm.target[2] < aimed, "its target is where it was measured"
    module, _, name = cell.driver.spec().stop_outside.partition(":")
    assert getattr(importlib.import_module(module), name) is stop_outside
    with pytest.raises(OSError, match="refused"):
        stop_outside({"urls": ["http://127.0.0.1:9/"]}, "a stop by desk")


@pytest.mark.parametrize("axis", [3, 5])
def test_angles_make_no_jump_where_euler_s_do(made, axis):
    place = START * (np.arange(6) != 5)
    cell = made(place, centre=place[3:])
    for k in range(1, 25):
        place = place + 0.1 * (np.arange(6) == axis)
        cell.server.arm.pose = cell.server.arm.target = np.append(place[:3], (-1) ** k * quat_of_euler(place[3:]))
        np.testing.assert_allclose(cell.newest(after=DT).q[:6], place, atol=1e-9)


def test_the_measured_speed_is_that_of_the_measured_angles(made):
    """What stops a robot that is too fast reads it."""
    start = np.array([0.5, 0.0, 0.3, 3.0, 0.6, 0.4])
    cell, to = made(start), start + np.array([0.05, -0.05, 0.02, 0.2, -0.2, 0.3])
    cell.server.arm.lag, cell.server.arm.target = 0.2, np.append(to[:3], quat_of_euler(to[3:]))
    readings = [cell.newest(after=0.002) for _ in range(4)]
    rates = np.diff([each.q for each in readings], axis=0)[:, :6] / 0.002
    dq = np.array([each.dq[:6] for each in readings])
    np.testing.assert_allclose((dq[1:] + dq[:-1]) / 2, rates, rtol=0.02, atol=0.01)


def test_one_request_that_fails_is_no_fault_and_two_are(cell):
    cell.driver.close()  # its threads: rounds are the test's
    faults = []
    for errs in ({"getstate"}, {"getstate"}, set()):
        cell.server.errs = errs
        cell.driver._arms[0].exchange()
        faults.append(cell.driver.read().faults)
    assert faults[::2] == [(), ()]
    assert "getstate: HTTP 500" in faults[1][0]


def test_a_repeated_state_is_no_older_than_the_server_may_leave_it(cell):
    cell.server.arm.noise = 0.0
    cell.newest()
    cell.newest(after=5.0)
    assert cell.newest().stamp == cell.now - REPEATS


def test_error_recoveries_that_do_not_help_end_in_a_fault(made):
    cell = made(recoveries=3)
    cell.server.arm.blocked = True
    for _ in range(10):  # it presses on something, or gravity keeps it away
        cell.driver.command(STILL + by(0.03), DT)
        cell.newest(after=STUCK)
    assert len(cell.server.paths("clearerr")) <= 1, "an arm that is kept from a target that stands is left alone"
    for k in range(20):
        cell.now += STUCK
        cell.driver.command(STILL + by(0.02 * (k % 2)), DT)
        if faults := cell.newest().faults:
            break
    assert "3 error recoveries did not help" in faults[0]
    cell.newest()
    assert len(cell.server.paths("clearerr")) == 3


def test_quantities_are_set_by_a_thread_and_refused_by_name(cell):
    driver, server = cell.driver, cell.server
    load = {"mass": 0.1, "F_x_center_load": [0, 0, 0.1], "load_inertia": [0] * 9}
    for name, value in (("params", {"rotational_Ki": 0}), ("params", "precision"), ("load", load),
                        ("gripper", "activate"), ("recover", True)):  # fmt: skip
        driver.set(name, value)
    wait(lambda: len(server.requests) == 5)
    assert server.requests == [
        ("update_param", {"rotational_Ki": 0}),
        ("update_param", {"translational_stiffness": 2000}),
        ("set_load", load),
        ("activate_gripper", None),
        ("clearerr", None),
    ]
    for name, value, why in (
        ("params", "soft", "'soft' is none"),
        ("load", {"mass": 1}, "F_x_center"),
        ("gripper", "close", "expected 'activate'"),
    ):
        with pytest.raises(DriverError, match=why):
            driver.set(name, value)
    server.errs = {"update_param"}
    driver.set("params", {"rotational_Ki": 0})
    wait(lambda: driver.read().faults)
    assert "update_param: HTTP 500" in driver.read().faults[0], "until it is cleared"
    driver.clear_faults()
    assert cell.newest().faults == ()
    server.hangs = {"update_param"}
    driver.set("params", {"rotational_Ki": 0})
    assert cell.newest(after=0.1).stamp == cell.now, "a slow order delays no state"


def test_a_stop_is_answered_by_a_later_round_and_a_harder_one_stays(cell):
    driver, server, target = cell.driver, cell.server, STILL + by(0.05)
    driver.command(target, DT)
    cell.newest()
    server.hangs = {"getstate"}
    time.sleep(0.05)
    assert not driver.stop("because")
    assert not driver.stop("because")
    assert not driver.stop("because", 1)
    server.goes_on()
    wait(lambda: driver.stop("because", 1))
    np.testing.assert_allclose(server.arm.target, server.arm.pose, atol=0.06)
    assert np.abs(server.arm.target[0] - target[0]) > 0.01, "it stays where it was measured"


def test_two_arms_are_one_robot(made):
    right = START + np.array([0.05, -0.1, 0, 0, 0, np.pi / 2 + 3.0])
    cell = made(START, right, centre=[[np.pi, 0, -1.5], [np.pi, 0, np.pi]], gripper_lock=0.0)
    driver, (a, b) = cell.driver, cell.servers
    assert (driver.spec().arms, driver.spec().grippers) == (((0, 7), (7, 14)), (6, 13))
    q = driver.read().q
    np.testing.assert_allclose(q, [*STILL, *right, 0.5], atol=1e-9)
    driver.command(q + np.array([0] * 6 + [0.5] + [0.01] * 3 + [0] * 3 + [-0.5]), DT)
    wait(lambda: all((a.paths("open_gripper"), b.paths("close_gripper"), a.paths("pose"), b.paths("pose"))))
    np.testing.assert_allclose(b.arm.target[:3], right[:3] + 0.01)
    cell.newest(after=DT)
    b.hangs = {"getstate"}
    time.sleep(0.05)
    cell.newest(after=DT, servers=slice(1))
    assert driver.read().stamp < cell.now, "the older of the two"


def test_without_a_server_the_error_names_its_address(cell):
    server = cell.server
    server.refuse()
    with pytest.raises(DriverError, match=rf"127\.0\.0\.1:{server.port}/: no state of a robot .*franka_server\.py"):
        FrankaHttp([f"127.0.0.1:{server.port}"]).connect(cell.clock)
    server.start()
    server.errs = {"getstate"}  # as where it was started without a gripper
    with pytest.raises(DriverError, match="HTTP 500"):
        FrankaHttp([server.url]).connect(cell.clock)


def test_the_lock_out_lets_one_gripper_request_through_and_then_the_last():
    paths: list[str] = []
    orders = Orders(types.SimpleNamespace(url="http://franka/", post=lambda path, body=None: paths.append(path)), 0.6)
    now = 50.0
    orders.clock = lambda: now
    for seconds, place, sent in (
        (0.0, 0.5, ""), (0.1, 0.26, ""),  # a gripper that is as it is
        (0.1, 0.0, "close_gripper"), (0.1, 1.0, ""), (0.3, 1.0, ""), (0.3, 0.6, "open_gripper"),
        (0.1, 0.1, ""), (0.1, 0.8, ""), (0.8, 0.8, ""),  # it is open again already
        (0.1, 0.1, "close_gripper_slow"),
    ):  # fmt: skip
        now += seconds
        orders.slow = sent == "close_gripper_slow"
        orders.aim(place)
        orders.act()
        assert paths == ([sent] if sent else []), place
        paths.clear()


# Under the loop.


@pytest.mark.parametrize("hangs", [True, False])
def test_a_server_that_hangs_or_repeats_itself_stops_the_robot_and_holds_no_pass_up(cell, hangs):
    at = cell.armed()
    cell.server.hangs, cell.server.frozen, cell.slowest = {"getstate"} if hangs else set(), not hangs, 0.0
    for k in range(1, 8):
        status = cell.tick(at + by(0.02 * k * (not hangs)), fresh=not hangs)
        if status.state != "RUN":
            break
    word = cell.run(5, fresh=not hangs).word
    assert "ms old" in word or (not hangs and "repeated" in word)
    assert cell.slowest < 0.05
    cell.server.goes_on()
    cell.run(3)
    assert cell.loop.machine.state == "STOPPED"


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ({"errs": {"pose"}}, "pose: HTTP 500"),
        ({}, "refused"),
        ({"answer": b"[" * 100_000}, "no state"),
        ({"answer": b'{"pose": [0, 0, 0, 0, 0, 0, 0]}'}, "no state"),
    ],
    ids=["errs", "refuse", "nested", "no state"],
)
def test_a_server_that_fails_stops_the_robot_which_goes_on_once_it_is_back(cell, fails, why):
    at, server = cell.armed(), cell.server
    vars(server).update(fails)
    if not fails:
        server.refuse()
    cell.tick(at, fresh=False)
    assert why in cell.loop.machine.word
    cell.run(10, fresh=False)
    assert cell.loop.machine.state == "STOPPED"
    server.errs, server.answer = set(), None
    if not fails:
        server.start()
    cell.run(5)
    assert cell.cleared().state == "HOLD"
    np.testing.assert_allclose(server.arm.pose[:3], START[:3], atol=2e-3)
    assert server.paths("close_gripper", "open_gripper") == []


def test_an_arm_in_a_reflex_is_recovered_and_counted(cell):
    at, before = cell.armed(), len(cell.server.paths("clearerr"))
    cell.server.arm.reflex = True
    for k in range(1, 9):
        status = cell.tick(at + by(0.005 * k))
    assert len(cell.server.paths("clearerr")) == before + 1, "one was enough"
    assert status.reading.extra["recoveries"] == [before + 1.0]
    assert cell.tick(at + by(0.04)).state == "RUN"
    np.testing.assert_allclose(cell.server.arm.pose[0], at[0] + 0.04, atol=3e-3)


def test_a_joint_reset_stops_the_robot_until_it_is_done(cell):
    cell.armed()
    driver, server = cell.driver, cell.server
    server.hangs = {"jointreset"}
    driver.set("joint_reset", True)
    status = cell.run(2)
    assert (status.state, status.set_point) == ("STOPPED", None)
    assert "a joint reset moves the arm" in status.word
    poses = len(server.paths("pose"))
    cell.run(2)
    assert len(server.paths("pose")) == poses, "nothing is commanded meanwhile"
    server.goes_on()
    wait(lambda: not driver.read().faults)
    server.arm.pose = server.arm.target = np.append([0.5, 0, 0.4], quat_of_euler(START[3:]))
    np.testing.assert_allclose(cell.cleared().set_point[:3], [0.5, 0, 0.4], atol=1e-6)
    driver.set("joint_reset", True)
    assert not driver.read().faults, "not twice in ten minutes"
    cell.now += JOINT_RESET_EVERY
    driver.set("joint_reset", True)
    wait(lambda: len(server.paths("jointreset")) == 2)
