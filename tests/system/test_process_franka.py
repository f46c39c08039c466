"""Frankas of HIL-SERL's as whole processes: their servers' stand-ins, the robot's server, and an actor's robot."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from franka_http import FrankaServer, angle_between
from robot_process import FILES, RobotProcess
from robot_served import wait

from serl_chunk.config.loader import load_experiment
from serl_chunk.config.robots import FrankaConfig
from serl_chunk.robots.franka import FrankaRobot
from serl_chunk.robots.registry import make_env
from serl_chunk_robot.client.client import RobotClient, RobotError
from serl_chunk_robot.geometry.rotations import matrix_of_quat, quat_of_euler

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(180)]

RAM, USB, HANDOVER = "ram_insertion", "usb_pickup_insertion", "object_handover"
TASK_FILES = {RAM: "franka_ram", USB: "franka_usb", HANDOVER: "franka_handover"}
PI = np.pi
STARTS = {  # places in the boxes
    RAM: [[0.6, -0.04, 0.28, PI, 0.05, 0.1]],
    USB: [[0.55, 0.2, 0.27, PI, 0.0, -PI / 2]],
    HANDOVER: [[0.55, -0.02, 0.35, PI, -0.1, 0.0], [0.45, 0.0, 0.4, PI, 0.1, PI]],
}
RESETS = {
    RAM: [[0.58812, -0.03579, 0.32843, PI, 0.05, 0.0]],
    USB: [[0.553, 0.20697, 0.30098, PI, 0.0, -PI / 2]],
    HANDOVER: [[0.6, -0.02, 0.42, PI, 0.0, 0.0], [0.4, 0.0, 0.5, PI, 0.0, PI]],
}
SLOT, HOLDER = [0.553, 0.17697, 0.25098], [0.58575, -0.22036, 0.2731]


class Cell(NamedTuple):
    arms: list[FrankaServer]
    config: FrankaConfig
    operator: RobotClient  # that may clear it
    server: RobotProcess
    ends: contextlib.ExitStack

    def robot(self, **changes: Any) -> FrankaRobot:
        robot = make_env(dataclasses.replace(self.config, **changes))
        self.ends.callback(robot.close)
        with contextlib.suppress(RobotError):  # another test's robot is to be cleared first
            self.operator.request("go")
        return robot


@pytest.fixture
def cell(request, tmp_path) -> Iterator[Cell]:
    task = request.param
    with contextlib.ExitStack() as stack:
        arms = [stack.enter_context(FrankaServer(np.array(start))) for start in STARTS[task]]
        text = (FILES / f"{TASK_FILES[task]}.toml").read_text().partition("[[camera]]")[0]
        for k, arm in enumerate(arms):
            text = text.replace(f"http://127.0.0.{k + 1}:5000/", arm.url)
        server = RobotProcess(tmp_path, text.replace("[driver]", "[driver]\ntimeout = 1.0"), ports=5)
        stack.callback(server.close)
        server.begin()
        with contextlib.closing(server.client("K", "operator")) as operator:
            wait(lambda: cleared(operator))
            config = load_experiment(f"hil_serl_franka:{task}").robot
            config = dataclasses.replace(config, server=server.address, cameras=())
            with contextlib.ExitStack() as ends:
                yield Cell(arms, config, operator, server, ends)
        if server.process is not None:
            assert server.end()[0] == 0


def cleared(operator: RobotClient) -> bool:
    try:
        operator.request("clear")
    except RobotError:
        return False
    with contextlib.suppress(RobotError):  # no one has the lease yet
        operator.request("go")
    return True


class Proceeding(threading.Thread):
    """An operator who ends each wait of a reset. `waits`: how many there were, or more on a slow machine."""

    def __init__(self, operator: RobotClient) -> None:
        super().__init__(daemon=True)
        self._operator, self._ends, self.waits = operator, threading.Event(), 0

    def run(self) -> None:
        while not self._ends.wait(0.2):
            with contextlib.suppress(RobotError):
                self._operator.request("proceed")
                self.waits += 1

    def __enter__(self) -> Proceeding:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self.join(30)


def orders(arm: FrankaServer) -> list[str]:
    """What was requested but poses; of parameters, the clip of the translation's z."""
    return [
        f"z {body['translational_clip_z']}" if path == "update_param" else path
        for path, body in list(arm.requests)
        if path != "pose"
    ]


def pose_at(arm: FrankaServer, order: str) -> np.ndarray:
    paths = [path for path, _ in arm.requests]
    return np.array([body["arr"] for path, body in arm.requests[: paths.index(order)] if path == "pose"][-1])


def at_reset(cell: Cell, task: str, draws: np.ndarray) -> None:
    for k, (arm, place) in enumerate(zip(cell.arms, np.array(RESETS[task]), strict=True)):
        drawn = place + draws[7 * k : 7 * k + 6]
        np.testing.assert_allclose(arm.arm.pose[:3], drawn[:3], atol=2e-3)
        assert angle_between(arm.arm.pose[3:], quat_of_euler(drawn[3:])) < 0.02


@pytest.mark.parametrize("cell", [USB], indirect=True)
def test_episodes_with_resets_steps_and_faults(cell):
    (franka,), operator = cell.arms, cell.operator
    robot = cell.robot(max_episode_steps=200)
    observation, info = robot.reset(seed=0)
    np.testing.assert_allclose(observation["state"][4:10], np.zeros(6), atol=1e-6)
    assert list(info["draws"]) == ["reset.step[6]"]
    at_reset(cell, USB, np.array(info["draws"]["reset.step[6]"]))
    of_a_reset = ["z 0.01", "clearerr", "open_gripper", "close_gripper", "z 0.0035", "clearerr", "open_gripper"]
    assert orders(franka) == of_a_reset
    np.testing.assert_allclose(pose_at(franka, "close_gripper")[:3], SLOT, atol=1e-4)

    before, begun = franka.arm.pose.copy(), len(franka.requests)
    turn = matrix_of_quat(before[3:])
    executed, infos, began = [], [], time.monotonic()
    for k in range(15):
        action = np.array([0, 0, 0.5, 0, 0, 0, -1.0 if k > 4 else 0.0], np.float32)
        observation, _, terminated, truncated, info = robot.step(action)
        assert not terminated, info
        assert not truncated, info
        executed.append(info.get("executed_action", action))
        infos.append(info)
    assert 1.4 < time.monotonic() - began < 1.9
    way = turn.T @ (franka.arm.pose[:3] - before[:3])
    assert way[2] > 0.04, "along the tip's z axis"
    assert orders(franka) == [*of_a_reset, "close_gripper"], "and no error recovery before a command"
    np.testing.assert_allclose(observation["state"][4:10][:3], way, atol=0.01)
    assert observation["state"][0] < 0.1, "the gripper's opening"
    assert np.abs(executed).max() <= 1.0
    assert sum("gate" in info for info in infos) <= 2, "the profile changes no step of this size"
    sent = np.array([body["arr"] for path, body in franka.requests[begun:] if path == "pose"])
    assert 30 < len(sent) / 1.5 < 90, "at the loop's rate"
    assert np.abs(np.diff(sent[:, :3], axis=0)).max() < 0.6 * 0.1

    franka.errs = {"getstate"}
    wait(lambda: operator.next_state()["state"] == "STOPPED")
    *_, truncated, info = robot.step(np.zeros(7, np.float32))
    while not truncated:
        *_, truncated, info = robot.step(np.zeros(7, np.float32))
    assert "HTTP 500" in info["fault"]
    franka.errs = set()
    wait(lambda: cleared(operator))
    observation, _ = robot.reset(seed=1)
    np.testing.assert_allclose(observation["state"][4:10], np.zeros(6), atol=1e-6)


@pytest.mark.parametrize("cell", [RAM], indirect=True)
def test_a_module_is_grasped_anew_in_the_first_episode_alone(cell):
    (franka,) = cell.arms
    robot = cell.robot()
    with Proceeding(cell.operator) as operator:
        observation, info = robot.reset(seed=0)
    assert operator.waits >= 2
    assert orders(franka) == [
        "z 0.1", "clearerr", "open_gripper", "close_gripper_slow", "z 0.0055", "clearerr",
    ]  # fmt: skip
    grasped = pose_at(franka, "close_gripper_slow")[:3]
    assert abs(grasped[0] - HOLDER[0]) <= 0.005 + 1e-6
    np.testing.assert_allclose(grasped[1:], HOLDER[1:], atol=1e-4)
    begins = np.array(info["draws"]["reset.step[10]"])
    at_reset(cell, RAM, begins)
    assert observation["state"][0] < 0.1, "the gripper holds the module"
    begun = len(franka.requests)
    for _ in range(5):
        robot.step(np.array([0, 0, 1, 0, 0, 0], np.float32))
    with Proceeding(cell.operator) as operator:
        _, info = robot.reset(seed=1)
    assert operator.waits == 0
    assert [path for path, _ in franka.requests[begun:] if "gripper" in path] == []
    assert not np.allclose(info["draws"]["reset.step[10]"], begins)
    at_reset(cell, RAM, np.array(info["draws"]["reset.step[10]"]))


@pytest.mark.parametrize("cell", [HANDOVER], indirect=True)
def test_two_arms_are_reset_moved_and_stopped_as_one_robot(cell):
    left, right = cell.arms
    robot = cell.robot()
    with Proceeding(cell.operator) as operator:
        observation, info = robot.reset(seed=0)
    assert operator.waits >= 1
    assert info["draws"] == {}
    at_reset(cell, HANDOVER, np.zeros(14))
    of_a_reset = ["z 0.01", "clearerr", "open_gripper", "z 0.005", "clearerr"]
    wait(lambda: orders(left) == of_a_reset == orders(right))
    clips = [body["translational_clip_neg_x"] for arm in cell.arms for p, body in arm.requests if p == "update_param"]
    assert clips == [0.01, 0.01, 0.02, 0.007], "each arm has its own parameters"
    state = observation["state"].reshape(2, 13)  # of each arm: gripper, pose, velocity
    np.testing.assert_allclose(state[:, 1:7], np.zeros((2, 6)), atol=1e-6)
    assert (state[:, 0] > 0.9).all()

    before = [arm.arm.pose.copy() for arm in cell.arms]
    action = np.zeros(14, np.float32)
    action[[2, 11, 13]] = 0.5, -0.5, -1.0  # left: down; right: turned about y, and closed
    for _ in range(25):
        observation, _, terminated, truncated, info = robot.step(action)
        assert (terminated, truncated) == (False, False), info
    state = observation["state"].reshape(2, 13)
    down = [a.arm.pose[2] - b[2] for a, b in zip(cell.arms, before, strict=True)]
    assert down[0] < -0.05
    assert abs(state[0, 3] + down[0]) < 0.03, "the tip's z axis points down"
    assert angle_between(left.arm.pose[3:], before[0][3:]) < 0.05
    assert angle_between(right.arm.pose[3:], before[1][3:]) > 0.1
    assert state[0, 0] > 0.9 > 0.1 > state[1, 0], "the right gripper alone"
    box = np.array([cell.config.box_low, cell.config.box_high]).reshape(2, 2, 6)
    for k, arm in enumerate(cell.arms):
        assert (arm.arm.target[:3] >= box[0, k, :3] - 1e-6).all()
        assert (arm.arm.target[:3] <= box[1, k, :3] + 1e-6).all()

    right.errs = {"getstate"}
    wait(lambda: cell.operator.next_state()["state"] == "STOPPED")
    stopped = left.arm.target.copy()
    truncated = False
    while not truncated:
        *_, truncated, info = robot.step(action)
    assert right.url in info["fault"]
    np.testing.assert_allclose(left.arm.target[:3], stopped[:3], atol=0.02)
    right.errs = set()
    wait(lambda: cleared(cell.operator))
    with Proceeding(cell.operator):
        robot.reset(seed=1)
    at_reset(cell, HANDOVER, np.zeros(14))


@pytest.mark.parametrize("cell", [USB], indirect=True)
def test_a_killed_server_leaves_the_arm_where_it_is(cell):
    (franka,) = cell.arms
    robot = cell.robot(grippers=False)
    robot.reset(seed=0)
    for _ in range(3):
        robot.step(np.array([0, 0, 0.5, 0, 0, 0], np.float32))
    cell.server.close()
    time.sleep(0.3)
    target, gripper = franka.arm.target.copy(), orders(franka)[-1]
    time.sleep(0.3)
    np.testing.assert_array_equal(franka.arm.target, target)
    assert gripper == orders(franka)[-1] == "open_gripper"
