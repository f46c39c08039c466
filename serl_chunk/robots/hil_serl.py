"""HIL-SERL's four published tasks as settings of a GymConfig; the environment itself is the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from serl_chunk.config.gripper import SetupMode
from serl_chunk.config.hil_serl import HilSerlTask, hil_serl_task
from serl_chunk.config.robots import GymConfig
from serl_chunk.types import ConfigError

CONTROL_HZ = 10.0


def hil_serl_robot(
    name: str,
    make_robot: Callable[..., Any],
    file: str,
    *,
    setup_mode: SetupMode | None = None,
    cameras: Sequence[str] | None = None,
    action_dim: int | None = None,
) -> GymConfig:
    """HIL-SERL's task `name` on the environment that `make_robot(name, fake_env, evaluating)` builds.

    A function without a parameter `evaluating` gets the others. The rest is as in `hil_serl_task`. When the environment
    is built, ConfigError is raised where `make_robot` is still to be filled in (it raises NotImplementedError; `file`
    is where), where the actions are not as many as the task's control mode has, and where a camera of the policy is
    missing.
    """
    task = hil_serl_task(name, setup_mode=setup_mode, cameras=cameras, action_dim=action_dim)

    def make(fake_env: bool, evaluating: bool = False) -> Any:
        from serl_chunk.robots.gym_adapter import call_factory  # gymnasium is not for a file that is only read

        try:
            env = call_factory(make_robot, name, fake_env=fake_env, evaluating=evaluating)
        except NotImplementedError as error:
            raise ConfigError(
                f"{name} needs your robot's environment: copy {file}, let its make_robot() return the gymnasium.Env "
                f"and give the copy as --exp_name FILE.py:{name} ({type(error).__name__}: {error})"
            ) from error
        _check(env, name, task, file)
        return env

    return GymConfig(
        make=make,
        task=task.words,
        robot_name=f"hil_serl {name}",
        max_episode_steps=task.max_episode_steps,
        control_hz=CONTROL_HZ,
        is_real=True,
        joint_of_action=(-1,) * task.action_dim,  # twists: a hold of 0 is a standstill
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
