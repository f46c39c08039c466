"""The Franka robot: its specification, its space of actions and states, what it makes of a served robot's reports.

The space is that of HIL-SERL's own wrappers on recorded calls (benchmarks/record_franka.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serl_chunk.config.hil_serl import TASKS
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.robots import FrankaConfig
from serl_chunk.robots import franka
from serl_chunk.robots.franka import FrankaRobot
from serl_chunk.robots.registry import robot_spec
from serl_chunk.robots.served.robot import differing_fields
from serl_chunk.robots.served.task import Seen
from serl_chunk.types import STATE
from serl_chunk_robot.control.motions import Reset
from serl_chunk_robot.geometry.rotations import euler_of_matrix, matrix_of_euler, matrix_of_quat
from serl_chunk_robot.robot_file.config import load, load_driver

PLACE = np.array([0.55, 0.2, 0.27, np.pi + 0.01, 0.02, -1.5])
LOW, HIGH = (0.523, 0.147, 0.221, 3.04, -0.1, -1.87), (0.583, 0.237, 0.301, 3.24, 0.1, -1.27)
CONFIG = FrankaConfig(server="127.0.0.1", scale=(0.015, 0.1), box_low=LOW, box_high=HIGH, cameras=("wrist",))
FILE = Path(__file__).parents[1] / "golden" / "hil_serl_franka.npz"
CASES = ("fixed_gripper", "learned_gripper", "upright", "dual")
TOLERANCE = 1e-6  # of the recorded numbers, of which poses and states are float32


class Server:
    """Stands for a ServedRobot. `told`: what the gripper was told; `info`: of the next tick."""

    conditions = '{"profile": "exploring"}'

    def __init__(self) -> None:
        self.place, self.told, self.info, self.at = PLACE.copy(), 0.5, {}, 0
        self.sent: list[np.ndarray] = []

    def seen(self) -> Seen:
        extra = {"vel": np.zeros(6), "force": np.arange(3.0), "torque": np.zeros(3), "gripper": np.array([0.7])}
        return Seen(np.append(self.place, self.told), np.zeros(7), extra)

    def reset(self, **_):
        self.at = 0
        return {}, {"draws": {}}

    def send(self, target: np.ndarray) -> None:
        self.sent.append(np.array(target))

    def receive(self):
        self.at += 1
        return {}, 1.0, False, True, dict(self.info)


class Recorded(Server):
    """One whose states are those of a recording."""

    def __init__(self, case: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.case = case

    def seen(self) -> Seen:
        c, k = self.case, self.at
        # The angles are unwrapped or not, which makes no difference.
        places = [[*pose[:3], *euler_of_matrix(matrix_of_quat(pose[3:])), 0.5] for pose in c["pose"][k]]
        extra = {name: c[name][k].reshape(-1) for name in ("vel", "force", "torque", "gripper")}
        return Seen(np.concatenate(places), np.zeros(0), extra)


@pytest.fixture
def robot_of(monkeypatch):
    """Makes the robot of a stand-in, and resets it; its state."""

    def make(server: Server, config: FrankaConfig = CONFIG) -> tuple[FrankaRobot, np.ndarray]:
        def init(self, config, spec, **_):
            self._set_spaces(spec, "on_request")
            self._config = config

        def reset(self, **_):
            self.conditions, (_, info) = server.conditions, server.reset()
            return self._first(), info

        def receive(self):
            _, *result = server.receive()
            return self._observe(), *result

        methods = {
            "__init__": init,
            "reset": reset,
            "receive": receive,
            "seen": lambda self: server.seen(),
            "_send_target": lambda self, target: server.send(target),
        }
        for name, method in methods.items():
            monkeypatch.setattr(franka.ServedRobot, name, method)
        robot = FrankaRobot(config)
        return robot, robot.reset()[0]["state"]

    return make


@pytest.mark.parametrize(("arms", "grippers", "size"), [(1, True, 7), (1, False, 6), (2, True, 14)])
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


def test_a_gripper_is_told_by_half_an_action_and_else_stays(robot_of):
    server = Server()
    robot, _ = robot_of(server)
    grips = []
    for action in (0.0, 0.49, 0.5, 0.0, -0.49, -0.5, 0.3, 1.0):
        robot.step(np.array([0] * 6 + [action], np.float32))
        grips.append(server.sent[-1][6])
    assert grips == [0.5, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    server.told = 0.0
    for size, config in ((7, CONFIG), (6, dataclasses.replace(CONFIG, grippers=False))):
        robot, _ = robot_of(server, config)
        robot.step(np.zeros(size, np.float32))
        assert server.sent[-1][6] == 0.0, "what the reset told it"


def test_what_was_reached_is_reported_as_an_action(robot_of):
    server = Server()
    robot, _ = robot_of(server)
    action = np.array([0.2, -0.1, 0.3, 0.1, -0.05, 0.08, -1.0], np.float32)

    def reported(reached: np.ndarray) -> np.ndarray:
        server.info = {"executed_action": reached.astype(np.float32), "gate": "velocity"}
        *_, truncated, info = robot.step(action)
        assert (truncated, info["gate"], info["executed_action"].dtype) == (True, "velocity", np.float32)
        return info["executed_action"]

    assert "executed_action" not in robot.step(action)[4]
    np.testing.assert_allclose(reported(server.sent[-1]), action, atol=1e-4)
    np.testing.assert_allclose(reported(np.append(PLACE, 0.0)), [0] * 6 + [-1], atol=1e-4)
    assert np.abs(reported(np.append(PLACE + 0.3, 0.0))).max() == 1.0, "within the limits of actions"


def recorded(name: str) -> tuple[dict[str, np.ndarray], FrankaConfig]:
    with np.load(FILE) as cases:
        case = {key.partition("/")[2]: cases[key] for key in cases.files if key.startswith(f"{name}/")}
    given = json.loads(str(case["config"]))
    arms = len(given["low"])
    low, high = (tuple(float(x) for row in given[key] for x in row) for key in ("low", "high"))
    return case, FrankaConfig(
        arms=arms, grippers=given["grippers"], scale=tuple(given["scale"]), box_low=low, box_high=high,
        mirrored_yaw=arms > 1, proprio=tuple(given["proprio"]), server="127.0.0.1",
    )  # fmt: skip


def same_pose(place: Any, pose: Any) -> None:
    np.testing.assert_allclose(place[:3], pose[:3], atol=TOLERANCE)
    np.testing.assert_allclose(matrix_of_euler(place[3:]), matrix_of_quat(pose[3:]), atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_targets_and_states_are_hil_serl_s_and_a_human_s_command_is_in_the_tip_s_frame(name, robot_of):
    case, config = recorded(name)
    server = Recorded(case)
    robot, state = robot_of(server, config)
    states, humans, each = [state], 0, 6 + config.grippers
    boxes = franka._boxes(config)
    for k, action in enumerate(case["actions"]):
        human = not np.isnan(case["human"][k]).any()
        for arm, pose in enumerate(case["sent"][k] if human else ()):
            place, twist = server.seen().q[7 * arm : 7 * arm + 6], case["human"][k][6 * arm : 6 * arm + 6]
            in_tip = franka.in_tip_frame(place, twist)
            np.testing.assert_allclose(in_tip, case["intervene"][k][each * arm : each * arm + 6], atol=TOLERANCE)
            same_pose(franka.target(place, in_tip, np.array(config.scale), boxes[arm]), pose)
            humans += 1
        if human:
            server.at += 1
            states.append(robot._observe()["state"])
            continue
        states.append(robot.step(action)[0]["state"])
        for arm, pose in enumerate(case["sent"][k]):
            same_pose(server.sent[-1][7 * arm : 7 * arm + 6], pose)
    # A force of 10 N as float32 is 1e-6 off; relative to it, as to a speed in the tip's frame, the bound is the same.
    np.testing.assert_allclose(states, case["state"], atol=TOLERANCE, rtol=TOLERANCE)
    assert humans >= 8
    for arm, box in enumerate(boxes):  # every side of the boxes is reached, else no clipping would be compared
        sent = np.array([[*p[:3], *euler_of_matrix(matrix_of_quat(p[3:]))] for p in case["sent"][:, arm]])
        sizes = np.where(np.isin(np.arange(6), [3 + m for m in box.mirrored]), np.abs(sent), sent)
        for side in (box.low, box.high):
            assert (np.abs(sizes - side) < 1e-6).any(axis=0)[[0, 1, 2, 4]].all()


places = st.tuples(*(st.floats(*of) for of in ((0.2, 0.8), (-0.4, 0.4), (0, 0.6), (2, 4.2), (-1.2, 1.2), (-3, 3)))).map(
    np.array
)
twists = st.tuples(*[st.floats(-0.5, 0.5)] * 6).map(np.array)
WIDE = franka.Box(np.array([-9.0] * 3 + [0.0, -9.0, -9.0]), np.array([9.0] * 6))


@given(places, twists)
def test_the_action_of_a_target_is_the_one_that_led_there(place, twist):
    scale = np.array([0.02, 0.2])
    action = franka.in_tip_frame(place, twist)
    to = franka.target(place, action, scale, WIDE)
    np.testing.assert_allclose(franka.action_of(place, to, scale), action, atol=1e-6)
    assert (np.abs(to[3:] - place[3:]) < 2.5).all(), "angles make no jump"
    np.testing.assert_allclose(franka.relative(place, place), np.zeros(6), atol=1e-12)


@given(places, twists, st.booleans())
@example(np.array([0.5, 0.0, 0.0, 3.0, 1.0, 3.0]), np.array([0.0, 0.0, 0.0, 0.0, 0.0, -0.5]), False)
def test_targets_are_within_what_the_box_says(place, twist, mirrored_yaw):
    low = np.array([0.4, -0.1, 0.2, np.pi - 0.2, -0.3, -0.5 + mirrored_yaw * 0.6])
    high = np.array([0.6, 0.1, 0.4, np.pi + 0.2, 0.3, 0.5])
    box = franka.Box(low, high, (0, 2) if mirrored_yaw else (0,))
    to = franka.target(place, twist, np.array([0.02, 0.2]), box)
    least, most = box.interval()
    turns = 2 * np.pi * np.round((to[3:] - (least + most)[3:] / 2) / (2 * np.pi))
    to[3:] -= turns  # a place half a turn from its box has a target that is nearer to it by a whole turn
    assert (to >= least - 1e-9).all()
    assert (to <= most + 1e-9).all()


ROBOTS = Path(__file__).parents[2] / "experiments" / "robots"
# Its file; HIL-SERL's ACTION_SCALE, actions, numbers of a state; of the state's condition: index, threshold, cameras.
EXPECTED = {
    "ram_insertion": ("franka_ram", (0.01, 0.06), 6, 19, 6, 0.04, ("wrist_1", "wrist_2")),
    "usb_pickup_insertion": ("franka_usb", (0.015, 0.1), 7, 19, 0, 0.4, ("side_classifier",)),
    "object_handover": ("franka_handover", (0.04, 0.2), 14, 26, 0, 0.5, ("left_side_classifier",)),
}


@pytest.mark.parametrize("task", EXPECTED)
def test_each_task_has_hil_serl_s_numbers_and_condition(task):
    config = load_experiment(f"hil_serl_franka:{task}")
    spec, settings = robot_spec(config.robot), TASKS[task]
    _, scale, actions, state, number, above, cameras = EXPECTED[task]
    assert (config.robot.scale, spec.action_dim, spec.state_dim) == (scale, actions, state)
    assert (spec.max_episode_steps, config.discount) == (settings.max_episode_steps, settings.discount)
    assert (config.agent.image_keys, spec.grippers) == (settings.cameras, settings.grippers)
    assert config.agent.gripper.setup_mode == settings.setup_mode
    assert {c.name for c in spec.cameras} == {*settings.cameras, *cameras}
    assert (config.name, config.outcome.classifier) == (f"hil_serl_franka_{task}", f"classifiers/{task}")
    assert config.robot.mirrored_yaw == (task == "object_handover")
    at = np.full(state, 9.0, np.float32)
    at[number] = above
    beyond = at.copy()
    beyond[number] = np.nextafter(at[number], np.float32(1))
    assert [config.outcome.condition({STATE: each}) for each in (at, beyond)] == [False, True]


@pytest.mark.parametrize("task", EXPECTED)
def test_a_task_fits_its_robot_s_file_and_a_reset_is_within_the_profile_from_every_corner_of_the_box(task):
    config = load_experiment(f"hil_serl_franka:{task}").robot
    file = load(ROBOTS / f"{EXPECTED[task][0]}.toml")
    driver, limits = load_driver(file), file.profiles[file.start].limits
    spec = franka._served_spec(config, robot_spec(config))
    assert differing_fields(spec, driver.spec()._asdict()) == []
    assert (limits.low <= spec.action_low).all()
    assert (limits.high >= spec.action_high).all()
    there = {c.name: (c.spec.height, c.spec.width) for c in file.cameras}
    assert {c.name: there.get(c.name) for c in spec.cameras} == {c.name: (c.height, c.width) for c in spec.cameras}
    turning = 5.0  # rad/s, the driver's
    wanted = np.minimum(40 * np.repeat(config.scale, 3), [9.0] * 3 + [turning] * 3)
    for first, _ in driver.spec().arms:  # docs/robot_server.md: this changes no step
        assert (limits.rates.velocity[first : first + 6] >= wanted - 1e-9).all()
    driver.close()
    sides = np.array([spec.action_low, spec.action_high])
    for corner in itertools.product((0, 1), repeat=6):
        start = np.array([sides[corner[j % 7] if j % 7 < 6 else 0, j] for j in range(len(sides[0]))])
        for episode in (0, 1):
            todo = Reset(start, file.reset, limits, episode=episode, rng=np.random.default_rng(0))._todo
            assert len(todo) == len(file.reset) - (7 if task == "ram_insertion" and episode else 0)
    for k, box in enumerate(franka._boxes(config)):
        least, most = box.interval()
        begins = file.reset[-2].joints[7 * k : 7 * k + 6]
        assert (begins >= least - 1e-5).all()
        assert (begins <= most + 1e-5).all()
