"""gym-aloha's TransferCube and Insertion (MuJoCo) behind the package's environment contract.

The models, start poses, start regions of the objects and the reward stages are gym-aloha's. Its environment class is
not used: it renders three 480x640 images on every step (2-7 steps/s), ignores the image size asked for and
declares a wrong action box.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk import extras
from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots.aloha_sim.scene import CONTROL_HZ, JOINTS, OBJECT_HEIGHT, SCENES, SUCCESS_STAGE, aloha_sim_spec
from serl_chunk.robots.base import Expert, RobotEnv
from serl_chunk.robots.mujoco_camera import MujocoCamera
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, DataError, Observation

INSTALL_HINT = "pip install 'serl-chunk[aloha-sim]'"

FINGER_CLOSED, FINGER_OPEN = 0.01844, 0.058  # m, a gripper's 0 and 1 (gym-aloha's PUPPET_GRIPPER_POSITION_*)
START_ARM = (0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.02239, -0.02239)  # joints (rad) and the two fingers (m) of an arm

# Where the 14 joints of state and action lie among the model's 16 (a gripper has two mirrored fingers there).
_JOINT_QPOS = np.array([0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14])
_GRIPPERS = np.array([6, 13])
_OBJECTS_FROM = 16  # 7 numbers an object follow: position and quaternion


def _import_simulator(model_file: str) -> tuple[Any, Path]:
    """MuJoCo and the path of one of gym-aloha's models; ConfigError with the install hint where one is missing."""
    package = importlib.util.find_spec("gym_aloha")
    simulator = extras.mujoco("robot aloha_sim", "aloha-sim")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(f"robot aloha_sim needs gym-aloha's model, which is not installed: {INSTALL_HINT}")
    return simulator, Path(package.submodule_search_locations[0]) / "assets" / model_file


class AlohaSimState(NamedTuple):
    """A moment of an episode; `physics` is MuJoCo's full integration state, float64."""

    physics: np.ndarray
    tick: int


class AlohaSimEnv(RobotEnv):
    """Two simulated ViperX arms: the right one hands the left one a cube, or puts its peg into the left one's socket.

    `step` returns reward 1 and terminates at gym-aloha's reward 4 (the left finger touches the cube off the table; the
    peg touches the pin inside the socket), else reward 0; it truncates after `config.max_episode_steps`.
    `info["stage"]` is gym-aloha's reward, 0..4; `aloha_sim_scene` says what its values mean.

    The objects' start poses are drawn from `np_random`: `reset(seed=...)` reproduces it. Nothing is rendered before
    `read_images` is called; all its calls must come from one thread, because an OpenGL context belongs to one.

    Raises ConfigError where the simulator is not installed, or has no such camera.
    """

    def __init__(self, config: AlohaSimConfig, *, images: str = "on_request") -> None:
        self._set_spaces(aloha_sim_spec(config), images)
        self.scene = SCENES[config.env_name]
        self._mujoco, path = _import_simulator(self.scene.model_file)
        self.model = self._mujoco.MjModel.from_xml_path(str(path))
        self._data = self._mujoco.MjData(self.model)
        self._camera = MujocoCamera(self._mujoco, self.model, config.image_size)
        self._substeps = round(1 / (CONTROL_HZ * self.model.opt.timestep))
        self._state_kind = self._mujoco.mjtState.mjSTATE_INTEGRATION
        self._env_name, self._cube_in_state = config.env_name, config.cube_in_state
        self._low, self._high = self.action_space.low, self.action_space.high  # type: ignore[attr-defined]
        self._names = [self.model.geom(i).name for i in range(self.model.ngeom)]
        self._own = np.array([name in self.scene.geometries for name in self._names])
        self._tick = 0

    @property
    def tick(self) -> int:
        """Ticks since the reset."""
        return self._tick

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

    @property
    def cube_pose(self) -> np.ndarray:
        """The first object's pose, `float64[7]`."""
        return self.object_poses[0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        """Arms to the start pose, every object to a random place before its arm; `options` are not used."""
        super().reset(seed=seed)
        self._mujoco.mj_resetData(self.model, self._data)
        self._data.qpos[:16] = START_ARM * 2
        self._data.ctrl[:] = START_ARM * 2
        for i, (low, high) in enumerate(self.scene.starts):
            pose = (*self.np_random.uniform(low, high), OBJECT_HEIGHT, 1, 0, 0, 0)
            self._data.qpos[_OBJECTS_FROM + 7 * i : _OBJECTS_FROM + 7 * (i + 1)] = pose
        self._mujoco.mj_step1(self.model, self._data)
        self._tick = 0
        return self._observe(), {"success": False, "stage": self.stage()}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Command `action float32[14]` for one tick (20 ms); values past the limits are clipped.

        Raises DataError if `action` has another shape or is not finite: physics would diverge silently.
        """
        action = np.asarray(action, np.float32)
        if action.shape != (JOINTS,) or not np.isfinite(action).all():
            raise DataError(f"an aloha_sim action is {JOINTS} finite numbers, got shape {action.shape}: {action}")
        executed = np.clip(action, self._low, self._high)
        self._data.ctrl[:] = self._to_ctrl(executed)
        # The position stage (mj_step1) of the present state is always done already, so contacts, joints and frames
        # belong to one moment. This is how gym-aloha's environment steps, too.
        self._mujoco.mj_step2(self.model, self._data)
        self._mujoco.mj_step(self.model, self._data, self._substeps - 1)
        self._mujoco.mj_step1(self.model, self._data)
        self._tick += 1
        stage = self.stage()
        success = stage == SUCCESS_STAGE
        info = {"success": success, "stage": stage, "executed_action": executed}
        truncated = not success and self._tick >= self.robot_spec.max_episode_steps
        return self._observe(), float(success), success, truncated, info

    def stage(self) -> int:
        """gym-aloha's reward of the present moment, 0..4 (see the class)."""
        pairs = self._data.contact.geom[: self._data.ncon]
        pairs = pairs[self._own[pairs].any(axis=1)]  # the arms' own joints touch each other all the time
        return self.scene.stage({frozenset((self._names[a], self._names[b])) for a, b in pairs.tolist()})

    def read_images(self, cameras: Sequence[str] | None = None) -> Observation:
        """Render `cameras` (default: all): `{"images/<camera>": uint8[image_size, image_size, 3]}`.

        Raises ConfigError for an unknown camera, or where no OpenGL context can be made.
        """
        names = [c.name for c in self.robot_spec.cameras] if cameras is None else list(cameras)
        images = {}
        for name in names:
            self.robot_spec.camera(name)
            images[IMAGE_PREFIX + name] = self._camera.frame(self._data, name)
        return images

    def save_state(self) -> AlohaSimState:
        """The present moment of this episode; the generator of start poses is not part of it."""
        physics = np.empty(self._mujoco.mj_stateSize(self.model, self._state_kind))
        self._mujoco.mj_getState(self.model, self._data, physics, self._state_kind)
        return AlohaSimState(physics, self._tick)

    def restore_state(self, state: AlohaSimState) -> Observation:
        """Return to a moment saved by any AlohaSimEnv; the same actions then give the same bits."""
        self._mujoco.mj_setState(self.model, self._data, state.physics, self._state_kind)
        self._mujoco.mj_step1(self.model, self._data)
        self._tick = state.tick
        return self._observe()

    def make_expert(self) -> Expert:
        """A scripted demonstrator of this environment."""
        if self._env_name == "insertion":
            from serl_chunk.robots.aloha_sim.experts import InsertionExpert

            return InsertionExpert(self)
        from serl_chunk.robots.aloha_sim.experts import AlohaSimExpert

        return AlohaSimExpert(self)

    def close(self) -> None:
        """Free the OpenGL context (otherwise freed at exit); the physics stays usable."""
        self._camera.close()

    def _observe(self) -> Observation:
        joints = self.joints
        state = np.concatenate([joints, self._data.qpos[_OBJECTS_FROM:]]) if self._cube_in_state else joints
        observation: Observation = {STATE: state.astype(np.float32)}
        if self.images == "always":
            observation.update(self.read_images())
        return observation

    @staticmethod
    def _to_ctrl(action: np.ndarray) -> np.ndarray:
        """The model's 16 actuator commands: a gripper's opening goes to both fingers, mirrored."""
        fingers = FINGER_CLOSED + action[_GRIPPERS].astype(np.float64) * (FINGER_OPEN - FINGER_CLOSED)
        left, right = fingers
        return np.concatenate([action[:6], (left, -left), action[7:13], (right, -right)])
