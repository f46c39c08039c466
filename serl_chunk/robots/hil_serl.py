"""HIL-SERL's four published tasks as settings of a GymConfig; the environment itself is the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from serl_chunk.config.agents.gripper import SetupMode
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
    episode_s: float | None = None,
) -> GymConfig:
    """Return HIL-SERL's task `name` on the environment that `make_robot(name, fake_env, evaluating)` builds.

    `evaluating` is optional, `episode_s` another time limit in seconds; the rest is as in `hil_serl_task`. Building the
    environment raises ConfigError for a `make_robot` (in `file`) that is still a stub, for another number of actions
    than the control mode's, and for a missing camera of the policy.
    """
    task = hil_serl_task(name, setup_mode=setup_mode, cameras=cameras, action_dim=action_dim)

    def make(fake_env: bool, evaluating: bool = False) -> Any:
        from serl_chunk.robots.gym_adapter import call_factory  # reading an experiment needs no gymnasium

        try:
            env = call_factory(make_robot, name, fake_env=fake_env, evaluating=evaluating)
        except NotImplementedError as error:
            raise ConfigError(
                f"{name}: make_robot() returns no environment ({type(error).__name__}: {error}). Copy {file}, let its "
                f"make_robot() return your robot's gymnasium.Env, and use the copy as exp_name FILE.py:{name}"
            ) from error
        _check(env, name, task, file)
        return env

    return GymConfig(
        make=make,
        task=task.words,
        robot_name=f"hil_serl {name}",
        max_episode_s=task.max_episode_steps / CONTROL_HZ if episode_s is None else episode_s,
        control_hz=CONTROL_HZ,
        is_real=True,
        joint_of_action=(-1,) * task.action_dim,  # twists: a hold of 0 is a standstill
        grippers=task.grippers,
    )


def _check(env: Any, name: str, task: HilSerlTask, file: str) -> None:
    shape = getattr(getattr(env, "action_space", None), "shape", None)
    if shape is not None and shape != (task.action_dim,):
        raise ConfigError(
            f"{name}: wrong action space (got shape {shape}, expected {(task.action_dim,)} for the control mode "
            f"{task.setup_mode}). Use the wrappers of that mode (GripperCloseEnv removes the gripper), or set "
            f"SETUP_MODE and ACTION_DIM in {file}"
        )
    observed = getattr(getattr(env, "observation_space", None), "spaces", {})
    there = {name.replace("/", "_") for name in (*observed, *getattr(observed.get("images"), "spaces", {}))}
    missing = [c for c in task.cameras if c not in there]
    if missing:
        raise ConfigError(
            f"{name}: camera {missing[0]!r} of the policy is missing (got {', '.join(sorted(there))}). Rename your "
            f"camera, or set CAMERAS in {file}"
        )
