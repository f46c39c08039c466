"""Franka arms behind HIL-SERL's server: the driver against a stand-in of it, alone and under the loop."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from franka_http import START, FrankaServer, angle_between

from serl_chunk_robot.config import checked, load, load_driver
from serl_chunk_robot.driver import Driver, DriverError, Reading
from serl_chunk_robot.drivers.franka_http import JOINT_RESET_EVERY, REPEATS, STUCK, FrankaHttp
from serl_chunk_robot.drivers.franka_requests import Orders
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.loop import Refused, RobotLoop, Status
from serl_chunk_robot.profiles import built_in
from serl_chunk_robot.rotations import quat_of_euler
from serl_chunk_robot.safety.gate import Command, Gate
from serl_chunk_robot.safety.measured import Measured

DT = 0.02
FILE = """
name = "cell"
start = "evaluating"
driver = {{ name = "franka_http", urls = ["{}"], params.precision = {{ translational_stiffness = 2000 }} }}
[profile.evaluating]
first = [0.1, 0.1, 0.1, 0.5, 0.5, 0.5, 1.0]
"""


class Clock:
    """A clock that tests set."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


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


def by(*numbers: float) -> np.ndarray:
    """An addition to the first of an arm's seven numbers."""
    return np.array(numbers + (0.0,) * (7 - len(numbers)))


def wait(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.001)


def newest(driver: FrankaHttp, server: FrankaServer) -> Reading:
    """What is read once two more states were asked for: what was commanded before has been sent then."""
    wanted = server.states + 3
    wait(lambda: server.states >= wanted)
    return driver.read()


class Loop:
    """The driver under the loop, in the clock's time."""

    def __init__(self, driver: FrankaHttp, server: FrankaServer, clock: Clock) -> None:
        self.driver, self.server, self.clock = driver, server, clock
        spec = driver.spec()
        limits = built_in(spec)["evaluating"]
        first = np.where(np.isin(np.arange(7), spec.grippers), 1.0, 0.3)
        measured = Measured(*(np.array(x) for x in (spec.low, spec.high, spec.velocity)))
        gate = Gate(limits._replace(first=first), DT)
        self.loop = RobotLoop(driver, gate, measured=measured, dt=DT, tick=spec.tick)
        self.slowest, self.number = 0.0, 0

    def run(self, passes: int, fresh: bool = True) -> Status:
        """Passes with a newer state before each; without `fresh`, after a time in which one would have come."""
        for _ in range(passes):
            self.clock.now += DT
            if fresh:
                newest(self.driver, self.server)
            else:
                time.sleep(0.03)
            began = time.monotonic()
            status = self.loop.run_pass(self.clock.now)
            self.slowest = max(self.slowest, time.monotonic() - began)
        return status

    def armed(self) -> np.ndarray:
        """Arm the robot; returns its set point."""
        self.run(3)
        self.loop.request("clear", "operator", "K", self.clock.now)
        self.loop.request("arm", "controller", "A", self.clock.now)
        self.number = 0
        return self.run(1).set_point

    def tick(self, target: np.ndarray, fresh: bool = True) -> Status:
        """A control tick of 0.1 s."""
        self.number += 1
        command = Command(target, self.number, self.loop.machine.generation)
        assert self.loop.command(command, self.clock.now) == ""
        return self.run(5, fresh)


@pytest.fixture
def loop(driver, server, clock) -> Loop:
    return Loop(driver, server, clock)


@pytest.mark.parametrize("arms", [1, 2])
def test_it_has_the_contract_s_methods_and_describes_poses(arms):
    driver = FrankaHttp(["http://127.0.0.1:5000/"] * arms)
    for name in (name for name in vars(Driver) if not name.startswith("_")):
        wanted = list(inspect.signature(getattr(Driver, name)).parameters)[1:]
        assert list(inspect.signature(getattr(driver, name)).parameters) == wanted, name
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


def test_under_the_loop_arm_and_gripper_get_where_they_are_told(loop, server):
    at = loop.armed()
    for k in range(1, 6):
        target = np.append(at[:6] + 0.01 * k * np.array([1, -1, 1, 2, -2, 2]), 0.0 if k > 1 else 0.5)
        status = loop.tick(target)
    assert status.factor == 1
    assert status.word == loop.loop.machine.word
    status = loop.tick(target)
    np.testing.assert_allclose(status.set_point, target, atol=1e-9)
    np.testing.assert_allclose(server.arm.pose[:3], target[:3], atol=2e-3)
    assert angle_between(server.arm.pose[3:], quat_of_euler(target[3:6])) < 0.01
    assert (loop.loop.machine.state, loop.slowest < 0.05) == ("RUN", True)
    assert server.paths("close_gripper", "open_gripper") == ["close_gripper"]
    assert loop.driver.read().q[6] == 0.0
    assert server.paths("clearerr") == [], "nothing was to be recovered from"
    sent = [np.array(body["arr"]) for path, body in server.requests if path == "pose"]
    steps = np.abs(np.diff([x[:3] for x in sent], axis=0)).max()
    assert steps < 0.01, "the gate's set points are sent, not the targets of ticks"


def test_a_frozen_robot_is_stopped(loop, server):
    at = loop.armed()
    loop.tick(at + by(0.02))
    server.frozen = True
    for k in range(2, 8):
        status = loop.tick(at + by(0.02 * k))
        if status.state != "RUN":
            break
    assert status.state in ("BRAKE", "STOPPED")
    assert "repeated" in status.word or "old" in status.word


def test_a_server_that_hangs_stops_the_robot_and_holds_no_pass_up(loop, server):
    at = loop.armed()
    server.hangs = {"getstate"}
    loop.slowest = 0.0
    status = loop.tick(at, fresh=False)
    status = loop.run(5, fresh=False)
    assert "ms old" in status.word
    assert loop.slowest < 0.05
    server._over.set()
    wait(lambda: loop.driver.read().stamp == loop.clock.now)
    loop.run(3)
    assert loop.loop.machine.state == "STOPPED"


@pytest.mark.parametrize(("kind", "why"), [("errs", "pose: HTTP 500"), ("refuse", "refused"), ("no state", "no state")])
def test_a_server_that_fails_stops_the_robot_which_goes_on_once_it_is_back(loop, server, kind, why):
    at = loop.armed()
    if kind == "errs":
        server.errs = {"pose"}
    elif kind == "refuse":
        server.refuse()
    else:
        server.answer = b'{"pose": [0, 0, 0, 0, 0, 0, 0]}'
    loop.tick(at, fresh=False)
    assert why in loop.loop.machine.word
    loop.run(10, fresh=False)
    assert loop.loop.machine.state == "STOPPED"
    server.errs, server.answer = set(), None
    if kind == "refuse":
        server.start()
    loop.run(5)
    for _ in range(4):
        loop.run(5)
        try:
            loop.loop.request("clear", "operator", "K", loop.clock.now)
            break
        except Refused:
            pass
    assert loop.run(1).state == "HOLD"
    np.testing.assert_allclose(server.arm.pose[:3], START[:3], atol=2e-3)


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


def test_a_robot_that_is_cleared_moves_no_gripper(loop, server):
    loop.armed()
    assert server.paths("close_gripper", "open_gripper") == []
    server.errs = {"getstate"}
    loop.run(5, fresh=False)
    server.errs = set()
    loop.run(5)
    loop.driver.clear_faults()
    loop.run(2)
    assert server.paths("close_gripper", "open_gripper") == []


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
        ("torque", False, "user stop"), ("gripper", "close", "not possible"), ("stiffness", 1, "Valid: params"),
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
    for _ in range(4):
        loop.run(3)
        try:
            loop.loop.request("clear", "operator", "K", clock.now)
            break
        except Refused:
            pass
    status = loop.run(1)
    np.testing.assert_allclose(status.set_point[:3], [0.5, 0, 0.4], atol=1e-6)
    loop.driver.set("joint_reset", True)
    assert not loop.driver.read().faults, "not twice in ten minutes"
    clock.now += JOINT_RESET_EVERY
    loop.driver.set("joint_reset", True)
    wait(lambda: server.paths("jointreset") == ["jointreset"] * 2)


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
