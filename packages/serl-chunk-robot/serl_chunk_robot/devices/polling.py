"""A device that a thread of its own opens, reads, and opens again after it was unplugged."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Callable, Optional

from serl_chunk_robot.devices.base import SILENT, DeviceError, Sample, lifeless, unshared
from serl_chunk_robot.devices.leader_motion import LeaderDrive
from serl_chunk_robot.drivers.base import why

logger = logging.getLogger(__name__)

AGAIN = 0.5  # s between attempts to open a lost device
JOINS = 1.0  # s


class PolledDevice:
    """A base of devices: subclasses have `_open`, `_look` and `_release`.

    The constructor opens the device and takes a first look. All further calls are made by a thread. Whatever `_look`
    raises is a loss: the reading becomes lifeless at once, one line is logged, and the device is opened again under the
    same name. A reading older than 0.2 s, of a thread that hangs in a library, is lifeless too.

    Args:
        name: path or id, as errors, log lines and the operator's console show it.
        clock: the machine's monotonic clock, s.

    Raises DeviceError: it cannot be opened.
    """

    pause = 0.0  # s between looks that do not wait themselves
    drive: Optional[LeaderDrive] = None  # of a leader that can be driven; it is stepped after each look

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self._clock = name, clock
        self._ending = threading.Event()
        try:
            self._open()
            self._sample = self._look()
        except Exception as e:
            self._let_go()
            if isinstance(e, DeviceError):
                raise
            raise DeviceError(f"{name}: cannot be read ({why(e)}). Unplug it and plug it in again.") from e
        self._thread = threading.Thread(target=self._run, name=f"device {name}", daemon=True)
        self._thread.start()

    def read(self) -> Sample:
        sample = self._sample
        if self._ending.is_set() or self._clock() - sample.stamp > SILENT:
            sample = lifeless(sample)
        if self.drive is not None:
            sample = sample._replace(drive=self.drive.status)
        return unshared(sample)

    def close(self) -> None:
        self._ending.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOINS)

    def _open(self) -> None:
        """Open the device by its name. Raises DeviceError; `_release` is called after that too."""
        raise NotImplementedError

    def _look(self) -> Sample:
        """Take in all that was reported, for 0.05 s at most, and return the newest reading. Raises if it is lost."""
        raise NotImplementedError

    def _release(self) -> None:
        """Close the handle, if one is open."""
        raise NotImplementedError

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._sample = self._look()
                if self.drive is not None:
                    self.drive.step(self._sample, self._clock())
            except Exception as e:  # of a library: of no common kind
                self._sample = lifeless(self._sample)
                if self.drive is not None:
                    self.drive.lost(why(e))
                logger.warning("%s: lost (%s). It commands nothing until it is connected again.", self.name, why(e))
                self._let_go()
                self._reopen()
            else:
                self._ending.wait(self.pause)
        self._let_go()

    def _reopen(self) -> None:
        last = ""
        while not self._ending.wait(AGAIN):
            try:
                self._open()
            except Exception as e:
                self._let_go()
                if why(e) != last:
                    logger.info("Not connected again yet: %s", why(e))
                last = why(e)
            else:
                logger.warning("%s: connected again.", self.name)
                return

    def _let_go(self) -> None:
        with contextlib.suppress(Exception):  # of a handle whose device is gone
            self._release()
