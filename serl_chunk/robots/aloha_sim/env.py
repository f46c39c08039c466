"""gym-aloha's TransferCube and Insertion (MuJoCo) behind the package's environment contract.

Models, start poses, start regions and reward stages are gym-aloha's. Its environment class is not used: it renders
three 480x640 images on every step (2-7 steps/s), ignores the requested image size and declares a wrong action box.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from serl_chunk import extras
from serl_chunk.config.fields import require
from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots.base import Expert, joints_spec
from serl_chunk.robots.mujoco_camera import MujocoEnv
from serl_chunk.types import ConfigError, RobotSpec

CONTROL_HZ = 50.0
JOINTS = 14  # two arms of six joints and a gripper each
OBJECT_POSE = 7  # position (m) and quaternion (w, x, y, z)

ARM_LOW = (-3.14158, -1.85005, -1.76278, -3.14158, -1.8675, -3.14158)  # rad, from the model's actuators
ARM_HIGH = (3.14158, 1.25664, 1.6057, 3.14158, 2.23402, 3.14158)
CAMERAS = ("left_pillar", "right_pillar", "top", "angle", "front_close", "left_wrist", "right_wrist")

FINGER_CLOSED, FINGER_OPEN = 0.01844, 0.058  # m, a gripper's 0 and 1 (gym-aloha's PUPPET_GRIPPER_POSITION_*)
START_ARM = (0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.02239, -0.02239)  # joints (rad) and the two fingers (m) of an arm
HOME = (*START_ARM[:6], (START_ARM[6] - FINGER_CLOSED) / (FINGER_OPEN - FINGER_CLOSED)) * 2  # the 14 joints there

# Where the 14 joints of state and action lie among the model's 16 (a gripper has two mirrored fingers there).
_JOINT_QPOS = np.array([0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14])
_GRIPPERS = np.array([6, 13])
_OBJECTS_FROM = 16  # 7 numbers an object follow: position and quaternion


def aloha_sim_spec(config: AlohaSimConfig) -> RobotSpec:
    """Return the specification of `aloha_sim`; raises ConfigError for an unknown or repeated camera.

    Actions are `float32[14]`: left arm (6 absolute joint positions, rad), left gripper (0 closed .. 1 open), the same
    for the right arm; gym-aloha's own box, -1..1, cannot hold its start pose. The state is the measured joints in the
    same order and units, then the objects' poses (the cube; or peg and socket) if `config.cube_in_state`. The model's
    fingers move between about 0.06 and 0.97 only; the range stays 0..1 because gym-aloha's data use it.
    """
    for name in config.cameras:
        valid = ", ".join(CAMERAS)
        require(name in CAMERAS, "robot.cameras", f"aloha_sim has no such camera ({name}, expected {valid})")
    once, named = len(set(config.cameras)) == len(config.cameras), ", ".join(config.cameras)
    require(once, "robot.cameras", f"a camera is named twice ({named})")
    name = config.kind if config.env_name == "transfer_cube" else f"{config.kind} {config.env_name}"
    state_dim = JOINTS + config.cube_in_state * OBJECT_POSE * len(SCENES[config.env_name].starts)
    frames = config.cameras, config.image_size, config.max_episode_steps
    return joints_spec(name, CONTROL_HZ, state_dim, ARM_LOW, ARM_HIGH, *frames)


Contacts = Set[frozenset[str]]  # pairs of geometries that touch, by name

SUCCESS_STAGE = 4
OBJECT_HEIGHT = 0.05  # m, of an object's centre at the start; it drops to the table

# gym-aloha's stages consider one finger of each hand only.
_LEFT_FINGER = "vx300s_left/10_left_gripper_finger"
_RIGHT_FINGER = "vx300s_right/10_right_gripper_finger"
_CUBE, _PEG, _PIN, _TABLE = "red_box", "red_peg", "pin", "table"
_SOCKET = ("socket-1", "socket-2", "socket-3", "socket-4")


class Scene(NamedTuple):
    """One task of gym-aloha. `stage` computes its reward 0..4 from the contacts."""

    model_file: str
    # Limits (m) of x and y of each object's centre at the start, in the order of the model's free joints
    starts: tuple[tuple[tuple[float, float], tuple[float, float]], ...]
    geometries: frozenset[str]  # the objects' own: contacts among others decide nothing
    stage: Callable[[Contacts], int]


def transfer_cube_stage(contacts: Contacts) -> int:
    """1: the right finger touches the cube, 2: and it is off the table, 3: the left finger does, 4: and it is off.

    Neither monotone nor a sum (gym-aloha, TransferCubeTask.get_reward).
    """
    lifted = not _touch(contacts, _CUBE, _TABLE)
    if _touch(contacts, _CUBE, _LEFT_FINGER):
        return 4 if lifted else 3
    if _touch(contacts, _CUBE, _RIGHT_FINGER):
        return 2 if lifted else 1
    return 0


def insertion_stage(contacts: Contacts) -> int:
    """1: both hands touch their object, 2: and both are off the table, 3: peg and socket touch in the air, 4: the pin.

    The pin sits inside the socket, 2 cm from its mouth; touching it is the success (gym-aloha,
    InsertionTask.get_reward).
    """
    if _touch(contacts, _PEG, _PIN):
        return 4
    touched = {name for name in (_TABLE, _PEG, _LEFT_FINGER) if any(_touch(contacts, part, name) for part in _SOCKET)}
    lifted = not _touch(contacts, _PEG, _TABLE) and _TABLE not in touched
    if lifted and _PEG in touched:
        return 3
    held = _LEFT_FINGER in touched and _touch(contacts, _PEG, _RIGHT_FINGER)
    return (2 if lifted else 1) if held else 0


SCENES: dict[str, Scene] = {
    "transfer_cube": Scene(
        "bimanual_viperx_transfer_cube.xml", (((0.0, 0.4), (0.2, 0.6)),), frozenset({_CUBE}), transfer_cube_stage
    ),
    "insertion": Scene(
        "bimanual_viperx_insertion.xml",
        (((0.1, 0.4), (0.2, 0.6)), ((-0.2, 0.4), (-0.1, 0.6))),  # peg, socket
        frozenset({_PEG, _PIN, *_SOCKET}),
        insertion_stage,
    ),
}


def _touch(contacts: Contacts, a: str, b: str) -> bool:
    return frozenset((a, b)) in contacts


def saved_states(file: str, nq: int) -> dict[str, np.ndarray]:
    """Read the start states of `robot.init_states`, float64[nq] under each id. Raises ConfigError."""
    try:
        with np.load(Path(file).expanduser()) as saved:
            states = {name: np.asarray(saved[name], np.float64) for name in saved.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:  # TypeError: a .npy file
        what = f"{file} cannot be read as a .npz file of states ({error}). Write it with numpy.savez"
        raise ConfigError(what, parameter="robot.init_states") from error
    for name, state in states.items():
        right = state.shape == (nq,) and bool(np.isfinite(state).all())
        require(
            right, "robot.init_states", f"state {name!r} of {file} is {list(state.shape)}, expected {nq} finite numbers"
        )
    return states


class AlohaSimEnv(MujocoEnv):
    """Two simulated ViperX arms: the right one hands the left one a cube, or puts its peg into the left one's socket.

    `step` (20 ms) returns reward 1 and terminates at gym-aloha's reward 4 (`info["stage"]`, see `*_stage`), else reward
    0. Raises ConfigError if the simulator is not installed, or has no such camera, and for bad saved states.
    """

    def __init__(self, config: AlohaSimConfig, *, images: str = "on_request") -> None:
        self._set_spaces(aloha_sim_spec(config), images)
        self.scene, package = SCENES[config.env_name], importlib.util.find_spec("gym_aloha")
        self._mujoco = extras.mujoco("robot aloha_sim", "aloha-sim")
        if package is None or not package.submodule_search_locations:
            raise ConfigError("robot aloha_sim: gym-aloha is not installed. Run pip install 'serl-chunk[aloha-sim]'")
        assets = Path(package.submodule_search_locations[0]) / "assets"
        self.model = self._mujoco.MjModel.from_xml_path(str(assets / self.scene.model_file))
        self._data = self._mujoco.MjData(self.model)
        self.substeps = round(1 / (CONTROL_HZ * self.model.opt.timestep))
        self._env_name, self._cube_in_state = config.env_name, config.cube_in_state
        self._names = [self.model.geom(i).name for i in range(self.model.ngeom)]
        self._own = np.array([name in self.scene.geometries for name in self._names])
        self._saved = saved_states(config.init_states, self.model.nq) if config.init_states else {}
        self.init_states = tuple(self._saved)

    @property
    def joints(self) -> np.ndarray:
        """Measured joints, `float64[14]`: radians, grippers 0..1."""
        joints = self._data.qpos[_JOINT_QPOS]
        joints[_GRIPPERS] = (joints[_GRIPPERS] - FINGER_CLOSED) / (FINGER_OPEN - FINGER_CLOSED)
        return joints

    @property
    def speeds(self) -> np.ndarray:
        """Measured velocity of the joints, `float64[14]`: rad/s, grippers' openings per second."""
        speeds = self._data.qvel[_JOINT_QPOS]
        speeds[_GRIPPERS] /= FINGER_OPEN - FINGER_CLOSED
        return speeds

    @property
    def forces(self) -> np.ndarray:
        """Actuators' forces, `float64[14]`: N m, N of a finger."""
        return self._data.actuator_force[_JOINT_QPOS]

    @property
    def object_poses(self) -> np.ndarray:
        """Position (m) and quaternion (w, x, y, z) of each object, `float64[N, 7]`: the cube; or peg, socket."""
        return self._data.qpos[_OBJECTS_FROM:].reshape(-1, 7).copy()

    def place(self, joints: np.ndarray, objects: np.ndarray) -> None:
        """Set the measured joints, float64[14], and the objects' poses, float64[N, 7] or flat; nothing moves then."""
        self._data.qpos[:_OBJECTS_FROM], self._data.qvel[:] = self._to_ctrl(joints), 0.0
        self._data.qpos[_OBJECTS_FROM:] = objects.reshape(-1)
        self._mujoco.mj_fwdPosition(self.model, self._data)

    def make_expert(self) -> Expert:
        from serl_chunk.robots.aloha_sim.experts import AlohaSimExpert, InsertionExpert

        return InsertionExpert(self) if self._env_name == "insertion" else AlohaSimExpert(self)

    def _start(self, seed: int | None) -> dict[str, Any]:
        self._mujoco.mj_resetData(self.model, self._data)
        self._data.qpos[:16] = START_ARM * 2
        self._data.ctrl[:] = START_ARM * 2
        self._draw_objects()
        return {"stage": self.stage()}

    def _restore(self, init_state: str) -> dict[str, Any]:
        qpos = self._saved[init_state]
        self._mujoco.mj_resetData(self.model, self._data)
        self._data.qpos[:], self._data.ctrl[:] = qpos, qpos[:_OBJECTS_FROM]
        self._mujoco.mj_step1(self.model, self._data)
        return {"stage": self.stage()}

    def reset_objects(self, seed: int) -> np.ndarray:
        """Put the objects where `reset` with this seed does, at rest; the arms stay. Returns their poses."""
        gymnasium.Env.reset(self, seed=seed)
        return self._draw_objects()

    def _draw_objects(self) -> np.ndarray:
        poses = [(*self.np_random.uniform(low, high), OBJECT_HEIGHT, 1, 0, 0, 0) for low, high in self.scene.starts]
        self.place_objects(np.array(poses, np.float64))
        return np.array(poses, np.float64)

    def place_objects(self, poses: np.ndarray) -> None:
        """Put the objects to `poses`, float64[N, 7], at rest."""
        self._data.qpos[_OBJECTS_FROM:] = poses.reshape(-1)
        self._data.qvel[_OBJECTS_FROM:] = 0
        self._mujoco.mj_step1(self.model, self._data)

    def _move(self, action: np.ndarray) -> tuple[float, dict[str, Any]]:
        executed = np.clip(action, self._low, self._high)
        self.command(executed)
        self.advance(self.substeps)
        stage = self.stage()
        success = stage == SUCCESS_STAGE
        return success, {"success": success, "stage": stage, "executed_action": executed}

    def place_arms(self, joints: np.ndarray) -> None:
        """Put the arms to `joints`, float[14], at rest."""
        self._data.qpos[:_OBJECTS_FROM] = self._to_ctrl(joints)
        self._data.qvel[:_OBJECTS_FROM] = 0
        self._mujoco.mj_step1(self.model, self._data)

    def command(self, joints: np.ndarray) -> None:
        self._data.ctrl[:] = self._to_ctrl(joints)

    def advance(self, steps: int) -> None:
        """Simulate `steps` steps of physics (2 ms each), at least one."""
        # The position stage (mj_step1) of the current state is always done already, so contacts, joints and frames
        # belong to one moment. gym-aloha's environment does the same.
        self._mujoco.mj_step2(self.model, self._data)
        if steps > 1:
            self._mujoco.mj_step(self.model, self._data, steps - 1)
        self._mujoco.mj_step1(self.model, self._data)

    def stage(self) -> int:
        pairs = self._data.contact.geom[: self._data.ncon]
        pairs = pairs[self._own[pairs].any(axis=1)]  # the arms' own joints touch each other all the time
        return self.scene.stage({frozenset((self._names[a], self._names[b])) for a, b in pairs.tolist()})

    def _state(self) -> np.ndarray:
        objects = self._data.qpos[_OBJECTS_FROM:] if self._cube_in_state else ()
        return np.concatenate([self.joints, objects]).astype(np.float32)

    def _scene(self) -> tuple[Any, Any, Any]:
        return self._mujoco, self.model, self._data

    @staticmethod
    def _to_ctrl(action: np.ndarray) -> np.ndarray:
        """Return the model's 16 actuator commands: a gripper's opening goes to both fingers, mirrored."""
        left, right = FINGER_CLOSED + action[_GRIPPERS].astype(np.float64) * (FINGER_OPEN - FINGER_CLOSED)
        return np.concatenate([action[:6], (left, -left), action[7:13], (right, -right)])
