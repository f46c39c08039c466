"""A LeRobot data set whose conversion was killed, at every moment, and continued: the same bytes as without."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("av")

from lerobot_sets import HZ, contents, episode_of, plain, write

from serl_chunk.data.lerobot.shards import PendingShards
from serl_chunk.data.lerobot.writer import LeRobotSink
from serl_chunk.data.source import Json
from serl_chunk.types import Episode

pytestmark = pytest.mark.system

CHANGES = ("replace", "fsync", "unlink", "rmdir", "mkdir")  # what a writer asks of the disk


class Killed(BaseException):
    """The process is gone; nothing handles it."""


class Disk:
    """Counts changes; from the `dies_at`-th on none happens, so that what would clean up cannot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_at: int | None) -> None:
        self.changes, self.dies_at = 0, dies_at
        fsync = os.fsync
        for name in CHANGES:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name), fsync))

    def _wrapped(self, real: Callable, fsync: Callable) -> Callable:
        def change(*arguments, **named):
            if self.dies_at is not None and self.changes >= self.dies_at:
                raise Killed
            self.changes += 1
            return None if real is fsync else real(*arguments, **named)  # nobody cuts the power here

        return change


def convert(sink: LeRobotSink, episodes: Sequence[Episode], manifest: list[Json], ahead: int = 2) -> None:
    """As the pipeline does: two episodes are staged ahead, each is noted before it is placed."""
    layout = plain(sink.layout(episodes[0], HZ))
    del manifest[sink.placed(layout, manifest) :]
    ready: dict[int, Json] = {}
    for number in range(len(manifest), len(episodes)):
        for next_one in range(number, min(number + ahead, len(episodes))):
            if next_one not in ready:
                ready[next_one] = plain(sink.stage(layout, next_one, episodes[next_one]))
        manifest.append(ready[number])
        sink.place(layout, number, manifest[-1])
    sink.finish(layout, manifest)


HOW = {
    "images": {"data_file_mb": 0.012},
    "videos": {"mode": "video", "data_file_mb": 0.004, "video_file_mb": 0.003},
    "version 2.1": {"mode": "video", "version": "v2.1"},
}


def killed(folder: Path, how: dict, episodes: list[Episode], *moments: int) -> int:
    """Convert, killed at each of these changes of the disk in turn, then to the end; return how often it was."""
    manifest, times = [], 0
    for moment in (*moments, None):
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, moment)
            try:
                convert(LeRobotSink(folder, **how), episodes, manifest)
            except Killed:
                times += 1
    return times


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        ("images", 7),
        pytest.param("videos", 9, marks=pytest.mark.slow),
        pytest.param("version 2.1", 23, marks=pytest.mark.slow),
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in HOW),
    ],
)
def test_killed_at_any_moment_and_continued(tmp_path: Path, kind: str, every: int):
    episodes = [episode_of(i, 3 + i % 2, task=f"task {i // 2}", every=1 + i % 2) for i in range(4)]
    wanted = contents(write(LeRobotSink(tmp_path / "whole", **HOW[kind]), episodes))
    if kind != "version 2.1":
        assert sum(name.startswith("data/") for name in wanted) == 2, sorted(wanted)
    moment = 0
    while True:
        died = killed(tmp_path / f"killed_{moment}", HOW[kind], episodes, moment)
        assert contents(tmp_path / f"killed_{moment}") == wanted, f"killed at change {moment}"
        if not died:
            break
        moment += every
    assert moment > 100


@pytest.mark.slow
def test_killed_twice(tmp_path: Path):
    episodes = [episode_of(i, 4) for i in range(4)]
    how = HOW["videos"]
    wanted = contents(write(LeRobotSink(tmp_path / "whole", **how), episodes))
    for first in range(5, 60, 18):
        for second in range(3, 40, 12):
            folder = tmp_path / f"killed_{first}_{second}"
            killed(folder, how, episodes, first, second)
            assert contents(folder) == wanted, (first, second)


def test_continued_after_the_end_and_what_never_came_leaves_nothing(tmp_path: Path):
    """`finish` was called and its caller killed before it could note that."""
    episodes = [episode_of(i, 4) for i in range(3)]
    manifest: list[Json] = []
    sink = LeRobotSink(tmp_path / "ended")
    convert(sink, episodes, manifest)
    wanted = contents(sink.folder)
    convert(sink, episodes, manifest)
    assert (len(manifest), contents(sink.folder)) == (3, wanted)
    sink = LeRobotSink(tmp_path / "begun")
    layout = sink.layout(episodes[0], HZ)
    sink.stage(layout, 0, episode_of(9, 6))
    assert sink.stage(layout, 0, episodes[0])["length"] == 4  # replaces the first attempt
    PendingShards(sink.folder, layout).set_tasks(["never"])  # of an episode that was left out at the second attempt
    assert sink.placed(layout, []) == 0
    assert PendingShards(sink.folder, layout).tasks() == []
    assert not [p for p in sink.folder.rglob("*") if p.is_file() and p.name != "tasks.json"]
