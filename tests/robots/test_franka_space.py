"""HIL-SERL's space of actions and states: equal to its own wrappers on recorded calls (benchmarks/record_franka.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serl_chunk.config.robots import FrankaConfig
from serl_chunk.robots import franka, franka_space
from serl_chunk.robots.franka import FrankaRobot
from serl_chunk.robots.served.task import Seen
from serl_chunk_robot.geometry.rotations import euler_of_matrix, matrix_of_euler, matrix_of_quat

FILE = Path(__file__).parents[1] / "golden" / "hil_serl_franka.npz"
CASES = ("fixed_gripper", "learned_gripper", "upright", "dual")
TOLERANCE = 1e-6  # of the recorded numbers, of which poses and states are float32


class Server:
    """Stands for a ServedRobot whose states are those of a recording."""

    conditions = "{}"

    def __init__(self, case: dict[str, np.ndarray]) -> None:
        self.case, self.at = case, 0
        self.sent: list[np.ndarray] = []

    def seen(self) -> Seen:
        c, k = self.case, self.at
        places = [
            [*pose[:3], *euler_of_matrix(matrix_of_quat(pose[3:])), 0.5] for pose in c["pose"][k]
        ]  # unwrapped or not makes no difference
        extra = {name: c[name][k].reshape(-1) for name in ("vel", "force", "torque", "gripper")}
        return Seen(np.concatenate(places), np.zeros(0), extra)

    def reset(self, **_):
        self.at = 0
        return {}, {}

    def send(self, target: np.ndarray) -> None:
        self.sent.append(np.array(target))

    def receive(self):
        self.at += 1
        return {}, 0.0, False, False, {}


def recorded(name: str) -> dict[str, np.ndarray]:
    with np.load(FILE) as cases:
        return {key.partition("/")[2]: cases[key] for key in cases.files if key.startswith(f"{name}/")}


def config_of(case: dict[str, np.ndarray]) -> FrankaConfig:
    given = json.loads(str(case["config"]))
    arms = len(given["low"])
    low, high = (tuple(float(x) for row in given[key] for x in row) for key in ("low", "high"))
    return FrankaConfig(
        arms=arms, grippers=given["grippers"], scale=tuple(given["scale"]), box_low=low, box_high=high,
        mirrored_yaw=arms > 1, proprio=tuple(given["proprio"]), server="127.0.0.1",
    )  # fmt: skip


@pytest.fixture
def robot_of(monkeypatch):
    """Makes the robot of a recorded case."""

    def make(case: dict[str, np.ndarray]) -> tuple[FrankaRobot, Server]:
        server = Server(case)
        monkeypatch.setattr(franka, "ServedRobot", lambda *_, **__: server)
        return FrankaRobot(config_of(case)), server

    return make


@pytest.mark.parametrize("name", CASES)
def test_targets_and_states_are_hil_serl_s(name, robot_of):
    case = recorded(name)
    robot, server = robot_of(case)
    states = [robot.reset()[0]["state"]]
    for k, action in enumerate(case["actions"]):
        if not np.isnan(case["human"][k]).any():
            server.at += 1  # that of a human is compared below
            states.append(robot._observe()["state"])
            continue
        states.append(robot.step(action)[0]["state"])
        for arm, pose in enumerate(case["sent"][k]):
            place = server.sent[-1][7 * arm : 7 * arm + 6]
            np.testing.assert_allclose(place[:3], pose[:3], atol=TOLERANCE)
            np.testing.assert_allclose(matrix_of_euler(place[3:]), matrix_of_quat(pose[3:]), atol=TOLERANCE)
    # A force of 10 N as float32 is 1e-6 off; relative to it, as to a speed in the tip's frame, the bound is the same.
    np.testing.assert_allclose(states, case["state"], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_a_human_s_command_is_that_of_hil_serl_in_the_tip_s_frame(name):
    case = recorded(name)
    checked = 0
    for k in np.flatnonzero(~np.isnan(case["human"]).any(axis=1)):
        config, server = config_of(case), Server(case)
        server.at = int(k)
        each = 6 + config.grippers
        for arm in range(config.arms):
            place = server.seen().q[7 * arm : 7 * arm + 6]
            twist = case["human"][k][6 * arm : 6 * arm + 6]
            given_back = case["intervene"][k][each * arm : each * arm + 6]
            in_tip = franka_space.in_tip_frame(place, twist)
            np.testing.assert_allclose(in_tip, given_back, atol=TOLERANCE)
            box = franka._boxes(config)[arm]
            to = franka_space.target(place, in_tip, np.array(config.scale), box)
            pose = case["sent"][k][arm]
            np.testing.assert_allclose(to[:3], pose[:3], atol=TOLERANCE)
            np.testing.assert_allclose(matrix_of_euler(to[3:]), matrix_of_quat(pose[3:]), atol=TOLERANCE)
            checked += 1
    assert checked >= 8


def test_the_cases_reach_every_side_of_the_boxes():
    """Else they would compare no clipping."""
    for name in CASES:
        case = recorded(name)
        for arm, box in enumerate(franka._boxes(config_of(case))):
            sent = np.array([[*p[:3], *euler_of_matrix(matrix_of_quat(p[3:]))] for p in case["sent"][:, arm]])
            sizes = np.where(np.isin(np.arange(6), [3 + m for m in box.mirrored]), np.abs(sent), sent)
            assert (np.abs(sizes - box.low) < 1e-6).any(axis=0)[[0, 1, 2, 4]].all(), name
            assert (np.abs(sizes - box.high) < 1e-6).any(axis=0)[[0, 1, 2, 4]].all(), name


places = st.tuples(
    st.floats(0.2, 0.8),
    st.floats(-0.4, 0.4),
    st.floats(0, 0.6),
    st.floats(2, 4.2),
    st.floats(-1.2, 1.2),
    st.floats(-3, 3),
).map(np.array)
twists = st.tuples(*[st.floats(-0.5, 0.5)] * 6).map(np.array)
WIDE = franka_space.Box(np.array([-9.0] * 3 + [0.0, -9.0, -9.0]), np.array([9.0] * 6))


@given(places, twists)
def test_the_action_of_a_target_is_the_one_that_led_there(place, twist):
    scale = np.array([0.02, 0.2])
    action = franka_space.in_tip_frame(place, twist)
    to = franka_space.target(place, action, scale, WIDE)
    np.testing.assert_allclose(franka_space.action_of(place, to, scale), action, atol=1e-6)
    assert (np.abs(to[3:] - place[3:]) < 2.5).all(), "angles make no jump"


@given(places)
def test_a_place_relative_to_itself_is_nothing(place):
    np.testing.assert_allclose(franka_space.relative(place, place), np.zeros(6), atol=1e-12)


@given(places, twists, st.booleans())
@example(np.array([0.5, 0.0, 0.0, 3.0, 1.0, 3.0]), np.array([0.0, 0.0, 0.0, 0.0, 0.0, -0.5]), False)
def test_targets_are_within_what_the_box_says(place, twist, mirrored_yaw):
    low = np.array([0.4, -0.1, 0.2, np.pi - 0.2, -0.3, -0.5 + mirrored_yaw * 0.6])
    high = np.array([0.6, 0.1, 0.4, np.pi + 0.2, 0.3, 0.5])
    box = franka_space.Box(low, high, (0, 2) if mirrored_yaw else (0,))
    to = franka_space.target(place, twist, np.array([0.02, 0.2]), box)
    least, most = box.interval()
    turns = 2 * np.pi * np.round((to[3:] - (least + most)[3:] / 2) / (2 * np.pi))
    to[3:] -= turns  # a place half a turn from its box has a target that is nearer to it by a whole turn
    assert (to >= least - 1e-9).all()
    assert (to <= most + 1e-9).all()
