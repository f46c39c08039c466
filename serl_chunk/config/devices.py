"""The input device of a human operator, at the actor's machine or at the robot's server."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.fields import Group, Requirement, require, setting

DEVICES = ("spacemouse", "gamepad", "keyboard", "leader", "gello")
TWISTS, LEADERS = DEVICES[:3], DEVICES[3:]  # devices that command velocities of a tip, or joints
_DEVICE = Requirement(f"actor.intervention={' or '.join(DEVICES)}", lambda c: c.actor.intervention.lower() in DEVICES)
_TWIST = Requirement(f"actor.intervention={' or '.join(TWISTS)}", lambda c: c.actor.intervention.lower() in TWISTS)
_LEADER = Requirement(f"actor.intervention={' or '.join(LEADERS)}", lambda c: c.actor.intervention.lower() in LEADERS)


@dataclasses.dataclass(frozen=True)
class DeviceConfig(Group, path="device."):
    """How the device of `actor.intervention` moves the robot (docs/operator.md)."""

    paths: tuple[str, ...] = setting(
        (), "one for each arm, left first; gello: files; empty: the only mouse", acts="", requires=_DEVICE, off=()
    )
    hosted: bool = setting(
        False, "the devices are those of robot.server, paths are names of its tables [[device]]; leader: always",
        acts="", requires=_DEVICE, off=False,
    )  # fmt: skip
    align: Literal["near", "blend", "drive"] = setting(
        "near", "a leader counts near its arm alone, or anywhere: its arm comes to it slowly; drive: near, and its "
        "motors take it there before each episode", acts="",
        requires=_LEADER, off="near",
    )  # fmt: skip
    scale: tuple[float, ...] = setting(
        (1.0,) * 6, "of x, y, z, roll, pitch, yaw; 0: that axis does nothing", acts="", requires=_TWIST, off=(1.0,) * 6
    )
    translation: float = setting(
        0.2, "speed of a tip at full deflection, of arms that take joint targets", unit="m/s", above=0, acts="",
        requires=_TWIST, off=0.2,
    )  # fmt: skip
    rotation: float = setting(1.0, "the same of turns", unit="rad/s", above=0, acts="", requires=_TWIST, off=1.0)
    frame: Literal["base", "tool"] = setting(
        "base", "axes of the deflection: the world's or the tip's", acts="", requires=_TWIST, off="base"
    )
    lead: float = setting(
        0.15, "by which a target may lead a joint: bounds what an arm presses with", unit="rad", above=0, acts="",
        requires=_TWIST, off=0.15,
    )  # fmt: skip
    gripper: Literal["hold", "press", "toggle"] = setting(
        "hold", "it moves while its button is pressed, goes all the way, or changes at each press", acts="",
        requires=_TWIST, off="hold",
    )  # fmt: skip
    switch_button: int = setting(
        -1, "lets a single device move the other arm; -1: it moves the first one alone", acts="", least=-1,
        requires=_TWIST, off=-1,
    )  # fmt: skip
    dead_man: int = setting(
        -1, "button that must be held for a deflection to count; -1: none", acts="", least=-1, requires=_TWIST, off=-1
    )
    start: float = setting(
        0.05, "deflection above which the human has an arm", acts="", above=0, most=1, requires=_DEVICE, off=0.05
    )
    end: float = setting(
        0.02, "deflection below which it is let go", acts="", least=0, most=1, requires=_DEVICE, off=0.02
    )
    hold_s: float = setting(
        0.4, "that it stays the human's after that", unit="s", acts="", least=0, requires=_DEVICE, off=0.4
    )

    def _check(self) -> None:
        # fmt: off
        require(len(self.scale) == 6, "device.scale", f"must be six numbers, got {self.scale}")
        require(any(self.scale), "device.scale", "all of its numbers are 0: no deflection would do anything")
        require(self.end < self.start, "device.end", f"must be below device.start={self.start}, got {self.end}")
        require(len(set(self.paths)) == len(self.paths), "device.paths",
            f"must name each device once, got {', '.join(self.paths)}")
        require(self.dead_man < 0 or self.dead_man != self.switch_button, "device.dead_man",
            f"must not be device.switch_button, got {self.dead_man} for both")
