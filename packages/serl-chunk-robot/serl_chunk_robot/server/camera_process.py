"""The process of one camera: it opens the camera and publishes views of its frames, as `protocol` describes them.

`processes` starts it, with a job as one line of JSON on its standard input, and the descriptor of a pipe for the reason
of its end as its argument. It ends with its server, however that ends: the standard input ends then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from pathlib import Path
from time import monotonic
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import zmq

from serl_chunk_robot.drivers.camera import CameraError, CameraSpec, Frame
from serl_chunk_robot.output import background_output
from serl_chunk_robot.robot_file.camera_views import View
from serl_chunk_robot.robot_file.config import CameraFile, load_camera
from serl_chunk_robot.robot_file.loading import Source
from serl_chunk_robot.server.admission import Admission
from serl_chunk_robot.server.processes import Child, Watch
from serl_chunk_robot.wire import arrays
from serl_chunk_robot.wire.protocol import MAX_FRAME, MAX_REQUEST
from serl_chunk_robot.wire.sockets import bind, make_socket, try_send

logger = logging.getLogger(__name__)

FRAMES_QUEUED = 2  # for a slow subscriber; newer ones are dropped
FUTURE = 0.1  # s: a stamp further ahead is of another clock


class Job(NamedTuple):
    """What a camera's process is to do; plain values, as JSON has them."""

    views: Sequence[Tuple[str, int, Sequence[Any]]]  # name, port and fields of each View
    file: str  # robot.toml
    driver: str
    options: Dict[str, Any]
    key: str  # see loading.Source
    table: str
    host: str
    keys: Optional[str]  # folder
    run: str  # of the server's process
    latency: float = 0.0  # s by which the camera's stamps are late

    @classmethod
    def of(cls, views: Sequence[CameraFile], host: str, keys: Optional[Path], run: str) -> Job:
        """Make the job of one device. `views`: of it."""
        source, folder = views[0].source, None if keys is None else str(keys)
        return cls([(each.name, each.port, each.view) for each in views], str(source.path), source.driver,
                   source.options, source.key, source.table, host, folder, run, views[0].latency)  # fmt: skip

    @property
    def name(self) -> str:
        """Of the first view, which has the device's options."""
        return self.views[0][0]

    @property
    def source(self) -> Source:
        return Source(Path(self.file), self.driver, self.options, self.key, self.table)


def children(cameras: Sequence[CameraFile], host: str, keys: Optional[Path], run: str) -> List[Child]:
    """Return the processes of a robot's cameras, one for each device with all its views.

    Args:
        host: at which the frames are published, each camera's at its port.
        keys: folder of the keys that are let in.
        run: of the server's process.
    """
    devices = [camera.name for camera in cameras if not camera.of]
    views = [[camera for camera in cameras if name in (camera.name, camera.of)] for name in devices]
    jobs = [Job.of(each, host, keys, run) for each in views]
    return [Child("camera", job.name, "serl_chunk_robot.server.camera_process", job._asdict()) for job in jobs]


class FramePublisher:
    """Publishes the views of one camera. Raises ConfigError: a port is in use, or the keys cannot be read."""

    def __init__(self, job: Job, spec: CameraSpec, clock: Callable[[], float] = monotonic) -> None:
        self._spec, self._clock = spec, clock
        self._run, self._latency = job.run, job.latency
        self._views: List[Tuple[str, View, zmq.Socket[bytes]]] = []
        self._last: Optional[np.ndarray] = None
        self._changed = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._admission: Optional[Admission] = None
        try:
            if job.keys is not None:
                self._admission = Admission(self._context, Path(job.keys))
            for name, port, view in job.views:
                socket = make_socket(self._context, zmq.PUB, MAX_REQUEST, MAX_FRAME)
                socket.sndhwm = FRAMES_QUEUED
                if self._admission is not None:
                    self._admission.secure(socket)
                bind(socket, job.host, port)
                self._views.append((name, View(*view), socket))
        except BaseException:
            self.close()
            raise

    def publish(self, frame: Frame) -> None:
        """Send a frame. Raises CameraError for one that is not as the camera's spec and contract say."""
        image, stamp, shape = frame.image, float(frame.stamp), (self._spec.height, self._spec.width, 3)
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape != shape:
            got = f"{image.dtype}{list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
            raise CameraError(f"a picture must be uint8{list(shape)}, got {got}")
        ahead = stamp - self._clock()
        if not (math.isfinite(stamp) and ahead < FUTURE):
            raise CameraError(f"a picture was taken {ahead:.3f} s from now. Take its stamp from the clock of `open`.")
        stamp -= self._latency
        if self._last is None or not self._spec.noisy or not _equal(self._last, image):
            self._changed = stamp
            self._last = np.array(image)
        for name, view, socket in self._views:
            message = {
                "run": self._run, "camera": name, "number": int(frame.number), "moment": stamp,
                "changed": self._changed, "image": view.apply(self._last),
            }  # fmt: skip
            try_send(socket, [arrays.pack(message)])

    def close(self) -> None:
        if self._admission is not None:
            self._admission.close()
        self._context.destroy(linger=0)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    row = len(a) // 2  # tells most pictures apart
    return bool((a[row] == b[row]).all() and (a == b).all())


def run(job: Job, watch: Watch) -> None:
    """Publish a camera's frames until the server ends. Raises what the camera raises."""
    camera = load_camera(job.source)
    spec = camera.spec()
    publisher = FramePublisher(job, spec)
    try:
        camera.open(monotonic)
        logger.info("camera open: name=%s size=%dx%d", job.name, spec.width, spec.height)
        try:
            while not watch.ended.is_set():
                watch.read()
                publisher.publish(camera.read())
        finally:
            camera.close()
    finally:
        publisher.close()


def main() -> None:
    """Run the process. Its argument: the descriptor of the pipe for the reason of its end."""
    pipe = int(sys.argv[1])
    os.set_inheritable(pipe, False)

    def report(reason: str) -> None:
        with contextlib.suppress(OSError):  # the server is gone
            os.write(pipe, reason.encode()[:4000])

    with background_output():  # a pipe that takes nothing must not stop it
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        job = Job(**json.loads(sys.stdin.readline()))
        try:
            run(job, Watch(report))
        except Exception as e:  # of a vendor's or a lab's code
            report(f"{type(e).__name__}: {e}")
            sys.exit(1)


if __name__ == "__main__":
    main()
