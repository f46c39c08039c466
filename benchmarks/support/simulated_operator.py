"""A simulated human operator: two hands on two SpaceMice, and eyes that see the robot late.

The operator sees the robot's measured joints and the cube's pose, `DELAY` seconds late, and nothing else. What it
decides reaches its hands `REACTION` seconds later, and a hand that moves a mouse trembles. Without more, a servo with a
delay of 0.4 s would have to be slow: its gain has to stay below 1 / (2 * 0.4 s). The operator therefore remembers what
its hands did meanwhile, and aims from where the tips are by then if the robot followed, as humans do (a Smith
predictor). What it remembers is wrong wherever the robot did not follow.

An operator whose hands move while the arms stand lets go for a moment, as the product asks for after a stop.

    operator.see(now, joints, cube)     # whenever there is a new state
    left, right = operator.hands(now)   # 125 times a second, the rate of a mouse's reports
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from serl_chunk.devices.teleoperation import Tips, axis_angle, rotation

DELAY = 0.2  # s from a state to its sight
REACTION = 0.2  # s from a decision to the motion of a hand
RATE = 125.0  # decisions and reports of a mouse a second
FOLLOWS = 0.06  # s by which the operator learned that the arms come after the hands
GAIN = 3.5  # 1/s: speed per distance that is left, as the operator predicts it
# It does not creep up to its goal: m/s and rad/s that it keeps up there, and the largest speed per distance, 1/s.
SLOWEST, STEEPEST = (0.05, 0.2), 8.0
TREMOR, TREMOR_HZ = 0.03, (8.0, 10.0)  # of a full deflection; physiological tremor of a hand
# A hand drifts for so many seconds, by so much of a full deflection, and by as much of its own deflection: unsteadier
# with effort. Turns drift by less.
DRIFT, DRIFT_S, TURNS = 0.05, 0.3, 0.5
# An arm that came so far, m, while a hand asked for so much, m, within so many seconds does not follow. Then the hands
# are off for so many seconds.
STANDS, ASKED, WITHIN, LETS_GO = 0.005, 0.05, 0.5, 0.8
GRIPPER_SECONDS = 0.6  # of a gripper's whole way
GRIPPER = (6, 13)  # in the joints
CLOSE, OPEN = 0, 1  # buttons of a mouse


class Pose(NamedTuple):
    """Of a tip in the world."""

    place: np.ndarray  # float64[3], m
    turned: np.ndarray  # float64[3, 3]


class Aim(NamedTuple):
    """What a hand is to do: bring its arm's tip to a pose. `button`: that is pressed meanwhile; None: none."""

    pose: Pose
    button: int | None = None


class Belief(NamedTuple):
    """What the operator knows when it decides."""

    now: float  # s
    seen: tuple[Pose, Pose]  # tips of the left and the right arm, as they were
    cube: np.ndarray  # float64[7], as it was then: position, m, and quaternion
    tips: tuple[Pose, Pose]  # as they will be when the decision is carried out, if the robot follows
    openings: tuple[float, float]  # likewise, of the grippers: 0 closed, 1 open


class Task(Protocol):
    """What the operator wants to do."""

    def begin(self, belief: Belief) -> None: ...

    def decide(self, belief: Belief) -> tuple[Aim, Aim] | None:
        """Return what the left and the right hand are to do; None: both are off their mice."""
        ...


class Hand(NamedTuple):
    """A mouse as it is held: deflection, float64[6] in [-1, 1] along x, y, z of the world and about them."""

    deflection: np.ndarray
    buttons: tuple[bool, bool]  # closes, opens


OFF = Hand(np.zeros(6), (False, False))


class _Sight(NamedTuple):
    at: float
    tips: tuple[Pose, Pose]
    openings: tuple[float, float]
    cube: np.ndarray
    ready: bool


class SimulatedOperator:
    """See the module. All times are the caller's, s.

    Args:
        tips: kinematics of both arms.
        translation, rotation: m/s and rad/s at full deflection, which the operator is used to.
        drift: of the hands, see `DRIFT`.
        seed: of tremor and drift.
    """

    def __init__(
        self, tips: Tips, task: Task, *, translation: float, rotation: float, drift: float = DRIFT, seed: int = 0
    ) -> None:
        self._arms, self._task, self._unsteady = tips, task, drift
        self._speed = np.repeat((translation, rotation), 3)
        self._rng = rng = np.random.default_rng(seed)
        self._drift = np.zeros((2, 6))
        self._tremor = rng.uniform(*TREMOR_HZ, (2, 6)), rng.uniform(0, 2 * math.pi, (2, 6))
        self.rest()

    def rest(self) -> None:
        """Take both hands off, and forget what was seen and done, as before another attempt."""
        self._coming: deque[_Sight] = deque()
        self._seen: deque[_Sight] = deque()  # the newest one, and those of `WITHIN` before it
        self._intended: deque[tuple[float, tuple[Hand, Hand]]] = deque()
        self._held = (OFF, OFF)
        self._done: deque[tuple[float, np.ndarray]] = deque()  # moment, and all that was intended to move by then
        self._moved = np.zeros((2, 7))  # m, rad, and openings
        self._began, self._off_until = False, -math.inf

    def see(self, at: float, joints: np.ndarray, cube: np.ndarray, ready: bool = True) -> None:
        """Look at the state of the moment `at`, which is understood `DELAY` later.

        Args:
            joints: measured, float[14].
            cube: position, m, and quaternion, float[7].
            ready: whether the console shows that the robot follows; the hands are off the mice while it does not.
        """
        frames = [self._arms.tip(arm, np.asarray(joints, np.float64))[0] for arm in (0, 1)]
        left, right = (Pose(frame[:3, 3], frame[:3, :3]) for frame in frames)
        openings = float(joints[GRIPPER[0]]), float(joints[GRIPPER[1]])
        self._coming.append(_Sight(at, (left, right), openings, np.array(cube, np.float64), ready))

    def hands(self, now: float) -> tuple[Hand, Hand]:
        """Decide, and return how both mice are held at `now`. Call it `RATE` times a second."""
        belief = self._belief(now)
        if belief is not None and not self._began:
            self._task.begin(belief)
        self._began = belief is not None
        if now >= self._off_until and self._stands():
            self._off_until = now + LETS_GO
        aims = None if belief is None or now < self._off_until else self._task.decide(belief)
        hands = (OFF, OFF) if belief is None or aims is None else self._towards(aims, belief)
        self._intended.append((now + REACTION, hands))
        for k, hand in enumerate(hands):
            self._moved[k, :6] += hand.deflection * self._speed / RATE
            self._moved[k, 6] += (hand.buttons[OPEN] - hand.buttons[CLOSE]) / (GRIPPER_SECONDS * RATE)
        self._done.append((now + REACTION, self._moved.copy()))
        while self._intended and self._intended[0][0] <= now + 1e-9:
            self._held = self._intended.popleft()[1]
        memory = math.exp(-1 / (RATE * DRIFT_S))
        self._drift = memory * self._drift + math.sqrt(1 - memory**2) * self._rng.standard_normal((2, 6))
        left, right = (self._trembling(k, hand, now) for k, hand in enumerate(self._held))
        return left, right

    def _belief(self, now: float) -> Belief | None:
        while self._coming and self._coming[0].at <= now - DELAY + 1e-9:
            self._seen.append(self._coming.popleft())
        if not self._seen or not self._seen[-1].ready:
            self._seen.clear()
            return None
        sight = self._seen[-1]
        while sight.at - self._seen[0].at > WITHIN:
            self._seen.popleft()
        while len(self._done) > 1 and self._done[1][0] <= self._seen[0].at - FOLLOWS:
            self._done.popleft()
        since = self._moved - self._moved_by(sight.at - FOLLOWS)
        tips = [_moved(pose, way) for pose, way in zip(sight.tips, since, strict=True)]
        openings = [min(1.0, max(0.0, x + float(way[6]))) for x, way in zip(sight.openings, since, strict=True)]
        return Belief(now, sight.tips, sight.cube, (tips[0], tips[1]), (openings[0], openings[1]))

    def _moved_by(self, moment: float) -> np.ndarray:
        """Return all that was intended to move by then, float64[2, 7]."""
        index = bisect.bisect_right(self._done, moment, key=lambda done: done[0])
        return self._done[max(0, index - 1)][1] if self._done else self._moved

    def _stands(self) -> bool:
        """Whether an arm is seen to stand while its hand moves it."""
        if len(self._seen) < 2 or self._seen[-1].at - self._seen[0].at < 0.9 * WITHIN:
            return False
        first, last = self._seen[0], self._seen[-1]
        asked = self._moved_by(last.at - FOLLOWS) - self._moved_by(first.at - FOLLOWS)
        return any(
            np.linalg.norm(way[:3]) > ASKED and np.linalg.norm(now.place - before.place) < STANDS
            for way, before, now in zip(asked, first.tips, last.tips, strict=True)
        )

    def _towards(self, aims: Sequence[Aim], belief: Belief) -> tuple[Hand, Hand]:
        left, right = (
            Hand(self._deflection(aim.pose, tip), (aim.button == CLOSE, aim.button == OPEN))
            for aim, tip in zip(aims, belief.tips, strict=True)
        )
        return left, right

    def _deflection(self, aim: Pose, tip: Pose) -> np.ndarray:
        way = np.concatenate([aim.place - tip.place, axis_angle(aim.turned @ tip.turned.T)])
        for part, slowest in zip(np.split(way, 2), SLOWEST, strict=True):
            part *= max(GAIN, min(slowest / max(float(np.linalg.norm(part)), 1e-9), STEEPEST))
        deflection = way / self._speed
        for part in np.split(deflection, 2):  # both keep their direction
            part /= max(1.0, float(np.abs(part).max()))
        return deflection

    def _trembling(self, k: int, hand: Hand, now: float) -> Hand:
        if hand is OFF:
            return hand
        hertz, phase = (part[k] for part in self._tremor)
        way, turn = hand.deflection[:3], hand.deflection[3:]
        effort = np.repeat((1.0 + math.hypot(*way), TURNS * (1.0 + math.hypot(*turn))), 3)
        shaken = hand.deflection + TREMOR * np.sin(2 * math.pi * hertz * now + phase)
        shaken += self._unsteady * effort * self._drift[k]
        return hand._replace(deflection=np.clip(shaken, -1.0, 1.0))


def _moved(pose: Pose, way: np.ndarray) -> Pose:
    return Pose(pose.place + way[:3], rotation(way[3:6]) @ pose.turned)
