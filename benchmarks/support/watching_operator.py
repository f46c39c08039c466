"""An operator who watches a policy transfer the cube, and intervenes where it makes no progress."""

from __future__ import annotations

import numpy as np

from support.simulated_operator import Aim, Belief
from support.transfer_task import MIDDLE, REACH, RIGHT, TransferCube, held

STALLS = 1.5  # s without progress before the operator decides to intervene
FELL = 0.2  # of the progress, 10 cm: at once a reason to do so
RISE = 0.01  # of the progress, about 5 mm: less is noise
NEAR_CUBE = 0.03  # m, within which fingers that close are progress
FAR = 0.5  # m at which a distance counts as no progress


class WatchingOperator:
    """Does nothing while the policy comes on; see `Task`.

    The operator takes both arms over and finishes the transfer. A cube out of reach is left to the policy.
    """

    def __init__(self) -> None:
        self._task = TransferCube()
        self._mine = False

    def begin(self, belief: Belief) -> None:
        self._mine = False
        self._watch(belief)

    def decide(self, belief: Belief) -> tuple[Aim, Aim] | None:
        if not self._mine and self._needed(belief):
            self._mine = True
            self._task.begin(belief)
        return self._task.decide(belief) if self._mine else None

    def _watch(self, belief: Belief) -> None:
        self._best, self._risen = progress(belief), belief.now

    def _needed(self, belief: Belief) -> bool:
        now = progress(belief)
        if now > self._best + RISE:
            self._best, self._risen = now, belief.now
        fell = self._best - now >= FELL
        x, y, z = belief.cube[:3]
        low, high = REACH.T
        reachable = bool(z > 0 and (low <= (x, y)).all() and ((x, y) <= high).all())
        return reachable and (fell or belief.now - self._risen > STALLS)


def progress(belief: Belief) -> float:
    """Measure what is seen: 0 to 1 while the right hand comes to the cube, 1 to 2 up to the left one's touch."""
    left, right = (tip.place for tip in belief.seen)
    cube = belief.cube[:3]
    if not held(belief):
        around = np.linalg.norm(right - cube) < NEAR_CUBE
        return 0.8 * _closeness(right, cube) + (0.2 * (1 - belief.openings[RIGHT]) if around else 0.0)
    return 1.0 + 0.5 * _closeness(cube, MIDDLE) + 0.5 * _closeness(left, cube)


def _closeness(a: np.ndarray, b: np.ndarray) -> float:
    return 1.0 - min(float(np.linalg.norm(a - b)) / FAR, 1.0)
