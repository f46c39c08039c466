"""gym-aloha's two scenes: which objects there are, where they start, and what its reward says of their contacts."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

Contacts = Set[frozenset[str]]  # pairs of geometries that touch, by name

SUCCESS_STAGE = 4
OBJECT_HEIGHT = 0.05  # m, of an object's centre at the start; it drops to the table

# gym-aloha looks at one finger of each hand only, and so its stages do.
_LEFT_FINGER = "vx300s_left/10_left_gripper_finger"
_RIGHT_FINGER = "vx300s_right/10_right_gripper_finger"
_CUBE, _PEG, _PIN, _TABLE = "red_box", "red_peg", "pin", "table"
_SOCKET = ("socket-1", "socket-2", "socket-3", "socket-4")


class Region(NamedTuple):
    """Where an object's centre may start: (x, y) in metres."""

    low: tuple[float, float]
    high: tuple[float, float]


class Scene(NamedTuple):
    """One task of gym-aloha. `stage` gives its reward 0..4 for the contacts there are."""

    model_file: str
    starts: tuple[Region, ...]  # one an object, in the order of the model's free joints
    geometries: frozenset[str]  # the objects' own: contacts among others decide nothing
    stage: Callable[[Contacts], int]


def transfer_cube_stage(contacts: Contacts) -> int:
    """1: the right finger touches the cube, 2: and it is off the table, 3: the left finger does, 4: and it is off.

    Neither monotone nor a sum (gym-aloha, TransferCubeTask.get_reward).
    """
    lifted = not _touch(contacts, _CUBE, _TABLE)
    if _touch(contacts, _CUBE, _LEFT_FINGER):
        return 4 if lifted else 3
    if _touch(contacts, _CUBE, _RIGHT_FINGER):
        return 2 if lifted else 1
    return 0


def insertion_stage(contacts: Contacts) -> int:
    """1: both hands touch their object, 2: and both are off the table, 3: peg and socket touch in the air, 4: the pin.

    The pin sits inside the socket, 2 cm from its mouth; the peg's touching it is the success, in the air or not
    (gym-aloha, InsertionTask.get_reward).
    """
    if _touch(contacts, _PEG, _PIN):
        return 4
    lifted = not _touch(contacts, _PEG, _TABLE) and not any(_touch(contacts, part, _TABLE) for part in _SOCKET)
    if lifted and any(_touch(contacts, _PEG, part) for part in _SOCKET):
        return 3
    held = any(_touch(contacts, part, _LEFT_FINGER) for part in _SOCKET) and _touch(contacts, _PEG, _RIGHT_FINGER)
    return (2 if lifted else 1) if held else 0


SCENES: dict[str, Scene] = {
    "transfer_cube": Scene(
        "bimanual_viperx_transfer_cube.xml",
        (Region((0.0, 0.4), (0.2, 0.6)),),
        frozenset({_CUBE}),
        transfer_cube_stage,
    ),
    "insertion": Scene(
        "bimanual_viperx_insertion.xml",
        (Region((0.1, 0.4), (0.2, 0.6)), Region((-0.2, 0.4), (-0.1, 0.6))),  # peg, socket
        frozenset({_PEG, _PIN, *_SOCKET}),
        insertion_stage,
    ),
}


def _touch(contacts: Contacts, a: str, b: str) -> bool:
    return frozenset((a, b)) in contacts
