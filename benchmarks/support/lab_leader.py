"""A hand of the rehearsal's operator on the leader of an SO-101, whose simulated motors `lab_motors` has.

The hand is as late as that on a mouse (`simulated_operator`): it sees the arm `DELAY` seconds late, and does what it
decided `REACTION` seconds later. It moves the leader's joints smoothly and trembles. While the leader's motors have
torque, on the way to its arm, it lets go.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections import deque
from pathlib import Path

import numpy as np

from serl_chunk_robot.client.client import Reading, RobotClient
from serl_chunk_robot.devices.base import GOING
from serl_chunk_robot.geometry.kinematics import reach
from support.lab_experiment import SO101_REACH, LabTask
from support.lab_motors import LEADER, message_of
from support.lab_operator import HELP, Meeting
from support.simulated_operator import CLOSE, DELAY, RATE, REACTION, TREMOR_HZ, Aim, Belief, Pose

GAIN, SMOOTH = 3.5, 0.1  # 1/s: speed per way that is left; s in which the speed follows that
FASTEST = np.array([1.2] * 5 + [1.5])  # rad/s, and openings/s
TREMOR = 0.002  # rad
AT_ARM, STEADY = 0.03, 0.6  # rad of a leader that is at its arm, and s for which it is, before the hand leads the arm


class LeaderHands:
    """See `lab_operator.Hands`. Args: folder of the hand's socket."""

    def __init__(self, folder: Path, task: LabTask, meeting: Meeting, seed: int) -> None:
        self.meeting, self._task, self._path = meeting, task, str(folder / LEADER)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._felt: Reading | None = None
        self._coming: deque[tuple[float, np.ndarray, bool]] = deque()  # moment, joints, whether the robot follows
        self._seen: tuple[np.ndarray, bool] | None = None
        self._decided: deque[tuple[float, np.ndarray | None]] = deque()  # when it is done, and the leader's goal
        self._goal: np.ndarray | None = None  # that is carried out; None: the hand is off
        self._at: np.ndarray | None = None  # where it has the leader
        self._speed = np.zeros(6)
        self._began, self._apart_at = False, math.inf  # of an episode, and when the leader was apart from its arm
        rng = np.random.default_rng(seed)
        self._tremor = rng.uniform(*TREMOR_HZ, 6), rng.uniform(0, math.tau, 6)

    @staticmethod
    def program(folder: Path) -> tuple[str, ...]:
        return ("-m", "serl_chunk")

    @staticmethod
    def flags(folder: Path, command: str) -> list[str]:
        """A recording begins where the arm is, an intervention wherever the leader is."""
        return ["--config.actor.intervention=leader",
                f"--config.device.align={'drive' if command == 'record' else 'blend'}"]  # fmt: skip

    def ready(self) -> bool:
        return True  # the robot's server has it

    def see(self, now: float, joints: np.ndarray, ready: bool) -> None:
        self._coming.append((now, np.array(joints, np.float64), ready))

    def move(self, now: float, robot: RobotClient) -> None:
        self._felt = robot.next_reading(LEADER, 0.0) or self._felt
        while self._coming and self._coming[0][0] <= now - DELAY:
            self._seen = self._coming.popleft()[1:]
        if self._felt is None or self._felt.joints is None or self._seen is None:
            return
        self._decided.append((now + REACTION, self._decide(now, self._felt.joints, *self._seen)))
        while self._decided[0][0] <= now:
            self._goal = self._decided.popleft()[1]
        if self._goal is None or (self._felt.drive is not None and self._felt.drive[1] in GOING):
            self._at = None
            return
        if self._at is None:  # the hand takes hold of it
            self._at, self._speed = self._felt.joints.copy(), np.zeros(6)
        wanted = GAIN * (self._goal - self._at)
        wanted *= min(1.0, float((FASTEST / np.maximum(np.abs(wanted), 1e-9)).min()))  # all joints arrive together
        self._speed += (wanted - self._speed) / (SMOOTH * RATE)
        self._at += self._speed / RATE
        hertz, phase = self._tremor
        joints = self._at + TREMOR * np.sin(math.tau * hertz * now + phase)
        with contextlib.suppress(OSError):  # the leader's process is started anew
            self._socket.sendto(message_of(joints), self._path)

    def let_go(self) -> None:
        """A leader is lost where nothing reads it: there is nothing to touch."""

    def close(self) -> None:
        self._socket.close()

    def _decide(self, now: float, leader: np.ndarray, joints: np.ndarray, follows: bool) -> np.ndarray | None:
        """Return where the leader is to be, float64[6]; None: the hand is off it."""
        if not follows:
            self._began = False
            return None
        frame, opening = self._task.arms.tip(0, joints)[0], float(joints[5])
        tip = Pose(frame[:3, 3], frame[:3, :3])
        belief = Belief(now, (tip, tip), np.zeros(7), (tip,), (opening,))
        if not self._began:
            self._began, self._apart_at = True, now
            self.meeting.begin(belief)
        aims = self.meeting.decide(belief)
        # An intervention begins wherever the leader is. A recording does not before the leader is at its arm.
        if aims is None or self.meeting.plan == HELP or now - self._apart_at > STEADY:
            self._apart_at = -math.inf
            return None if aims is None else self._joints(aims[0])
        if np.abs(leader - joints).max() > AT_ARM:
            self._apart_at = now
        return joints

    def _joints(self, aim: Aim) -> np.ndarray:
        goal, limit = self._task.goal.copy(), np.full(6, SO101_REACH)
        frame = self._task.arms.tip(0, goal)[0]
        frame[:3, 3] = aim.pose.place
        found = reach(self._task.arms, 0, goal, frame, -limit, limit, turned=False)
        assert found is not None, f"no joints for {aim.pose.place}"
        found[5] = 0.0 if aim.button == CLOSE else goal[5]
        return found
