"""The Franka robot: its specification, its settings, and what it makes of a served robot's reports."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from serl_chunk.config.robots import FrankaConfig
from serl_chunk.robots import franka
from serl_chunk.robots.franka import FrankaRobot
from serl_chunk.robots.registry import robot_spec
from serl_chunk.robots.served.task import Seen

PLACE = np.array([0.55, 0.2, 0.27, np.pi + 0.01, 0.02, -1.5])
LOW, HIGH = (0.523, 0.147, 0.221, 3.04, -0.1, -1.87), (0.583, 0.237, 0.301, 3.24, 0.1, -1.27)
CONFIG = FrankaConfig(server="127.0.0.1", scale=(0.015, 0.1), box_low=LOW, box_high=HIGH, cameras=("wrist",))


class Server:
    """Stands for a ServedRobot. `told`: what the gripper was told; `info`: of the next tick."""

    conditions = '{"profile": "exploring"}'

    def __init__(self) -> None:
        self.place, self.told, self.info = PLACE.copy(), 0.5, {}
        self.sent: list[np.ndarray] = []

    def seen(self) -> Seen:
        extra = {"vel": np.zeros(6), "force": np.arange(3.0), "torque": np.zeros(3), "gripper": np.array([0.7])}
        return Seen(np.append(self.place, self.told), np.zeros(7), extra)

    def reset(self, **_):
        return {}, {"draws": {}}

    def send(self, target: np.ndarray) -> None:
        self.sent.append(target)

    def receive(self):
        return {}, 1.0, False, True, dict(self.info)


@pytest.fixture
def server(monkeypatch):
    server = Server()
    monkeypatch.setattr(franka, "ServedRobot", lambda *_, **__: server)
    return server


@pytest.mark.parametrize(("arms", "grippers", "size"), [(1, True, 7), (1, False, 6), (2, True, 14), (2, False, 12)])
def test_the_specification_has_hil_serl_s_numbers(arms, grippers, size):
    config = dataclasses.replace(CONFIG, arms=arms, grippers=grippers, box_low=LOW * arms, box_high=HIGH * arms)
    spec = robot_spec(config)
    assert (spec.action_dim, spec.control_hz, spec.state_dim) == (size, 10.0, 19 * arms)
    assert spec.grippers == ((6, 13)[:arms] if grippers else ())
    assert (spec.action_low, spec.action_high) == ((-1.0,) * size, (1.0,) * size)
    assert [c.name for c in spec.cameras] == ["wrist"]
    handover = dataclasses.replace(config, proprio=("tcp_pose", "tcp_vel", "gripper_pose"))
    assert robot_spec(handover).state_dim == 13 * arms
    assert config.real


def test_a_target_is_of_the_measured_place_and_not_of_the_last_target(server):
    robot = FrankaRobot(CONFIG)
    robot.reset()
    assert robot.conditions == server.conditions
    for _ in range(3):
        robot.step(np.array([0, 0, 1, 0, 0, 0, 0], np.float32))
    np.testing.assert_array_equal(server.sent[0], server.sent[2])
    assert np.linalg.norm(server.sent[0][:3] - PLACE[:3]) < 0.015 * np.sqrt(3) + 1e-9


def test_a_gripper_is_told_by_half_an_action_and_else_stays(server):
    robot = FrankaRobot(CONFIG)
    robot.reset()
    grips = []
    for action in (0.0, 0.49, 0.5, 0.0, -0.49, -0.5, 0.3, 1.0):
        robot.step(np.array([0] * 6 + [action], np.float32))
        grips.append(server.sent[-1][6])
    assert grips == [0.5, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    server.told = 0.0
    robot.reset()
    robot.step(np.zeros(7, np.float32))
    assert server.sent[-1][6] == 0.0, "what the reset told it"
    fixed = FrankaRobot(dataclasses.replace(CONFIG, grippers=False))
    fixed.reset()
    fixed.step(np.zeros(6, np.float32))
    assert server.sent[-1][6] == 0.0


def test_what_was_reached_is_reported_as_an_action(server):
    robot = FrankaRobot(CONFIG)
    robot.reset()
    action = np.array([0.2, -0.1, 0.3, 0.1, -0.05, 0.08, -1.0], np.float32)
    assert "executed_action" not in robot.step(action)[4]
    reached = server.sent[-1].astype(np.float32)
    server.info = {"executed_action": reached, "gate": "velocity"}
    *_, truncated, info = robot.step(action)
    np.testing.assert_allclose(info["executed_action"], action, atol=1e-4)
    assert (truncated, info["gate"]) == (True, "velocity")
    server.info = {"executed_action": np.append(PLACE, 0.0).astype(np.float32)}
    executed = robot.step(action)[4]["executed_action"]
    np.testing.assert_allclose(executed, [0] * 6 + [-1], atol=1e-4)
    server.info = {"executed_action": np.append(PLACE + 0.3, 0.0).astype(np.float32)}
    executed = robot.step(action)[4]["executed_action"]
    assert executed.dtype == np.float32
    assert np.abs(executed).max() == 1.0, "within the limits of actions"


def test_the_state_is_relative_to_the_reset_and_in_hil_serl_s_order(server):
    robot = FrankaRobot(CONFIG)
    state = robot.reset()[0]["state"]
    np.testing.assert_allclose(state, [0.7, 0, 1, 2, *[0] * 15], atol=1e-6)
    server.place[0] += 0.01
    moved = robot.step(np.zeros(7, np.float32))[0]["state"]
    assert np.linalg.norm(moved[4:7]) == pytest.approx(0.01, abs=1e-6)
    np.testing.assert_allclose(moved[7:10], 0, atol=1e-6)
