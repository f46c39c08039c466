"""my_robot: an arm that reaches a target, seen by one camera. Written by `serl-chunk new`; it runs as it is.

Replace the class Arm by your robot: the gymnasium interface is all that serl_chunk needs (docs/your_robot.md).

    serl-chunk record --exp_name ./my_robot.py --n_demos 10 --out demos/my_robot
    serl-chunk --exp_name ./my_robot.py --learner --actor --demo_path demos/my_robot
"""

import gymnasium
import numpy as np

from serl_chunk import (
    AcfqlConfig,
    ChunkConfig,
    EncoderConfig,
    ExperimentConfig,
    GymConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
)
from serl_chunk.robots.base import InterventionCommand

CONTROL_HZ = 10.0
MAX_STEPS = 40  # time limit in ticks
IMAGE_SIZE = 32  # pixels; 128 for a real camera
SPEED = 0.03  # metres per tick at full deflection


class Arm(gymnasium.Env):
    """The gripper of an arm over a table of one square metre.

    Observations: `state`, the position that the arm measures (x, y; metres), and a camera, which alone shows the
    target.
    Actions: what a SpaceMouse gives, a velocity of the gripper along x and y in [-1, 1]. For joint targets instead,
    declare the joints' limits as the action space, name in `joint_of_action` the state of each joint, and use
    `NormaliserConfig(actions="relative")`.
    """

    def __init__(self, fake_env: bool, evaluating: bool) -> None:
        self.observation_space = gymnasium.spaces.Dict(
            {
                "state": gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32),
                "top": gymnasium.spaces.Box(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8),
            }
        )
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.evaluating = evaluating  # for what only training episodes have, such as an operator who labels them
        if not fake_env:
            pass  # open cameras and controllers here; the learner asks for the spaces only

    def reset(self, *, seed=None, options=None):
        """Move to the start. Draw what differs between episodes from `self.np_random`, so that a seed repeats it."""
        super().reset(seed=seed)
        self.position = np.full(2, 0.5)
        self.target = self.np_random.uniform(0.1, 0.9, 2)
        return self._observe(), {}

    def step(self, action):
        """Execute one command and wait for the next tick's observation; on a real robot the caller keeps the rate."""
        self.position = np.clip(self.position + SPEED * np.asarray(action, float), 0, 1)
        reached = bool(np.linalg.norm(self.target - self.position) < 0.06)
        return self._observe(), float(reached), reached, False, {"succeed": reached}

    def _observe(self):
        frame = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), 40, np.uint8)
        for where, colour in ((self.target, (230, 60, 60)), (self.position, (60, 200, 230))):
            row, column = (where[::-1] * (IMAGE_SIZE - 3)).astype(int)
            frame[row : row + 3, column : column + 3] = colour
        return {"state": self.position.astype(np.float32), "top": frame}

    def make_expert(self):
        """Return the demonstrator of `serl-chunk record --policy scripted`. Optional."""
        return Script(self)

    def make_scripted_human(self):
        """Return the stand-in for an operator of `--config.actor.intervention=scripted`. Optional."""
        return Human(self)


class Script:
    """Pushes the SpaceMouse towards the target, not quite steadily."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm

    def reset(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def act(self):
        push = (self.arm.target - self.arm.position) / SPEED + self.rng.normal(0, 0.1, 2)
        return np.clip(push, -1, 1).astype(np.float32)


class Human:
    """Watches for 20 ticks, then acts for 20 or more, until the policy would decide, and watches again."""

    def __init__(self, arm: Arm) -> None:
        self.hands = Script(arm)

    def reset(self, seed: int) -> None:
        self.hands.reset(seed)
        self.since = 0  # tick on which it began to watch

    def poll(self, tick, observation, decision_tick, last):
        if tick - self.since >= 40 and decision_tick:
            self.since = tick
        return None if tick - self.since < 20 else InterventionCommand(self.hands.act())

    def close(self) -> None:
        pass


def make(fake_env: bool, evaluating: bool) -> gymnasium.Env:
    """Build the environment; with `fake_env` (the learner) only its spaces are used, so open no device then."""
    return Arm(fake_env, evaluating)


def experiment() -> ExperimentConfig:
    """Small sizes that train on a laptop; `serl-chunk config ./my_robot.py` explains every setting."""
    return ExperimentConfig(
        name="my_robot",
        robot=GymConfig(
            make=make,
            robot_name="my_robot",
            task="move the gripper over the target",
            control_hz=CONTROL_HZ,
            max_episode_steps=MAX_STEPS,
            is_real=False,  # True for a robot: random actions are then refused; also set actor=ActorConfig("realtime")
        ),
        agent=AcfqlConfig(image_keys=("top",), encoder=EncoderConfig(features=(8, 16), latent=32, shift=0)),
        chunk=ChunkConfig(horizon=4),  # 0.4 s
        normaliser=NormaliserConfig(actions="absolute_range"),  # velocities in [-1, 1] already
        replay=ReplayConfig(capacity=20_000, demo_capacity=5_000, human_capacity=5_000, image_capacity=20_000),
        learner=LearnerConfig(batch_size=64, pretrain_steps=1_000, warmup_episodes=8, max_steps=3_000),
        discount=0.96,  # 0.96**40 = 0.2
    )
