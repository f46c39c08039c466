"""Corrections reach a learner as files: applied once, refused with a reason, withdrawn, or left by a killed one."""

from __future__ import annotations

import json
import threading
import time

import pytest
from errors import naming

from serl_chunk.runs import amend
from serl_chunk.runs.amend import FOLDER, AmendRequests, request
from serl_chunk.types import Amend, ConfigError, DataError, Outcome

AMEND = Amend("e1", Outcome.FAILURE, "operator", terminated=False, reward=0.5)


class Learner:
    """Polls in a thread, and takes every correction as `answer` says: why it fails, or ""."""

    def __init__(self, run, answer: str = "") -> None:
        self.taken: list = []
        self._answer = answer
        self._requests = AmendRequests(run, self._correct)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _correct(self, session, actor_id, amend, done) -> None:
        self.taken.append((session, actor_id, amend))
        threading.Timer(0.05, done, [self._answer]).start()  # from another thread, as the server does

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            self._requests.poll()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def left(run) -> list[str]:
    return sorted(p.name for p in (run / FOLDER).iterdir())


def test_every_request_is_applied_once_and_leaves_nothing(tmp_path):
    with Learner(tmp_path) as learner:
        for k in range(3):
            request(tmp_path, f"s{k}", "actor", AMEND, 20)
        request(tmp_path, "s", "actor", Amend("e2", discard=True), 20)
    assert [taken[0] for taken in learner.taken] == ["s0", "s1", "s2", "s"]
    assert learner.taken[0] == ("s0", "actor", AMEND)
    assert learner.taken[3][2] == Amend("e2", discard=True)
    assert left(tmp_path) == []


def test_a_refusal_comes_back_with_its_reason(tmp_path):
    with Learner(tmp_path, "the disk is full"), pytest.raises(DataError, match=naming(tmp_path, "the disk is full")):
        request(tmp_path, "s", "actor", AMEND, 20)
    assert left(tmp_path) == []


def test_without_a_learner_it_is_withdrawn(tmp_path):
    with pytest.raises(ConfigError, match=naming(tmp_path)):
        request(tmp_path, "s", "actor", AMEND, 0.05)
    assert left(tmp_path) == []
    with Learner(tmp_path) as learner:
        time.sleep(0.05)
    assert learner.taken == []


def test_one_that_was_claimed_is_waited_for(tmp_path):
    """However long: it will be applied."""
    applied = []

    def slow(session, actor_id, amend, done):
        threading.Timer(0.3, lambda: (applied.append(amend), done(""))).start()

    learner = AmendRequests(tmp_path, slow)
    thread = threading.Thread(target=request, args=(tmp_path, "s", "actor", AMEND, 0.1))
    thread.start()
    while thread.is_alive():
        learner.poll()
        time.sleep(0.001)
    assert applied == [AMEND]


def test_a_learner_that_is_killed_with_it_is_not_waited_for_forever_and_the_next_applies_it(tmp_path, monkeypatch):
    monkeypatch.setattr(amend, "_CLAIMED_S", 0.1)
    learner = AmendRequests(tmp_path, lambda *_: None)
    errors: list = []

    def ask() -> None:
        try:
            request(tmp_path, "s", "a", AMEND, 0.1)
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive() and not list(tmp_path.glob(f"{FOLDER}/*.taken")):
        learner.poll()
    thread.join()
    assert str(tmp_path) in str(errors[0])
    assert len(left(tmp_path)) == 1
    with Learner(tmp_path) as following:
        while not following.taken:
            time.sleep(0.005)
    assert following.taken == [("s", "a", AMEND)]


@pytest.mark.parametrize(
    "change",
    [{"outcome": "good"}, {"reward": float("nan")}, {"reward": 1e39}, {"reward": 10**400}, {"terminated": 1},
     {"session": None}, {"episode_id": []}, {"more": 1}, "{", "[" * 20000],
)  # fmt: skip
def test_a_malformed_one_is_refused_and_reaches_no_replay(tmp_path, change):
    (tmp_path / FOLDER).mkdir()
    content = {"session": "s", "actor_id": "a", **AMEND._asdict()}
    text = change if isinstance(change, str) else json.dumps(content | change)
    (tmp_path / FOLDER / "1.json").write_text(text)
    with Learner(tmp_path) as learner:
        while left(tmp_path) != ["1.refused"]:
            time.sleep(0.005)
    assert learner.taken == []
    assert "1." in (tmp_path / FOLDER / "1.refused").read_text()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / FOLDER).write_text("a file")
    with pytest.raises(ConfigError, match=naming(tmp_path / FOLDER)):
        request(tmp_path, "s", "actor", AMEND, 1)
    AmendRequests(tmp_path, lambda *_: None).poll()
