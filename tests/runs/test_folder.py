"""Flags to configuration, the run folder and its lock, an actor's spools, and what both sides must share."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import threading
import time
from pathlib import Path

import pytest
from coded_episodes import make
from coded_replay import RNG
from counting_robot import experiment
from errors import naming
from journal_runs import LIMITS, Run
from metric_logs import add_episode, open_log

from serl_chunk.cli.process import load, split_overrides
from serl_chunk.config.overrides import to_dict
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs import amend
from serl_chunk.runs.amend import FOLDER, AmendRequests, RunAmender, request
from serl_chunk.runs.episodes import JOURNAL, RunSource
from serl_chunk.runs.folder import FORMAT, RUN_LOCK, open_run, read_config
from serl_chunk.runs.metrics import Counters, read_metrics
from serl_chunk.transport.storage.journal import Journal
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.storage.spool import SpoolFolders
from serl_chunk.types import Amend, ConfigError, DataError, Outcome
from serl_chunk.version import version_info

CONFIG = load("fake_aloha", [])
SPEC = spec_of(CONFIG)


def test_overrides_are_split_at_the_sign_or_the_next_word():
    given = ["--config.seed=3", "--config.robot.task", "a=b c", "--config.robot.task=x=y"]
    assert split_overrides(given) == [("seed", "3"), ("robot.task", "a=b c"), ("robot.task", "x=y")]
    for words, named in (
        (["--config.seed=1", "--lerner"], ("--lerner", "--config.FIELD=VALUE", "serl-chunk --help_all")),
        (["--config.seed", "--config.discount=0.9"], ("--config.seed", "--config.seed=VALUE")),  # a flag is no value
    ):
        with pytest.raises(ConfigError, match=naming(*named)):
            split_overrides(words)


def test_a_new_folder_records_the_configuration_and_a_resumed_one_keeps_its_id_and_logs_what_changed(
    tmp_path, caplog, monkeypatch
):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    unnamed = open_run(CONFIG, SPEC, None)
    assert unnamed.path.parent == Path("runs") / "fake_aloha"
    unnamed.lock.close()
    first = open_run(CONFIG, SPEC, str(tmp_path))
    assert not first.resumed
    assert not (tmp_path / "config.json").exists()  # what a start that fails would leave behind
    first.write_config()
    saved = read_config(tmp_path)
    assert (saved["run_id"], saved["robot_spec"], saved["format"]) == (first.run_id, SPEC.to_json(), FORMAT)
    assert saved["serl_chunk"] == version_info()._asdict()
    first.lock.close()
    changed = dataclasses.replace(CONFIG, seed=CONFIG.seed + 1)
    open_run(changed, SPEC, str(tmp_path)).lock.close()  # a start that failed before it recorded anything
    assert read_config(tmp_path)["seed"] == CONFIG.seed
    caplog.clear()
    again = open_run(changed, SPEC, str(tmp_path))
    again.write_config()
    again.lock.close()
    assert (again.resumed, again.run_id) == (True, first.run_id)
    assert f"seed: {CONFIG.seed} -> {CONFIG.seed + 1}" in caplog.messages[0]
    assert read_config(tmp_path)["seed"] == CONFIG.seed + 1
    caplog.clear()
    open_run(changed, SPEC, str(tmp_path)).lock.close()
    assert caplog.messages == []


def test_one_learner_a_folder_and_one_experiment_a_run(tmp_path):
    run = open_run(CONFIG, SPEC, str(tmp_path))
    with pytest.raises(ConfigError, match=naming(tmp_path, "learner", "checkpoint_path")):
        open_run(CONFIG, SPEC, str(tmp_path))
    run.write_config()
    run.lock.close()
    other = dataclasses.replace(CONFIG, name="other")
    with pytest.raises(ConfigError, match=naming(tmp_path, "fake_aloha", "other", "checkpoint_path")):
        open_run(other, SPEC, str(tmp_path))
    open_run(CONFIG, SPEC, str(tmp_path)).lock.close()  # a refusal does not keep the lock


def written(folder: Path, **changes: object) -> Path:
    """Write the config.json of a run with `changes` at its top level; None removes a field."""
    run = open_run(CONFIG, SPEC, str(folder))
    run.write_config()
    run.lock.close()
    file = folder / "config.json"
    saved = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in saved.items() if value is not None}))
    return file


@pytest.mark.parametrize("number", [None, FORMAT - 1])
def test_a_run_of_another_format_is_refused_with_the_version_that_wrote_it(tmp_path, number):
    file = written(tmp_path, format=number, serl_chunk={"version": "9.8", "commit": "12ab"})
    expected = naming(file, repr(number), f"expected {FORMAT}", "serl_chunk 9.8 (commit 12ab)", "start a new run")
    for read in (read_config, lambda path: open_run(CONFIG, SPEC, str(path))):
        with pytest.raises(ConfigError, match=expected):
            read(tmp_path)
    file.write_text('{"name": ')
    with pytest.raises(ConfigError, match=naming("config.json", "line 1 column 10")):
        read_config(tmp_path)


def test_a_run_with_an_unknown_field_is_refused(tmp_path):
    agent = json.loads(json.dumps(to_dict(CONFIG)))["agent"]
    unknown = written(tmp_path / "unknown", momentum=1, agent=agent | {"dreams": 3})
    with pytest.raises(ConfigError, match=naming(unknown, "agent.dreams", "momentum", "serl_chunk")):
        open_run(CONFIG, SPEC, str(tmp_path / "unknown"))
    other_agent = written(tmp_path / "other", agent={"kind": "another", "dreams": 3})  # `config` says what is used
    open_run(CONFIG, SPEC, str(other_agent.parent)).lock.close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = open_run(CONFIG, SPEC, str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("serl_chunk.runs.folder.write_json", full)
        with pytest.raises(ConfigError, match=naming("checkpoint_path", tmp_path, "No space left on device")):
            run.write_config()
    run.lock.close()
    open_run(CONFIG, SPEC, str(tmp_path)).lock.close()


def test_what_other_runs_left_behind_is_counted_while_the_open_spool_is_trimmed(tmp_path, monkeypatch):
    spools = SpoolFolders(experiment(), "left", tmp_path)
    spool = spools.open("this")
    assert spools.folder == tmp_path / "counting_robot" / "left"
    other = Journal(spools.folder / "other")
    other.append([b"kept"])
    other.close()
    kept = other.nbytes
    (spools.folder / "other_damaged").mkdir()
    (spools.folder / "other_damaged" / "0.journal").write_bytes(b"damaged")
    (spools.folder / "gone").mkdir()
    (spools.folder / "gone" / "0.journal").write_bytes(b"going")
    (spools.folder / "this" / "0.journal").write_bytes(b"going")
    stat = Path.stat

    def vanished(path: Path, **options: bool):
        if path.name == "0.journal":
            path.unlink()
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", vanished)
    try:
        assert spools.unsent(but_open=True) == [(spools.folder / "other", kept, "of an unknown version")]
    finally:
        spool.close()


def test_a_second_actor_of_that_name_is_refused_by_its_flag(tmp_path):
    spool = SpoolFolders(experiment(), "left", tmp_path).open("run")
    try:
        with pytest.raises(ConfigError, match=naming("actor_id", "left", tmp_path)):
            SpoolFolders(experiment(), "left", tmp_path).open("run")
    finally:
        spool.close()


FAILED = Amend("e1", Outcome.FAILURE, "operator", reward=0.0)


@pytest.fixture
def run(tmp_path) -> Run:
    run = Run(tmp_path / "run")
    rng = RNG(3)
    with run.opened():
        run.feed([make(rng, k, session="ab"[k % 2], end="success", every_frame=True) for k in range(6)])
    return run


@pytest.fixture
def amender(run):
    amender = RunAmender(run.path)
    yield amender
    amender.close()


def states(run: Run) -> dict:
    store = RecordStore(run.path / JOURNAL, LIMITS)
    list(store.replay())
    store.close()
    return store.states


def test_readers_have_the_correction_and_the_streams_of_actors_go_on_where_they_were(run, amender):
    before = states(run)
    source = RunSource(run.path)
    assert source.about("b/e1").outcome is Outcome.SUCCESS
    total = source.about("b/e1").episode_return
    with open_log(run.path) as log:  # as its learner
        for session, name in (("b", "e1"), ("a", "e2")):
            add_episode(log, Counters(0, 0, 0), episode=f"actor {session}/{session}/{name}", last_reward=1.0)
    amender.amend("b", "actor b", FAILED)
    amender.amend("a", "actor a", Amend("e2", discard=True))
    amender.close()
    assert [row["succeed"] for row in read_metrics(run.path)["episode"]] == [0, None]
    fresh = RunSource(run.path)
    assert "a/e2" not in fresh.keys()
    end = fresh.read("b/e1").end
    assert (end.outcome, end.outcome_by, end.reward, end.terminated) == (Outcome.FAILURE, "operator", 0.0, True)
    assert fresh.about("b/e1").corrected_end.outcome is Outcome.FAILURE
    assert fresh.about("b/e1").episode_return < total  # its last reward is 0
    assert states(run) == before
    with run.opened():  # the actors' next records have the numbers that follow
        run.feed([make(RNG(9), 21, session="b")])
    assert "b/e21" in RunSource(run.path).keys()


def test_labels_in_a_row_share_a_segment_which_survives_those_before_it(run, amender):
    """The table at its head has every session, so that older segments may go."""
    before = states(run)
    amender.amend("b", "actor b", FAILED)
    segments = sorted((run.path / JOURNAL).glob("*.journal"))
    for _ in range(5):
        amender.amend("b", "actor b", FAILED)
    amender.close()
    assert sorted((run.path / JOURNAL).glob("*.journal")) == segments
    for path in segments[:-1]:
        path.unlink()
    assert {s: state.expected for s, state in states(run).items()} == {s: x.expected for s, x in before.items()}


def test_a_run_whose_holder_takes_no_corrections_is_left_alone(run):
    amender = RunAmender(run.path, patience_s=0.1)
    files = {p: p.stat().st_size for p in (run.path / JOURNAL).glob("*.journal")}
    with (run.path / RUN_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=naming(run.path, 0.1)):
            amender.amend("b", "actor b", FAILED)
    assert files == {p: p.stat().st_size for p in (run.path / JOURNAL).glob("*.journal")}
    assert list((run.path / FOLDER).iterdir()) == []  # a learner that starts later must not find it
    amender.amend("b", "actor b", FAILED)
    amender.close()


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


def test_every_request_is_applied_once_and_leaves_nothing_and_a_refusal_comes_back_with_its_reason(tmp_path):
    with Learner(tmp_path) as learner:
        for k in range(3):
            request(tmp_path, f"s{k}", "actor", AMEND, 20)
        request(tmp_path, "s", "actor", Amend("e2", discard=True), 20)
    assert [taken[0] for taken in learner.taken] == ["s0", "s1", "s2", "s"]
    assert learner.taken[0] == ("s0", "actor", AMEND)
    assert learner.taken[3][2] == Amend("e2", discard=True)
    assert left(tmp_path) == []
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


@pytest.mark.parametrize("change", [
    {"outcome": "good"}, {"reward": float("nan")}, {"reward": 10**400}, {"terminated": 1}, {"session": None},
    {"more": 1}, "{", "[" * 20000,
])  # fmt: skip
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
