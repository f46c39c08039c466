"""The operator's console, keys and pedal at the machine that moves a robot, and the input device of a human."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal

from serl_chunk.config.fields import CRITIC, Group, Requirement, optional, require

AXES = ("x", "y", "z", "roll", "pitch", "yaw")  # of a device's twist
DEVICES = ("spacemouse", "gamepad", "keyboard", "leader", "gello")
TWISTS, LEADERS = DEVICES[:3], DEVICES[3:]  # devices that command velocities of a tip, or joints
_DEVICE = Requirement(f"actor.intervention={' or '.join(DEVICES)}", lambda c: c.actor.intervention.lower() in DEVICES)
_TWIST = Requirement(f"actor.intervention={' or '.join(TWISTS)}", lambda c: c.actor.intervention.lower() in TWISTS)
_LEADER = Requirement(f"actor.intervention={' or '.join(LEADERS)}", lambda c: c.actor.intervention.lower() in LEADERS)
_of_device, _of_twist = partial(optional, requires=_DEVICE), partial(optional, requires=_TWIST)


@dataclasses.dataclass(frozen=True)
class DeviceConfig(Group, path="device."):
    """How the device of `actor.intervention` moves the robot (docs/operator.md)."""

    paths: tuple[str, ...] = _of_device((), "one for each arm, left first; gello: files; empty: the only mouse")
    hosted: bool = _of_device(
        False, "the devices are those of robot.server, paths are names of its tables [[device]]; leader: always"
    )
    align: Literal["near", "blend", "drive"] = optional(
        "near",
        "a leader counts near its arm alone, or anywhere: its arm comes to it slowly; drive: near, and its "
        "motors take it there before each episode",
        requires=_LEADER,
    )
    axes: tuple[str, ...] = _of_twist(
        (),
        "of a robot that takes velocities: the axis that moves each of its numbers, in their order, without grippers; "
        "empty: x, y, z of three, all of six",
    )
    scale: tuple[float, ...] = _of_twist((1.0,) * 6, "of x, y, z, roll, pitch, yaw; 0: that axis does nothing")
    translation: float = _of_twist(
        0.2, "speed of a tip at full deflection, of arms that take joint targets", unit="m/s", above=0
    )
    rotation: float = _of_twist(1.0, "the same of turns", unit="rad/s", above=0)
    frame: Literal["base", "tool"] = _of_twist("base", "axes of the deflection: the world's or the tip's")
    lead: float = _of_twist(
        0.15, "by which a target may lead a joint: bounds what an arm presses with", unit="rad", above=0
    )
    gripper: Literal["hold", "press", "toggle"] = _of_twist(
        "hold", "it moves while its button is pressed, goes all the way, or changes at each press"
    )
    gripper_closed: Literal["low", "high"] = _of_twist("low", "end of the gripper's range at which it is closed")
    switch_button: int = _of_twist(
        -1, "lets a single device move the other arm; -1: it moves the first one alone", least=-1
    )
    dead_man: int = _of_twist(-1, "button that must be held for a deflection to count; -1: none", least=-1)
    start: float = _of_device(0.05, "deflection above which the human has an arm", above=0, most=1)
    end: float = _of_device(0.02, "deflection below which it is let go", least=0, most=1)
    hold_s: float = _of_device(0.4, "that it stays the human's after that", unit="s", least=0)

    def _check(self) -> None:
        # fmt: off
        require(set(self.axes) <= {*AXES} and len(set(self.axes)) == len(self.axes), "device.axes",
            f"must be different ones of {', '.join(AXES)}, got {', '.join(self.axes)}")
        require(len(self.scale) == 6, "device.scale", f"must be six numbers, got {self.scale}")
        require(any(self.scale), "device.scale", "all of its numbers are 0: no deflection would do anything")
        require(self.end < self.start, "device.end", f"must be below device.start={self.start}, got {self.end}")
        require(len(set(self.paths)) == len(self.paths), "device.paths",
            f"must name each device once, got {', '.join(self.paths)}")
        require(self.dead_man < 0 or self.dead_man != self.switch_button, "device.dead_man",
            f"must not be device.switch_button, got {self.dead_man} for both")


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

    keys: tuple[str, ...] = optional((), "changes, as success=s 1; nothing after =: no key", requires=_OPERATED)
    gestures: tuple[str, ...] = optional((), "the same of pedals and devices, as go=pedal_middle", requires=_OPERATED)
    pedal: str = optional("", "a foot pedal: part of its name in /dev/input/by-id, or a path", requires=_OPERATED)
    pedal_hosted: bool = optional(
        False, "operator.pedal is the name of a table [[device]] of robot.server", requires=_PEDAL
    )
    countdown_s: float = optional(2.0, "before each motion", unit="s", least=1, most=60, requires=_REAL)
    ready: Literal["first", "each"] = optional(
        "first", "episodes of a session before which the operator confirms the scene", requires=_REAL
    )
    attention: str = optional(
        "", "file of `serl-chunk attention fit`: a fall of Q beyond its threshold rings", requires=(_REAL, CRITIC)
    )
    attention_holds: bool = optional(False, "it also holds the robot, until the operator goes on", requires=_WATCHED)

    approve: int = optional(
        0,
        "chunks of each new policy version that the operator approves in training, each before it is executed",
        least=0,
        requires=(_REAL, _REALTIME),
    )

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
