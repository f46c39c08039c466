"""Robot configurations; `serl_chunk.robots.registry` turns one into an environment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from serl_chunk.config.fields import Group, Requirement, needs, optional, require, setting, ticks_of

_SCRIPTED = needs("actor.intervention", "scripted")
_SERVED = Requirement("robot.server", lambda c: bool(c.robot.server))
_IN_TICKS = Requirement("robot.max_episode_s=none", lambda c: getattr(c.robot, "max_episode_s", None) is None)
_DAY = 86_400.0
_image_size = partial(setting, unit="pixels, square", least=8)


@dataclasses.dataclass(frozen=True)
class ScriptedHumanConfig(Group, path="robot.scripted_human."):
    """The scripted human of the fake ALOHA task (`actor.intervention="scripted"`), faults included."""

    stall_ticks: int = setting(15, "time without progress before the human starts to react", unit="ticks", least=1)
    reaction_ticks: tuple[int, ...] = setting((10, 25), "delay to the intervention: least, most", unit="ticks", least=0)
    correction_ticks: tuple[int, ...] = setting((20, 44), "length of a correction: least, most", unit="ticks", least=1)
    speed: tuple[float, ...] = setting((0.6, 0.9), "share of the joint rate limit: least, most", above=0, most=1)
    noise: float = setting(0.02, "of the human's commands; the demonstrators' is 0.01", unit="rad", least=0)
    miss_rate: float = setting(0.0, "share of the occasions to intervene that the human misses", least=0, most=1)
    fault_rate: float = setting(0.0, "share of corrections in which the fingers do the opposite", least=0, most=1)

    def _check(self) -> None:
        # fmt: off
        for name in ("reaction_ticks", "correction_ticks", "speed"):
            value = getattr(self, name)
            require(len(value) == 2 and value[0] <= value[1], self.PATH + name,
                f"must be two numbers, the least and the most, got {value}")


@dataclasses.dataclass(frozen=True)
class RobotConfig(Group, path="robot."):
    """Settings of every robot."""

    kind: ClassVar[str] = ""
    frames_with_observation: ClassVar[bool] = False  # its environment gives camera frames with every observation
    several: ClassVar[bool] = False  # whether a process may open several of it without being told how many

    task: str = setting("", "instruction in words, recorded with every episode")
    max_episode_steps: int = setting(120, "time limit T", unit="ticks", least=1)
    server: str = setting("", "HOST[:PORT] of the robot server that moves the robot; empty: this process", acts="")
    server_keys: str = optional("", "file with this machine's keys for that server", acts="", requires=_SERVED)
    joints_at: Literal["now", "capture"] = optional(
        "now", "joints in the state: the newest, or those when the oldest frame was taken", acts="", requires=_SERVED
    )

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the texts of its tasks; those of a user's own environment are not known here."""
        return (self.task,)

    @property
    def real(self) -> bool:
        """Return whether this is a physical robot, which a random action can damage, or served like one."""
        return bool(self.server)

    @property
    def negative_rewards(self) -> bool:
        """Return whether a step's reward may be below 0 before `ExperimentConfig.reward` changes it."""
        return False

    @property
    def data_hint(self) -> str:
        """Return a source of demonstrations of this robot, as a sentence; empty where there is none."""
        return ""


@dataclasses.dataclass(frozen=True)
class FakeAlohaConfig(RobotConfig):
    """The numpy bimanual pick, hand-over and place task."""

    kind: ClassVar[str] = "fake_aloha"
    several: ClassVar[bool] = True

    task: str = "pick the cube with the right arm, hand it to the left arm, place it on the target"
    control_hz: float = setting(50.0, "rate of the control loop", unit="Hz", above=0)
    grasp_tolerance: float = setting(0.03, "distance of grip point and cube that can be held", unit="m", above=0)
    image_size: int = _image_size(64, "size of camera frames")
    observe_objects: bool = setting(True, "the cube is in the state; else only cameras show it")
    scripted_human: ScriptedHumanConfig = setting(
        ScriptedHumanConfig, "the human of actor.intervention=scripted", acts="", requires=_SCRIPTED
    )


@dataclasses.dataclass(frozen=True)
class FakeSingleArmConfig(RobotConfig):
    """The numpy pick and place task of one arm that is commanded by velocities, as HIL-SERL's robots are."""

    kind: ClassVar[str] = "fake_single_arm"
    several: ClassVar[bool] = True

    task: str = "pick the block up and put it on the target"
    max_episode_steps: int = 80
    control_hz: float = setting(10.0, "rate of the control loop", unit="Hz", above=0)
    image_size: int = _image_size(64, "size of camera frames")
    observe_objects: bool = setting(True, "the block is in the state; else only cameras show it")


@dataclasses.dataclass(frozen=True)
class AlohaSimConfig(RobotConfig):
    """gym-aloha's TransferCube or Insertion (MuJoCo); the default `task` is that of `env_name`, another stays."""

    kind: ClassVar[str] = "aloha_sim"
    several: ClassVar[bool] = True
    TASKS: ClassVar[dict[str, str]] = {
        "transfer_cube": "transfer the cube from the right arm to the left arm",
        "insertion": "put the right arm's peg into the left arm's socket",
    }

    task: str = TASKS["transfer_cube"]
    env_name: Literal["transfer_cube", "insertion"] = setting("transfer_cube", "the simulated task")
    max_episode_steps: int = 300
    cube_in_state: bool = setting(True, "append the pose (7) of every object, cube or peg and socket, to the 14 joints")
    image_size: int = _image_size(128, "size of camera frames")
    cameras: tuple[str, ...] = setting(("top", "left_wrist", "right_wrist"), "cameras that are rendered")
    init_states: str = setting(
        "", "file (.npz) of saved start states: under each id MuJoCo's qpos, float64[nq]; empty: none", acts=""
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task in self.TASKS.values():  # another env_name's, left there by an override
            object.__setattr__(self, "task", self.TASKS[self.env_name])


@dataclasses.dataclass(frozen=True)
class OgbenchConfig(RobotConfig):
    """A single-task manipulation environment of OGBench (cube, scene, puzzle), states only (extra `[ogbench]`)."""

    kind: ClassVar[str] = "ogbench"
    several: ClassVar[bool] = True

    env_name: str = setting("cube-single-play-singletask-task1-v0", "a single-task environment of OGBench")
    max_episode_steps: int = setting(0, "time limit; 0: the environment's own (200 to 1000)", unit="ticks", least=0)
    # With reward.offset=-1 both are OGBench's own: dense as it gives them, sparse as Q-chunking's --sparse=True (scene,
    # puzzle-3x3) has them.
    reward: Literal["sparse", "dense"] = setting("sparse", "1 at success, or 1 minus the parts still to be done")
    image_size: int = _image_size(128, "size of the frames of videos")

    def _check(self) -> None:
        # fmt: off
        require("singletask" in self.env_name.split("-"), "robot.env_name",
            f"only single-task environments have rewards, such as cube-single-play-singletask-task1-v0, got "
            f"{self.env_name}")

    @property
    def negative_rewards(self) -> bool:
        return self.reward == "dense"

    @property
    def data_hint(self) -> str:
        data = f"{self.env_name.partition('-singletask')[0]}-v0"
        return (
            f"OGBench's data for it: python -c \"import ogbench; ogbench.download_datasets(['{data}'])\", then "
            f"--demo_path ~/.ogbench/data/{data}.npz"
        )


@dataclasses.dataclass(frozen=True)
class RobomimicConfig(RobotConfig):
    """A robosuite task with robomimic's low-dimensional observations (extra `[robomimic]`)."""

    kind: ClassVar[str] = "robomimic"

    env_name: Literal["lift", "can", "square"] = setting("lift", "the robosuite task")
    max_episode_steps: int = setting(0, "time limit; 0: published (300; square 400)", unit="ticks", least=0)
    image_size: int = _image_size(84, "size of the frames of videos")

    @property
    def data_hint(self) -> str:
        file = f"v1.5/{self.env_name}/mh/low_dim_v15.hdf5"
        return (
            f"robomimic's data for it: hf download robomimic/robomimic_datasets {file} --repo-type dataset --local-dir "
            f"~/.robomimic, then --demo_path ~/.robomimic/{file}"
        )


@cache
def libero_tasks() -> dict[str, list[str]]:
    """Return suite -> instructions of LIBERO's tasks, in the benchmark's order."""
    return json.loads(Path(__file__).with_name("libero_tasks.json").read_text())


@dataclasses.dataclass(frozen=True)
class LiberoConfig(RobotConfig):
    """A task of LIBERO in robosuite (extra `[libero]`), or all of a suite.

    The default `task` is its instruction, another stays; of a suite it is empty, and each episode has its own.
    """

    kind: ClassVar[str] = "libero"

    env_name: str = setting("libero_goal/0", "SUITE/N: task N of a suite, counted from 0; SUITE: all of them")
    max_episode_steps: int = setting(
        0, "time limit; 0: that of published evaluations (220 to 520)", unit="ticks", least=0
    )
    image_size: int = _image_size(256, "size of camera frames")

    def __post_init__(self) -> None:
        super().__post_init__()
        suite, _, number = self.env_name.partition("/")
        if not self.task or any(self.task in texts for texts in libero_tasks().values()):  # or another env_name's
            object.__setattr__(self, "task", libero_tasks()[suite][int(number)] if number else "")

    def _check(self) -> None:
        # fmt: off
        suite, _, number = self.env_name.partition("/")
        tasks = libero_tasks().get(suite, [])
        suites = ", ".join(f"{name} (N up to {len(texts) - 1})" for name, texts in libero_tasks().items())
        require(bool(tasks), "robot.env_name",
            f"must be SUITE or SUITE/N with SUITE one of {suites}, got {self.env_name!r}")
        numbers = ", ".join(f"{n} ({text})" for n, text in enumerate(tasks))
        require(self.env_name == suite or number in map(str, range(len(tasks))), "robot.env_name",
            f"must be {suite}, or {suite}/N with N one of {numbers}; got {self.env_name!r}")
        own = not self.task or any(self.task in texts for texts in libero_tasks().values())
        require(bool(number) or own, "robot.task",
            f"{suite} has {len(tasks)} tasks with texts of their own. Leave it out, or choose one: {suite}/N")

    @property
    def tasks(self) -> tuple[str, ...]:
        return (self.task,) if self.task else tuple(libero_tasks()[self.env_name])

    @property
    def data_hint(self) -> str:
        return (
            "LIBERO publishes demonstrations of its tasks, and openpi a converted set; record none here, and pass "
            "yours with --demo_path (docs/benchmarks.md)"
        )


@dataclasses.dataclass(frozen=True)
class FrankaConfig(RobotConfig):
    """One or two Frankas of HIL-SERL's behind a robot server, with HIL-SERL's actions, states and box at 10 Hz."""

    kind: ClassVar[str] = "franka"
    PROPRIO: ClassVar[tuple[str, ...]] = ("gripper_pose", "tcp_force", "tcp_pose", "tcp_torque", "tcp_vel")

    max_episode_steps: int = 100
    arms: int = setting(1, "number of arms", least=1, most=2)
    grippers: bool = setting(True, "the last action of each arm tells its gripper; else grippers stay as they are")
    scale: tuple[float, ...] = setting((0.01, 0.06), "m and rad of an action of 1 (ACTION_SCALE)", above=0)
    box_low: tuple[float, ...] = setting((), "least x, y, z (m) and Euler angles (rad) of targets, of each arm")
    box_high: tuple[float, ...] = setting((), "the largest; of the first angle, both are of its magnitude")
    mirrored_yaw: bool = setting(False, "of the third angle, too, they are of its magnitude (HIL-SERL's hand-over)")
    proprio: tuple[str, ...] = setting(PROPRIO, "what a state holds of each arm (proprio_keys)")
    cameras: tuple[str, ...] = setting((), "cameras of the robot's file")
    image_size: int = _image_size(128, "size of camera frames")

    def _check(self) -> None:
        # fmt: off
        require(len(self.scale) == 2, "robot.scale", f"must be two numbers, m and rad, got {self.scale}")
        for name in ("box_low", "box_high"):
            values = getattr(self, name)
            require(len(values) == 6 * self.arms, f"robot.{name}",
                f"must be {6 * self.arms} numbers, six of each arm: x, y, z (m) and Euler angles (rad), got {values}")
        require(all(low < high for low, high in zip(self.box_low, self.box_high, strict=True)), "robot.box_low",
            f"must be below robot.box_high everywhere, got {self.box_low} and {self.box_high}")
        known = set(self.proprio) <= set(self.PROPRIO) and len(set(self.proprio)) == len(self.proprio) > 0
        require(known, "robot.proprio", f"must be different ones of {', '.join(self.PROPRIO)}, got {self.proprio}")

    @property
    def real(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class AlohaConfig(RobotConfig):
    """A real ALOHA with two arms behind a robot server: absolute joint targets at 50 Hz, six joints and a gripper an
    arm, left first.

    `expert(robot)` returns a scripted demonstrator, an `Expert`; `robot.seen()` is what the server published last.
    """

    kind: ClassVar[str] = "aloha"

    max_episode_steps: int = 500
    arms: Literal["ros1", "ros2", "trossen"] = setting(
        "ros1", "ALOHA with ROS 1, ALOHA 2 with ROS 2, or WidowX AI arms: the driver of the server"
    )
    cameras: tuple[str, ...] = setting(
        ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist"), "cameras of the robot's file"
    )
    image_size: int | tuple[int, int] = setting(
        128, "size of camera frames: the side of squares, or HEIGHT,WIDTH", unit="pixels", least=8
    )
    expert: Callable[[Any], Any] | None = setting(None, "expert(robot) -> Expert, for `serl-chunk record`", acts="")

    def _check(self) -> None:
        # fmt: off
        require(len({*self.cameras}) == len(self.cameras), "robot.cameras",
            f"must be different names, got {self.cameras}")
        require(self.expert is None or callable(self.expert), "robot.expert",
            f"must be a callable expert(robot) -> Expert, or none, got {self.expert!r}")

    @property
    def real(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class GymConfig(RobotConfig):
    """Any gymnasium environment: the way to bring your own robot.

    `make(fake_env, evaluating)` builds it. With `fake_env=True` (the learner) only its spaces are used, so a driver may
    skip its devices; `evaluating=True` is for episodes that are only evaluated, and optional in a factory. `info` is
    read as HIL-SERL, gym-hil and LeRobot name humans and success (`robots/gym_adapter.py`). `check_devices` is for
    `serl-chunk doctor`: it returns a sentence for each missing device, within seconds and without a movement.
    """

    kind: ClassVar[str] = "gym"
    frames_with_observation = True

    max_episode_steps: int = setting(120, "time limit T", unit="ticks", least=1, requires=_IN_TICKS)
    max_episode_s: float | None = setting(
        None, "time limit, in ticks of control_hz; none: max_episode_steps", unit="s", above=0, most=_DAY
    )
    make: Callable[..., Any] | None = setting(None, "make(fake_env, evaluating) -> gymnasium.Env")
    robot_name: str = setting("gym", "name of the robot")
    control_hz: float = setting(10.0, "rate of the control loop", unit="Hz", above=0)
    is_real: bool = setting(False, "a physical robot: random actions are refused")
    joint_of_action: tuple[int, ...] = setting((), "state index that measures each action, -1 none; empty: none")
    grippers: tuple[int, ...] = setting((), "action dimensions that are grippers")
    check_devices: Callable[[], Sequence[str]] | None = setting(None, "for `serl-chunk doctor`: missing devices")

    def _check(self) -> None:
        # fmt: off
        require(callable(self.make), "robot.make",
            f"must be a callable make(fake_env, evaluating) -> gymnasium.Env, got {self.make!r}")

    @property
    def real(self) -> bool:
        return self.is_real or bool(self.server)

    @property
    def time_limit(self) -> int:
        return self.max_episode_steps if self.max_episode_s is None else ticks_of(self.max_episode_s, self.control_hz)
