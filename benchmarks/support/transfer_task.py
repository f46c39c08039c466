"""How a human operator transfers the cube: the right hand takes it to the middle, the left one takes it there."""

from __future__ import annotations

import math

import numpy as np

from serl_chunk.devices.teleoperation import axis_angle
from support.simulated_operator import CLOSE, OPEN, Aim, Belief, Pose

LEFT, RIGHT = 0, 1
BASES = np.array([[-0.469, 0.5], [0.469, 0.5]])  # m, of the arms
DOWN = 1.05  # rad below the horizontal, at which the right hand grasps
ABOVE, GRASP, LIFT = 0.11, 0.02, 0.2  # m, heights of its tip
MIDDLE = np.array([0.0, 0.5, 0.25])  # m, where the cube changes hands
ASIDE = np.array([-0.12, 0.0, 0.0])  # m, of the left hand from there, as it waits
LIFTED = 0.035  # m, of a cube's centre that is off the table
NEAR = 0.05  # m, of a cube's centre from the tip that has it
OPENED = 0.9
CLOSES = 0.6  # s, of the button
PATIENCE = 1.5  # s, until a closed left hand that did not get the cube opens again
REACH = np.array([[-0.15, 0.45], [0.1, 0.75]])  # m, of x and y: elsewhere, the operator does not try


class TransferCube:
    """Phases of the transfer, each with aims of both hands; see `Task`.

    The right hand comes to the cube through a funnel: the further it is aside, the higher it stays. Fingers close once
    they were seen in place, and the left hand waits until the right one was seen in the middle: what a hand does
    follows from where the hands are, and not from how they came there. A cube that was not grasped, or was lost, is
    fetched again.
    """

    def __init__(self) -> None:
        self.phase = "reach"
        self._since = 0.0

    def begin(self, belief: Belief) -> None:
        """Choose the phase from what is seen."""
        self._enter("lift" if held(belief) else "reach", belief)

    def decide(self, belief: Belief) -> tuple[Aim, Aim]:
        after = getattr(self, "_after_" + self.phase)(belief)
        if after is not None:
            self._enter(after, belief)
        return self._aims(belief)

    def _enter(self, phase: str, belief: Belief) -> None:
        self.phase, self._since = phase, belief.now
        self._spot = belief.cube[:2].copy()

    def _aims(self, belief: Belief) -> tuple[Aim, Aim]:
        opens = [None if opening > OPENED else OPEN for opening in belief.openings]
        wait = Aim(Pose(MIDDLE + ASIDE, hand(0.0, 0.0, math.pi / 2)), opens[LEFT])
        give = Aim(Pose(MIDDLE, hand(math.pi, 0.0, 0.0)))
        if self.phase == "meet":
            return wait, give
        if self.phase in ("come", "take"):
            goal = belief.tips[RIGHT].place + belief.cube[:3] - belief.seen[RIGHT].place  # where the cube will be
            button = CLOSE if self.phase == "take" else opens[LEFT]
            return Aim(Pose(goal, wait.pose.turned), button), give
        if self.phase == "reach":
            return wait, self._grasping(belief, belief.cube[:2], opens[RIGHT])
        grasp = self._grasping(belief, self._spot, CLOSE)
        x, y, _ = grasp.pose.place
        height = GRASP if self.phase == "close" else LIFT
        return wait, grasp._replace(pose=grasp.pose._replace(place=np.array([x, y, height])))

    def _grasping(self, belief: Belief, spot: np.ndarray, button: int | None) -> Aim:
        azimuth = math.atan2(spot[1] - BASES[RIGHT, 1], spot[0] - BASES[RIGHT, 0])
        turned, tip = hand(azimuth, DOWN, 0.0), belief.tips[RIGHT]
        aside = float(np.linalg.norm(tip.place[:2] - spot)) + 0.05 * _turn(turned, tip)
        aside += 0.0 if belief.openings[RIGHT] > 0.6 else 0.05
        height = GRASP + (ABOVE - GRASP) * _share(aside, 0.015, 0.045)
        return Aim(Pose(np.array([*spot, height]), turned), button)

    def _after_reach(self, belief: Belief) -> str | None:
        aim = self._aims(belief)[RIGHT].pose
        low = aim.place[2] < GRASP + 0.005
        seen = _near(aim, belief.seen[RIGHT], 0.012, 0.3)
        return "close" if low and seen and _near(aim, belief.tips[RIGHT], 0.012, 0.3) else None

    def _after_close(self, belief: Belief) -> str | None:
        return "lift" if belief.now - self._since > CLOSES else None

    def _after_lift(self, belief: Belief) -> str | None:
        if belief.seen[RIGHT].place[2] < 0.6 * LIFT:  # turned any lower, the hand would push the table
            return None
        return "meet" if held(belief) else "reach"

    def _after_meet(self, belief: Belief) -> str | None:
        if not held(belief):
            return "reach"
        left, right = self._aims(belief)
        ready = _near(right.pose, belief.seen[RIGHT], 0.02, 0.3) and _near(left.pose, belief.tips[LEFT], 0.03, 0.3)
        return "come" if ready and belief.openings[LEFT] > OPENED - 0.1 else None

    def _after_come(self, belief: Belief) -> str | None:
        if not held(belief):
            return "reach"
        left, right = self._aims(belief)
        if not _near(right.pose, belief.seen[RIGHT], 0.05, 0.5) or belief.now - self._since > 2 * PATIENCE:
            return "meet"
        return "take" if _near(left.pose, belief.seen[LEFT], 0.015, 0.3) else None

    def _after_take(self, belief: Belief) -> str | None:
        if not held(belief):
            return "reach"
        return "meet" if belief.now - self._since > PATIENCE else None


def held(belief: Belief) -> bool:
    """Whether the right hand is seen to have the cube in the air."""
    apart = np.linalg.norm(belief.cube[:3] - belief.seen[RIGHT].place)
    return bool(belief.cube[2] > LIFTED and apart < NEAR)


def hand(azimuth: float, pitch: float, roll: float) -> np.ndarray:
    """Return the orientation of a hand that points `pitch` below the horizontal, float64[3, 3]; angles in rad."""
    (cz, cy, cx), (sz, sy, sx) = np.cos((azimuth, pitch, roll)), np.sin((azimuth, pitch, roll))
    about_z = np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    return np.asarray(about_z @ about_y @ np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]]))


def _near(aim: Pose, tip: Pose, place: float, turn: float) -> bool:
    return float(np.linalg.norm(aim.place - tip.place)) < place and _turn(aim.turned, tip) < turn


def _turn(turned: np.ndarray, tip: Pose) -> float:
    """Return the angle to an orientation, rad."""
    return float(np.linalg.norm(axis_angle(turned @ tip.turned.T)))


def _share(x: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (x - low) / (high - low)))
