"""Drives a leader to its follower's joints, as if a hand were on it: slowly, with little torque, and never unpermitted.

The robot's server permits each moment of it (`drives`). The leader gets torque `STANDS` s after a beep. It moves as a
robot does in motions of its own, through a gate, and keeps its torque at the end until the requester ends that. Then,
and whenever something is in its way, it has none.
"""

from __future__ import annotations

import logging
from typing import NamedTuple, Optional, Tuple

import numpy as np

from serl_chunk_robot.control.motions import Step, StepSequence
from serl_chunk_robot.control.pursuit import Pursuit
from serl_chunk_robot.devices.base import FAILED, KEEPS, MOVES, THERE, WAITS, DriveStatus, Sample
from serl_chunk_robot.devices.neutral import APART
from serl_chunk_robot.drivers.base import Reading, why
from serl_chunk_robot.drivers.lerobot_library import LeRobotMotors
from serl_chunk_robot.errors import SerlChunkError
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.safety.motion import Limits, Rates, SetPoint

logger = logging.getLogger(__name__)

DT = 0.02  # s between two set points, at least
STANDS = 1.0  # s between the beep and the torque
VALID = 0.1  # s for which a permission is valid, and a reading is new enough to move by
SPEED = 0.8  # of the profile's velocity, acceleration and jerk: the gate has the rest to keep it on its way
FASTEST = 0.5  # rad/s, and of a gripper's opening per second: the profile's velocity counts up to it
HELD = 0.15  # rad, and of a gripper's opening, of a leader from its set point: a hand holds it, or it is blocked
MOVED = 0.02  # the same of its arm from where that was: the arm does not stand
NEAR = 0.8 * APART  # of a leader that is there
SETTLES = 1.0  # s in which a leader comes so near once its set point is there
KEEPS_MOST = 10.0  # s with torque at its arm


class Permission(NamedTuple):
    """The server's permission to drive at one moment."""

    number: int  # of the drive
    moment: float  # monotonic s of this machine
    joints: np.ndarray  # of the follower, measured, float64[J]
    limits: Limits  # of these joints, of the cautious profile


class LeaderDrive:
    """One leader's drives, each of which is permitted anew. Pure but for its motors and log lines: times are given.

    `permit` and `end` may be called by any thread, `step` and `lost` by the one that reads the leader.

    Args:
        name: of the device, in log lines.
        size: its joints and grippers.
    """

    def __init__(self, name: str, motors: LeRobotMotors, size: int) -> None:
        self._name, self.motors, self.size = name, motors, size
        self.status = DriveStatus()
        self._permission: Optional[Permission] = None  # the newest
        self._ended: Tuple[int, str] = (0, "")  # the newest drive that the server ended, and why
        self._target = self._beeped_at = np.zeros(0)  # float64[J]: where it goes, and where it was at the beep
        self._since = 0.0  # when its phase began
        self._stepped = 0.0  # when its last set point was
        self._at: Optional[SetPoint] = None
        self._doubted = False  # the newest reading was far from the set point
        self._moves: Optional[StepSequence] = None
        self._gate: Optional[Gate] = None
        self._pursuit: Optional[Pursuit] = None

    def permit(self, permission: Permission) -> None:
        """Take a permission. The first one of a number begins that drive."""
        self._permission = permission

    def end(self, number: int, why: str) -> None:
        """End the drive of this number: a leader that is at its arm loses its torque there."""
        self._ended = number, why

    def step(self, sample: Sample, now: float) -> None:
        """Go on after a look at the leader. Raises where its torque could not be taken: it has to be opened anew."""
        if sample.joints is None:
            return
        permission, status = self._permission, self.status
        if not status.going:
            if permission is not None and permission.number not in (status.number, self._ended[0]):
                self._begin(permission, sample.joints, now)
            return
        ended, reason = self._ended
        if ended != status.number:
            reason = self._hindrance(permission, sample, now)
        if ended == status.number or reason or permission is None:
            self._leave(reason)
            return
        try:
            self._advance(permission, sample.joints, now)
        except Exception as e:  # of a library, too
            self._leave(why(e))

    def lost(self, why: str) -> None:
        """The leader is lost, and is opened anew, which takes its torque."""
        if self.status.going:
            self._fail(f"the leader was lost ({why})")

    def _begin(self, permission: Permission, joints: np.ndarray, now: float) -> None:
        self._target, self._beeped_at, self._since = permission.joints.copy(), joints.copy(), now
        self.status = DriveStatus(permission.number, WAITS)
        if self._target.shape != joints.shape or not np.isfinite(self._target).all():
            self._fail(f"its arm has {self._target.size} joints and grippers, the leader {joints.size}")
        elif now - permission.moment > VALID:
            self._fail(f"no permission of the robot's server for {VALID:g} s")
        elif self._is_near(joints):
            self.status = DriveStatus(permission.number, THERE)
        else:
            try:
                self._plan(permission.limits, joints)
            except SerlChunkError as e:  # its arm is where it cannot get
                self._fail(str(e))
                return
            logger.warning("leader %s: it moves to its arm in %g s. Take your hand off it\a", self._name, STANDS)

    def _plan(self, limits: Limits, joints: np.ndarray) -> None:
        """Plan the way from `joints`. Raises ConfigError where it leads outside what leader and arm can reach."""
        still, (low, high) = np.zeros(len(joints)), self.motors.reach()
        rates = Rates(*(rate * np.minimum(1.0, FASTEST / limits.rates.velocity) for rate in limits.rates))
        within = limits._replace(low=np.maximum(limits.low, low), high=np.minimum(limits.high, high), rates=rates,
                                 following=np.full(len(joints), 2 * HELD), workspace=None, grip=None)  # fmt: skip
        self._at, self._gate = SetPoint.standing(joints), Gate(within, DT)
        self._pursuit = Pursuit(within, DT)
        way = Step(self._target, still, still, speed=SPEED)
        self._moves = StepSequence(joints, [("the way to the arm", way)], within, stands=0.0)

    def _hindrance(self, permission: Optional[Permission], sample: Sample, now: float) -> str:
        """Return why the drive may not go on; empty where it may."""
        assert sample.joints is not None
        if permission is None or permission.number != self.status.number:
            return "another drive was requested"
        if not -VALID <= now - permission.moment <= VALID:
            return f"no permission of the robot's server for {VALID:g} s"
        if not (sample.alive and now - sample.stamp <= VALID):
            return f"it was not read for {VALID:g} s"
        if permission.joints.shape != self._target.shape or not np.isfinite(permission.joints).all():
            return "its arm was not measured"
        if np.abs(permission.joints - self._target).max() > MOVED:
            return "its arm moves"
        if self.status.phase == WAITS:
            return "a hand moves it" if np.abs(sample.joints - self._beeped_at).max() > APART else ""
        return self._holder(sample.joints)

    def _holder(self, joints: np.ndarray) -> str:
        """Return why two readings in a row are far from the set point. It stands where one is: a bus may misread."""
        assert self._at is not None
        apart = np.abs(joints - self._at.position)
        doubted, self._doubted = self._doubted, not apart.max() <= HELD  # also where it is no number
        if not (doubted and self._doubted):
            return ""
        joint = int(np.argmax(apart))
        return f"a hand holds it, or it is blocked: joint {joint} is {apart[joint]:.2f} from its set point"

    def _advance(self, permission: Permission, joints: np.ndarray, now: float) -> None:
        phase = self.status.phase
        if phase == WAITS and now - self._since >= STANDS:
            self._plan(permission.limits, joints)
            # First: whatever fails from here on, the torque is taken.
            self.status, self._since = self.status._replace(phase=MOVES), now
            self._doubted = False
            self.motors.hold(joints)
            self._stepped = now
        elif phase == KEEPS and now - self._since > KEEPS_MOST:
            self._leave(f"nothing ended it for {KEEPS_MOST:g} s")
        elif phase == MOVES and now - self._stepped >= DT and not self._doubted:
            self._move(joints, now)

    def _move(self, joints: np.ndarray, now: float) -> None:
        """Command the next set point. A late look moves it no further than one in time."""
        assert self._at and self._moves and self._gate and self._pursuit  # noqa: PT018
        still = np.zeros(len(joints))
        goal = self._moves.goal(self._at, Reading(joints, still, still, now), now)
        self._stepped = now
        if goal is not None:
            self._since = now
            place, _ = self._pursuit.place(self._at, goal)
            self._at = self._gate.step(self._at, place, joints).set_point
            self.motors.move(self._at.position)
        elif self._is_near(joints):
            self.status, self._since = self.status._replace(phase=KEEPS), now
        elif now - self._since > SETTLES:
            apart = np.abs(joints - self._target)
            self._leave(f"joint {int(np.argmax(apart))} stays {apart.max():.2f} from its arm")

    def _is_near(self, joints: np.ndarray) -> bool:
        return bool(np.abs(joints - self._target).max() <= NEAR)

    def _leave(self, why: str) -> None:
        """Take the torque at once, and end the drive. Raises where the torque could not be taken.

        A leader that was at its arm has been there, whatever ended that: it counts once it is neutral without torque.
        """
        phase = self.status.phase
        if phase == KEEPS:
            self.motors.release()
            logger.info("leader %s: at its arm, without torque: %s", self._name, why)
            self.status = self.status._replace(phase=THERE)
            return
        self._fail(why)  # before the motors are written to: nothing goes on, whatever they answer
        if phase == MOVES:
            self.motors.release()

    def _fail(self, why: str) -> None:
        logger.warning("leader %s: not driven to its arm: %s", self._name, why)
        self.status = self.status._replace(phase=FAILED, why=why)
