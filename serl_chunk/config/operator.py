"""The operator's console, keys and pedal at the machine that moves a robot."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.devices import DEVICES
from serl_chunk.config.fields import CRITIC, Group, Requirement, require, setting

_REAL = Requirement("a real or served robot (robot.server)", lambda c: c.robot.real)
_OPERATED = Requirement(
    "a real or served robot (robot.server), a device in actor.intervention, or --viewer",
    lambda c: c.robot.real or c.actor.intervention.lower() in DEVICES,
)
OF_PAGES = ("operator.keys", "operator.gestures", "operator.pedal")  # settings that a page (--viewer) needs as well
_REALTIME = Requirement("actor.clock=realtime", lambda c: c.actor.clock == "realtime")
_PEDAL = Requirement("operator.pedal", lambda c: bool(c.operator.pedal))
_WATCHED = Requirement("operator.attention", lambda c: bool(c.operator.attention))


@dataclasses.dataclass(frozen=True)
class OperatorConfig(Group, path="operator."):
    """What an operator presses, and what a motion waits for (docs/operator.md)."""

    keys: tuple[str, ...] = setting(
        (), "changes, as success=s 1; nothing after =: no key", acts="", requires=_OPERATED, off=()
    )
    gestures: tuple[str, ...] = setting(
        (), "the same of pedals and devices, as go=pedal_middle", acts="", requires=_OPERATED, off=()
    )
    pedal: str = setting(
        "", "a foot pedal: part of its name in /dev/input/by-id, or a path", acts="", requires=_OPERATED, off=""
    )
    pedal_hosted: bool = setting(
        False, "operator.pedal is the name of a table [[device]] of robot.server", acts="", requires=_PEDAL, off=False
    )
    countdown_s: float = setting(
        2.0, "before each motion", unit="s", least=1, most=60, acts="", requires=_REAL, off=2.0
    )
    ready: Literal["first", "each"] = setting(
        "first", "episodes of a session before which the operator confirms the scene", acts="", requires=_REAL,
        off="first",
    )  # fmt: skip
    attention: str = setting(
        "", "file of `serl-chunk attention fit`: a fall of Q beyond its threshold rings", acts="",
        requires=(_REAL, CRITIC), off="",
    )  # fmt: skip
    attention_holds: bool = setting(
        False, "it also holds the robot, until the operator goes on", acts="", requires=_WATCHED, off=False
    )

    approve: int = setting(
        0, "chunks of each new policy version that the operator approves in training, each before it is executed",
        least=0, acts="", requires=(_REAL, _REALTIME), off=0,
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
