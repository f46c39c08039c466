"""The operator's console, keys and pedal at the machine that moves a robot."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.fields import Group, Requirement, require, setting

_REAL = Requirement("a real or served robot (robot.server)", lambda c: c.robot.real)


@dataclasses.dataclass(frozen=True)
class OperatorConfig(Group, path="operator."):
    """What an operator presses, and what a motion waits for (docs/operator.md)."""

    keys: tuple[str, ...] = setting(
        (), "changes, as success=s 1; nothing after =: no key", acts="", requires=_REAL, off=()
    )
    gestures: tuple[str, ...] = setting(
        (), "the same of pedals and devices, as go=pedal_middle", acts="", requires=_REAL, off=()
    )
    pedal: str = setting(
        "", "a foot pedal: part of its name in /dev/input/by-id, or a path", acts="", requires=_REAL, off=""
    )
    countdown_s: float = setting(
        2.0, "before each motion", unit="s", least=1, most=60, acts="", requires=_REAL, off=2.0
    )
    ready: Literal["first", "each"] = setting(
        "first", "episodes of a session before which the operator confirms the scene", acts="", requires=_REAL,
        off="first",
    )  # fmt: skip

    def _check(self) -> None:
        changes(self.keys, "operator.keys")
        changes(self.gestures, "operator.gestures")


def changes(texts: tuple[str, ...], parameter: str) -> dict[str, str]:
    """Return action -> inputs of texts `action=inputs`. Raises ConfigError for another form, or an action twice."""
    found: dict[str, str] = {}
    for text in texts:
        action, equals, inputs = text.partition("=")
        require(bool(equals), parameter, f"must be action=inputs, got {text!r}. Write it as success=s 1")
        require(action not in found, parameter, f"names {action!r} twice. Give it all of its inputs at once")
        found[action] = inputs
    return found
