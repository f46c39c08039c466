"""Commands of a robot: holds, limits, and a bounded acceleration of joints where a human lets go of them."""

from __future__ import annotations

import numpy as np

from serl_chunk.actor.chunk_queue import TickAction
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.operator import DEVICES
from serl_chunk.config.robots import GymConfig, RobotConfig
from serl_chunk.types import RobotSpec, Source

ACCELERATION = 20.0  # rad/s^2, as of the human's own motion (`devices.teleoperation.TwistLimits`)
LEAST = 2  # ticks after a human's that are bounded: both have targets of the human among the last two


class HoldPolicy:
    """Commands float32[A], robot units, that keep a robot where it is.

    Repeating a position holds it; repeating a difference would keep the robot moving. Dimensions that command a
    measured joint, and grippers, are positions; all others are taken for differences, and hold at 0.
    """

    def __init__(self, spec: RobotSpec) -> None:
        self._joint = np.array(spec.joint_of_action)
        self._is_position = self._joint >= 0
        self._is_position[list(spec.grippers)] = True
        self._low, self._high = np.array(spec.action_low), np.array(spec.action_high)
        self._no_motion = np.clip(0.0, self._low, self._high).astype(np.float32)

    def initial(self, state: np.ndarray) -> np.ndarray:
        """Return the hold before the first action: joints measured in `state` float32[S], in the limits, else 0."""
        rest = np.where(self._joint >= 0, state[np.maximum(self._joint, 0)], 0.0)
        return np.clip(rest, self._low, self._high).astype(np.float32)

    def next(self, action: np.ndarray) -> np.ndarray:
        return np.where(self._is_position, action, self._no_motion)


def with_kept(command: np.ndarray, hold: np.ndarray, dimensions: tuple[int, ...]) -> np.ndarray:
    """`command` [..., A] with `dimensions` of `hold`, which only a human changes (`agent.gripper.mode=fixed`)."""
    if not dimensions:
        return command
    command, kept = np.array(command), list(dimensions)
    command[..., kept] = hold[kept]
    return command


def hold_warning(config: RobotConfig, spec: RobotSpec) -> str | None:
    """Return a warning where a hold of 0 is a guess; None where the configuration defines the hold.

    It is a guess for a user's environment that names neither grippers nor measured joints, and for unmeasured actions
    whose limits do not have 0 inside.
    """
    if not isinstance(config, GymConfig) or config.joint_of_action:
        return None
    free = [i for i, joint in enumerate(spec.joint_of_action) if joint < 0 and i not in spec.grippers]
    if config.grippers:
        free = [i for i in free if not spec.action_low[i] < 0 < spec.action_high[i]]
    if not free:
        return None
    dimensions, confirmed = ", ".join(map(str, free)), ", ".join(["-1"] * len(spec.joint_of_action))
    return (
        f"nothing measures where action dimensions {dimensions} of robot {spec.name!r} are: on a tick without "
        "an action they are commanded 0, which stops a velocity, but moves a position and may open a gripper. Name "
        "grippers in robot.grippers and measured joints in robot.joint_of_action. If all of them are velocities or "
        f"differences, robot.joint_of_action=({confirmed}) confirms it"
    )


class Handover:
    """Blends from a human's commands into those that follow. Call `bounded` on every tick.

    It bounds joint targets of a robot that this process moves, and of a simulator under a human's device. A joint's
    blend ends once the command is within the bound and can go on so. Simulators under scripted interventions stay as
    they are: nothing is spared there.
    """

    def __init__(self, config: ExperimentConfig, spec: RobotSpec) -> None:
        device = config.actor.intervention.lower() in DEVICES
        self._joints = np.array(spec.joint_of_action) >= 0
        self._joints[list(spec.grippers)] = False
        self._joints &= not config.robot.server and (config.robot.real or device)
        self._dt, self._change = spec.dt, ACCELERATION * spec.dt
        self.begin()

    def begin(self) -> None:
        """Begin an episode: no human had the robot."""
        none = np.zeros(len(self._joints))
        self._human, self._blends, self._ticks = none.astype(bool), none.astype(bool), none.astype(int)
        self._last: np.ndarray | None = None  # executed on the tick before the last one
        self._goal: np.ndarray | None = None  # that was to be commanded on the last one

    def bounded(self, command: np.ndarray, choice: TickAction, last: np.ndarray) -> np.ndarray:
        """Return the command of this tick, float32[A].

        Args:
            command: float32[A], of `choice`. A hold stays as it is: it is to stop the robot at once.
            last: executed on the last tick, float32[A].
        """
        if not self._joints.any():
            return command
        before, self._last = last if self._last is None else self._last, last
        goal_before, self._goal = command if self._goal is None else self._goal, command
        # a human's numbers
        dims = choice.by_human if choice.human_dims is None else choice.human_dims & choice.by_human
        had, self._human = self._human, self._joints & dims
        self._ticks[had & ~self._human] = 0
        self._blends = (self._blends | had) & ~self._human
        if not self._blends.any() or choice.source is Source.HOLD:
            return command
        velocity = (last - before).astype(np.float64) / self._dt
        # A goal's own speed, without its jump from what the human commanded.
        moves = np.where(self._ticks == 0, 0.0, (command - goal_before).astype(np.float64) / self._dt)
        wanted = moves + _approach(command - last - moves * self._dt, self._change, self._dt)
        taken = velocity + np.clip(wanted - velocity, -self._change, self._change)
        direct = (command - last).astype(np.float64) / self._dt
        fits = (np.abs(direct - velocity) <= self._change) & (np.abs(direct - moves) <= self._change)
        blended = np.where(self._blends & ~fits, last + taken * self._dt, command)
        self._ticks += self._blends
        self._blends = self._blends & ~(fits & (self._ticks >= LEAST))
        return blended.astype(np.float32)


def _approach(way: np.ndarray, change: float, dt: float) -> np.ndarray:
    """Return the speeds from which `change` less on each tick ends at the end of a way, both float64[A]."""
    distance = np.abs(way)
    # S = (k + 1) v dt - k (k + 1) / 2 change dt for v from k to k + 1 times `change`.
    k = np.floor(0.5 * np.sqrt(1 + 8 * distance / (change * dt)) - 0.5)
    return np.asarray(np.copysign((distance / dt + 0.5 * k * (k + 1) * change) / (k + 1), way))


class Commands:
    """Makes commands float32[A], the robot's units, of what was chosen for a tick."""

    def __init__(self, config: ExperimentConfig, spec: RobotSpec) -> None:
        self._hold_policy, self._handover = HoldPolicy(spec), Handover(config, spec)
        self._low, self._high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
        gripper = config.agent.gripper
        self._kept = spec.grippers if gripper.kept else ()
        self._not_random = spec.grippers if gripper.composition == "fixed" else ()

    def begin(self, state: np.ndarray) -> np.ndarray:
        """Begin an episode in `state` float32[S]; return what keeps the robot still."""
        self._handover.begin()
        return self._hold_policy.initial(state)

    def hold_after(self, executed: np.ndarray) -> np.ndarray:
        """Return what keeps the robot still after `executed`."""
        return self._hold_policy.next(executed)

    def random(self, rng: np.random.Generator, hold: np.ndarray) -> np.ndarray:
        """Draw one within the limits; grippers that no policy moves keep those of `hold`."""
        return with_kept(rng.uniform(self._low, self._high), hold, self._not_random)

    def of_policy(self, command: np.ndarray, hold: np.ndarray) -> np.ndarray:
        """Return a policy's, with the grippers of `hold` where it has none."""
        return with_kept(command, hold, self._kept)

    def bounded(self, choice: TickAction, last: np.ndarray) -> np.ndarray:
        """Return the command of a choice within the limits, blended after a human's. `last`: executed before."""
        command = np.clip(choice.command, self._low, self._high).astype(np.float32)
        return self._handover.bounded(command, choice, last)
