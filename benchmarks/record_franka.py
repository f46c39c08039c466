"""Records cases of HIL-SERL's Franka environments and wrappers for `tests/robots/test_franka.py`.

Runs in an environment of that code's own (numpy, scipy, gymnasium below 1.1, pyquaternion) and imports nothing of ours.
The robot's server is replaced by drawn states: what the wrappers make of states and actions is recorded, and the poses
that they would send. A case NAME has arrays `NAME/...`: `pose`, `vel`, `force`, `torque` and `gripper` of N + 1 states
(of each arm), `actions` of N steps, `human`, what a SpaceMouse commanded (nan: nothing), and as results `sent`, `state`
and `intervene`. Everything follows from one seed.

/path/to/that/python benchmarks/record_franka.py --hil_serl CHECKOUT --out tests/robots/franka_cases.npz
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
from scipy.spatial.transform import Rotation

STEPS, SEED = 40, 0
PI = np.pi
FULL = ("tcp_pose", "tcp_vel", "tcp_force", "tcp_torque", "gripper_pose")
DUAL = tuple(f"{side}/{key}" for side in ("left", "right") for key in ("tcp_pose", "tcp_vel", "gripper_pose"))
# name -> boxes of the arms (low, high), scale of actions, whether grippers are actions, the state's keys
CASES: dict[str, tuple[list[tuple[list[float], list[float]]], list[float], bool, tuple[str, ...]]] = {
    "fixed_gripper": (
        [([0.55, -0.06, 0.26, PI - 0.01, -0.1, -0.4], [0.62, -0.01, 0.33, PI + 0.01, 0.1, 0.4])], [0.01, 0.06, 1.0],
        False, FULL,
    ),
    "learned_gripper": (
        [([0.52, 0.16, 0.22, PI - 0.1, -0.1, -PI / 2 - 0.3], [0.59, 0.24, 0.31, PI + 0.1, 0.1, -PI / 2 + 0.3])],
        [0.015, 0.1, 1.0], True, FULL,
    ),
    "upright": ([([0.3, -0.2, 0.1, -0.3, -0.3, -0.5], [0.6, 0.2, 0.5, 0.3, 0.3, 0.5])], [0.02, 0.2, 1.0], True, FULL),
    "dual": (
        [([0.4, -0.03, 0.3, PI - 0.01, -0.3, 0.0], [0.67, -0.01, 0.42, PI + 0.01, 0.0, 0.01]),
         ([0.32, -0.01, 0.36, PI - 0.01, 0.0, PI - 0.01], [0.67, 0.01, 0.5, PI + 0.01, 0.3, PI + 0.01])],
        [0.04, 0.2, 1.0], True, DUAL,
    ),
}  # fmt: skip


class Robot:
    """The server of one arm: it answers with the states of a list, and keeps what it is sent."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.at = 0
        self.sent: list[list[float]] = []

    def post(self, path: str, body: Any) -> Any:
        if path == "pose":
            self.sent.append(body["arr"])
        return types.SimpleNamespace(json=lambda: self.states[self.at])


def drawn_states(rng: np.random.Generator, low: np.ndarray, high: np.ndarray) -> list[dict[str, Any]]:
    """States within the box, around it, and of any orientation."""
    states = []
    for k in range(STEPS + 1):
        place = rng.uniform(low - 0.2 * (k % 3) * (high - low), high + 0.2 * (k % 3) * (high - low))
        turned = Rotation.from_euler("xyz", place[3:])
        if k % 4 == 3:
            turned = Rotation.from_rotvec(rng.normal(0, 0.4, 3)) * turned
        quat = turned.as_quat() * (1 if k % 2 else -1)
        draws = rng.normal(0, 1, 12)
        states.append({
            "pose": [*place[:3], *quat], "vel": (0.2 * draws[:6]).tolist(), "force": (5 * draws[6:9]).tolist(),
            "torque": draws[9:].tolist(), "jacobian": [[0.0] * 7] * 6, "q": [0.0] * 7, "dq": [0.0] * 7,
            "gripper_pos": float(rng.uniform()),
        })  # fmt: skip
    return states


class Mouse:
    """Stands for a SpaceMouse: what it commands is set."""

    action, buttons = np.zeros(6), [0, 0]

    def get_action(self) -> tuple[np.ndarray, list[int]]:
        return Mouse.action, Mouse.buttons


def stand_ins(robots: dict[str, Robot]) -> dict[str, types.ModuleType]:
    """Modules of devices that HIL-SERL's code imports."""

    def module(name: str, **names: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(names)
        return made

    def post(url: str, json: Any = None) -> Any:
        address, _, path = url.rpartition("/")
        return robots[address].post(path, json)

    listener = types.SimpleNamespace(start=lambda: None, stop=lambda: None)
    keyboard = types.SimpleNamespace(Listener=lambda **_: listener, Key=types.SimpleNamespace(esc=0))
    nothing = type("Nothing", (), {})
    return {
        "requests": module("requests", post=post),
        "cv2": module("cv2"),
        "gym": gymnasium,
        "pynput": module("pynput", keyboard=keyboard),
        "franka_env.camera.video_capture": module("video_capture", VideoCapture=nothing),
        "franka_env.camera.rs_capture": module("rs_capture", RSCapture=nothing),
        "franka_env.spacemouse.spacemouse_expert": module("spacemouse_expert", SpaceMouseExpert=Mouse),
    }


def record(name: str, rng: np.random.Generator, robots: dict[str, Robot], folder: Path) -> dict[str, np.ndarray]:
    boxes, scale, learned, keys = CASES[name]
    env_class = importlib.import_module("franka_env.envs.franka_env").FrankaEnv
    wrappers = importlib.import_module("franka_env.envs.wrappers")
    frames = importlib.import_module("franka_env.envs.relative_env")
    default = importlib.import_module("franka_env.envs.franka_env").DefaultEnvConfig
    dual = len(boxes) > 1
    if dual:
        sys.path.insert(0, str(folder / "examples" / "experiments" / "object_handover"))
        env_class = importlib.import_module("wrapper").HandOffEnv
    arms, used = [], []
    for k, (low, high) in enumerate(boxes):
        robot = robots[f"http://arm{k}"] = Robot()
        robot.states = drawn_states(rng, np.array(low), np.array(high))
        used.append(robot)
        config = type("Config", (default,), {
            "SERVER_URL": f"http://arm{k}/", "REALSENSE_CAMERAS": {}, "ACTION_SCALE": scale, "DISPLAY_IMAGE": False,
            "RESET_POSE": np.array(low), "ABS_POSE_LIMIT_LOW": np.array(low), "ABS_POSE_LIMIT_HIGH": np.array(high),
            "GRIPPER_SLEEP": 0.0,
        })  # fmt: skip
        arm = env_class(config=config())
        arm.go_to_reset = lambda **_: None
        arms.append(arm)
    env = arms[0]
    if dual:
        env = importlib.import_module("franka_env.envs.dual_franka_env").DualFrankaEnv(*arms, display_images=False)
        env = frames.DualRelativeFrame(wrappers.DualSpacemouseIntervention(env, gripper_enabled=True))
        env = wrappers.DualQuat2EulerWrapper(env)
    else:
        env = env if learned else wrappers.GripperCloseEnv(env)
        env = wrappers.Quat2EulerWrapper(frames.RelativeFrame(wrappers.SpacemouseIntervention(env)))
    observe = importlib.import_module("serl_obs_wrappers").SERLObsWrapper(env, proprio_keys=keys)
    size = observe.action_space.shape[0]
    actions = rng.uniform(-1.1, 1.1, (STEPS, size)).astype(np.float32)
    human = np.where(np.arange(STEPS)[:, None] % 5 == 4, rng.uniform(-0.3, 0.3, (STEPS, 6 * len(boxes))), np.nan)
    Mouse.action, Mouse.buttons = np.zeros(6 * len(boxes)), [0] * (4 if dual else 2)
    states, intervene = [observe.reset()[0]["state"]], np.full((STEPS, size), np.nan)
    sent = np.zeros((STEPS, len(boxes), 7))
    for k in range(STEPS):
        Mouse.action = np.nan_to_num(human[k])
        for robot in used:
            robot.at, robot.sent = k + 1, []
        seen, _, _, _, info = observe.step(actions[k])
        states.append(seen["state"])
        sent[k] = [robot.sent[-1] for robot in used]
        if "intervene_action" in info:
            intervene[k] = info["intervene_action"]
    found = {"actions": actions, "human": human, "intervene": intervene, "sent": sent, "state": np.array(states)}
    for key, as_named in (("pose", "pose"), ("vel", "vel"), ("force", "force"), ("torque", "torque"),
                          ("gripper", "gripper_pos")):  # fmt: skip
        found[key] = np.array([[s[as_named] for s in robot.states] for robot in used]).swapaxes(0, 1)
    config = {"low": [low for low, _ in boxes], "high": [high for _, high in boxes], "scale": scale[:2],
              "grippers": learned, "proprio": sorted({key.rpartition("/")[2] for key in keys})}  # fmt: skip
    found["config"] = np.array(json.dumps(config))
    return {f"{name}/{key}": value for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hil_serl", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    robots: dict[str, Robot] = {}
    sys.path[:0] = [
        str(args.hil_serl / "serl_robot_infra"),
        str(args.hil_serl / "serl_launcher" / "serl_launcher" / "wrappers"),
    ]
    cases: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(SEED)
    with mock.patch.dict(sys.modules, stand_ins(robots)), mock.patch("time.sleep"):
        for name in CASES:
            cases |= record(name, rng, robots, args.hil_serl)
    np.savez_compressed(args.out, **cases)
    print(f"{args.out}: {len(CASES)} cases of {STEPS} steps")


if __name__ == "__main__":
    main()
