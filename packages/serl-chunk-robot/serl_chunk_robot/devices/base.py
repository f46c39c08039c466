"""What an input device is: the newest reading of an operator's device, which never waits.

| device | twist | joints | silence | `stamp` |
|---|---|---|---|---|
| SpaceMouse | yes | | normal at rest, not while deflected | newest look at the handle |
| keyboard, gamepad | yes | | normal: they report changes | newest look at the handle |
| foot pedal | | | normal: it reports changes | newest look at the handle |
| GELLO, leader arm | | yes | never normal | newest report |
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Protocol, Tuple

import numpy as np

from serl_chunk_robot.errors import SerlChunkError

AXES = 6  # x, y, z, roll, pitch, yaw
SILENT = 0.2  # s after which a device that should have reported is not alive
NEUTRAL = 0.02  # of a twist: each number of a device at rest is smaller
WAITS, MOVES, KEEPS = GOING = ("waits", "moves", "keeps")  # phases of a drive that has not ended
THERE, FAILED = "there", "failed"
PHASES = ("off", *GOING, THERE, FAILED)


class DeviceError(SerlChunkError):
    """An input device that cannot be opened: its name, what is valid, and the remedy."""


class DriveStatus(NamedTuple):
    """What the newest drive of a leader to its arm does: see `devices.drive`."""

    number: int = 0  # of the drive, as its requester numbered it; 0 before the first
    phase: str = "off"  # of PHASES
    why: str = ""  # it failed

    @property
    def going(self) -> bool:
        """Whether it has not ended: the leader's motors have torque, or get it."""
        return self.phase in GOING


class Sample(NamedTuple):
    """The newest reading of one device. Its arrays are the caller's own."""

    twist: Optional[np.ndarray]  # float64[6] in [-1, 1]: x forward, y left, z up, and turns about them; or none
    joints: Optional[np.ndarray]  # float64[J] of a leader: rad, and grippers from 0 closed to 1 open; or none
    buttons: Tuple[bool, ...]  # pressed now
    stamp: float  # monotonic s: see the module
    alive: bool  # False: unplugged, closed, or silent for 0.2 s where reports are regular; the twist is zero then
    drive: Optional[DriveStatus] = None  # of a leader that can be driven


class KeyEvent(NamedTuple):
    """A key, button or pedal that went down or up."""

    name: str
    pressed: bool
    stamp: float  # monotonic s


class InputDevice(Protocol):
    """One device. A device with keys, buttons or pedals for gestures has `keys() -> List[KeyEvent]` in addition.

    One that is a pedal has `pedals`, the names of its events: Tuple[str, ...].
    """

    name: str  # path or id, as shown to the operator

    def read(self) -> Sample:
        """Return the newest reading. It never waits."""

    def close(self) -> None:
        """Close the device. Readings are not alive from then on."""


def lifeless(sample: Sample) -> Sample:
    """Return a reading of a device that is not alive: no motion, no button. Joints and stamp are its last."""
    twist = None if sample.twist is None else np.zeros(AXES)
    return sample._replace(twist=twist, buttons=(False,) * len(sample.buttons), alive=False)


def unshared(sample: Sample) -> Sample:
    """Return a reading with arrays of its own."""
    twist, joints = (None if a is None else a.copy() for a in (sample.twist, sample.joints))
    return sample._replace(twist=twist, joints=joints)


def listed(names: List[str]) -> str:
    """Write names into an error."""
    return ", ".join(names) or "none"
