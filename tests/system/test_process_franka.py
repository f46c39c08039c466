"""A Franka of HIL-SERL's as whole processes: the stand-in of its server, the robot's server, and an actor's robot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from franka_http import FrankaServer, angle_between
from robot_served import HERE, free_port, wait

from serl_chunk.config.robots import FrankaConfig
from serl_chunk.robots.registry import make_env
from serl_chunk_robot.client import RobotClient, RobotError
from serl_chunk_robot.rotations import matrix_of_quat, quat_of_euler

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(120)]

FILE = Path(__file__).parents[2] / "experiments" / "robots" / "franka.toml"
# Machines that run tests may stand still for longer than robot PCs may.
MAIN = """
from serl_chunk_robot import loop, main
from serl_chunk_robot.safety import measured, watchdog
loop.GAP, measured.STALE, watchdog.LEAST_VALIDITY = 1.0, 1.0, 0.5
raise SystemExit(main.main())
"""
START = np.array([0.55, 0.2, 0.27, np.pi, 0.0, -np.pi / 2])
RESET = np.array([0.553, 0.207, 0.301, np.pi, 0.0, -np.pi / 2])
LOW, HIGH = (0.523, 0.167, 0.221, 3.04, -0.1, -1.87), (0.583, 0.237, 0.301, 3.24, 0.1, -1.27)


@pytest.fixture
def franka():
    with FrankaServer(START) as server:
        yield server


@pytest.fixture
def served(tmp_path, franka):
    """The address of the robot's server, and a client that may clear it."""
    port, file = free_port(), tmp_path / "franka.toml"
    text = FILE.read_text().replace("http://127.0.0.1:5000/", franka.url)
    text = text.replace("[driver]", "[driver]\ntimeout = 1.0")
    file.write_text(f"port = {port}\n{text}")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", MAIN, "serve", str(file)], env=environment)
    with RobotClient(f"{HERE}:{port}", name="K", role="operator", answer=20.0) as operator:
        operator.next_state(60)
        yield f"{HERE}:{port}", operator, process
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) in (0, -signal.SIGKILL)


def cleared(operator: RobotClient) -> bool:
    try:
        operator.request("clear")
    except RobotError:
        return False
    return True


def test_episodes_with_resets_steps_and_faults(franka, served):
    address, operator, _ = served
    wait(lambda: cleared(operator))
    config = FrankaConfig(
        server=address, scale=(0.015, 0.1), box_low=LOW, box_high=HIGH, max_episode_steps=200, server_keys=""
    )
    robot = make_env(config)
    observation, info = robot.reset(seed=0)
    np.testing.assert_allclose(observation["state"][4:10], np.zeros(6), atol=1e-6)
    assert "reset.step[1]" in info["draws"]
    draw = info["draws"]["reset.step[1]"]
    np.testing.assert_allclose(franka.arm.pose[:2], RESET[:2] + draw[:2], atol=2e-3)
    assert angle_between(franka.arm.pose[3:], quat_of_euler(RESET[3:] + draw[3:6])) < 0.02
    assert [b["translational_clip_z"] for p, b in franka.requests if p == "update_param"] == [0.01, 0.0035]
    assert franka.paths("clearerr") == ["clearerr"], "the reset's"

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
    assert franka.paths("close_gripper", "open_gripper") == ["open_gripper", "close_gripper"], "the reset's is first"
    np.testing.assert_allclose(observation["state"][4:10][:3], way, atol=0.01)
    assert observation["state"][0] < 0.1, "the gripper's opening"
    assert np.abs(executed).max() <= 1.0
    assert sum("gate" in info for info in infos) <= 2, "the profile changes no step of this size"
    sent = np.array([body["arr"] for path, body in franka.requests[begun:] if path == "pose"])
    assert 30 < len(sent) / 1.5 < 90, "at the loop's rate"
    assert np.abs(np.diff(sent[:, :3], axis=0)).max() < 0.6 * 0.1
    assert franka.paths("clearerr") == ["clearerr"], "never before a command"

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
    robot.close()


def test_a_killed_server_leaves_the_arm_where_it_is(franka, served):
    address, operator, process = served
    wait(lambda: cleared(operator))
    config = FrankaConfig(server=address, scale=(0.015, 0.1), box_low=LOW, box_high=HIGH, grippers=False)
    robot = make_env(config)
    robot.reset(seed=0)
    for _ in range(3):
        robot.step(np.array([0, 0, 0.5, 0, 0, 0], np.float32))
    process.kill()
    process.wait(10)
    time.sleep(0.3)
    target = franka.arm.target.copy()
    time.sleep(0.3)
    np.testing.assert_array_equal(franka.arm.target, target)
    assert franka.paths("close_gripper") == []
    robot.close()
