"""gym-aloha's TransferCube and Insertion (MuJoCo) behind the package's environment contract.

Models, start poses, start regions of the objects and reward stages are gym-aloha's. Its environment class is not used:
it renders three 480x640 images on every step (2-7 steps/s), ignores the requested image size and declares a wrong
action box.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk import extras
from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots.aloha_sim.scene import CONTROL_HZ, OBJECT_HEIGHT, SCENES, SUCCESS_STAGE, aloha_sim_spec
from serl_chunk.robots.base import Expert
from serl_chunk.robots.mujoco_camera import MujocoCamera, MujocoEnv
from serl_chunk.types import ConfigError

FINGER_CLOSED, FINGER_OPEN = 0.01844, 0.058  # m, a gripper's 0 and 1 (gym-aloha's PUPPET_GRIPPER_POSITION_*)
START_ARM = (0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.02239, -0.02239)  # joints (rad) and the two fingers (m) of an arm

# Where the 14 joints of state and action lie among the model's 16 (a gripper has two mirrored fingers there).
_JOINT_QPOS = np.array([0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14])
_GRIPPERS = np.array([6, 13])
_OBJECTS_FROM = 16  # 7 numbers an object follow: position and quaternion


def _import_simulator(model_file: str) -> tuple[Any, Path]:
    """Return MuJoCo and the path of one of gym-aloha's models; raise ConfigError if one is not installed."""
    package = importlib.util.find_spec("gym_aloha")
    simulator = extras.mujoco("robot aloha_sim", "aloha-sim")
    if package is None or not package.submodule_search_locations:
        raise ConfigError("robot aloha_sim: gym-aloha is not installed. Run pip install 'serl-chunk[aloha-sim]'")
    return simulator, Path(package.submodule_search_locations[0]) / "assets" / model_file


class AlohaSimEnv(MujocoEnv):
    """Two simulated ViperX arms: the right one hands the left one a cube, or puts its peg into the left one's socket.

    `step` (20 ms) returns reward 1 and terminates at gym-aloha's reward 4 (the left finger touches the cube off the
    table; the peg touches the pin inside the socket), else reward 0. `info["stage"]` is gym-aloha's reward, 0..4; the
    functions `*_stage` of `scene.py` define its values.

    Raises ConfigError if the simulator is not installed, or has no such camera.
    """

    def __init__(self, config: AlohaSimConfig, *, images: str = "on_request") -> None:
        self._set_spaces(aloha_sim_spec(config), images)
        self.scene = SCENES[config.env_name]
        self._mujoco, path = _import_simulator(self.scene.model_file)
        self.model = self._mujoco.MjModel.from_xml_path(str(path))
        self._data = self._mujoco.MjData(self.model)
        self._substeps = round(1 / (CONTROL_HZ * self.model.opt.timestep))
        self._env_name, self._cube_in_state = config.env_name, config.cube_in_state
        self._names = [self.model.geom(i).name for i in range(self.model.ngeom)]
        self._own = np.array([name in self.scene.geometries for name in self._names])

    @property
    def joints(self) -> np.ndarray:
        """Measured joints, `float64[14]`: radians, grippers 0..1."""
        joints = self._data.qpos[_JOINT_QPOS]
        joints[_GRIPPERS] = (joints[_GRIPPERS] - FINGER_CLOSED) / (FINGER_OPEN - FINGER_CLOSED)
        return joints

    @property
    def object_poses(self) -> np.ndarray:
        """Position (m) and quaternion (w, x, y, z) of each object, `float64[N, 7]`: the cube; or peg, socket."""
        return self._data.qpos[_OBJECTS_FROM:].reshape(-1, 7).copy()

    def make_expert(self) -> Expert:
        from serl_chunk.robots.aloha_sim.experts import AlohaSimExpert, InsertionExpert

        return InsertionExpert(self) if self._env_name == "insertion" else AlohaSimExpert(self)

    def _start(self, seed: int | None) -> dict[str, Any]:
        """Set the arms to the start pose and draw a place for every object."""
        self._mujoco.mj_resetData(self.model, self._data)
        self._data.qpos[:16] = START_ARM * 2
        self._data.ctrl[:] = START_ARM * 2
        for i, (low, high) in enumerate(self.scene.starts):
            pose = (*self.np_random.uniform(low, high), OBJECT_HEIGHT, 1, 0, 0, 0)
            self._data.qpos[_OBJECTS_FROM + 7 * i : _OBJECTS_FROM + 7 * (i + 1)] = pose
        self._mujoco.mj_step1(self.model, self._data)
        return {"stage": self._stage()}

    def _move(self, action: np.ndarray) -> tuple[float, dict[str, Any]]:
        executed = np.clip(action, self._low, self._high)
        self._data.ctrl[:] = self._to_ctrl(executed)
        # The position stage (mj_step1) of the current state is always done already, so contacts, joints and frames
        # belong to one moment. gym-aloha's environment does the same.
        self._mujoco.mj_step2(self.model, self._data)
        self._mujoco.mj_step(self.model, self._data, self._substeps - 1)
        self._mujoco.mj_step1(self.model, self._data)
        stage = self._stage()
        success = stage == SUCCESS_STAGE
        return success, {"success": success, "stage": stage, "executed_action": executed}

    def _stage(self) -> int:
        pairs = self._data.contact.geom[: self._data.ncon]
        pairs = pairs[self._own[pairs].any(axis=1)]  # the arms' own joints touch each other all the time
        return self.scene.stage({frozenset((self._names[a], self._names[b])) for a, b in pairs.tolist()})

    def _state(self) -> np.ndarray:
        objects = self._data.qpos[_OBJECTS_FROM:] if self._cube_in_state else ()
        return np.concatenate([self.joints, objects]).astype(np.float32)

    def _moment(self) -> Any:
        return self._data

    def _open_camera(self, size: int) -> MujocoCamera:
        return MujocoCamera(self._mujoco, self.model, size)

    @staticmethod
    def _to_ctrl(action: np.ndarray) -> np.ndarray:
        """Return the model's 16 actuator commands: a gripper's opening goes to both fingers, mirrored."""
        left, right = FINGER_CLOSED + action[_GRIPPERS].astype(np.float64) * (FINGER_OPEN - FINGER_CLOSED)
        return np.concatenate([action[:6], (left, -left), action[7:13], (right, -right)])
