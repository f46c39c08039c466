"""What an environment's `info` reports about a human and about success, in the field's dialects.

| report | HIL-SERL | gym-hil and LeRobot |
|---|---|---|
| a human acted on this tick | `intervene_action` is there | a true `is_intervention` |
| what the human commanded | `intervene_action` | `teleop_action` (once `action_intervention`), on every tick |
| success | `succeed` | `success`, `next.success` (the operator's key) |
| the episode is to be recorded again | | `rerecord_episode` |

LeRobot's processors use members of an enumeration, `TeleopEvents.IS_INTERVENTION`, as keys: their values are read.
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
FLAG_KEYS = ("is_intervention", "intervene_flag")  # the second one is RLinf's, beside HIL-SERL's action

_UNDERSTOOD = frozenset((*ACTION_KEYS, *FLAG_KEYS))
_LIKE_INTERVENTION = re.compile(
    r"interven|teleop|take_?over|^(is_|by_)?human($|_(action|acts|active|command|control|input|override))"
)


def plain_info(native: Mapping[Any, Any], robot: str) -> dict[Any, Any]:
    """A copy of an environment's `info` in which members of enumerations are replaced by their values, as keys.

    Raises DataError for a key that looks like an intervention and is none of those understood: what it reports would
    be recorded as the policy's.
    """
    info = {key.value if isinstance(key, enum.Enum) else key: value for key, value in native.items()}
    for key in info:
        if isinstance(key, str) and key not in _UNDERSTOOD and _LIKE_INTERVENTION.search(key.lower()):
            raise DataError(
                f'info["{key}"] of robot {robot!r} looks like a report of an intervention and is not understood, so '
                "that a human's actions would be recorded as the policy's. Rename it in a wrapper: a true "
                'info["is_intervention"] with the human\'s command as info["teleop_action"], or '
                'info["intervene_action"] on the human\'s ticks alone; remove it where it is something else'
            )
    return info


def human_action(info: Mapping[Any, Any], robot: str) -> tuple[str, Any] | None:
    """The key and the value of what a human commanded on this tick; None where none acted.

    A flag that is there decides; without one, HIL-SERL's action is there on a human's ticks alone. Raises DataError
    for an intervention without its action, and for LeRobot's action without its flag.
    """
    flags = [key for key in FLAG_KEYS if key in info]
    if flags:
        acting = [key for key in flags if is_true(info[key])]
        if not acting:
            return None
        for key in ACTION_KEYS:
            if info.get(key) is not None:
                return key, info[key]
        raise DataError(
            f'info["{acting[0]}"] of robot {robot!r} is true, and what the human commanded is missing: give it as '
            f"info[{'] or info['.join(repr(key) for key in ACTION_KEYS[:2])}]"
        )
    for key in ACTION_KEYS[1:]:
        if info.get(key) is not None:
            raise DataError(
                f'info["{key}"] of robot {robot!r} comes without info["is_intervention"], and gym-hil gives it on the '
                "policy's ticks too: give the flag on every tick"
            )
    value = info.get("intervene_action")
    return None if value is None else ("intervene_action", value)


def succeeded(info: Mapping[Any, Any]) -> bool:
    """Whether the environment, or its operator's key, reports success."""
    return any(is_true(info.get(key)) for key in SUCCESS_KEYS)


def is_true(value: Any) -> bool:
    """Whether a flag is true: one element of an array suffices. None is false."""
    return value is not None and bool(np.any(value))
