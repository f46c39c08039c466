"""The simulated operator on a simulated clock: an intervention source for a robot in lockstep.

All of the product's devices run, from the raw reports of the virtual mice to the intervention; only their clock is the
robot's: a tick is `dt` seconds, in which each mouse reports every 8 ms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

import numpy as np

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.devices import operator as devices
from serl_chunk.devices.human import HumanIntervention
from serl_chunk.robots.base import InterventionCommand, RobotEnv
from serl_chunk.types import STATE, Observation
from serl_chunk_robot.devices import spacemouse
from serl_chunk_robot.devices.base import Sample, unshared
from serl_chunk_robot.devices.spacemouse import SpaceMouse
from support.simulated_operator import RATE, Hand
from support.virtual_mice import NAMES, MouseReports, fake_hid

JOINTS = 14


class Hands(Protocol):
    """As `SimulatedOperator`."""

    def rest(self) -> None: ...

    def see(self, at: float, joints: np.ndarray, cube: np.ndarray) -> None: ...

    def hands(self, now: float) -> tuple[Hand, Hand]: ...


class SteppedMouse(SpaceMouse):
    """A SpaceMouse that looks when it is read, not in a thread of its own."""

    def _run(self) -> None:
        pass

    def read(self) -> Sample:
        self._sample = self._look()
        return unshared(self._sample)

    def close(self) -> None:
        self._let_go()


class SteppedOperator:
    """An intervention source: the operator's hands, their mice, and the product's devices."""

    def __init__(self, human: HumanIntervention, hands: Hands, mice: list, clock: list[float], dt: float) -> None:
        self._human, self._hands, self._mice, self._clock, self._dt = human, hands, mice, clock, dt
        self._reports = [MouseReports() for _ in mice]
        self._due = 0.0

    def reset(self, seed: int) -> None:
        self._hands.rest()
        self._clock[0] += 10.0  # between two episodes
        self._due = self._clock[0]
        self._report((Hand(np.zeros(6), (False, False)),) * 2)
        self._human.reset(seed)

    def poll(
        self, tick: int, observation: Observation, decision_tick: bool, last: np.ndarray
    ) -> InterventionCommand | None:
        now, state = self._clock[0] + self._dt, observation[STATE]
        self._hands.see(now, state[:JOINTS], state[JOINTS:])
        while self._due <= now + 1e-9:
            self._report(self._hands.hands(self._due))
            self._due += 1 / RATE
        self._clock[0] = now
        return self._human.poll(tick, observation, decision_tick, last)

    def restart(self) -> None:
        self._human.restart()

    def close(self) -> None:
        self._human.close()

    def _report(self, hands: tuple[Hand, Hand]) -> None:
        for mouse, reports, hand in zip(self._mice, self._reports, hands, strict=True):
            mouse.push(*reports.tick(hand.deflection, hand.buttons))


@contextlib.contextmanager
def operated(folder: Path, make: Callable[[ExperimentConfig, RobotEnv], Hands]) -> Iterator[None]:
    """Let `actor.intervention=spacemouse` be the operator of `make` in this process, with virtual mice in `folder`."""
    clock = [0.0]
    original = devices.make_human

    with fake_hid.installed(folder) as hid:
        mice = [hid.mouse(name) for name in NAMES]

        def stepped(config: ExperimentConfig, env: RobotEnv) -> SteppedOperator:
            now = partial(clock.__getitem__, 0)
            with (
                patch.object(spacemouse, "SpaceMouse", partial(SteppedMouse, clock=now)),
                patch.object(devices, "HumanIntervention", partial(HumanIntervention, now=now)),
            ):
                human = original(config, env)
            return SteppedOperator(human, make(config, env), mice, clock, env.robot_spec.dt)

        with patch.object(devices, "make_human", stepped):
            yield
