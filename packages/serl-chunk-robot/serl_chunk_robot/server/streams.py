"""The processes of cameras and input devices: each opens one, and publishes what it gives as `protocol` describes it.

In a process of its own a camera or device that hangs or crashes delays no pass of the server's loop. ALOHA's leader
arms share ROS with the robot.
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
from typing import Any, Callable, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import zmq

from serl_chunk_robot.devices import HOSTED
from serl_chunk_robot.devices.base import InputDevice, KeyEvent, Sample, lifeless
from serl_chunk_robot.drivers.camera import CameraError, CameraSpec, Frame
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.camera_views import View
from serl_chunk_robot.robot_file.config import CameraFile, DeviceFile, load_camera
from serl_chunk_robot.robot_file.loading import Source, make
from serl_chunk_robot.server.admission import Admission
from serl_chunk_robot.server.leader_permissions import take_permits
from serl_chunk_robot.server.processes import Child, Watch, run_child
from serl_chunk_robot.wire import arrays
from serl_chunk_robot.wire.protocol import MAX_FRAME, MAX_REQUEST
from serl_chunk_robot.wire.sockets import bind, make_socket, try_send

logger = logging.getLogger(__name__)

QUEUED = 2  # messages for a slow subscriber; newer ones are dropped
FUTURE = 0.1  # s: a camera's stamp further ahead is of another clock
PERIOD = 0.008  # s between two readings: as often as a SpaceMouse reports
KEYS_KEPT, MOST_KEYS = 2.0, 256  # s and number of the newest key events, which every reading repeats

Outlet = Tuple[str, int, Sequence[Any]]  # name, port and, of a camera, fields of a View


class Job(NamedTuple):
    """What a process is to open and to publish; plain values, as JSON has them."""

    kind: str  # camera or device
    outlets: Sequence[Outlet]
    of_file: Sequence[Any]  # fields of a loading.Source, its path as a text
    host: str
    keys: Optional[str]  # folder
    run: str  # of the server's process
    latency: float = 0.0  # s by which a camera's stamps are late
    permits: int = -1  # descriptor from which permissions to drive a device are read; -1: there are none

    @classmethod
    def of(
        cls, kind: str, outlets: Sequence[Outlet], of: Source, host: str, keys: Optional[Path], run: str, **more: Any
    ) -> Job:
        folder = None if keys is None else str(keys)
        return cls(kind, outlets, [str(of.path), *of[1:]], host, folder, run, **more)

    def child(self) -> Child:
        return Child(self.kind, self.name, __name__, self._asdict(), tuple({self.permits} - {-1}))

    @property
    def name(self) -> str:
        """Of the first outlet, which has the device's options."""
        return self.outlets[0][0]

    @property
    def source(self) -> Source:
        return Source(Path(self.of_file[0]), *self.of_file[1:])


def camera_children(cameras: Sequence[CameraFile], host: str, keys: Optional[Path], run: str) -> List[Child]:
    """Return the processes of a robot's cameras, one for each device with all its views; arguments as in `Job`."""
    found = []
    for device in cameras:
        if not device.of:
            views = [(each.name, each.port, each.view) for each in cameras if device.name in (each.name, each.of)]
            found.append(Job.of("camera", views, device.source, host, keys, run, latency=device.latency).child())
    return found


def device_children(
    devices: Sequence[DeviceFile], host: str, keys: Optional[Path], run: str, permits: Mapping[str, int] = {},
) -> List[Child]:  # fmt: skip
    """Return the processes of the devices. `permits`: device -> descriptor of `Drives`; else as in `Job`."""
    found = []
    for device in devices:
        views, permit = [(device.name, device.port, ())], permits.get(device.name, -1)
        found.append(Job.of("device", views, device.source, host, keys, run, permits=permit).child())
    return found


class Publisher:
    """The sockets of a job, by name. Raises ConfigError: a port is in use, or the keys cannot be read."""

    def __init__(self, job: Job, clock: Callable[[], float] = monotonic) -> None:
        self._job, self._clock = job, clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._admission: Optional[Admission] = None
        self._sockets: Dict[str, zmq.Socket[bytes]] = {}
        try:
            if job.keys is not None:
                self._admission = Admission(self._context, Path(job.keys))
            for name, port, _ in job.outlets:
                self._sockets[name] = socket = make_socket(self._context, zmq.PUB, MAX_REQUEST, MAX_FRAME)
                socket.sndhwm = QUEUED
                if self._admission is not None:
                    self._admission.secure(socket)
                bind(socket, job.host, port)
        except BaseException:
            self.close()
            raise

    def send(self, name: str, message: Dict[str, Any]) -> None:
        try_send(self._sockets[name], [arrays.pack({"run": self._job.run, **message})])

    def close(self) -> None:
        if self._admission is not None:
            self._admission.close()
        self._context.destroy(linger=0)


class FramePublisher(Publisher):
    """Publishes the views of one camera."""

    def __init__(self, job: Job, spec: CameraSpec, clock: Callable[[], float] = monotonic) -> None:
        self._spec = spec
        self._views = [(name, View(*view)) for name, _, view in job.outlets]
        self._last: Optional[np.ndarray] = None
        self._changed = 0.0
        super().__init__(job, clock)

    def publish(self, frame: Frame) -> None:
        """Send a frame. Raises CameraError for one that is not as the camera's spec and contract say."""
        image, stamp, shape = frame.image, float(frame.stamp), (self._spec.height, self._spec.width, 3)
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape != shape:
            got = f"{image.dtype}{list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
            raise CameraError(f"a picture must be uint8{list(shape)}, got {got}")
        ahead = stamp - self._clock()
        if not (math.isfinite(stamp) and ahead < FUTURE):
            raise CameraError(f"a picture was taken {ahead:.3f} s from now. Take its stamp from the clock of `open`.")
        stamp -= self._job.latency
        row = len(image) // 2  # tells most pictures apart
        same = self._last is not None and (self._last[row] == image[row]).all() and (self._last == image).all()
        if self._last is None or not (self._spec.noisy and same):
            self._changed = stamp
            self._last = np.array(image)
        for name, view in self._views:
            self.send(name, {"camera": name, "number": int(frame.number), "moment": stamp, "changed": self._changed,
                             "image": view.apply(self._last)})  # fmt: skip


class ReadingPublisher(Publisher):
    """Publishes the readings of one device."""

    def __init__(self, job: Job, clock: Callable[[], float] = monotonic) -> None:
        self._began, self._number, self._count = clock(), 0, 0
        self._keys: Deque[Tuple[int, str, bool, float]] = deque(maxlen=MOST_KEYS)
        super().__init__(job, clock)

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
        self.send(self._job.name, {
            "device": self._job.name, "number": self._number, "moment": now, "stamp": float(sample.stamp),
            "alive": bool(sample.alive), "twist": sample.twist, "joints": sample.joints,
            "buttons": [bool(pressed) for pressed in sample.buttons], "began": self._began,
            "keys": [list(each) for each in self._keys], "pedals": list(pedals),
            "drive": None if sample.drive is None else list(sample.drive),
        })  # fmt: skip


def opened(source: Source) -> InputDevice:
    """Open the device that a file names. Raises ConfigError, also where it cannot be opened."""
    return make(source, HOSTED, ("read", "close"))  # type: ignore[no-any-return]


def run_camera(job: Job, watch: Watch) -> None:
    """Publish a camera's frames until the server ends. Raises what the camera raises."""
    camera = load_camera(job.source)
    spec = camera.spec()
    with contextlib.closing(FramePublisher(job, spec)) as publisher:
        camera.open(monotonic)
        logger.info("camera open: name=%s size=%dx%d", job.name, spec.width, spec.height)
        with contextlib.closing(camera):
            while not watch.ended.is_set():
                watch.read()
                publisher.publish(camera.read())


def run_device(job: Job, watch: Watch) -> None:
    """Publish a device's readings until the server ends. Raises what the device raises."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a device is closed: a leader that is driven has torque
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


def _run(values: Dict[str, Any], report: Callable[[str], None]) -> None:
    job = Job(**values)
    (run_camera if job.kind == "camera" else run_device)(job, Watch(report))


if __name__ == "__main__":  # other errors than those of the file are of a vendor's or a lab's code
    run_child(_run, lambda error: str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}")
