"""A contestant's processes: a learner and up to four actors."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from serl_chunk.transport.security.server import ServerKeys
from support.worker import Worker

ACTORS = 4
COSTLY = 'logging.debug(f"Received new request: {message}")'  # of agentlace's server, for every request
COSTLY_FILE = Path("agentlace/zmq_wrapper/req_rep.py")


@dataclasses.dataclass
class Deployment:
    """One contestant. `options` go to the learner's `open` and the actors' `connect`."""

    name: str
    learner: Worker
    actors: list[Worker]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    module: str = "support.transport_baselines.ours"
    interpreter: dict[str, Any] = dataclasses.field(default_factory=dict)  # of further workers

    def worker(self, name: str) -> Worker:
        """Another process: "Learner" or "Actor"."""
        return Worker(self.module, name, **self.interpreter)

    def variant(self, name: str, **options: Any) -> Deployment:
        """The same processes with other options; only one of the two can be open."""
        return dataclasses.replace(self, name=name, options={**self.options, **options})

    @contextlib.contextmanager
    def connected(self, actors: int = 1, **options: Any) -> Iterator[dict[str, float]]:
        """Open the learner and connect actors; what the learner received is in the dictionary afterwards."""
        received: dict[str, float] = {}
        options = {**self.options, **options}
        names = [f"actor{i}" for i in range(actors)]
        port = self.learner("open", names=names, **options)["port"]
        for name, actor in zip(names, self.actors, strict=False):
            actor("connect", **{**options, "port": port, "name": name})
        yield received
        for actor in self.actors[:actors]:
            actor("disconnect")
        received.update(self.learner("close"))


def make_deployment(name: str, module: str, options: dict[str, Any] | None = None, **interpreter: Any) -> Deployment:
    learner = Worker(module, "Learner", **interpreter)
    actors = [Worker(module, "Actor", **interpreter) for _ in range(ACTORS)]
    return Deployment(name, learner, actors, options or {}, module, interpreter)


@contextlib.contextmanager
def deployments(folder: Path, agentlace: str | None, python: str) -> Iterator[list[Deployment]]:
    """Ours, bare sockets, both also with keys, bare ones that write first, and agentlace; ended afterwards."""
    with contextlib.ExitStack() as stack:
        interpreter = stack.enter_context(_patched(Path(agentlace), python)) if agentlace else None
        ours = make_deployment("ours", "support.transport_baselines.ours")
        keys = folder / "keys"
        ServerKeys.ensure(keys)  # which has a key for actors on this machine, too
        bare = make_deployment("bare", "support.transport_baselines.raw_zmq")
        curve = [key.decode() for key in zmq.curve_keypair()]
        found = [
            ours,
            ours.variant("keys", keys=str(keys)),
            bare,
            bare.variant("bare_file", file=True),
            bare.variant("bare_curve", curve=curve),
            bare.variant("bare_file_curve", file=True, curve=curve),
        ]
        if interpreter is not None:
            ports = _free_ports(2)
            found.append(
                make_deployment("agentlace", "support.transport_baselines.agentlace", {"ports": ports}, **interpreter)
            )
        try:
            yield found
        finally:
            for worker in {id(w): w for deployment in found for w in (deployment.learner, *deployment.actors)}.values():
                worker.kill()


@contextlib.contextmanager
def _patched(checkout: Path, python: str) -> Iterator[dict[str, Any]]:
    """Arguments of workers that import a copy of agentlace without its costly line."""
    source = checkout / COSTLY_FILE
    if not source.is_file():
        raise SystemExit(f"--agentlace={checkout}: no checkout of agentlace, {COSTLY_FILE} is missing")
    text = source.read_text()
    if text.count(COSTLY) != 1:
        raise SystemExit(f"{source} has no line {COSTLY!r}: this is not the version that is known here")
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(checkout / "agentlace", Path(copy) / "agentlace")
        (Path(copy) / COSTLY_FILE).write_text(text.replace(COSTLY, "pass"))
        tried = subprocess.run([python, "-c", "import agentlace.trainer"], cwd=copy, capture_output=True, text=True)
        if tried.returncode:
            why = " ".join(tried.stderr.strip().splitlines()[-1:])
            raise SystemExit(f"{python} cannot import agentlace ({why}): give one that can as --agentlace_python")
        yield {"python": python, "path": [copy]}


def _free_ports(n: int) -> list[int]:
    """Ports that no process uses now."""
    held = [socket.socket() for _ in range(n)]
    for s in held:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports
