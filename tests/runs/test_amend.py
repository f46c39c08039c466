"""A correction that comes from no actor: in the journal, in what its readers give, and never in an actor's stream."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import time

import numpy as np
import pytest
from coded_episodes import SPEC, config, make, preprocess
from coded_replay import RNG
from errors import naming
from journal_runs import LIMITS, Run

from serl_chunk.replay.replay import Replay
from serl_chunk.runs.amend import FOLDER, RunAmender
from serl_chunk.runs.episodes import JOURNAL, RunSource
from serl_chunk.runs.folder import RUN_LOCK
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.types import Amend, Begin, ConfigError, End, Outcome, SparseRows, StepBlock

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
    amender.amend("b", "actor b", FAILED)
    amender.amend("a", "actor a", Amend("e2", discard=True))
    amender.close()
    fresh = RunSource(run.path)
    assert "a/e2" not in fresh.keys()
    end = fresh.read("b/e1").end
    assert (end.outcome, end.outcome_by, end.reward, end.terminated) == (Outcome.FAILURE, "operator", 0.0, True)
    assert fresh.about("b/e1").corrected_end.outcome is Outcome.FAILURE
    assert states(run) == before
    with run.opened():  # the actors' next records have the numbers that follow
        run.feed([make(RNG(9), 21, session="b")])
    assert "b/e21" in RunSource(run.path).keys()
    assert [note for note in RunSource(run.path).notes() if "discarded" not in note] == []


def test_a_restarted_learner_replays_it(run, amender):
    amender.amend("b", "actor b", FAILED)
    amender.amend("a", "actor a", Amend("e2", discard=True))
    amender.close()
    cfg = config()
    replay = Replay(SPEC, cfg, preprocess(cfg))
    store = RecordStore(run.path / JOURNAL, LIMITS)
    for stored in store.replay():
        assert stored.delivered
        replay.insert(f"{stored.actor_id}/{stored.session}", stored.record)
    store.close()
    held = {e.key[1]: e.outcome for e in replay._partitions.online.episodes.values()}
    assert held["e1"] is Outcome.FAILURE
    assert held["e3"] is Outcome.SUCCESS
    assert "e2" not in held


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


def test_the_run_is_free_again_soon(run):
    amender = RunAmender(run.path, keep_s=0.01)
    for _ in range(2):
        amender.amend("b", "actor b", FAILED)
        with (run.path / RUN_LOCK).open("w") as lock:
            for attempt in itertools.count():
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    assert attempt < 1000
                    time.sleep(0.01)


def test_the_index_has_returns_and_the_lowest_value(tmp_path):
    run = Run(tmp_path / "run")
    coded = make(RNG(1), 3, session="a", end="success", every_frame=True)
    steps = [coded.step(t) for t in range(coded.length)]
    block = StepBlock.from_steps("e3", steps)
    q = SparseRows(np.array([0, 1], np.int32), np.array([[0.5, 0.75], [-1.5, np.float32(-2)]], np.float32))
    block = dataclasses.replace(block, sparse=block.sparse | {"decision/q": q})
    with run.opened():
        for record in (Begin("e3", task="stack"), block, End("e3", coded.length, None, True, False, Outcome.SUCCESS)):
            run.put("a", record)
    source = RunSource(run.path)
    entry = source.about("a/e3")
    assert entry.task == "stack"
    assert entry.lowest_q == -1.5  # the better candidate of the worse decision
    assert entry.episode_return == pytest.approx(float(block.reward.sum()))
    source.amended("a/e3", Amend("e3", reward=0.25))
    assert source.about("a/e3").episode_return == pytest.approx(float(block.reward[:-1].sum()) + 0.25)
    source.amended("a/e3", Amend("e3", discard=True))
    assert source._indexed().episodes == {}
