"""What of robosuite is used: it makes a task whose number, drawn on reset, moves by the action and is solved at 1."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


class Stand:
    """A simulation of robosuite."""

    def __init__(self, width: int) -> None:
        self.rng = np.random.default_rng(0)
        self.width, self.closed, self.at = width, 0, 0.0
        self.actions: list[np.ndarray] = []

    def reset(self) -> dict[str, Any]:
        self.at = np.random.uniform(0, 0.1) + self.rng.uniform(0, 0.1)  # noqa: NPY002 (as robosuite does)
        return self.observe()

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        self.actions.append(action)
        self.at += float(action[2])
        return self.observe(), 0.9999 if self.at >= 1 else 0.0, False, {}

    def observe(self) -> dict[str, Any]:
        return {
            "object-state": np.full(self.width, self.at),
            "robot0_gripper_qpos": np.array([7.0, 8.0]),
            "robot0_eef_quat": np.array([3.0, 4, 5, 6]),
            "robot0_proprio-state": np.zeros(40),
            "robot0_eef_pos": np.array([0.0, 1, 2]),
        }

    def close(self) -> None:
        self.closed += 1


def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace robosuite; returns what it was asked to make, and the `stand` that it made."""
    asked: dict[str, Any] = {}

    def make(name: str, **settings: Any) -> Stand:
        asked.update(settings, name=name, stand=Stand(10 if name == "Lift" else 14))
        return asked["stand"]

    monkeypatch.setitem(sys.modules, "robosuite", SimpleNamespace(make=make))
    return asked
