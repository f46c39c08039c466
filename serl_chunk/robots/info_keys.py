"""Reads reports of interventions and success from an environment's `info`, in the known dialects.

HIL-SERL: `intervene_action` on a human's ticks alone, `succeed`. gym-hil and LeRobot: a true `is_intervention` with
`teleop_action` (once `action_intervention`), which is there on every tick; `success`, `next.success` (the operator's
key) and `rerecord_episode`. LeRobot's keys are members of an enumeration, `TeleopEvents`: their values are read.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from serl_chunk.types import DataError

SUCCESS_KEYS = ("succeed", "is_success", "success", "next.success")
ACTION_KEYS = ("intervene_action", "teleop_action", "action_intervention")
FLAG_KEYS = ("is_intervention", "intervene_flag")  # the second one is RLinf's, next to HIL-SERL's action

_UNDERSTOOD = frozenset((*ACTION_KEYS, *FLAG_KEYS))
_LIKE_INTERVENTION = re.compile(
    r"interven|teleop|take_?over|^(is_|by_)?human($|_(action|acts|active|command|control|input|override))"
)


def plain_info(native: Mapping[Any, Any], robot: str) -> dict[Any, Any]:
    """Return a copy of `info` with members of enumerations replaced by their values, as keys.

    Raises DataError for an unknown key that looks like an intervention: its actions would be recorded as the policy's.
    """
    info = {key.value if isinstance(key, enum.Enum) else key: value for key, value in native.items()}
    for key in info:
        if isinstance(key, str) and key not in _UNDERSTOOD and _LIKE_INTERVENTION.search(key.lower()):
            raise DataError(
                f'info["{key}"] of robot {robot!r}: unknown report of an intervention. Rename it in a wrapper to '
                'info["intervene_action"], on the human\'s ticks only, or to info["is_intervention"] with '
                'info["teleop_action"]; remove it if it is something else'
            )
    return info


def human_action(info: Mapping[Any, Any], robot: str) -> tuple[str, Any] | None:
    """Return key and value of a human's command on this tick; None if no human acted.

    A flag decides; without one, HIL-SERL's action is present on a human's ticks only. Raises DataError for an
    intervention without its action, and for LeRobot's action without its flag.
    """
    flags = [key for key in FLAG_KEYS if key in info]
    acting = [key for key in flags if is_true(info[key])]
    if flags and not acting:
        return None
    key = next((key for key in ACTION_KEYS if info.get(key) is not None), None)
    if key is None and acting:
        raise DataError(
            f'info["{acting[0]}"] of robot {robot!r}: true without the human\'s command. Add it as '
            "info['intervene_action'] or info['teleop_action']"
        )
    lerobot = None if flags else next((key for key in ACTION_KEYS[1:] if info.get(key) is not None), None)
    if lerobot is not None:
        raise DataError(
            f'info["{lerobot}"] of robot {robot!r}: present without info["is_intervention"]. Add the flag on every '
            "tick: gym-hil reports this action on the policy's ticks too"
        )
    return None if key is None else (key, info[key])


def succeeded(info: Mapping[Any, Any]) -> bool:
    """Return whether the environment, or its operator's key, reports success."""
    return any(is_true(info.get(key)) for key in SUCCESS_KEYS)


def is_true(value: Any) -> bool:
    """Return whether a flag is true: one element of an array suffices. None is false."""
    return value is not None and bool(np.any(value))
