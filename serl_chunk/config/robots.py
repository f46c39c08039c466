"""Robot configurations; `serl_chunk.robots.registry` turns one into an environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from serl_chunk.config.agents import require


@dataclasses.dataclass(frozen=True)
class RobotConfig:
    """What every robot has."""

    kind: ClassVar[str] = ""

    task: str = ""  # instruction in words, recorded with every episode
    max_episode_steps: int = 120  # time limit T in ticks

    def __post_init__(self) -> None:
        require(
            self.max_episode_steps >= 1, f"robot.max_episode_steps must be at least 1, got {self.max_episode_steps}"
        )

    @property
    def real(self) -> bool:
        """Whether this is a physical robot, which a random action can hurt."""
        return False


@dataclasses.dataclass(frozen=True)
class FakeAlohaConfig(RobotConfig):
    """The numpy bimanual pick, hand-over and place task."""

    kind: ClassVar[str] = "fake_aloha"

    task: str = "pick the cube with the right arm, hand it to the left arm, place it on the target"
    max_episode_steps: int = 120
    control_hz: float = 50.0
    grasp_tolerance: float = 0.03  # metres between grip point and cube at which closing fingers hold it
    place_tolerance: float = 0.05  # metres from the target at which releasing counts
    image_size: int = 64  # pixels, square

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.grasp_tolerance > 0, "robot.grasp_tolerance must be positive metres")
        require(self.place_tolerance > 0, "robot.place_tolerance must be positive metres")
        require(self.image_size >= 8, f"robot.image_size must be at least 8 pixels, got {self.image_size}")
        require(self.control_hz > 0, f"robot.control_hz must be positive, got {self.control_hz}")


@dataclasses.dataclass(frozen=True)
class AlohaSimConfig(RobotConfig):
    """gym-aloha TransferCube (MuJoCo), behind the same contract."""

    kind: ClassVar[str] = "aloha_sim"

    task: str = "transfer the cube from the right arm to the left arm"
    max_episode_steps: int = 300
    cube_in_state: bool = True  # append the cube's pose (7) to the joint positions (14)
    image_size: int = 128  # pixels, square
    cameras: tuple[str, ...] = ("top", "left_wrist", "right_wrist")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.image_size >= 8, f"robot.image_size must be at least 8 pixels, got {self.image_size}")


@dataclasses.dataclass(frozen=True)
class GymConfig(RobotConfig):
    """Any gymnasium environment: the way to bring your own robot.

    `make(fake_env)` builds it; with `fake_env=True` (the learner) only its spaces are used, so a driver may
    skip its devices. HIL-SERL's `info["intervene_action"]`, `info["succeed"]` and `info["grasp_penalty"]`
    are honoured. `check_devices` is for `serl-chunk doctor`: it returns a sentence for each device that is missing,
    within seconds and without moving anything.
    """

    kind: ClassVar[str] = "gym"

    make: Callable[[bool], Any] | None = None
    robot_name: str = "gym"
    control_hz: float = 10.0
    is_real: bool = False  # a physical robot: random actions are refused
    joint_of_action: tuple[int, ...] = ()  # state index that measures each action dimension; () means none
    grippers: tuple[int, ...] = ()
    check_devices: Callable[[], Sequence[str]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(callable(self.make), "robot.make must be a callable make(fake_env: bool) -> gymnasium.Env")
        require(self.control_hz > 0, f"robot.control_hz must be positive, got {self.control_hz}")

    @property
    def real(self) -> bool:
        """`is_real`."""
        return self.is_real
