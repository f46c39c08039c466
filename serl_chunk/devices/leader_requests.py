"""Leaders that are driven to their arms before an episode: what is requested of the robot's server, and how it goes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.devices.base import FAILED, KEEPS, MOVES, THERE, WAITS, DriveStatus, InputDevice

logger = logging.getLogger(__name__)

AGAIN_S = 0.1  # between two requests; the server permits a drive for 0.3 s after each
KEEPS_S = 2.0  # for which all leaders keep their torque at their arms, so that hands take hold of them
LONGEST_S = 60.0  # of a drive
RELEASED_S = 1.0  # until leaders that were there report that they have no torque


class LeaderDrives:
    """The leaders of one robot, which are driven together. All calls come from the control loop's thread.

    The server permits each moment of a drive, while its robot stands in HOLD, and ends it where no request follows.

    Args:
        request: sends a drive's number and the first joint that each device leads; no device ends it.
        leaders: each with its first joint, by the name of its table.
        now: monotonic seconds.
    """

    def __init__(
        self,
        request: Callable[[int, Mapping[str, int]], object],
        leaders: Mapping[str, tuple[InputDevice, int]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request, self._now = request, now
        self._devices = {name: device for name, (device, _) in leaders.items()}
        self._first = {name: first for name, (_, first) in leaders.items()}
        self._number = 0
        self._began = self._requested = 0.0
        self._announced = False  # that a leader is about to move
        self._kept: float | None = None  # since when all leaders are at their arms
        self._released: float | None = None  # since when they are to have no torque
        self.failed = ""  # why the newest drive failed

    def begin(self) -> None:
        # Another number than those of other processes of this actor, too.
        self._number = max(self._number + 1, time.time_ns() // 1_000_000)
        self._began, self._requested, self._kept, self._released = self._now(), -1.0, None, None
        self._announced, self.failed = False, ""

    def poll(self) -> bool:
        """Go on with the drive; returns whether it is under way. Else the leaders are there, or it has `failed`."""
        if self.failed:
            return False
        now, drives = self._now(), self._statuses()
        for name, drive in drives.items():
            if drive is None:
                return self._fail(f"{name} is lost")
            if drive.number == self._number and drive.phase == FAILED:
                return self._fail(f"{name}: {drive.why}")
        if now - self._began > LONGEST_S:
            return self._fail(f"they were not there within {LONGEST_S:g} s")
        phases = {
            drive.phase if drive is not None and drive.number == self._number else "" for drive in drives.values()
        }
        if phases == {THERE}:
            return False
        if self._released is not None:
            return now - self._released < RELEASED_S or self._fail("one reports no end of its drive")
        if phases & {WAITS, MOVES} and not self._announced:
            self._announced = True
            logger.warning("leaders: they move to their arms in a second. Take your hands off them\a")
        if phases <= {KEEPS, THERE} and self._kept is None:
            self._kept = now
            logger.warning(f"leaders: at their arms. Take hold of them: their torque ends in {KEEPS_S:g} s\a")
        try:
            if self._kept is not None and now - self._kept >= KEEPS_S:
                self._released = now
                self._request(self._number, {})
            elif now - self._requested >= AGAIN_S:
                self._requested = now
                self._request(self._number, self._first)
        except RobotError as e:
            return self._fail(str(e))
        return True

    def cancel(self) -> None:
        """End the drive at once: no leader keeps torque."""
        with contextlib.suppress(RobotError):  # without requests the server ends it
            self._request(self._number, {})

    def remarks(self) -> tuple[tuple[str, str], ...]:
        """Return what the leaders do, and what the operator does meanwhile."""
        names = ", ".join(self._devices)
        if self._kept is not None:
            return ((f"{names}: at its arm", f"take hold of it: its torque ends after {KEEPS_S:g} s"),)
        return ((f"{names}: moves to its arm", "keep your hands off it"),)

    def _statuses(self) -> dict[str, DriveStatus | None]:
        samples = {name: device.read() for name, device in self._devices.items()}
        return {name: sample.drive if sample.alive else None for name, sample in samples.items()}

    def _fail(self, why: str) -> bool:
        self.failed = why
        self.cancel()
        return False
