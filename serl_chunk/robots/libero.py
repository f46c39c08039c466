"""LIBERO's tasks in robosuite from two cameras, and their specifications.

Settings and protocol are those of published evaluations (OpenVLA, openpi): robosuite's default operational-space
controller, ten ticks without motion after a reset, frames turned by half a turn, success by the benchmark's own check.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from serl_chunk import extras
from serl_chunk.config.robots import LiberoConfig
from serl_chunk.robots.base import moves_spec
from serl_chunk.robots.mujoco_camera import MujocoEnv
from serl_chunk.types import RobotSpec

CONTROL_HZ = 20.0
ACTIONS = 7  # moves of the hand: x, y, z (up to 5 cm), axis-angle (0.5 rad each), and the gripper; each in -1..1
GRIPPER = 6  # the action dimension of the gripper, 1 closes
STATE_DIM = 3 + 3 + 2  # the hand's position (m) and axis-angle (rad), the two fingers (m)
CAMERAS = ("agentview", "robot0_eye_in_hand")
LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
STILL = np.array([0.0] * GRIPPER + [-1.0])
SETTLE_TICKS = 10


def libero_spec(config: LiberoConfig) -> RobotSpec:
    """Return the specification of a task of LIBERO.

    Actions are `float32[7]` in -1..1, differences that no state measures (see `ACTIONS`). The state has 8 numbers (see
    `STATE_DIM`) and no objects: only cameras show them.
    """
    steps = config.max_episode_steps or LIMITS[config.env_name.partition("/")[0]]
    name = f"libero {config.env_name}"
    return moves_spec(name, CONTROL_HZ, STATE_DIM, ACTIONS, (GRIPPER,), CAMERAS, config.image_size, steps)


class LiberoEnv(MujocoEnv):
    """A task of LIBERO with a Panda arm, or those of a suite; a tick is 50 ms. Raises ConfigError without LIBERO.

    `step` returns reward 1 and terminates if the task is solved after it, else 0. `reset(seed=...)` draws the objects
    anew; with `options={"init_state": "SUITE/N/I"}` it restores the benchmark's initial state I of the task. Both
    repeat an episode bit for bit. Nothing is rendered before `read_images` is called, from one thread.
    """

    hidden = (0,)  # the group of the shapes that collide, next to the visible ones
    shadows = True  # published policies were trained with them

    def __init__(self, config: LiberoConfig, *, images: str = "on_request") -> None:
        self._set_spaces(libero_spec(config), images)
        package = extras.libero(f"robot {config.kind}")
        suite, _, number = config.env_name.partition("/")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the order of its tasks
            benchmark = package.benchmark.get_benchmark_dict()[suite]()
        numbers = [int(number)] if number else range(len(config.tasks))
        self._of: dict[str, list[int]] = {}  # tasks of a text: libero_90 has some texts in several scenes
        for text, n in zip(config.tasks, numbers, strict=True):
            self._of.setdefault(text, []).append(n)
        self._saved = {
            f"{suite}/{n}/{i}": state for n in numbers
            for i, state in enumerate(np.asarray(benchmark.get_task_init_states(n)))
        }  # fmt: skip
        self.init_states = tuple(self._saved)
        self._load = lambda n: package.envs.env_wrapper.ControlEnv(
            benchmark.get_task_bddl_file_path(n), control_freq=CONTROL_HZ, ignore_done=True,
            hard_reset=False, use_camera_obs=False, has_offscreen_renderer=False,
        )  # fmt: skip
        self._suite = suite
        # Without a hard reset a model is loaded once: a reset takes milliseconds, not seconds, and draws alike.
        self._loaded: dict[int, Any] = {}  # those of a suite as they are needed
        self.simulation: Any = None  # the episode's
        if number:
            self._choose(int(number))
        else:
            self.tasks = config.tasks

    def _choose(self, number: int) -> None:
        if number not in self._loaded:
            self._loaded[number] = self._load(number)
        if self.simulation is not self._loaded[number]:
            self.simulation = self._loaded[number]
            super().close()  # a camera draws one model

    def _begin_task(self, seed: int | None, options: Mapping[str, Any]) -> None:
        seed = int(self.np_random.integers(2**31)) if seed is None else seed
        super()._begin_task(seed, options)
        turn, alike = seed % len(self.tasks), self._of[self.task]
        at = options.get("init_state", "")
        of_state = [n for n in alike if at.startswith(f"{self._suite}/{n}/")]
        self._choose((of_state or [n for n in alike if n == turn] or [alike[turn % len(alike)]])[0])

    def states_of(self, task: str) -> Sequence[str]:
        of_task = tuple(f"{self._suite}/{n}/" for n in self._of[task])
        return [name for name in self.init_states if name.startswith(of_task)]

    def close(self) -> None:
        super().close()
        for simulation in self._loaded.values():
            simulation.close()  # a second call fails
        self._loaded, self.simulation = {}, None

    def _start(self, seed: int | None) -> dict[str, Any]:
        self._reset(int(self.np_random.integers(2**32)))
        return self._settle()

    def _restore(self, init_state: str) -> dict[str, Any]:
        self._reset(0)  # furniture is no part of a saved state: the published protocol draws it with seed 0
        self.simulation.set_init_state(self._saved[init_state])
        return self._settle()

    def _reset(self, draw: int) -> None:
        others = np.random.get_state()  # noqa: NPY002 (robosuite draws start states from numpy's global generator)
        np.random.seed(draw)  # noqa: NPY002
        try:
            self.simulation.env.reset()
        finally:
            np.random.set_state(others)  # noqa: NPY002
        # What robosuite keeps of the previous episode: the gripper's opening, and where MuJoCo's solver starts from.
        for robot in self.simulation.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        self.simulation.sim.data.qacc_warmstart[:] = 0

    def _settle(self) -> dict[str, Any]:
        for _ in range(SETTLE_TICKS):
            self._observation, *_ = self.simulation.step(STILL)
        return {}

    def _move(self, action: np.ndarray) -> tuple[float, dict[str, Any]]:
        executed = np.clip(action, -1, 1)
        self._observation, _, success, _ = self.simulation.step(executed)
        success = bool(success)
        return success, {"success": success, "executed_action": executed}

    def _state(self) -> np.ndarray:
        position, quaternion, fingers = (
            self._observation[f"robot0_{part}"] for part in ("eef_pos", "eef_quat", "gripper_qpos")
        )
        half = np.arccos(np.clip(quaternion[3], -1, 1))  # of an angle in 0 to 2 pi: robosuite's and openpi's, no other
        turn = quaternion[:3] * 2 * half / max(np.sin(half), 1e-9)
        return np.concatenate([position, turn, fingers]).astype(np.float32)

    def _frame(self, camera: str) -> np.ndarray:
        # The benchmark's frames are upside down. Published policies see them turned, the scene mirrored.
        return np.ascontiguousarray(super()._frame(camera)[:, ::-1])

    def _scene(self) -> tuple[Any, Any, Any]:
        sim = self.simulation.sim
        return extras.mujoco(self.robot_spec.name, "libero"), sim.model._model, sim.data._data
