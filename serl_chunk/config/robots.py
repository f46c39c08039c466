"""Robot configurations; `serl_chunk.robots.registry` turns one into an environment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from serl_chunk.config.validation import require, require_choices


@dataclasses.dataclass(frozen=True)
class ScriptedHumanConfig:
    """The scripted human of the fake ALOHA task (`actor.intervention="scripted"`), faults included."""

    stall_ticks: int = 15  # without progress before the human starts to react
    reaction_ticks: tuple[int, ...] = (10, 25)  # delay from there to the intervention, drawn uniformly, both included
    correction_ticks: tuple[int, ...] = (20, 44)  # length of a correction, drawn uniformly, both included
    speed: tuple[float, ...] = (0.6, 0.9)  # share of the joint rate limit, drawn uniformly for each correction
    noise: float = 0.02  # radians; the demonstrators' is 0.01
    miss_rate: float = 0.0  # share of the occasions to intervene that the human does not notice
    fault_rate: float = 0.0  # share of the corrections that are fumbled: the fingers do the opposite

    def __post_init__(self) -> None:
        require(self.stall_ticks >= 1, f"robot.scripted_human.stall_ticks must be at least 1, got {self.stall_ticks}")
        for name, least in (("reaction_ticks", 0), ("correction_ticks", 1)):
            value = getattr(self, name)
            require(
                len(value) == 2 and least <= value[0] <= value[1],
                f"robot.scripted_human.{name} must be two numbers of ticks, least (>= {least}) and most, got {value}",
            )
        require(
            len(self.speed) == 2 and 0 < self.speed[0] <= self.speed[1] <= 1,
            f"robot.scripted_human.speed must be two shares in (0, 1], the least and the most, got {self.speed}",
        )
        require(
            0 <= self.noise < math.inf, f"robot.scripted_human.noise must be >= 0 radians and finite, got {self.noise}"
        )
        for name in ("miss_rate", "fault_rate"):
            require(
                0 <= getattr(self, name) <= 1,
                f"robot.scripted_human.{name} must be a share in 0..1, got {getattr(self, name)}",
            )


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

    @property
    def frames_with_observation(self) -> bool:
        """Whether its environment gives camera frames with every observation (`RobotEnv.frames_with_observation`)."""
        return False

    @property
    def negative_rewards(self) -> bool:
        """Whether a step's reward may be below 0 before `ExperimentConfig.reward` changes it."""
        return False

    @property
    def data_hint(self) -> str:
        """A sentence that names a source of demonstrations of this robot, "" where there is none."""
        return ""


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
    observe_objects: bool = True  # the cube in the state; without it cameras alone show where it is
    scripted_human: ScriptedHumanConfig = dataclasses.field(
        default_factory=ScriptedHumanConfig
    )  # the human of actor.intervention=scripted

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.grasp_tolerance > 0, "robot.grasp_tolerance must be positive metres")
        require(self.place_tolerance > 0, "robot.place_tolerance must be positive metres")
        require(self.image_size >= 8, f"robot.image_size must be at least 8 pixels, got {self.image_size}")
        require(0 < self.control_hz < math.inf, f"robot.control_hz must be positive and finite, got {self.control_hz}")


@dataclasses.dataclass(frozen=True)
class FakeSingleArmConfig(RobotConfig):
    """The numpy pick and place task of one arm that is commanded by velocities, as HIL-SERL's robots are."""

    kind: ClassVar[str] = "fake_single_arm"

    task: str = "pick the block up and put it on the target"
    max_episode_steps: int = 80
    control_hz: float = 10.0
    grasp_tolerance: float = 0.02  # metres between grip point and block at which closing fingers hold it
    grasp_angle: float = 0.4  # radians between the fingers' axis and the block's short side at which they do
    place_tolerance: float = 0.04  # metres from the target at which releasing counts
    image_size: int = 64  # pixels, square
    observe_objects: bool = True  # the block in the state; without it cameras alone show where it is

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("control_hz", "grasp_tolerance", "grasp_angle", "place_tolerance"):
            require(getattr(self, name) > 0, f"robot.{name} must be positive, got {getattr(self, name)}")
        require(self.image_size >= 8, f"robot.image_size must be at least 8 pixels, got {self.image_size}")


@dataclasses.dataclass(frozen=True)
class AlohaSimConfig(RobotConfig):
    """gym-aloha's TransferCube or Insertion (MuJoCo), behind the same contract.

    The default `task` is the one of `env_name`, whichever it is; a text of your own stays.
    """

    kind: ClassVar[str] = "aloha_sim"
    TASKS: ClassVar[dict[str, str]] = {
        "transfer_cube": "transfer the cube from the right arm to the left arm",
        "insertion": "put the right arm's peg into the left arm's socket",
    }

    task: str = TASKS["transfer_cube"]
    env_name: Literal["transfer_cube", "insertion"] = "transfer_cube"
    max_episode_steps: int = 300
    cube_in_state: bool = True  # append the pose (7) of every object, cube or peg and socket, to the 14 joints
    image_size: int = 128  # pixels, square
    cameras: tuple[str, ...] = ("top", "left_wrist", "right_wrist")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choices(self, "robot.")
        if self.task in self.TASKS.values():  # another env_name's, left there by an override
            object.__setattr__(self, "task", self.TASKS[self.env_name])
        require(self.image_size >= 8, f"robot.image_size must be at least 8 pixels, got {self.image_size}")


@dataclasses.dataclass(frozen=True)
class OgbenchConfig(RobotConfig):
    """A single-task manipulation environment of OGBench (cube, scene, puzzle), states only (extra `[ogbench]`)."""

    kind: ClassVar[str] = "ogbench"

    task: str = ""
    env_name: str = "cube-single-play-singletask-task1-v0"
    max_episode_steps: int = 0  # 0: the environment's own (200 to 1000)
    # sparse: 1 at success, else 0. dense: 1 minus the parts of the task still to be done. With reward.offset=-1 both
    # are OGBench's own: dense as it gives them, sparse as Q-chunking's --sparse=True (scene, puzzle-3x3) has them.
    reward: Literal["sparse", "dense"] = "sparse"
    image_size: int = 128  # pixels of the camera videos are filmed with, square

    def __post_init__(self) -> None:
        require_choices(self, "robot.")
        require(self.max_episode_steps >= 0, f"robot.max_episode_steps must be >= 0, got {self.max_episode_steps}")
        require(self.image_size >= 8, f"robot.image_size must be at least 8 pixels, got {self.image_size}")
        require(
            "singletask" in self.env_name.split("-"),
            f"robot.env_name={self.env_name}: only single-task environments have rewards, such as "
            "cube-single-play-singletask-task1-v0",
        )

    @property
    def negative_rewards(self) -> bool:
        """With dense rewards."""
        return self.reward == "dense"

    @property
    def data_hint(self) -> str:
        """OGBench's own downloader, and where it puts the files."""
        data = f"{self.env_name.partition('-singletask')[0]}-v0"
        return (
            f"OGBench's data for it: python -c \"import ogbench; ogbench.download_datasets(['{data}'])\", then "
            f"--demo_path ~/.ogbench/data/{data}.npz"
        )


@dataclasses.dataclass(frozen=True)
class RobomimicConfig(RobotConfig):
    """A robosuite task with robomimic's low-dimensional observations (extra `[robomimic]`)."""

    kind: ClassVar[str] = "robomimic"

    env_name: Literal["lift", "can", "square"] = "lift"
    max_episode_steps: int = 0  # 0: the published limit (lift and can 300, square 400)
    image_size: int = 84  # pixels of the camera videos are filmed with, square

    def __post_init__(self) -> None:
        require_choices(self, "robot.")
        require(self.max_episode_steps >= 0, f"robot.max_episode_steps must be >= 0, got {self.max_episode_steps}")
        require(self.image_size >= 8, f"robot.image_size must be at least 8 pixels, got {self.image_size}")

    @property
    def data_hint(self) -> str:
        """The hub that robomimic keeps its data sets on."""
        file = f"v1.5/{self.env_name}/mh/low_dim_v15.hdf5"
        return (
            f"robomimic's data for it: hf download robomimic/robomimic_datasets {file} --repo-type dataset --local-dir "
            f"~/.robomimic, then --demo_path ~/.robomimic/{file}"
        )


@dataclasses.dataclass(frozen=True)
class GymConfig(RobotConfig):
    """Any gymnasium environment: the way to bring your own robot.

    `make(fake_env)` builds it; with `fake_env=True` (the learner) only its spaces are used, so a driver may
    skip its devices. What `info` reports of humans and success is read as HIL-SERL, gym-hil and LeRobot name it
    (`serl_chunk/robots/info_keys.py`). `check_devices` is for
    `serl-chunk doctor`: it returns a sentence for each device that is missing, within seconds and without moving
    anything.
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
        require(0 < self.control_hz < math.inf, f"robot.control_hz must be positive and finite, got {self.control_hz}")

    @property
    def real(self) -> bool:
        """`is_real`."""
        return self.is_real

    @property
    def frames_with_observation(self) -> bool:
        """Always: they are entries of what `step` returns."""
        return True
