"""A device that a robot's server hosts, on real sockets, from a thread of the test with faults that the test sets."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

from robot_served import HERE

from serl_chunk_robot.devices.base import KeyEvent, Sample
from serl_chunk_robot.robot_file.loading import Source
from serl_chunk_robot.server.streams import Job, ReadingPublisher


class HostedDevice:
    """A context. `sample` is published until it is `silent`, with a stamp that is `late` by so many s.

    The server's process is that of `run`, and its clock is `ahead` of this machine's, s.
    """

    def __init__(
        self, run: str, name: str, port: int, sample: Sample, *, keys: Path | None = None, ahead: float = 0.0
    ) -> None:
        self.sample, self.silent, self.late, self._ahead = sample, False, 0.0, ahead
        self.pedals: tuple[str, ...] = ()
        self._keys: deque[KeyEvent] = deque()
        source = Source(Path("robot.toml"), "fake", {}, "device[0].driver", "device[0]")
        job = Job.of("device", [(name, port, ())], source, HERE, keys, run)
        self._publisher = ReadingPublisher(job, self._clock)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> HostedDevice:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._publisher.close()

    def press(self, name: str, pressed: bool = True, *, ago: float = 0.0) -> None:
        self._keys.append(KeyEvent(name, pressed, self._clock() - ago))

    def _clock(self) -> float:
        return time.monotonic() + self._ahead

    def _run(self) -> None:
        while not self._ended.wait(0.008):
            if not self.silent:
                keys = [self._keys.popleft() for _ in range(len(self._keys))]
                self._publisher.publish(self.sample._replace(stamp=self._clock() - self.late), keys, self.pedals)
