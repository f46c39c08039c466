"""Records enter the replay in turns, as they would one by one."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streamed_demos import episode, make_router
from transport_tools import eventually

from serl_chunk.learner import intake as intake_module
from serl_chunk.learner.intake import ClosedError, Entry, Intake
from serl_chunk.types import Begin, DataError, SerlChunkError, StepBlock

LENGTH = 7


def stream(session: str, cuts: list[int], *, wrong: int = -1, camera: bool = False) -> list[Entry]:
    """The entries of two episodes in blocks that end at `cuts`; block `wrong` of the first has a state too many."""
    out = []
    for number in range(2):
        _, steps, end = episode(number, f"e{number}", LENGTH)
        bounds = [0, *sorted({c for c in cuts if 0 < c < LENGTH}), LENGTH]
        blocks = [steps.slice(a, b) for a, b in itertools.pairwise(bounds)]
        if number == 0 and wrong >= 0:
            at = wrong % len(blocks)
            blocks[at].observation["state"] = np.zeros((blocks[at].n, 4), np.float32)
        out += [Begin(f"e{number}"), *blocks, end]
    return [Entry(session, record) for record in out]


def contents(cameras, entries, turns) -> tuple:
    """What a learner has of entries that come in turns of so many."""
    replay, router = make_router(cameras)
    misfits, entries = [], list(entries)
    while entries:
        n = min(len(entries), turns.pop(0) if turns else len(entries))
        misfits += [(entry.session, why) for entry, why in router.insert_all(entries[:n])]
        del entries[:n]
    received, stats = router.take(), replay.stats()
    storage, held = replay._partitions.storage, {}
    for key in replay.episodes():
        found = replay._partitions.find(key)
        rows = found.rows
        shown = [storage.frames.at(c, storage.frames.frame[rows, c])[0].tolist() for c in range(len(cameras))]
        live, steps = storage.links.live[rows], storage.steps
        of_steps = (v[rows][live].tolist() for v in (steps.effective, steps.bc_weight))  # the last row is no step
        held[key] = (
            found.indexed,
            live.tolist(),
            *(v[rows].tolist() for v in (steps.state, steps.tick)),
            *of_steps,
            shown,
        )
    finished = sorted((e.session, e.episode_id, e.length, e.success) for e in received.episodes)
    return held, stats, sorted(misfits), received.env_steps, finished


@given(
    cuts=st.lists(st.lists(st.integers(1, LENGTH), max_size=6), min_size=3, max_size=3),
    order=st.randoms(use_true_random=False),
    turns=st.lists(st.integers(1, 30), max_size=5),
    wrong=st.sampled_from([-1, 0, 1, 3]),
    cameras=st.sampled_from([(), ("top",)]),
)
def test_turns_hold_what_records_one_by_one_do(cuts, order, turns, wrong, cameras):
    """However sessions mix, blocks are cut and turns end: the same steps, the same episodes, the same misfits."""
    streams = [stream(f"s{i}", c, wrong=wrong if i == 1 else -1) for i, c in enumerate(cuts)]
    entries = []
    while any(streams):
        entries.append(order.choice([s for s in streams if s]).pop(0))
    assert contents(cameras, entries, list(turns)) == contents(cameras, entries, [1] * len(entries))


@pytest.fixture
def inserting():
    """A router with an intake, what was refused, and the entries of each turn."""
    _, router = make_router()
    refused, inserted = [], []
    taking = Intake(
        router, refill=lambda closed: set(), refuse=lambda *said: refused.append(said), inserted=inserted.append
    )  # fmt: skip
    with contextlib.closing(taking):
        taking.drain()
        yield router, taking, refused, inserted


def test_a_turn_joins_steps_and_ends_at_once_for_whoever_waits(inserting, monkeypatch):
    router, taking, refused, inserted = inserting
    monkeypatch.setattr(intake_module, "TURN_S", 1e9)
    joined = []
    insert = router._replay.insert
    monkeypatch.setattr(router._replay, "insert", lambda s, r: joined.append(getattr(r, "n", 0)) or insert(s, r))
    begin, *blocks, end = stream("s", list(range(LENGTH)))[: LENGTH + 2]
    for entry in (begin, *blocks[:3]):
        taking.put(entry)
    assert (router.env_steps, taking.steps) == (0, 3)
    router.wait(0.05, missing=4)  # these are too few
    assert router.env_steps == 0
    threading.Timer(0.05, lambda: taking.put(blocks[3])).start()
    router.wait(60, missing=4)
    assert (router.env_steps, joined) == (4, [0, 4])
    router.take()
    for entry in (*blocks[4:], end):
        taking.put(entry)
    router.wait(60)  # for an episode
    assert (router.env_steps, joined[2:]) == (LENGTH, [3, 0])
    eventually(lambda: [len(turn) for turn in inserted] == [5, 4])
    taking.drain()
    assert (taking.steps, refused) == (0, [])


def test_a_misfit_is_refused_and_what_follows_it_is_kept(inserting):
    router, taking, refused, _ = inserting
    for entry in stream("s", [2, 4], wrong=1):
        taking.put(entry._replace(sender="its session"))
    taking.drain()
    assert {name for name, _ in refused} == {"its session"}
    assert "state has shape" in refused[0][1]
    assert router.env_steps == 2 + LENGTH


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_backlog_is_bounded_and_an_error_seen(inserting, monkeypatch):
    router, taking, _, _ = inserting
    monkeypatch.setattr(intake_module, "MAX_BACKLOG", 200)
    shut, passed = threading.Event(), router.insert_all

    def waits(entries):
        shut.wait(60)
        return passed(entries)

    monkeypatch.setattr(router, "insert_all", waits)
    entries = stream("s", [1, 2, 3])
    for entry in entries[:4]:
        taking.put(entry)
    assert "wait for the replay" in taking.backlog
    shut.set()
    taking.drain()
    assert taking.backlog == ""
    monkeypatch.setattr(router, "insert_all", lambda entries: 1 / 0)
    taking.put(entries[4])
    eventually(lambda: taking._error is not None)
    for call in (taking.drain, taking.check, lambda: taking.put(entries[5])):
        with pytest.raises(SerlChunkError, match="ZeroDivisionError"):
            call()


def test_what_comes_while_the_journal_is_put_back_follows_it():
    """It waits for that, and an episode of which something is damaged there does not go on."""
    _, router = make_router()
    began, inserted = threading.Event(), []

    def refill(closed):
        began.wait(60)
        router.refill([(n, entry.session, entry.record) for n, entry in enumerate(old)])
        return {("t", "e0")}

    old, new = stream("s", [3])[:2], stream("s", [3])[2:] + stream("t", [3])
    with contextlib.closing(Intake(router, refill=refill, refuse=None, inserted=inserted.append)) as taking:
        for entry in new:
            taking.put(entry._replace(sender=entry.session))
        assert router.refilling
        began.set()
        taking.drain()
        assert not router.refilling
    assert router.env_steps == 3 * LENGTH  # of s both episodes, of t the second
    assert sorted(e.episode_id for e in router.take().episodes) == ["e0", "e1", "e1"]


def test_a_stop_does_not_wait_for_the_journal():
    """And no checkpoint is written, whose counters would be of a part of it."""
    _, router = make_router()

    def refill(closed):
        while not closed():
            time.sleep(0.001)
        raise ClosedError

    taking = Intake(router, refill=refill, refuse=None, inserted=None)
    taking.put(stream("s", [])[0])
    taking.close()
    taking.drain()
    assert router.refilling
    assert router.env_steps == 0


def test_blocks_that_do_not_go_together_are_not_joined():
    first, second = episode(0).steps.slice(0, 2), episode(0).steps.slice(2, 4)
    assert StepBlock.join([first, second]).n == 4
    second.observation["other"] = second.observation["state"]
    with pytest.raises(DataError, match="names of its observations"):
        StepBlock.join([first, second])
