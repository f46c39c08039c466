"""The process of one input device: it opens the device and publishes its readings, as `protocol` describes them.

ALOHA's leader arms share ROS with the robot. In a process of its own a device that hangs or crashes delays no pass of
the server's loop. `processes` starts it, with a job as one line of JSON on its standard input and the descriptor of a
pipe for the reason of its end as its argument. It ends with its server, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
from collections import deque
from pathlib import Path
from time import monotonic
from typing import Any, Callable, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import zmq

from serl_chunk_robot.devices import HOSTED
from serl_chunk_robot.devices.base import InputDevice, KeyEvent, Sample, lifeless
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.output import background_output
from serl_chunk_robot.robot_file.device_file import DeviceFile
from serl_chunk_robot.robot_file.loading import Source, make
from serl_chunk_robot.server.admission import Admission
from serl_chunk_robot.server.leader_permissions import take_permits
from serl_chunk_robot.server.processes import Child, Watch
from serl_chunk_robot.wire import arrays
from serl_chunk_robot.wire.protocol import MAX_FRAME, MAX_REQUEST
from serl_chunk_robot.wire.sockets import bind, make_socket, try_send

logger = logging.getLogger(__name__)

PERIOD = 0.008  # s between two readings: as often as a SpaceMouse reports
QUEUED = 2  # for a slow subscriber; newer ones are dropped
KEYS_KEPT, MOST_KEYS = 2.0, 256  # s and number of the newest key events, which every reading repeats


class Job(NamedTuple):
    """What a device's process is to do; plain values, as JSON has them."""

    name: str
    port: int
    file: str  # robot.toml
    driver: str
    options: Dict[str, Any]
    key: str  # see loading.Source
    table: str
    host: str
    keys: Optional[str]  # folder
    run: str  # of the server's process
    permits: int = -1  # descriptor from which the server's permissions to drive it are read; -1: there are none

    @classmethod
    def of(cls, device: DeviceFile, host: str, keys: Optional[Path], run: str, permits: int) -> Job:
        source, folder = device.source, None if keys is None else str(keys)
        return cls(device.name, device.port, str(source.path), source.driver, source.options, source.key, source.table,
                   host, folder, run, permits)  # fmt: skip

    @property
    def source(self) -> Source:
        return Source(Path(self.file), self.driver, self.options, self.key, self.table)


def children(
    devices: Sequence[DeviceFile], host: str, keys: Optional[Path], run: str, permits: Mapping[str, int] = {},
) -> List[Child]:  # fmt: skip
    """Return the processes of the devices; further arguments as of `camera_process.children`.

    Args:
        permits: name of a device -> descriptor of `drives.Drives`.
    """
    jobs = [Job.of(each, host, keys, run, permits.get(each.name, -1)) for each in devices]
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
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._admission: Optional[Admission] = None
        try:
            if job.keys is not None:
                self._admission = Admission(self._context, Path(job.keys))
            self._socket = make_socket(self._context, zmq.PUB, MAX_REQUEST, MAX_FRAME)
            self._socket.sndhwm = QUEUED
            if self._admission is not None:
                self._admission.secure(self._socket)
            bind(self._socket, job.host, job.port)
        except BaseException:
            self.close()
            raise

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
        try_send(self._socket, [arrays.pack(message)])

    def close(self) -> None:
        if self._admission is not None:
            self._admission.close()
        self._context.destroy(linger=0)


def opened(source: Source) -> InputDevice:
    """Open the device that a file names. Raises ConfigError, also where it cannot be opened."""
    return make(source, HOSTED, ("read", "close"))  # type: ignore[no-any-return]


def run(job: Job, watch: Watch) -> None:
    """Publish a device's readings until the server ends. Raises what the device raises."""
    publisher = ReadingPublisher(job)
    try:
        device = opened(job.source)
        logger.info("device open: name=%s device=%s", job.name, device.name)
        keys, pedals = getattr(device, "keys", list), getattr(device, "pedals", ())
        drive = getattr(device, "drive", None)
        try:
            while not watch.ended.wait(PERIOD):
                watch.read()
                if drive is not None and job.permits >= 0:
                    take_permits(job.permits, drive)
                publisher.publish(device.read(), keys(), pedals)
        finally:
            device.close()  # which takes the torque of a leader that is driven
    finally:
        publisher.close()


def main() -> None:
    """Run the process. Its argument: the descriptor of the pipe for the reason of its end."""
    pipe = int(sys.argv[1])
    os.set_inheritable(pipe, False)

    def report(reason: str) -> None:
        with contextlib.suppress(OSError):  # the server is gone
            os.write(pipe, reason.encode()[:4000])

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a device is closed: a leader that is driven has torque
    with background_output():  # a pipe that takes nothing must not stop it
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        job = Job(**json.loads(sys.stdin.readline()))
        try:
            run(job, Watch(report))
        except ConfigError as e:
            report(str(e))
            sys.exit(1)
        except Exception as e:  # of a vendor's or a lab's code
            report(f"{type(e).__name__}: {e}")
            sys.exit(1)


if __name__ == "__main__":
    main()
