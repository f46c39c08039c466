"""The process of one camera: it opens the camera and publishes views of its frames, as `protocol` describes them."""

from __future__ import annotations

import contextlib
import logging
import math
from pathlib import Path
from time import monotonic
from typing import Callable, List, Optional, Sequence

import numpy as np

from serl_chunk_robot.drivers.camera import CameraError, CameraSpec, Frame
from serl_chunk_robot.robot_file.camera_views import View
from serl_chunk_robot.robot_file.config import CameraFile, load_camera
from serl_chunk_robot.server.hosted import Job, Outlets, reason_of
from serl_chunk_robot.server.processes import Child, Watch, run_child
from serl_chunk_robot.wire import arrays

logger = logging.getLogger(__name__)

FUTURE = 0.1  # s: a stamp further ahead is of another clock


def children(cameras: Sequence[CameraFile], host: str, keys: Optional[Path], run: str) -> List[Child]:
    """Return the processes of a robot's cameras, one for each device with all its views. See `Job.of`."""
    jobs = []
    for device in cameras:
        if not device.of:
            views = [camera for camera in cameras if device.name in (camera.name, camera.of)]
            outlets = [(each.name, each.port, each.view) for each in views]
            jobs.append(Job.of(outlets, device.source, host, keys, run)._replace(latency=device.latency))
    return [Child("camera", job.name, "serl_chunk_robot.server.camera_process", job._asdict()) for job in jobs]


class FramePublisher:
    """Publishes the views of one camera. Raises ConfigError: a port is in use, or the keys cannot be read."""

    def __init__(self, job: Job, spec: CameraSpec, clock: Callable[[], float] = monotonic) -> None:
        self._spec, self._clock = spec, clock
        self._run, self._latency = job.run, job.latency
        self._views = [(name, View(*view)) for name, _, view in job.outlets]
        self._last: Optional[np.ndarray] = None
        self._changed = 0.0
        self._outlets = Outlets(job)

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
        for name, view in self._views:
            message = {
                "run": self._run, "camera": name, "number": int(frame.number), "moment": stamp,
                "changed": self._changed, "image": view.apply(self._last),
            }  # fmt: skip
            self._outlets.publish(name, arrays.pack(message))

    def close(self) -> None:
        self._outlets.close()


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    row = len(a) // 2  # tells most pictures apart
    return bool((a[row] == b[row]).all() and (a == b).all())


def run(job: Job, watch: Watch) -> None:
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


if __name__ == "__main__":
    run_child(lambda job, report: run(Job(**job), Watch(report)), reason_of)
