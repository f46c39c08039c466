"""Reading and staging episodes, in this process or in worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from serl_chunk.data.source import Json, Sink, Source
from serl_chunk.data.validate import cameras_of, check_equal_steps, check_times
from serl_chunk.io import os_reason
from serl_chunk.types import ConfigError, DataError

QUEUED = 8  # jobs a process has; where one takes long, so many episodes lie on disk twice


class ConversionSpec(NamedTuple):
    """What is the same for all episodes of a conversion."""

    source: Source
    sink: Sink
    layout: Json
    tolerance_s: float | None  # by which a step may leave its place at the rate; None: not looked at


class EpisodeJob(NamedTuple):
    """One episode of the source."""

    number: int
    key: str


class Staged(NamedTuple):
    """An episode that is ready to be placed."""

    job: EpisodeJob
    staged: Json
    steps: int
    frames: int
    nbytes: int  # of arrays and decoded frames


class RefusedEpisode(NamedTuple):
    """An episode that cannot be converted because of its content."""

    job: EpisodeJob
    reason: str


class WorkerFault(NamedTuple):
    """A failure that is not the episode's: a full disk, no memory, a mistake in the program."""

    error: str
    is_config: bool = False


Result = Staged | RefusedEpisode | WorkerFault


def stage(work: ConversionSpec, job: EpisodeJob) -> Result:
    """Read one episode and stage it; never raises an Exception."""
    where = f"{work.source.path}: episode {job.key}"
    try:
        episode = work.source.read(job.key)
        check_times(where, episode.steps.stamp)
        if work.tolerance_s is not None:
            check_equal_steps(where, episode.steps.stamp, work.source.hz, work.tolerance_s)
        staged = work.sink.stage(work.layout, job.number, episode)
    except DataError as error:
        reason = str(error)
        return RefusedEpisode(job, reason if reason.startswith(str(work.source.path)) else f"{where}: {reason}")
    except ConfigError as error:
        return WorkerFault(str(error), is_config=True)
    except OSError as error:
        reason = os_reason(error)
        return WorkerFault(f"{where} could not be converted: {reason}. If the disk is full, make room, and resume")
    except MemoryError as error:
        return WorkerFault(f"{where} does not fit into memory ({error}). Use fewer workers")
    except Exception:
        return WorkerFault(f"{where}: a mistake in this program, not in your data:\n{traceback.format_exc()}")
    steps = episode.steps
    images = [rows.values for rows in cameras_of(episode).values()]
    nbytes = sum(values.nbytes for values in (steps.action, *steps.observation.values(), *images))
    return Staged(job, staged, steps.n, sum(map(len, images)), nbytes)


class Pool:
    """Stages jobs in `n` processes started anew (`spawn`), since a fork would copy this one's threads; 0: in this one.

    Each has `QUEUED` jobs at most, the one it works on included: it need not wait while this process writes a file.
    They end with this process, however that ends, and keep the file descriptor `held` open until then. This process has
    one job at most.
    """

    def __init__(self, work: ConversionSpec, n: int, held: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._work, self.window = work, max(1, QUEUED * n)  # jobs at most
        self._workers: list[tuple[BaseProcess, Connection]] = []
        # Of each worker, the one it works on first.
        self._jobs: list[deque[EpisodeJob]] = [deque() for _ in range(max(1, n))]
        lock = Connection(os.dup(held))  # the one thing with a descriptor that a spawned process can be passed
        try:
            for i in range(n):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(work, theirs, lock), name=f"convert-{i}", daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
        except BaseException:
            self.close()
            raise
        finally:
            lock.close()

    def idle(self) -> int:
        """Return how many jobs may be submitted now."""
        return self.window - sum(map(len, self._jobs))

    def submit(self, job: EpisodeJob) -> None:
        index = min(range(len(self._jobs)), key=lambda i: len(self._jobs[i]))
        self._jobs[index].append(job)
        if self._workers:
            with contextlib.suppress(OSError):  # it is dead, which `results` returns
                self._workers[index][1].send(job)

    def results(self) -> Sequence[Result]:
        """Wait until a job is done."""
        if not self._workers:
            return [stage(self._work, self._jobs[0].pop())]
        found: list[Result] = []
        while not found:
            busy = {i: self._workers[i] for i, jobs in enumerate(self._jobs) if jobs}
            ready = wait([each for process, ours in busy.values() for each in (ours, process.sentinel)])
            for i, (process, ours) in busy.items():
                if ours not in ready and process.sentinel not in ready:
                    continue
                try:
                    found.append(ours.recv())  # what it sent before it died counts
                except (EOFError, OSError):
                    process.join()
                    status, how = process.exitcode or 0, f"ended with status {process.exitcode}"
                    if status < 0:
                        memory = " (out of memory? Use fewer workers)" if -status == signal.SIGKILL else ""
                        how = f"was killed by {signal.Signals(-status).name}{memory}"
                    where = f"{self._work.source.path}: episode {self._jobs[i][0].key}"
                    remedy = "Resume, or leave the episode out"
                    return [WorkerFault(f"{where}: the process that converted it {how}. {remedy}")]
                self._jobs[i].popleft()
        return found

    def close(self) -> None:
        """End, also amid a job."""
        for process, ours in self._workers:
            ours.close()
            process.kill()  # what it leaves half done is removed by the next attempt, as after a power cut
        for process, _ in self._workers:
            process.join()


def _serve(work: ConversionSpec, connection: Connection, held: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent decides
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(stage(work, job))
