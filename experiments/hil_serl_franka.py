"""HIL-SERL's tasks on Frankas behind a robot server: actions, states, boxes, and success by a classifier and the state.

    cp FOLDER/hil_serl_franka.py my_franka.py         FOLDER: the folder of this file
    cp FOLDER/robots/franka_usb.toml .                at the robot PC; or franka_ram.toml, franka_handover.toml
    serl-chunk robot serve franka_usb.toml
    serl-chunk classifier record --exp_name my_franka.py:usb_pickup_insertion --out frames/usb
    serl-chunk classifier train frames/usb --cameras side_classifier --out classifiers/usb_pickup_insertion
    serl-chunk --exp_name my_franka.py:usb_pickup_insertion --learner --demo_path demos/usb --checkpoint_path runs/usb
    serl-chunk --exp_name my_franka.py:usb_pickup_insertion --actor --ip GPU_BOX

The task follows the colon: ram_insertion (the default), usb_pickup_insertion or object_handover. Places are those of
HIL-SERL's lab: write yours into both files. An episode is a success where the classifier in `classifiers/TASK`, at the
actor, agrees with the state.
"""

import dataclasses
from functools import partial
from math import pi
from typing import NamedTuple

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.gripper import GripperConfig
from serl_chunk.config.experiment import (
    ActorConfig,
    ChunkConfig,
    ExperimentConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
)
from serl_chunk.config.hil_serl import hil_serl_encoder, hil_serl_task
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.config.robots import FrankaConfig
from serl_chunk.types import STATE, ConfigError, Observation

SERVER = "127.0.0.1"  # of the robot, as the actor reaches it
# HIL-SERL's vision: the file that `serl-chunk data encoder` makes of its ResNet-10, at the learner. "": a small network
# that is trained from scratch.
WEIGHTS = ""
CLASSIFIERS = "classifiers"  # folder of the classifiers, at the actor


class Cell(NamedTuple):
    """A task in its cell. Places are x, y, z (m) and Euler angles (rad), six numbers for each arm."""

    scale: tuple[float, float]  # m and rad of an action of 1: ACTION_SCALE
    box_low: tuple[float, ...]  # ABS_POSE_LIMIT_LOW: targets are clipped to the box
    box_high: tuple[float, ...]
    judged_by: tuple[str, ...]  # cameras of the classifier: classifier_keys
    number: int  # of the state, which has `proprio` of each arm in sorted order
    above: float  # what that number has to be above in a success
    proprio: tuple[str, ...] = FrankaConfig.PROPRIO
    mirrored_yaw: bool = False


CELLS = {
    "ram_insertion": Cell(
        scale=(0.01, 0.06),
        box_low=(0.55812, -0.05579, 0.26843, pi - 0.01, -0.1, -0.4),
        box_high=(0.61812, -0.01579, 0.32843, pi + 0.01, 0.1, 0.4),
        judged_by=("wrist_1", "wrist_2"),
        number=6,  # z of the tip's frame at the reset, m: it points down
        above=0.04,
    ),
    "usb_pickup_insertion": Cell(
        scale=(0.015, 0.1),
        box_low=(0.523, 0.16697, 0.22098, pi - 0.1, -0.1, -pi / 2 - 0.3),
        box_high=(0.583, 0.23697, 0.30098, pi + 0.1, 0.1, -pi / 2 + 0.3),
        judged_by=("side_classifier",),
        number=0,  # opening of the gripper, which has let go
        above=0.4,
    ),
    "object_handover": Cell(
        scale=(0.04, 0.2),
        box_low=(0.4, -0.03, 0.3, pi - 0.01, -0.3, 0.0, 0.32, -0.01, 0.36, pi - 0.01, 0.0, pi - 0.01),
        box_high=(0.67, -0.01, 0.42, pi + 0.01, 0.0, 0.01, 0.67, 0.01, 0.5, pi + 0.01, 0.3, pi + 0.01),
        judged_by=("left_side_classifier",),
        number=0,  # opening of the left gripper
        above=0.5,
        proprio=("gripper_pose", "tcp_pose", "tcp_vel"),
        mirrored_yaw=True,
    ),
}


def placed(task: str, observation: Observation) -> bool:
    """Return whether the state agrees that the task is done: the classifier's condition."""
    cell = CELLS[task]
    return bool(observation[STATE][cell.number] > cell.above)


def experiment(task: str = "ram_insertion") -> ExperimentConfig:
    """Return the task's experiment: HIL-SERL's robot, cameras, grippers, discount and length, our agent."""
    if task == "egg_flip":
        raise ConfigError(
            "egg_flip is controlled by wrenches, and the robot server commands poses. Use its GymConfig: "
            "hil_serl_template:egg_flip", parameter="exp_name",
        )  # fmt: skip
    settings = hil_serl_task(task)
    cell = CELLS[task]
    gripper = GripperConfig(setup_mode=settings.setup_mode)
    if gripper.composition == "learned":  # HIL-SERL's cost of a change
        gripper = dataclasses.replace(gripper, penalty=-0.02)
    return ExperimentConfig(
        name=f"hil_serl_franka_{task}",  # also of run folders and spools, so that tasks do not mix
        robot=FrankaConfig(
            task=settings.words,
            server=SERVER,
            arms=len(cell.box_low) // 6,
            grippers=bool(settings.grippers),
            scale=cell.scale,
            box_low=cell.box_low,
            box_high=cell.box_high,
            mirrored_yaw=cell.mirrored_yaw,
            proprio=cell.proprio,
            cameras=tuple(dict.fromkeys((*settings.cameras, *cell.judged_by))),
            max_episode_steps=settings.max_episode_steps,
        ),
        agent=AcfqlConfig(
            image_keys=settings.cameras,
            encoder=hil_serl_encoder(WEIGHTS) if WEIGHTS else EncoderConfig(features=(32, 64, 64, 64)),
            gripper=gripper,
        ),
        outcome=OutcomeConfig(classifier=f"{CLASSIFIERS}/{task}", condition=partial(placed, task)),
        chunk=ChunkConfig(horizon=4),  # 0.4 s at 10 Hz
        normaliser=NormaliserConfig(actions="absolute_range"),  # actions are moves in [-1, 1] already
        replay=ReplayConfig(
            capacity=200_000, demo_capacity=50_000, human_capacity=50_000, image_capacity=50_000, max_image_age=0
        ),
        learner=LearnerConfig(
            utd_ratio=1.0,
            max_steps=100_000,
            training_starts=100,
            pretrain_steps=5_000,
            warmup_episodes=10,
            steps_per_update=50,
            checkpoint_period=settings.checkpoint_period,
        ),
        actor=ActorConfig(clock="realtime"),
        discount=settings.discount,
    )
