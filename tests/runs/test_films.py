"""Films of training episodes, from a run's journal."""

import json

import pytest
from coded_replay import coded
from journal_runs import Run
from metric_logs import add_episode, open_log

from serl_chunk.runs.metrics import Counters
from serl_chunk.runs.report import tables
from serl_chunk.runs.report.tables import film_training_episodes
from serl_chunk.types import Source


class FakeVideo:
    """As EpisodeVideo, without an encoder."""

    human: dict = {}  # noqa: RUF012 (of all videos, by name)

    def __init__(self, path, control_hz):
        self.path, self.shown = path, []
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, images, *, human=False):
        assert set(images) == {"images/a", "images/b"}
        self.shown.append(human)

    def finish(self, name):
        self.human[name] = self.shown
        self.path.write_bytes(b"mp4")

    def discard(self):
        raise AssertionError("no error")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "EpisodeVideo", FakeVideo)
    monkeypatch.setattr(tables, "ffmpeg_program", lambda: "ffmpeg")
    FakeVideo.human = {}
    run = Run(tmp_path / "run")
    episodes = [coded(k, n, "success") for k, n in enumerate((12, 10, 9))]
    episodes[2].source[2:5] = Source.HUMAN
    with run.opened():
        run.feed(episodes)
    return run


def rows(run, *lengths):
    with open_log(run.path) as log:
        for number, length in enumerate(lengths, 1):
            add_episode(log, Counters(0, 0, 0), length=length, number=number)


def test_the_newest_episodes_are_filmed_with_the_ticks_of_a_human(run):
    rows(run, 12, 10, 9)
    assert film_training_episodes(run.path, 2) == 2
    assert FakeVideo.human["000003.mp4"] == [False] * 2 + [True] * 3 + [False] * 4
    assert FakeVideo.human["000002.mp4"] == [False] * 10
    index = json.loads((run.path / "videos/training/films.json").read_text())
    assert index == [{"number": 3, "file": "000003.mp4"}, {"number": 2, "file": "000002.mp4"}]
    FakeVideo.human.clear()
    assert film_training_episodes(run.path, 3) == 3  # those that exist are kept
    assert set(FakeVideo.human) == {"000001.mp4"}


def test_an_episode_of_another_length_than_its_row_is_not_filmed(run):
    rows(run, 12, 11, 9)
    assert film_training_episodes(run.path, 3) == 2
    assert set(FakeVideo.human) == {"000001.mp4", "000003.mp4"}
