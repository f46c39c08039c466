"""Small episodes at rest of every kind that takes labels, and a viewer of them that is spoken to as a browser does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lerobot_sets
import numpy as np
from coded_episodes import SPEC, make
from http_requests import Answer, Requests
from journal_runs import Run

from serl_chunk.data.formats.hdf5 import write_episode
from serl_chunk.data.lerobot.writer import LeRobotSink
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.runs.episodes import FORMAT
from serl_chunk.types import Begin, Episode, Outcome, Source, SparseRows
from serl_chunk.viewer.server import Viewer

ENDS = ("success", "failure", "limit", "success")
LENGTH = 12


def episodes() -> list[Episode]:
    """Four episodes of 12 ticks: number k has k human ticks, a gap at tick 6 (number 2), and Q falling to -k."""
    found = []
    for k, end in enumerate(ENDS):
        coded = make(np.random.default_rng(k), k, human=False, every_frame=True, end=end)
        coded = dataclasses.replace(
            coded, length=LENGTH, source=np.full(LENGTH, Source.POLICY, np.uint8),
            reads=[set(range(LENGTH + 1)), set(range(0, LENGTH, 3))], lost={6: 9} if k == 2 else {}, end=end,
        )  # fmt: skip
        coded.source[:k] = Source.HUMAN
        coded.source[k : k + 1] = Source.HOLD
        begin, steps, ended = coded.episode()
        index = np.array([0, 5, 10], np.int32)
        q = SparseRows(index, np.array([1.0, 0.5 - k, -k], np.float32))
        values = SparseRows(index, np.array([[1, 0], [0.5 - k, -3], [-k, -9]], np.float32))
        std = SparseRows(index, np.array([0.25, 0.5, k], np.float32))
        reward = np.zeros(LENGTH, np.float32)
        reward[-1] = float(end == "success")
        steps = dataclasses.replace(
            steps,
            sparse=steps.sparse | {"decision/q": q, "decision/q_std": std, "decision/values": values},
            reward=reward,
        )
        found.append(Episode(begin._replace(task=f"task {k}"), steps, ended._replace(reward=None)))
    return found


def hdf5_folder(path: Path) -> Path:
    path.mkdir()
    for k, episode in enumerate(episodes()):
        write_episode(path / f"episode_{k}.hdf5", episode, SPEC)
    return path


def run_folder(path: Path) -> Path:
    run = Run(path)
    with run.opened():
        for k, (begin, steps, end) in enumerate(episodes()):
            for record in (begin, steps.slice(0, 5), steps.slice(5, LENGTH), end):
                run.put("ab"[k % 2], record, jpeg_quality=90)
    return path


def died(path: Path) -> Path:
    """Add an episode to a run whose actor died in it: number 4, e9 of session a."""
    run = Run(path)
    _, steps, _ = episodes()[1]
    with run.opened():
        run.sessions.clear()
        for record in (Begin("e9"), dataclasses.replace(steps.slice(0, 5), episode_id="e9"), Begin("e10")):
            run.put("c", record)
    return path


def lerobot_set(path: Path) -> Path:
    return lerobot_sets.write(LeRobotSink(path), [lerobot_sets.episode_of(k, 8) for k in range(4)])


KINDS = {"hdf5": hdf5_folder, "run": run_folder, "lerobot": lerobot_set}


class Browser(Requests):
    """Requests of one viewer."""

    def label(self, number: int, label: str | None) -> Answer:
        body = json.dumps({"label": label}).encode()
        return self.request(f"label/{number}", body=body, headers={"Content-Type": "application/json"})

    def rows(self) -> list[dict[str, Any]]:
        """All rows, once they are gathered."""
        for _ in range(600):
            listed = self.get("list/0")
            if listed["gathered"] == listed["total"]:
                return list(listed["rows"])
            time.sleep(0.05)
        raise AssertionError("the list is never complete")


@contextlib.contextmanager
def viewing(path: Path, **options: Any) -> Iterator[Browser]:
    """A viewer of `path` that serves."""
    viewer = Viewer(open_episodes(path, ReadOptions(labels=False, **options), None, (FORMAT,)))
    thread = threading.Thread(target=viewer.serve_forever, kwargs={"poll_interval": 0.01})
    viewer.pages.catalogue.start()
    thread.start()
    try:
        yield Browser(viewer.url)
    finally:
        viewer.shutdown()
        thread.join()
        viewer.close()


OUTCOMES = [Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN, Outcome.SUCCESS]
