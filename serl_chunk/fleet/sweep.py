"""Many jobs that do not belong together, so many at once: each runs to its end, whatever comes of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from serl_chunk.fleet.engines import Engine, Job, JobStatus, Worker

SHOWN_LINES = 5  # of a job that failed


class LocalJobs:
    """An engine for this machine under which the end of one job is not that of the others."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def start(self, jobs: Sequence[Job]) -> int:
        self._workers.update((job.name, Worker(job)) for job in jobs)
        return 0

    def status(self) -> list[JobStatus]:
        return [worker.status() for worker in self._workers.values()]

    def stop(self, names: Collection[str], *, drain: bool) -> None:
        for name in names:
            self._workers[name].stop(drain)

    def close(self) -> None:
        self._workers = {name: worker for name, worker in self._workers.items() if not worker.status().ended}


class Scheduler:
    """Runs jobs by engines, so many at once. Another one later goes on: it adopts what an engine still runs.

    Args:
        jobs: in the order in which they begin.
        engine_of: the engine of a job, which may be that of others too.
        at_once: jobs at most.
        finished: whether what a job makes is whole.
        busy: whether another process works on it, whose end is awaited.
        show: receives a line for people.
    """

    def __init__(
        self, jobs: Sequence[Job], engine_of: Callable[[str], Engine], *, at_once: int,
        finished: Callable[[str], bool], busy: Callable[[str], bool], show: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._jobs, self._engine_of, self._at_once = {job.name: job for job in jobs}, engine_of, at_once
        self._is_finished, self._busy, self._show = finished, busy, show
        for engine in self._engines(self._jobs):
            engine.close()  # jobs of an earlier process that ended
        known = self._statuses(self._jobs)
        self.running = {name: known[name] for name in self._jobs if name in known and not known[name].ended}
        left = [name for name in self._jobs if name not in self.running]
        self.finished = [name for name in left if finished(name)]
        self.waiting = [name for name in left if name not in self.finished]
        self.failed: list[str] = []
        self._stopping = False
        for name in self.running:
            show(f"{name}: runs already")

    def step(self) -> bool:
        """Take what ended, and begin what may; returns whether anything is left to do."""
        known = self._statuses(self.running)
        for name, before in list(self.running.items()):
            status = known.get(name) or JobStatus(name, "failed", "its engine knows it no more")
            self.running[name] = status
            if status.ended:
                del self.running[name]
                self._engine_of(name).close()  # it may keep a place on a cluster
                self._end(status)
            elif status.state not in (before.state, "running"):
                self._show(f"{name}: {status.state} {status.detail}".rstrip())
        free = 0 if self._stopping else self._at_once - len(self.running)
        for name in [name for name in self.waiting if free > 0 and not self._busy(name)][: max(0, free)]:
            self.waiting.remove(name)
            self._engine_of(name).start([self._jobs[name]])
            self.running[name] = JobStatus(name, "running")
            self._show(f"{name}: begins")
        return bool(self.running or (self.waiting and not self._stopping))

    def stop(self) -> None:
        """Request the end of what runs, as SIGTERM does; nothing begins any more."""
        self._stopping = True
        for name in self.running:
            self._engine_of(name).stop([name], drain=False)

    def progress(self) -> list[str]:
        """Return how far it is: the counts, then the newest line of each job that runs."""
        counts = {"finished": self.finished, "running": self.running, "waiting": self.waiting, "failed": self.failed}
        text = ", ".join(f"{len(names)} {state}" for state, names in counts.items() if names)
        lines = [f"  {name} | {status.lines[-1]}" for name, status in self.running.items() if status.lines]
        lines += [f"  {name} | another process works on it" for name in self.waiting if self._busy(name)]
        return [f"{text} of {len(self._jobs)}", *lines]

    def _end(self, status: JobStatus) -> None:
        name = status.name
        if self._is_finished(name):
            self.finished.append(name)
            self._show(f"{name}: finished ({len(self.finished)} of {len(self._jobs)})")
        elif self._stopping and status.state == "stopped":
            self.waiting.append(name)
            self._show(f"{name}: stopped")
        else:
            self.failed.append(name)
            how = status.detail if status.state == "failed" else "it ended before its last update"
            self._show("\n  | ".join([f"{name}: failed ({how or status.state})", *status.lines[-SHOWN_LINES:]]))

    def _engines(self, names: Collection[str]) -> list[Engine]:
        return list({id(engine): engine for engine in map(self._engine_of, names)}.values())

    def _statuses(self, names: Collection[str]) -> dict[str, JobStatus]:
        return {status.name: status for engine in self._engines(names) for status in engine.status()}
