"""HIL-SERL's four published tasks as settings of a GymConfig; the environment itself is the user's.

Numbers from HIL-SERL (Luo et al. 2024), `examples/experiments/*/config.py`: discount, cameras of the policy, episode
length, control mode (`setup_mode`) and checkpoint period.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

from serl_chunk.config.encoders import EncoderConfig
from serl_chunk.config.gripper import SetupMode
from serl_chunk.config.loader import import_failure
from serl_chunk.config.robots import GymConfig
from serl_chunk.types import ConfigError

CONTROL_HZ = 10.0


class HilSerlTask(NamedTuple):
    """What HIL-SERL's configuration of one task says."""

    words: str  # the task, recorded with every episode
    setup_mode: SetupMode
    action_dim: int
    cameras: tuple[str, ...]  # of the policy; the adapter writes left/wrist as left_wrist
    discount: float  # per tick
    max_episode_steps: int  # ticks of 0.1 s
    checkpoint_period: int  # updates
    grippers: tuple[int, ...] = ()  # action dimensions that a fixed gripper does not have


TASKS: dict[str, HilSerlTask] = {
    "ram_insertion": HilSerlTask(
        "insert the memory module", "single-arm-fixed-gripper", 6, ("wrist_1", "wrist_2"), 0.97, 100, 5_000
    ),
    "usb_pickup_insertion": HilSerlTask(
        "pick up the USB stick and insert it", "single-arm-learned-gripper", 7, ("side_policy", "wrist_1", "wrist_2"),
        0.98, 120, 2_000, (6,),
    ),
    "object_handover": HilSerlTask(
        "hand the object over and put it down", "dual-arm-learned-gripper", 14,
        ("left_wrist", "right_wrist", "left_side"), 0.97, 200, 5_000, (6, 13),
    ),
    "egg_flip": HilSerlTask(  # wrenches
        "flip the egg in the pan", "single-arm-fixed-gripper", 3, ("wrist_1", "side"), 0.985, 100, 5_000
    ),
}  # fmt: skip


_ACTIONS: dict[str, int] = {  # of HIL-SERL's wrappers: six numbers an arm, and one for a gripper that is there
    "single-arm-fixed-gripper": 6,
    "single-arm-learned-gripper": 7,
    "dual-arm-fixed-gripper": 12,
    "dual-arm-learned-gripper": 14,
}


def hil_serl_task(
    name: str,
    *,
    setup_mode: SetupMode | None = None,
    cameras: Sequence[str] | None = None,
    action_dim: int | None = None,
) -> HilSerlTask:
    """The settings of the task `name`, with what your robot has otherwise.

    Another `setup_mode` has the number of actions of HIL-SERL's wrappers, unless `action_dim` says it; the gripper of a
    learned one is the last number of each arm. `cameras` are those of the policy. Raises ConfigError, with what is
    valid.
    """
    if name not in TASKS:
        raise ConfigError(f"HIL-SERL has no task {name!r}; valid: {', '.join(TASKS)}")
    task = TASKS[name]
    if cameras is not None:
        task = task._replace(cameras=tuple(c.replace("/", "_") for c in cameras))
    if setup_mode is None and action_dim is None:
        return task
    mode = setup_mode or task.setup_mode
    if mode not in _ACTIONS:
        valid = ", ".join(m for m in get_args(SetupMode) if m)
        raise ConfigError(f"{name}: setup_mode={mode!r} is none of HIL-SERL's; valid: {valid}")
    dim = action_dim or (task.action_dim if mode == task.setup_mode else _ACTIONS[mode])
    arms = 2 if mode.startswith("dual") else 1
    if dim % arms:
        raise ConfigError(f"{name}: setup_mode={mode} has two arms, and action_dim={dim} is not even")
    grippers = tuple((arm + 1) * dim // arms - 1 for arm in range(arms)) if "learned" in mode else ()
    return task._replace(setup_mode=mode, action_dim=dim, grippers=grippers)


def hil_serl_encoder(weights: str) -> EncoderConfig:
    """HIL-SERL's vision (docs/algorithms/vision.md): a frozen ResNet-10, and heads that the critic's loss trains.

    `weights` is the file that `serl-chunk data encoder` makes of HIL-SERL's; the learner alone reads it.
    """
    return EncoderConfig(
        kind="resnet10",
        weights=weights,
        frozen_backbone=True,
        trained_by="critic",
        pooling="spatial",
        latent=256,
        share_cameras=False,
        state_latent=64,
    )


def hil_serl_robot(
    name: str,
    make_robot: Callable[[str, bool], Any],
    file: str,
    *,
    setup_mode: SetupMode | None = None,
    cameras: Sequence[str] | None = None,
    action_dim: int | None = None,
) -> GymConfig:
    """HIL-SERL's task `name` on the environment that `make_robot(name, fake_env)` builds; the rest as `hil_serl_task`.

    When it is built, ConfigError is raised where `make_robot` is still to be filled in (it raises NotImplementedError;
    `file` tells the reader where) or cannot import, where the actions are not as many as the task's control mode has,
    and where a camera of the policy is missing.
    """
    task = hil_serl_task(name, setup_mode=setup_mode, cameras=cameras, action_dim=action_dim)

    def make(fake_env: bool) -> Any:
        try:
            env = make_robot(name, fake_env)
        except NotImplementedError as error:
            raise ConfigError(
                f"{name} needs your robot's environment: copy {file}, let its make_robot() return the gymnasium.Env "
                f"and give the copy as --exp_name FILE.py:{name} ({type(error).__name__}: {error})"
            ) from error
        except ImportError as error:
            raise ConfigError(f"make_robot() cannot import: {import_failure(file, error)}") from error
        _check(env, name, task, file)
        return env

    return GymConfig(
        make=make,
        task=task.words,
        robot_name=f"hil_serl {name}",
        max_episode_steps=task.max_episode_steps,
        control_hz=CONTROL_HZ,
        is_real=True,
        grippers=task.grippers,
    )


def _check(env: Any, name: str, task: HilSerlTask, file: str) -> None:
    """Refuse an environment of another control mode or without one of the policy's cameras, in HIL-SERL's words."""
    shape = getattr(getattr(env, "action_space", None), "shape", None)
    if shape is not None and shape != (task.action_dim,):
        raise ConfigError(
            f"{name} has the control mode {task.setup_mode}: {task.action_dim} numbers an action; the environment's "
            f"action space has the shape {shape}. Use the wrappers of that mode (GripperCloseEnv takes the gripper "
            f"away), or say yours in {file}: SETUP_MODE, ACTION_DIM"
        )
    observed = getattr(getattr(env, "observation_space", None), "spaces", {})
    there = {name.replace("/", "_") for name in (*observed, *getattr(observed.get("images"), "spaces", {}))}
    missing = [c for c in task.cameras if c not in there]
    if missing:
        raise ConfigError(
            f"{name}'s policy sees camera {missing[0]!r}, which the environment does not observe; it has: "
            f"{', '.join(sorted(there))}. Rename your camera, or say yours in {file}: CAMERAS"
        )
