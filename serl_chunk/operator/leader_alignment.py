"""What an episode waits for between its reset and its first tick: the operator, and leaders that are driven."""

from __future__ import annotations

import logging
from typing import Protocol

from serl_chunk.console.view import Obstacle
from serl_chunk.devices.leader_requests import LeaderDrives
from serl_chunk.operator.motion_permit import Permit

logger = logging.getLogger(__name__)


class Wait(Protocol):
    """Polls the operator, shows why the episode does not begin, and waits a moment."""

    def __call__(self, *why: Obstacle) -> bool:
        """Return whether the episode may still begin without another reset."""
        ...


def confirm_scene(permit: Permit, wait: Wait, go: str) -> bool:
    """Wait for "scene ready" and its countdown; returns whether it came. `go`: its key."""
    permit.granted = False
    why = Obstacle("the scene is not confirmed", f"look at it, then press {go}")
    while not permit.granted and wait(why):
        pass
    return permit.granted


def drive_leaders(drives: LeaderDrives | None, permit: Permit, wait: Wait) -> bool:
    """Drive leaders to their arms; returns whether they are there.

    A hold, a stop and a drive that failed take their torque. The robot then holds until the operator goes on, which
    begins another drive after the countdown.
    """
    while drives is not None:
        drives.begin()
        while drives.poll():
            if not wait(*(Obstacle(*each) for each in drives.remarks())):
                drives.cancel()
                return False
            if permit.held or permit.counts:
                drives.cancel()
                break
        else:
            if not drives.failed:
                break
            logger.warning(f"leaders: {drives.failed}. Put them at their arms by hand, or go on to drive them again\a")
            permit.hold()
        while permit.held or permit.counts:
            if not wait():
                return False
        permit.granted = False
    return True
