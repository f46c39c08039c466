"""An environment of the shape of HIL-SERL's, behind all its wrappers: stacked observations, `info` as they fill it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class HilSerlShape(gymnasium.Env):
    """`{"state": (1, 19), "<camera>": (1, 128, 128, 3)}`; a human has some steps, and the last one succeeds."""

    HUMAN_STEPS = (3, 4)  # steps, counted from 1
    SOLVED = 6
    HUMAN_ACTION = np.linspace(-0.6, 0.6, 14)  # float64, as a SpaceMouse gives it

    def __init__(self, action_dim: int, cameras: Sequence[str]) -> None:
        self.action_space = spaces.Box(-1.0, 1.0, (action_dim,), np.float32)
        frame = spaces.Box(0, 255, (1, 128, 128, 3), np.uint8)
        state = spaces.Box(-np.inf, np.inf, (1, 19), np.float32)
        self.observation_space = spaces.Dict({"state": state, **dict.fromkeys(cameras, frame)})
        self.cameras = tuple(cameras)
        self.t = 0

    def _observation(self) -> dict[str, np.ndarray]:
        frames = {c: np.full((1, 128, 128, 3), 10 * i + self.t, np.uint8) for i, c in enumerate(self.cameras)}
        return {"state": np.full((1, 19), self.t, np.float32), **frames}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._observation(), {"succeed": False}

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert action.shape == self.action_space.shape
        self.t += 1
        solved = self.t == self.SOLVED
        info: dict[str, Any] = {"succeed": solved, "grasp_penalty": -0.02 if self.t == 1 else 0.0}
        if self.t in self.HUMAN_STEPS:
            info["intervene_action"] = self.HUMAN_ACTION[None, : len(action)]
        return self._observation(), np.array([int(solved)]), solved, False, info
