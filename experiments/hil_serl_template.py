"""HIL-SERL's four tasks on your robot: their settings, and the one function that you have to fill in.

    cp FOLDER/hil_serl_template.py my_robot.py        FOLDER: the folder of this file; then fill in make_robot
    serl-chunk --exp_name my_robot.py:usb_pickup_insertion --learner --demo_path demos/usb --checkpoint_path runs/usb
    serl-chunk --exp_name my_robot.py:usb_pickup_insertion --actor --ip GPU_BOX

The task follows the colon: ram_insertion (the default), usb_pickup_insertion, object_handover or egg_flip.
`make_robot(task, fake_env, evaluating)` returns an environment as HIL-SERL's `get_environment` does. It may have the
Env's own observations, `{"state": {...}, "images": {...}}`, or those of the wrappers,
`{"state": (1, D), "<camera>": (1, 128, 128, 3)}`; actions of 3, 6, 7, 12 or 14 numbers in [-1, 1]; and an `info` with
`succeed` and `intervene_action`. HIL-SERL itself does not run in this Python: docs/from_hil_serl.md lists the files to
copy and change.

Set SETUP_MODE, CAMERAS, ACTION_DIM and EPISODE_S below where your robot differs from HIL-SERL's for the task. WEIGHTS
selects HIL-SERL's vision. The flag `--setup_mode` sets the use of the grippers among these actions; a fixed one is not
moved. Learner and actor do not wait for each other (learner.utd_ratio=none), as in HIL-SERL.
"""

import dataclasses
from typing import Any

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.gripper import GripperConfig, SetupMode
from serl_chunk.config.experiment import (
    ActorConfig,
    ChunkConfig,
    ExperimentConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
)
from serl_chunk.config.hil_serl import hil_serl_encoder, hil_serl_task
from serl_chunk.robots.hil_serl import hil_serl_robot

# None: HIL-SERL's for the task. A fixed gripper is no action (6 numbers, or 12 for two arms). A learned one is the last
# action of its arm (7, or 14). Set another number of actions in ACTION_DIM.
SETUP_MODE: SetupMode | None = None  # for example "single-arm-fixed-gripper"
CAMERAS: tuple[str, ...] | None = None  # of the policy, for example ("wrist_1", "side")
ACTION_DIM: int | None = None
# Time limit of an episode in seconds; None: HIL-SERL's for the task (10, and 12 and 20 for the second and third).
EPISODE_S: float | None = None
# HIL-SERL's vision: the file that `serl-chunk data encoder` makes of its ResNet-10, at the learner. "": a small network
# that is trained from scratch.
WEIGHTS = ""


def make_robot(task: str, fake_env: bool, evaluating: bool) -> Any:
    """Return your robot's gymnasium environment for `task`.

    With `fake_env` only its spaces are used: open no device then. `evaluating` is True for episodes that are only
    evaluated.

    For example, with copies of HIL-SERL's Env classes and wrappers in a file my_env.py next to this one:

        from my_env import get_environment
        return get_environment(task, fake_env=fake_env, classifier=True)

    Use the classifier on both machines, as in HIL-SERL: egg_flip's wrapper adds a number to the state, and learner
    (fake_env) and actor must declare the same state.
    """
    raise NotImplementedError("make_robot() is to be filled in")


def experiment(task: str = "ram_insertion") -> ExperimentConfig:
    """Return the task's experiment: our agent, HIL-SERL's cameras, grippers, discount, limit and checkpoint period."""
    settings = hil_serl_task(task, setup_mode=SETUP_MODE, cameras=CAMERAS, action_dim=ACTION_DIM)
    gripper = GripperConfig(setup_mode=settings.setup_mode)
    if gripper.composition == "learned":  # HIL-SERL's cost of a change
        gripper = dataclasses.replace(gripper, penalty=-0.02)
    return ExperimentConfig(
        name=f"hil_serl_{task}",  # also of run folders and spools, so that tasks do not mix
        robot=hil_serl_robot(
            task,
            make_robot,
            __file__,
            setup_mode=SETUP_MODE,
            cameras=CAMERAS,
            action_dim=ACTION_DIM,
            episode_s=EPISODE_S,
        ),
        agent=AcfqlConfig(
            image_keys=settings.cameras,
            encoder=hil_serl_encoder(WEIGHTS) if WEIGHTS else EncoderConfig(features=(32, 64, 64, 64)),
            gripper=gripper,
        ),
        chunk=ChunkConfig(horizon=4),  # 0.4 s at 10 Hz
        normaliser=NormaliserConfig(actions="absolute_range"),  # actions are moves in [-1, 1] already
        replay=ReplayConfig(
            capacity=200_000, demo_capacity=50_000, human_capacity=50_000, image_capacity=50_000, max_image_age=0
        ),
        learner=LearnerConfig(
            utd_ratio=None,
            max_steps=1_000_000,  # HIL-SERL's; the operator ends a run before
            training_starts=100,
            pretrain_steps=5_000,
            warmup_episodes=10,
            steps_per_update=50,
            checkpoint_period=settings.checkpoint_period,
        ),
        actor=ActorConfig(clock="realtime"),
        discount=settings.discount,
    )
