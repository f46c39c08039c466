"""Franka arms behind HIL-SERL's server, under the loop: faults, reflexes and joint resets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from franka_driver import Clock, Loop, by, wait
from franka_http import START, FrankaServer, angle_between

from serl_chunk_robot.control.loop import Refused
from serl_chunk_robot.drivers.franka_http import JOINT_RESET_EVERY, FrankaHttp
from serl_chunk_robot.geometry.rotations import quat_of_euler


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


@pytest.fixture
def loop(driver, server, clock) -> Loop:
    return Loop(driver, server, clock)


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


@pytest.mark.parametrize(
    ("kind", "why"),
    [("errs", "pose: HTTP 500"), ("refuse", "refused"), ("no state", "no state"), ("nested", "no state")],
)
def test_a_server_that_fails_stops_the_robot_which_goes_on_once_it_is_back(loop, server, kind, why):
    at = loop.armed()
    if kind == "errs":
        server.errs = {"pose"}
    elif kind == "refuse":
        server.refuse()
    else:
        server.answer = b"[" * 100_000 if kind == "nested" else b'{"pose": [0, 0, 0, 0, 0, 0, 0]}'
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
