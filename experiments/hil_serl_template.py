"""HIL-SERL's four tasks on your robot: their settings, and the one function that you have to fill in.

    cp FOLDER/hil_serl_template.py my_robot.py        FOLDER: where this file lies; then fill in make_robot
    serl-chunk --exp_name my_robot.py:usb_pickup_insertion --learner --demo_path demos/usb --checkpoint_path runs/usb
    serl-chunk --exp_name my_robot.py:usb_pickup_insertion --actor --ip GPU_BOX

After the colon stands the task: ram_insertion (the default), usb_pickup_insertion, object_handover or egg_flip.
`make_robot(task, fake_env, evaluating)` returns an environment as HIL-SERL's `get_environment` does. Its observations,
the Env's own `{"state": {...}, "images": {...}}` or the wrappers' `{"state": (1, D), "<camera>": (1, 128, 128, 3)}`,
its actions of 3, 6, 7, 12 or 14 numbers in [-1, 1] and its `info` (`succeed`, `intervene_action`) are understood.
HIL-SERL itself does not run in this Python: docs/your_robot.md lists what to copy and change.

What your robot has otherwise than HIL-SERL's for that task is said in SETUP_MODE, CAMERAS and ACTION_DIM below; WEIGHTS
gives it HIL-SERL's vision. The flag `--setup_mode` says what becomes of the grippers among these actions: with a fixed
one they are held as they are.
"""

import dataclasses
from typing import Any

from serl_chunk.config.agents import AcfqlConfig
from serl_chunk.config.encoders import EncoderConfig
from serl_chunk.config.experiment import ActorConfig, ChunkConfig, ExperimentConfig, NormaliserConfig
from serl_chunk.config.gripper import GripperConfig, SetupMode
from serl_chunk.config.hil_serl import hil_serl_encoder, hil_serl_task
from serl_chunk.config.learner import LearnerConfig
from serl_chunk.config.replay import ReplayConfig
from serl_chunk.robots.hil_serl import hil_serl_robot

# None: as HIL-SERL has them for the task. A fixed gripper is no action (6 numbers, or 12 for two arms), a learned one
# is the last of its arm (7, or 14); set another number of actions in ACTION_DIM.
SETUP_MODE: SetupMode | None = None  # for example "single-arm-fixed-gripper"
CAMERAS: tuple[str, ...] | None = None  # of the policy, for example ("wrist_1", "side")
ACTION_DIM: int | None = None
# For HIL-SERL's vision the file that `serl-chunk data encoder` makes of its ResNet-10, at the learner; "" is a small
# network trained from scratch.
WEIGHTS = ""


def make_robot(task: str, fake_env: bool, evaluating: bool) -> Any:
    """Your robot's gymnasium environment for `task`. With `fake_env` only its spaces are used: open no device then.

    `evaluating` is True for episodes that are only evaluated.

    For example, with copies of HIL-SERL's Env classes and wrappers in a file my_env.py next to this one:

        from my_env import get_environment
        return get_environment(task, fake_env=fake_env, classifier=True)

    The classifier, as in HIL-SERL, on both machines: egg_flip's wrapper adds a number to the state, and learner
    (fake_env) and actor must declare the same.
    """
    raise NotImplementedError("make_robot() is to be filled in")


def experiment(task: str = "ram_insertion") -> ExperimentConfig:
    """The chosen task's cameras, grippers, discount, length and checkpoint period; the agent and its loop are ours."""
    settings = hil_serl_task(task, setup_mode=SETUP_MODE, cameras=CAMERAS, action_dim=ACTION_DIM)
    gripper = GripperConfig(setup_mode=settings.setup_mode)
    if gripper.composition == "learned":  # HIL-SERL's price of a change, which a bounded critic's range does not hold
        gripper = dataclasses.replace(gripper, penalty=-0.02, loss="squared")
    return ExperimentConfig(
        name=f"hil_serl_{task}",  # of run folders and spools: a task does not go on with another's
        robot=hil_serl_robot(task, make_robot, __file__, setup_mode=SETUP_MODE, cameras=CAMERAS, action_dim=ACTION_DIM),
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
            utd_ratio=1.0,
            max_steps=100_000,
            training_starts=100,
            pretrain_steps=5_000,
            warmup_episodes=10,
            critic_warmup_steps=1_000,
            steps_per_update=50,
            checkpoint_period=settings.checkpoint_period,
        ),
        actor=ActorConfig(clock="realtime"),
        discount=settings.discount,
    )
