"""A learner's end of the transport in a process of its own, for benchmarks over loopback. Measures nothing itself."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.server.handler import ServerHandler
from serl_chunk.transport.server.server import LearnerServer
from serl_chunk.transport.storage.spool import Spool
from serl_chunk_robot.wire.codec import Limits

HOST = "127.0.0.1"
CONTRACT = {"benchmark": "loopback"}
START_SECONDS = 60.0  # for a process to import what it needs, on a busy machine


@contextlib.contextmanager
def serving(port: int, pipe: Connection) -> Iterator[LearnerServer]:
    """A server that takes every record and keeps none; the other process is told when it is ready."""
    server = LearnerServer(
        TransportConfig(),
        ServerHandler(),
        bind=HOST,
        port=port,
        contract=CONTRACT,
    )
    server.start()
    try:
        pipe.send("ready")
        yield server
    finally:
        server.close()


def connected(port: int) -> LearnerLink:
    """The actor's end, connected to the server at `port`."""
    folder, config = Path(tempfile.mkdtemp()), TransportConfig()  # removed with the spool
    limits = Limits(config.max_message_bytes, config.max_arrays)
    link = LearnerLink(
        config, host=HOST, port=port, actor_id="bench", contract=CONTRACT, spools=lambda run: Spool(folder, limits)
    )
    link.connect(timeout=START_SECONDS)
    return link


def other_process(target: Callable[[int, Connection], None], port: int) -> tuple[BaseProcess, Connection]:
    """Start `target(port, pipe)` in a process of its own; returns it and this end of the pipe once it is ready."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(port, theirs), daemon=True)
    process.start()
    theirs.close()  # else the end of the process would not end our reading
    if not mine.poll(START_SECONDS) or mine.recv() != "ready":
        raise SystemExit(f"the other process was not ready after {START_SECONDS:g} s")
    return process, mine
