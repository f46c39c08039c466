"""A camera's frames on real sockets, from a thread of the test, with faults that the test injects."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from robot_served import HERE

from serl_chunk_robot.drivers.fake_camera import FakeCamera
from serl_chunk_robot.robot_file.camera_views import View
from serl_chunk_robot.robot_file.loading import Source
from serl_chunk_robot.server.streams import FramePublisher, Job


def job(name: str, port: int, keys: Path | None = None, driver: str = "fake", **options: object) -> Job:
    source = Source(Path("robot.toml"), driver, options, "camera[0].driver", "camera[0]")
    return Job.of("camera", [(name, port, View())], source, HERE, keys, "run")


class PublishedCamera:
    """A fake camera whose frames are published, `late` by so many s. `camera.frozen` and `silent` are its faults."""

    def __init__(self, name: str, port: int, keys: Path | None = None, height: int = 12, width: int = 16) -> None:
        self.camera = FakeCamera(height, width, rate=60.0)
        self.silent, self.late = False, 0.0
        self._publisher = FramePublisher(job(name, port, keys), self.camera.spec())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._publisher.close()

    def _run(self) -> None:
        self.camera.open(time.monotonic)
        while not self._ended.is_set():
            frame = self.camera.read()
            if not self.silent:
                self._publisher.publish(frame._replace(stamp=frame.stamp - self.late))
