"""What the processes of cameras and input devices share: the job that `processes` gives them, and their sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import zmq

from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.loading import Source
from serl_chunk_robot.server.admission import Admission
from serl_chunk_robot.wire.protocol import MAX_FRAME, MAX_REQUEST
from serl_chunk_robot.wire.sockets import bind, make_socket, try_send

QUEUED = 2  # messages for a slow subscriber; newer ones are dropped


class Job(NamedTuple):
    """What a process is to open and to publish; plain values, as JSON has them."""

    outlets: Sequence[Tuple[str, int, Sequence[Any]]]  # name, port and, of a camera, fields of a View
    of_file: Sequence[Any]  # fields of a loading.Source, its path as a text
    host: str
    keys: Optional[str]  # folder
    run: str  # of the server's process
    latency: float = 0.0  # s by which a camera's stamps are late
    permits: int = -1  # descriptor from which permissions to drive a device are read; -1: there are none

    @classmethod
    def of(
        cls, outlets: Sequence[Tuple[str, int, Sequence[Any]]], source: Source, host: str, keys: Optional[Path],
        run: str,
    ) -> Job:  # fmt: skip
        """Make the job of one camera or device. Arguments as the fields."""
        return cls(outlets, [str(source.path), *source[1:]], host, None if keys is None else str(keys), run)

    @property
    def name(self) -> str:
        """Of the first outlet, which has the device's options."""
        return self.outlets[0][0]

    @property
    def source(self) -> Source:
        return Source(Path(self.of_file[0]), *self.of_file[1:])


class Outlets:
    """The sockets of a job, by name. Raises ConfigError: a port is in use, or the keys cannot be read."""

    def __init__(self, job: Job) -> None:
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

    def publish(self, name: str, message: bytes) -> None:
        try_send(self._sockets[name], [message])

    def close(self) -> None:
        if self._admission is not None:
            self._admission.close()
        self._context.destroy(linger=0)


def reason_of(error: Exception) -> str:
    """Return why a process ends: other errors than those of the file are of a vendor's or a lab's code."""
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
