"""Jobs on an existing Ray cluster: a named, detached Ray actor for each, which runs the ordinary command."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from serl_chunk.fleet.engines import LEARNER, Job, JobStatus, Worker
from serl_chunk.types import ConfigError

NAMESPACE = "serl-chunk"
ANSWER_S = 2.0  # seconds in which an actor that has its resources answers
CLOSE_S = 5.0
HINT = "--engine ray needs Ray (pip install 'serl-chunk[ray]'), as has each node of the cluster"
OPEN = (
    "any program that reaches the cluster's ports may run code on its nodes as their user: Ray listens on an outward "
    "address, also where 127.0.0.1 was given. Start it with RAY_AUTH_MODE=token, and set that here too, or accept "
    "that network with --open_cluster"
)

logger = logging.getLogger(__name__)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"{HINT}: {error}") from error


def _note(mark: str, state: str) -> None:
    """Keep a job's end, or the request of it, in the cluster: a worker that Ray starts again sees it."""
    importlib.import_module("ray.experimental.internal_kv")._internal_kv_put(mark, state)


def _noted(mark: str) -> str:
    found = importlib.import_module("ray.experimental.internal_kv")._internal_kv_get(mark)
    return (found or b"").decode()


class RayEngine:
    """Ray restarts an actor whose process or node is gone, and that starts its child again; no driver is needed.

    Args:
        fleet: names the actors, as FLEET/JOB.
        address: of the cluster; "auto": the one of this machine.
        resources: that an actor needs; `learner`: that the learner does. cpu and gpu are Ray's own.
        open_cluster: accept a cluster without tokens.

    Raises ConfigError without Ray, a cluster, or tokens.
    """

    def __init__(
        self, fleet: str, *, address: str = "auto", resources: Mapping[str, float] | None = None,
        learner: Mapping[str, float] | None = None, open_cluster: bool = False,
    ) -> None:  # fmt: skip
        if os.environ.get("RAY_AUTH_MODE") != "token":
            if not open_cluster:
                raise ConfigError(OPEN, parameter="engine")
            logger.warning(f"--open_cluster: {OPEN.partition(':')[0]}")
        self._ray, self._fleet = _ray(), fleet
        self._actors, self._learner = {"cpu": 1.0, **(resources or {})}, {"cpu": 1.0, **(learner or {})}
        try:
            if not self._ray.is_initialized():
                self._ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
        except Exception as error:  # Ray's own kinds differ by version
            text = f"no Ray cluster at {address!r} ({type(error).__name__}: {error}). Start one with `ray start --head`"
            raise ConfigError(text, parameter="ray_address") from error

    def start(self, jobs: Sequence[Job]) -> int:
        worker = self._ray.remote(Worker)
        for job in jobs:
            needed, mark = dict(self._needs(job.name)), self._mark(job.name)
            _note(mark, "")  # of an earlier fleet
            worker.options(
                name=f"{self._fleet}/{job.name}", lifetime="detached", max_restarts=-1, max_concurrency=8,
                num_cpus=needed.pop("cpu"), num_gpus=needed.pop("gpu", 0.0), resources=needed,
            ).remote(job, functools.partial(_noted, mark), functools.partial(_note, mark))  # fmt: skip
        return 0

    def _mark(self, name: str) -> str:
        return f"{NAMESPACE}/{self._fleet}/{name}"

    def _needs(self, name: str) -> dict[str, float]:
        return self._learner if name == LEARNER else self._actors

    def _handles(self) -> dict[str, Any]:
        found = {}
        for name in self._ray.util.list_named_actors():
            fleet, _, job = name.rpartition("/")
            if fleet == self._fleet:
                found[job] = self._ray.get_actor(name)
        return found

    def status(self) -> list[JobStatus]:
        asked = {name: handle.status.remote() for name, handle in self._handles().items()}
        waited = self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
        return [self._answer(name, asked[name], asked[name] in waited[0]) for name in sorted(asked)]

    def _answer(self, name: str, reference: Any, answered: bool) -> JobStatus:
        if answered:
            try:
                status: JobStatus = self._ray.get(reference)
                return status
            except self._ray.exceptions.RayActorError as error:
                return JobStatus(name, "restarting", f"its process or node is gone ({type(error).__name__})")
        if not self._begins(name):
            return JobStatus(name, "lost", f"gives no answer within {ANSWER_S:g} s: check its node")
        needs = ", ".join(f"{what}={n:g}" for what, n in self._needs(name).items())
        return JobStatus(name, "waiting", f"for a node with {needs} to spare, or it starts")

    def _begins(self, name: str) -> bool:
        """Return whether Ray waits for a place for an actor, or starts it: it has no child."""
        table = self._ray._private.state.actors().values()
        states = [row["State"] for row in table if row["Name"] == f"{self._fleet}/{name}"]
        return not {"ALIVE"}.intersection(states)

    def stop(self, names: Collection[str], *, drain: bool) -> None:
        handles = {name: handle for name, handle in self._handles().items() if name in names}
        for name in handles:
            _note(self._mark(name), "stopped")  # first: what Ray starts again from now on starts no child
        asked = {handle.stop.remote(drain): name for name, handle in handles.items()}
        waited = self._ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
        for late in waited[1]:
            if self._begins(asked[late]):  # another one takes its time, and has the request
                self._ray.kill(handles[asked[late]])

    def close(self) -> None:
        ended, handles = [status.name for status in self.status() if status.ended], self._handles()
        for name in ended:
            self._ray.kill(handles[name])
        deadline = time.monotonic() + CLOSE_S
        while self._handles().keys() & set(ended) and time.monotonic() < deadline:
            time.sleep(0.1)
