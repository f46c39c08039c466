"""A task behind a robot server, as its scripted demonstrator and human see it: from published states alone.

No environment is stepped and no simulator is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from serl_chunk.config.loader import user_error
from serl_chunk.config.robots import AlohaConfig, AlohaSimConfig, FakeAlohaConfig, RobotConfig
from serl_chunk.robots.base import Expert, InterventionSource
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.kinematics import LEFT, RIGHT, Point, grip_point
from serl_chunk.types import ConfigError, RobotSpec, SerlChunkError

UNDECIDED = 0.01  # of an opening, above the one at which fingers have closed: they are about to


class Seen(NamedTuple):
    """What a robot's server published last. Arrays are float64[J]."""

    q: np.ndarray
    target: np.ndarray  # that the joints are on their way to
    extra: dict[str, np.ndarray]


class Robot(Protocol):
    """A served robot."""

    robot_spec: RobotSpec

    def seen(self) -> Seen:
        """Return what its server published last."""


class SeenFakeAloha:
    """The fake ALOHA task with the attributes of FakeAlohaEnv that its expert and its human read.

    A published state is a tick older than the joints, which have gone to their target meanwhile. A command that follows
    from older joints would take a step back, so joints and a held cube are those after that tick.
    """

    def __init__(self, robot: Robot) -> None:
        self._robot = robot

    @property
    def holder(self) -> int:
        return int(self._robot.seen().extra["holder"][0])

    @property
    def joints(self) -> list[float]:
        """Radians and openings, 14; fingers have only closed once that was measured, as `holder` then is."""
        q, target, extra = self._robot.seen()
        joints = np.clip(target, np.subtract(q, task.RATES), np.add(q, task.RATES)).tolist()
        for arm, i in enumerate(task.GRIPPER):
            if int(extra["holder"][0]) == arm:
                joints[i] = max(joints[i], task.FINGERS_ON_CUBE)
            elif q[i] > task.FINGERS_CLOSED:
                joints[i] = max(joints[i], task.FINGERS_CLOSED + UNDECIDED)
        return joints

    @property
    def grips(self) -> list[Point]:
        return _grips(self.joints)

    @property
    def cube(self) -> Point:
        q, _, extra = self._robot.seen()
        x, y, z = extra["cube"].tolist()
        if (holder := self.holder) in (LEFT, RIGHT):
            now, then = self.grips[holder], _grips(q.tolist())[holder]
            x, y, z = x + now[0] - then[0], y + now[1] - then[1], max(z + now[2] - then[2], task.CUBE_REST_Z)
        return x, y, z


class SeenAlohaSim:
    """gym-aloha's tasks with the attributes of AlohaSimEnv that its experts read.

    A plan begins at the joints' target: arms hang some mrad below it, and a plan from there would begin with a jump.
    """

    def __init__(self, robot: Robot) -> None:
        self._robot, self.robot_spec = robot, robot.robot_spec

    @property
    def joints(self) -> np.ndarray:
        return self._robot.seen().target.copy()

    @property
    def object_poses(self) -> np.ndarray:
        return self._robot.seen().extra["objects"].reshape(-1, 7).copy()


def make_expert(config: RobotConfig, robot: Robot) -> Expert:
    """Return the scripted demonstrator of a task; raise ConfigError where there is none for a served robot."""
    if isinstance(config, FakeAlohaConfig):
        from serl_chunk.robots.fake.expert import ScriptedExpert

        return ScriptedExpert(_view(SeenFakeAloha, robot))
    if isinstance(config, AlohaSimConfig):
        from serl_chunk.robots.aloha_sim.experts import AlohaSimExpert, InsertionExpert

        insertion = config.env_name == "insertion"
        return (InsertionExpert if insertion else AlohaSimExpert)(_view(SeenAlohaSim, robot))
    if isinstance(config, AlohaConfig) and config.expert is not None:
        return _users_expert(config.expert, robot)
    raise ConfigError(f"robot {robot.robot_spec.name!r} has no scripted expert. Record demonstrations by hand instead")


def make_scripted_human(config: RobotConfig, robot: Robot) -> InterventionSource:
    """Return the scripted human of the fake ALOHA task; raise ConfigError for another one."""
    if isinstance(config, FakeAlohaConfig):
        from serl_chunk.robots.fake.scripted_human import ScriptedHuman

        return ScriptedHuman(_view(SeenFakeAloha, robot), config.scripted_human)
    raise ConfigError(
        f"robot {robot.robot_spec.name!r} has no scripted human behind a robot server (expected none or a file)",
        parameter="actor.intervention",
    )


def _users_expert(make: Callable[[Any], Any], robot: Robot) -> Expert:
    try:
        expert = make(robot)
    except SerlChunkError:
        raise
    except Exception as error:
        raise user_error(error, "expert()") from error
    if not all(callable(getattr(expert, method, None)) for method in ("reset", "act")):
        raise ConfigError(
            f"must return an Expert with reset(seed) and act(), got {type(expert).__name__}", parameter="robot.expert"
        )
    return expert  # type: ignore[no-any-return]


def _view(make: Callable[[Robot], Any], robot: Robot) -> Any:
    """A view; raises ConfigError where the server does not publish what it needs."""
    view = make(robot)
    try:
        _ = view.cube if isinstance(view, SeenFakeAloha) else view.object_poses
    except KeyError as e:
        raise ConfigError(
            f"the robot server publishes no {e}: it serves no simulated task. Use another demonstrator or human",
            parameter="robot.server",
        ) from e
    return view


def _grips(joints: list[float]) -> list[Point]:
    return [grip_point(LEFT, joints, 0), grip_point(RIGHT, joints, task.ARM_DIM)]
