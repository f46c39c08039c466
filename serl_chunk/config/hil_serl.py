"""HIL-SERL's settings (Luo et al. 2024): of its four published tasks (`examples/experiments/*/config.py`), and its
vision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.gripper import SetupMode
from serl_chunk.types import ConfigError


class HilSerlTask(NamedTuple):
    """HIL-SERL's configuration of one task."""

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


def hil_serl_task(
    name: str, *, setup_mode: SetupMode | None = None, cameras: Sequence[str] | None = None,
    action_dim: int | None = None,
) -> HilSerlTask:  # fmt: skip
    """Return the settings of the task `name`, with those in which your robot differs; raises ConfigError with what is
    valid.

    Another `setup_mode` has the number of actions of HIL-SERL's wrappers, unless `action_dim` is given; the gripper of
    a learned one is the last number of each arm. `cameras` are those of the policy.
    """
    if name not in TASKS:
        raise ConfigError(f"HIL-SERL has no task {name!r}; valid: {', '.join(TASKS)}")
    task = TASKS[name]
    if cameras is not None:
        task = task._replace(cameras=tuple(c.replace("/", "_") for c in cameras))
    if setup_mode is None and action_dim is None:
        return task
    mode = setup_mode or task.setup_mode
    if mode not in get_args(SetupMode):
        valid = ", ".join(m for m in get_args(SetupMode) if m)
        raise ConfigError(f"{name}: setup_mode={mode!r} is none of HIL-SERL's; valid: {valid}")
    arms, learned = 2 if mode.startswith("dual") else 1, "learned" in mode
    # HIL-SERL's wrappers have six numbers an arm, and one for a gripper that is there.
    dim = action_dim or (task.action_dim if mode == task.setup_mode else arms * (6 + learned))
    if dim % arms:
        raise ConfigError(f"{name}: setup_mode={mode} has two arms, and action_dim={dim} is not even")
    grippers = tuple((arm + 1) * dim // arms - 1 for arm in range(arms)) if learned else ()
    return task._replace(setup_mode=mode, action_dim=dim, grippers=grippers)


def hil_serl_encoder(weights: str) -> EncoderConfig:
    """Return HIL-SERL's vision (docs/algorithms/vision.md): a frozen ResNet-10, and heads that the critic's loss
    trains.

    `weights` is the file that `serl-chunk data encoder` makes of HIL-SERL's; the learner alone reads it.
    """
    return EncoderConfig(
        kind="resnet10", weights=weights, frozen_backbone=True, trained_by="critic", pooling="spatial", latent=256,
        share_cameras=False, state_latent=64,
    )  # fmt: skip
