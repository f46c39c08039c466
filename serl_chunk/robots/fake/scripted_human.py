"""A scripted human that watches the policy and intervenes, late and imperfectly, when there is no progress."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from serl_chunk.config.robots import ScriptedHumanConfig
from serl_chunk.robots.base import Expert, InterventionCommand
from serl_chunk.robots.fake.expert import HAND_OVER, ScriptedExpert, fetching_arm
from serl_chunk.robots.fake.kinematics import LEFT, RIGHT, Point
from serl_chunk.robots.fake.spec import GRIPPER, PLACE
from serl_chunk.types import Observation

if TYPE_CHECKING:
    from serl_chunk.robots.fake.env import FakeAlohaEnv

FALL = 0.5  # of the progress measure, at once a reason to react: a dropped cube

_RISE = 0.01  # of the progress measure, about 5 mm: less is noise
_RANGE = 0.5  # metres at which a distance counts as no progress at all


def progress(env: FakeAlohaEnv) -> float:
    """Measure progress: 0-1 fetching, 1-2 handing over (or fetching with the left arm), 2-3 placing."""
    if env.holder == LEFT:
        return 2.0 + _closeness(env.cube, PLACE)
    if env.holder == RIGHT:
        return 1.0 + 0.5 * _closeness(env.cube, HAND_OVER) + 0.5 * _closeness(env.grips[LEFT], env.cube)
    arm = fetching_arm(env.cube[0])
    return (1.0 if arm == LEFT else 0.0) + _closeness(env.grips[arm], env.cube)


class InterveningHuman:
    """Intervenes for a while once `_needed()` is true, then keeps still until the policy decides.

    All its decisions follow from the seed of `reset` and the environment `env`, which is read and never changed.
    """

    def __init__(self, env: Any, config: ScriptedHumanConfig, hands: Expert) -> None:
        self._env, self._config, self._hands = env, config, hands
        self.reset(0)

    def reset(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._in_control = False
        self._correcting = 0  # ticks left of the current correction
        self._fumbles = False  # in the current correction
        self._watch()

    def poll(
        self, tick: int, observation: Observation, decision_tick: bool, last: np.ndarray
    ) -> InterventionCommand | None:
        if not self._in_control:
            self._in_control = self._needed()
            if not self._in_control:
                return None
            least, most = self._config.correction_ticks
            self._correcting = int(self._rng.integers(least, most, endpoint=True))
            self._hands.reset(int(self._rng.integers(2**31)))
            self._fumbles = self._happens(self._config.fault_rate)
        if self._correcting > 0:
            self._correcting -= 1
            command = self._hands.act()
            if self._fumbles:
                command[list(GRIPPER)] = 1 - command[list(GRIPPER)]
            return InterventionCommand(command)
        if not decision_tick:
            return InterventionCommand(self._standstill(), idle=True)
        self._in_control = False
        self._watch()
        return None

    def close(self) -> None:
        pass

    def _happens(self, rate: float) -> bool:
        """Return True in a share `rate` of the calls; a rate of 0 draws nothing and leaves later draws unchanged."""
        return rate > 0 and bool(self._rng.random() < rate)

    def _watch(self) -> None:
        """Start watching from the current state."""
        raise NotImplementedError

    def _needed(self) -> bool:
        """Watch one tick; return whether to intervene now."""
        raise NotImplementedError

    def _standstill(self) -> np.ndarray:
        raise NotImplementedError


class ScriptedHuman(InterveningHuman):
    """Intervenes after a stall or a drop of the fake ALOHA's cube, with a human's faults.

    The reaction comes late, and not at all if the policy recovers meanwhile. The correction is slower and twice as
    noisy as a demonstration, and stops when its time is up rather than when the problem is solved. Idle ticks follow.
    If `config` requests it, the human also misses occasions, and fumbles corrections: fingers do the opposite.
    """

    def __init__(self, env: FakeAlohaEnv, config: ScriptedHumanConfig) -> None:
        super().__init__(env, config, ScriptedExpert(env, speed=config.speed, noise=config.noise))

    def _watch(self) -> None:
        self._best, self._since_rise = progress(self._env), 0
        self._reaction: int | None = None  # ticks until the intervention; None while there is no reason for one

    def _needed(self) -> bool:
        now = progress(self._env)
        if now > self._best + _RISE:
            self._best, self._since_rise, self._reaction = now, 0, None
            return False
        self._since_rise += 1
        fell = self._best - now >= FALL
        if fell:
            self._best, self._since_rise = now, 0  # recovering is measured from here
        if self._reaction is None:
            if fell or self._since_rise >= self._config.stall_ticks:
                if self._happens(self._config.miss_rate):
                    self._since_rise = 0
                else:
                    least, most = self._config.reaction_ticks
                    self._reaction = int(self._rng.integers(least, most, endpoint=True))
            return False
        self._reaction -= 1
        return self._reaction <= 0

    def _standstill(self) -> np.ndarray:
        return np.array(self._env.joints, np.float32)


def _closeness(a: Point, b: Point) -> float:
    """1 if the points meet, 0 from `_RANGE` metres on."""
    return 1.0 - min(math.dist(a, b) / _RANGE, 1.0)
