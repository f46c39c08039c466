"""A Franka of HIL-SERL's as whole processes: its server's stand-in, the robot's server, and an actor's robot."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import numpy as np
import pytest
from franka_http import FrankaServer, angle_between
from robot_process import FILES, RobotProcess
from robot_served import wait

from serl_chunk.config.loader import load_experiment
from serl_chunk.robots.registry import make_env
from serl_chunk_robot.client.client import RobotClient, RobotError
from serl_chunk_robot.geometry.rotations import matrix_of_quat, quat_of_euler

START, RESET = np.array([[0.55, 0.2, 0.27, np.pi, 0.0, -np.pi / 2], [0.553, 0.20697, 0.30098, np.pi, 0.0, -np.pi / 2]])
SLOT = [0.553, 0.17697, 0.25098]
OF_A_RESET = ["z 0.01", "clearerr", "open_gripper", "close_gripper", "z 0.0035", "clearerr", "open_gripper"]


def cleared(operator: RobotClient) -> bool:
    try:
        operator.request("clear")
    except RobotError:
        return False
    with contextlib.suppress(RobotError):  # no one has the lease yet
        operator.request("go")
    return True


def orders(arm: FrankaServer) -> list[str]:
    """What was requested but poses; of parameters, the clip of the translation's z."""
    names = ((path, body) for path, body in list(arm.requests) if path != "pose")
    return [f"z {body['translational_clip_z']}" if path == "update_param" else path for path, body in names]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_episodes_with_resets_steps_and_faults(tmp_path):
    with contextlib.ExitStack() as stack:
        franka = stack.enter_context(FrankaServer(START))
        text = (FILES / "franka_usb.toml").read_text().partition("[[camera]]")[0]
        text = text.replace("http://127.0.0.1:5000/", franka.url).replace("[driver]", "[driver]\ntimeout = 1.0")
        server = stack.enter_context(contextlib.closing(RobotProcess(tmp_path, text, ports=5)))
        server.begin()
        operator = stack.enter_context(contextlib.closing(server.client("K", "operator")))
        wait(lambda: cleared(operator))
        config = load_experiment("hil_serl_franka:usb_pickup_insertion").robot
        changes = {"server": server.address, "cameras": (), "max_episode_steps": 200}
        robot = stack.enter_context(contextlib.closing(make_env(dataclasses.replace(config, **changes))))
        with contextlib.suppress(RobotError):
            operator.request("go")
        episodes(franka, operator, robot)
        robot.close()
        assert server.end()[0] == 0


def episodes(franka, operator, robot):
    observation, info = robot.reset(seed=0)
    np.testing.assert_allclose(observation["state"][4:10], np.zeros(6), atol=1e-6)
    assert list(info["draws"]) == ["reset.step[6]"]
    drawn = RESET + np.array(info["draws"]["reset.step[6]"])[:6]
    np.testing.assert_allclose(franka.arm.pose[:3], drawn[:3], atol=2e-3)
    assert angle_between(franka.arm.pose[3:], quat_of_euler(drawn[3:])) < 0.02
    assert orders(franka) == OF_A_RESET
    paths = [path for path, _ in franka.requests]
    grasped = [body for path, body in franka.requests[: paths.index("close_gripper")] if path == "pose"][-1]
    np.testing.assert_allclose(grasped["arr"][:3], SLOT, atol=1e-4)

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
    assert orders(franka) == [*OF_A_RESET, "close_gripper"], "and no error recovery before a command"
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
