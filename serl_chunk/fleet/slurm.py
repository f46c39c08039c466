"""Jobs on a Slurm cluster by submitit: one for the learner, an array for the actors; requeued where their time ends."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from serl_chunk.fleet.engines import LEARNER, POLL_S, Job, JobFiles, JobStatus, Worker
from serl_chunk.types import ConfigError

HINT = "--engine slurm needs submitit (pip install 'serl-chunk[slurm]')"
LOGS = "slurm"  # folder of submitit's files, in the fleet's
IDS = "jobs.txt"  # NAME ID, a line for each job


def _submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError as error:
        raise ConfigError(f"{HINT}: {error}") from error


class SlurmJob:
    """What submitit runs on a node: a job, with its state and requests in files that all nodes see."""

    def __init__(self, files: JobFiles) -> None:
        self._files = files
        self._worker: Worker | None = None

    def __call__(self, job: Job) -> str:
        self._worker = Worker(job, lambda: self._files.requested(job.name) and "stopped")
        return self._files.follow(job.name, self._worker).state

    def checkpoint(self, job: Job) -> Any:
        """End the child as SIGTERM does, and queue the job again; submitit calls this before its time is up."""
        if self._worker is not None:
            self._worker.stop()
            while not self._worker.wait(POLL_S):
                self._files.write(self._worker.status())
        if self._files.requested(job.name):
            self._files.write(JobStatus(job.name, "stopped"))
            return None
        self._files.write(JobStatus(job.name, "waiting", "queued again: its time was up"))
        return _submitit().helpers.DelayedSubmission(SlurmJob(self._files), job)


class SlurmEngine:
    """Jobs of Slurm, or of submitit's local executor.

    Args:
        folder: the fleet's, on a disk that all nodes see.
        parameters: submitit's, as `slurm_partition`, `timeout_min`, `mem_gb`; `cluster`: slurm or local.
        learner: those that are the learner's own.

    Raises ConfigError without submitit.
    """

    def __init__(
        self, folder: Path, *, parameters: Mapping[str, Any] | None = None, learner: Mapping[str, Any] | None = None
    ) -> None:
        folder = folder.absolute()
        self._submitit, self._files, self._logs = _submitit(), JobFiles(folder), folder / LOGS
        self._parameters, self._learner = dict(parameters or {}), dict(learner or {})
        self._cluster = self._parameters.pop("cluster", "slurm")

    def start(self, jobs: Sequence[Job]) -> int:
        """See `Engine.start`. Raises ConfigError where Slurm is not there, or refuses."""
        (self._files.folder / IDS).unlink(missing_ok=True)  # of an earlier fleet
        self._files.begin([job.name for job in jobs])
        learner = [job for job in jobs if job.name == LEARNER]
        actors = [job for job in jobs if job.name != LEARNER]
        submitted: list[tuple[str, Any]] = []  # of a name, Slurm's job
        for group, own in ((learner, self._learner), (actors, {})):
            if not group:
                continue
            try:
                executor = self._submitit.AutoExecutor(folder=self._logs, cluster=self._cluster)
                executor.update_parameters(**{"timeout_min": 60, "name": "serl-chunk", **self._parameters, **own})
                names, found = [job.name for job in group], executor.map_array(SlurmJob(self._files), group)
            except Exception as error:  # of submitit's own kinds, and of the commands that it runs
                for _, accepted in submitted:
                    accepted.cancel()
                for job in jobs:
                    self._files.write(JobStatus(job.name, "failed", "not submitted, or cancelled as others were not"))
                raise ConfigError(f"submitit: {type(error).__name__}: {error}", parameter="slurm") from error
            submitted += zip(names, found, strict=True)
            (self._files.folder / IDS).write_text("".join(f"{name} {job.job_id}\n" for name, job in submitted))
        return 0

    def _job(self, name: str) -> Any:
        """Return Slurm's own job; None where it has none."""
        if self._cluster != "slurm" or not (self._files.folder / IDS).exists():
            return None
        ids = dict(line.split() for line in (self._files.folder / IDS).read_text().splitlines())
        return self._submitit.SlurmJob(self._logs, ids[name]) if name in ids else None

    def status(self) -> list[JobStatus]:
        return [self._in_queue(status) for status in self._files.status()]

    def _in_queue(self, status: JobStatus) -> JobStatus:
        if status.state not in ("waiting", "lost") or (job := self._job(status.name)) is None:
            return status
        queued = str(job.state)
        detail = f"Slurm job {job.job_id}: {queued}"
        # A job that Slurm ended before, or without, its worker.
        over = queued.startswith(("CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"))
        return status._replace(state="failed" if over else status.state, detail=detail)

    def stop(self, names: Collection[str], *, drain: bool) -> None:
        self._files.request(names, drain=drain)
        for status in self._files.status():
            if status.name in names and status.state == "waiting" and (job := self._job(status.name)) is not None:
                job.cancel()
                self._files.write(JobStatus(status.name, "stopped", "it was not begun"))

    def close(self) -> None:
        return
