"""Units in which large models were trained, where a robot's own differ; before differences and statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class RobotUnits(NamedTuple):
    """Maps of a robot's states and actions; all take and return float[..., S] or float[..., A]."""

    state: Callable[[np.ndarray], np.ndarray]
    action: Callable[[np.ndarray], np.ndarray]  # of the robot to the model's
    command: Callable[[np.ndarray], np.ndarray]  # its inverse


_ALOHA_DIM = 14  # states and actions: six joints and a gripper of each arm
_ALOHA_GRIPPERS = (6, 13)
_SIGNS = np.tile([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0], 2)
_GRIPPERS = list(_ALOHA_GRIPPERS)
# Of an ALOHA's gripper, m: the fingers' travel, the crank that moves them and its rod. A state of 0..1 is a travel.
_TRAVEL, _CRANK, _ROD = (0.01844, 0.05800), 0.022, 0.036
# Angles of cranks, rad, which the model has for 0 and 1: of the measured gripper, and of the commanded one.
_MEASURED, _COMMANDED = (0.5476, 1.6296), (-0.6213, 1.4910)


def _aloha_state(state: np.ndarray) -> np.ndarray:
    """Change the joints' signs; make the grippers' travel the crank's angle, 0..1 of its range."""
    out = state * _SIGNS
    travel = state[..., _GRIPPERS] * (_TRAVEL[1] - _TRAVEL[0]) + _TRAVEL[0]
    sine = (_CRANK**2 + travel**2 - _ROD**2) / (2 * _CRANK * travel)
    low, high = _MEASURED
    out[..., _GRIPPERS] = (np.arcsin(np.clip(sine, -1.0, 1.0)) - low) / (high - low)
    return out


def _aloha_action(action: np.ndarray) -> np.ndarray:
    """Change the joints' signs; make the grippers' commands, 0..1, angles from the measured one at 0."""
    out = action * _SIGNS
    low, high = _COMMANDED
    out[..., _GRIPPERS] = action[..., _GRIPPERS] * (high - low) + low - _MEASURED[0]
    return out


def _aloha_command(action: np.ndarray) -> np.ndarray:
    out = action * _SIGNS
    low, high = _COMMANDED
    out[..., _GRIPPERS] = (action[..., _GRIPPERS] + _MEASURED[0] - low) / (high - low)
    return out


def _same(values: np.ndarray) -> np.ndarray:
    return values


UNITS = {
    "none": RobotUnits(_same, _same, _same),
    "aloha": RobotUnits(_aloha_state, _aloha_action, _aloha_command),  # openpi's `adapt_to_pi`
}


def units_fault(robot: str, state_dim: int, action_dim: int, grippers: tuple[int, ...] = _ALOHA_GRIPPERS) -> str:
    """Return why a robot of these sizes has no states and actions in the units of `robot`; empty where it has."""
    if robot == "none" or (state_dim, action_dim, grippers) == (_ALOHA_DIM, _ALOHA_DIM, _ALOHA_GRIPPERS):
        return ""
    return (
        f"{robot} is for {_ALOHA_DIM} state values, {_ALOHA_DIM} actions and the grippers {_ALOHA_GRIPPERS} among "
        f"them, got {state_dim}, {action_dim} and {grippers}"
    )
