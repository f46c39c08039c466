"""The process of one input device: it opens the device and publishes its readings, as `protocol` describes them.

ALOHA's leader arms share ROS with the robot. In a process of its own a device that hangs or crashes delays no pass of
the server's loop.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
from collections import deque
from pathlib import Path
from time import monotonic
from typing import Callable, Deque, List, Mapping, Optional, Sequence, Tuple

from serl_chunk_robot.devices import HOSTED
from serl_chunk_robot.devices.base import InputDevice, KeyEvent, Sample, lifeless
from serl_chunk_robot.robot_file.device_file import DeviceFile
from serl_chunk_robot.robot_file.loading import Source, make
from serl_chunk_robot.server.hosted import Job, Outlets, reason_of
from serl_chunk_robot.server.leader_permissions import take_permits
from serl_chunk_robot.server.processes import Child, Watch, run_child
from serl_chunk_robot.wire import arrays

logger = logging.getLogger(__name__)

PERIOD = 0.008  # s between two readings: as often as a SpaceMouse reports
KEYS_KEPT, MOST_KEYS = 2.0, 256  # s and number of the newest key events, which every reading repeats


def children(
    devices: Sequence[DeviceFile], host: str, keys: Optional[Path], run: str, permits: Mapping[str, int] = {},
) -> List[Child]:  # fmt: skip
    """Return the processes of the devices. `permits`: device -> descriptor of `Drives`; else see `Job.of`."""
    jobs = [Job.of([(each.name, each.port, ())], each.source, host, keys, run)._replace(
        permits=permits.get(each.name, -1)) for each in devices]  # fmt: skip
    return [
        Child("device", job.name, "serl_chunk_robot.server.device_process", job._asdict(), tuple({job.permits} - {-1}))
        for job in jobs
    ]


class ReadingPublisher:
    """Publishes the readings of one device. Raises ConfigError: the port is in use, or the keys cannot be read."""

    def __init__(self, job: Job, clock: Callable[[], float] = monotonic) -> None:
        self._job, self._clock, self._number = job, clock, 0
        self._began, self._count = clock(), 0
        self._keys: Deque[Tuple[int, str, bool, float]] = deque(maxlen=MOST_KEYS)
        self._outlets = Outlets(job)

    def publish(self, sample: Sample, keys: Sequence[KeyEvent] = (), pedals: Sequence[str] = ()) -> None:
        """Send a reading. One that holds a number which is not finite is lifeless.

        Args:
            keys: that went down or up since the last reading.
            pedals: names of the events, of a device that is a pedal.
        """
        now = self._clock()
        for key in keys:
            self._keys.append((self._count, key.name, bool(key.pressed), float(key.stamp)))
            self._count += 1
        while self._keys and now - self._keys[0][3] > KEYS_KEPT:
            self._keys.popleft()
        parts = [part for part in (sample.twist, sample.joints) if part is not None]
        if not all(math.isfinite(x) for part in parts for x in part) or not math.isfinite(sample.stamp):
            sample = lifeless(sample)
        self._number += 1
        message = {
            "run": self._job.run, "device": self._job.name, "number": self._number, "moment": now,
            "stamp": float(sample.stamp), "alive": bool(sample.alive), "twist": sample.twist, "joints": sample.joints,
            "buttons": [bool(pressed) for pressed in sample.buttons], "began": self._began,
            "keys": [list(each) for each in self._keys], "pedals": list(pedals),
            "drive": None if sample.drive is None else list(sample.drive),
        }  # fmt: skip
        self._outlets.publish(self._job.name, arrays.pack(message))

    def close(self) -> None:
        self._outlets.close()


def opened(source: Source) -> InputDevice:
    """Open the device that a file names. Raises ConfigError, also where it cannot be opened."""
    return make(source, HOSTED, ("read", "close"))  # type: ignore[no-any-return]


def run(job: Job, watch: Watch) -> None:
    """Publish a device's readings until the server ends. Raises what the device raises."""
    with contextlib.closing(ReadingPublisher(job)) as publisher:
        device = opened(job.source)
        logger.info("device open: name=%s device=%s", job.name, device.name)
        keys, pedals = getattr(device, "keys", list), getattr(device, "pedals", ())
        drive = getattr(device, "drive", None)
        with contextlib.closing(device):  # which takes the torque of a leader that is driven
            while not watch.ended.wait(PERIOD):
                watch.read()
                if drive is not None and job.permits >= 0:
                    take_permits(job.permits, drive)
                publisher.publish(device.read(), keys(), pedals)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a device is closed: a leader that is driven has torque
    run_child(lambda job, report: run(Job(**job), Watch(report)), reason_of)
