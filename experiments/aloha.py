"""A real ALOHA with four cameras at 50 Hz: settings, and what you have to fill in for your task.

    cp FOLDER/aloha.py my_task.py                     FOLDER: the folder of this file; its robots/ has robot files
    serl-chunk robot serve my_robot.toml              on the robot PC, as docs/robot_server.md describes
    serl-chunk record --exp_name my_task.py:ros1 --policy scripted --n_demos 30 --out demos/my_task
    serl-chunk --exp_name my_task.py:ros1 --learner --demo_path demos/my_task --checkpoint_path runs/my_task
    serl-chunk --exp_name my_task.py:ros1 --actor --ip GPU_BOX

The arms follow the colon: `ros1` (ALOHA, the default), `ros2` (ALOHA 2) or `trossen` (WidowX AI arms). An action is the
targets of the joints, rad, and of the grippers, 0 closed to 1 open: six joints and a gripper, left arm first. A state
is the same, measured.

The task here is an example without an object: both arms go to MEETING, and close their grippers there.
"""

from typing import Any

import numpy as np

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.experiment import (
    ActorConfig,
    ChunkConfig,
    ExperimentConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
)
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.config.robots import AlohaConfig
from serl_chunk.types import Observation

CAMERAS = ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")  # as in the robot's file, with IMAGE_SIZE there
IMAGE_SIZE = 128
# Joints of either arm at the meeting, rad. In the usual ALOHA, the tips of ViperX arms are 16 cm apart there.
MEETING = {"ros1": (0.0, -0.6, 0.9, 0.0, -0.3, 0.0), "ros2": (0.0, -0.6, 0.9, 0.0, -0.3, 0.0),
           "trossen": (0.0, 1.7, 1.5, 0.0, 0.0, 0.0)}  # fmt: skip
NEAR = 0.1  # rad
CLOSED = 0.3  # of an opening


class Demonstrator:
    """A scripted demonstrator, which leads the arms through `keyframes` on straight lines in joint space.

    Args:
        robot: `robot.seen()` has the measured joints `q` and the `target` that they are on their way to, float64[14].
        keyframes: joints and openings, 14 numbers each.
    """

    TICK = 0.02  # s
    SPEED, ACCELERATION = 1.2, 6.0  # rad/s and rad/s2 of the fastest joint
    GRIPPER_SPEED = 2.5  # openings/s

    def __init__(self, robot: Any, keyframes: list[np.ndarray]) -> None:
        self._robot, self._keyframes = robot, keyframes
        self._grippers = list(robot.robot_spec.grippers)
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Begin at the first keyframe, at a pace of this seed."""
        self._next, self._speed, self._pace = 0, 0.0, float(np.random.default_rng(seed).uniform(0.7, 1.0))

    def act(self) -> np.ndarray:
        """Return the next target, float32[14]."""
        seen = self._robot.seen()
        away = np.abs(seen.q - self._keyframes[self._next])
        away[self._grippers] = 0.0  # one that holds something does not get there
        if away.max() < NEAR / 2 and self._next < len(self._keyframes) - 1:
            self._next += 1
        way = self._keyframes[self._next] - seen.target
        furthest = max(float(np.abs(np.delete(way, self._grippers)).max()), 1e-9)
        gains = self._speed + self.ACCELERATION * self.TICK
        self._speed = min(gains, self._pace * self.SPEED, (2 * self.ACCELERATION * furthest) ** 0.5)
        step = way * min(1.0, self.TICK * self._speed / furthest)  # all joints arrive together
        most = self.TICK * self._pace * self.GRIPPER_SPEED
        step[self._grippers] = np.clip(way[self._grippers], -most, most)
        return (seen.target + step).astype(np.float32)


def experiment(arms: str = "ros1") -> ExperimentConfig:
    """Return the experiment for these arms."""
    meeting = np.array([*MEETING.get(arms, MEETING["ros1"]), 1.0] * 2)
    closed = np.where(np.arange(14) % 7 == 6, 0.0, meeting)

    def expert(robot: Any) -> Demonstrator:
        return Demonstrator(robot, [meeting, closed])

    def success(observation: Observation) -> bool:
        away = np.abs(observation["state"] - meeting)
        return bool(np.delete(away, (6, 13)).max() < NEAR and observation["state"][[6, 13]].max() < CLOSED)

    return ExperimentConfig(
        name=f"aloha_{arms}",  # also of run folders and spools, so that robots do not mix
        robot=AlohaConfig(
            arms=arms,  # type: ignore[arg-type] - AlohaConfig refuses another one
            server="127.0.0.1",
            cameras=CAMERAS,
            image_size=IMAGE_SIZE,
            max_episode_steps=500,  # 10 s
            expert=expert,
            task="bring both grippers together and close them",
        ),
        agent=AcfqlConfig(
            image_keys=CAMERAS,
            encoder=EncoderConfig(features=(32, 64, 64, 64)),
            critic=CriticConfig(ensemble=2),
        ),
        chunk=ChunkConfig(horizon=10),  # 0.2 s
        normaliser=NormaliserConfig(actions="relative"),
        replay=ReplayConfig(capacity=300_000, demo_capacity=100_000, human_capacity=50_000, image_capacity=50_000),
        learner=LearnerConfig(
            utd_ratio=0.1,  # a chunk of 10 ticks is one decision
            max_steps=100_000,
            pretrain_steps=10_000,
            warmup_episodes=10,
            steps_per_update=50,
            checkpoint_period=5_000,
        ),
        actor=ActorConfig(clock="realtime"),
        outcome=OutcomeConfig(success),  # reward 1, and the end of the episode; the time limit ends the others
        discount=0.997,  # 0.997**500 = 0.22
    )
