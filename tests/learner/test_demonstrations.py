"""Streamed demonstrations: whole and once in the partition `demo`, and in none of the counters of online steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from errors import naming
from streamed_demos import LENGTH, demo_rows, episode, make_router, parts

from serl_chunk.data.demos import short_digest
from serl_chunk.learner.intake import Entry, RecordRouter
from serl_chunk.types import Amend, DataError, Outcome

SESSION = "robot-demonstrations/s"
ROWS = LENGTH + 1


def feed(router: RecordRouter, rows, session=SESSION) -> None:
    for record in rows:
        router.insert(session, record, demonstrations=True)


def test_one_is_in_the_demo_partition_with_its_end_and_counts_nowhere():
    replay, router = make_router()
    feed(router, parts(episode(0))[:3])
    assert demo_rows(replay) == (0, 0, 0)
    feed(router, parts(episode(0))[3:])
    assert demo_rows(replay) == (1, ROWS, 0)
    received = router.take()
    assert (received.env_steps, received.episodes) == (0, [])
    assert [d.begin.episode_id for d in received.demonstrations] == ["d0"]
    assert (replay.ready.steps, replay.ready.online, replay.ready.demo) == (0, 0, LENGTH)


def test_one_that_the_learner_has_is_left_out_whatever_its_name():
    replay, router = make_router()
    replay.add_demo(known := episode(0, "from demo_path"))
    router.demonstrations.hold([known])
    feed(router, parts(episode(0)))
    feed(router, parts(episode(1)))
    feed(router, parts(episode(1, "again")), session="another/t")
    assert demo_rows(replay) == (2, 2 * ROWS, 0)
    assert router.demonstrations.duplicates == 2
    assert {bytes(d) for d in router.demonstrations.digests} == {short_digest(episode(i)) for i in (0, 1)}


@pytest.mark.parametrize("received", [1, 3])
def test_one_whose_recording_died_is_sent_again_whole(received):
    replay, router = make_router()
    feed(router, parts(episode(0))[:received])
    router.insert_all([Entry(SESSION, None, gone=False)])
    feed(router, parts(episode(0)))
    assert demo_rows(replay) == (1, ROWS, 0)
    feed(router, parts(episode(1))[:received])
    router.insert_all([Entry(SESSION, None, gone=True)])
    feed(router, parts(episode(1))[received:])  # of nothing that is open
    assert demo_rows(replay) == (1, ROWS, 0)
    assert router.env_steps == 0


def test_the_journal_puts_them_back_and_counts_no_step():
    rows = [*parts(episode(0)), *parts(episode(1))[:2], None, *parts(episode(1))]
    replay, router = make_router()
    router.resume(40, 5)
    assert router.refill([(n, SESSION, record) for n, record in enumerate(rows)]) == 0
    assert demo_rows(replay) == (2, 2 * ROWS, 0)
    assert router.fresh_steps == 0
    received = router.take()
    # They were reported when they came.
    assert (received.env_steps, received.position, received.demonstrations) == (40, len(rows), [])
    assert router.demonstrations.received == len(router.demonstrations.digests) == 2


def test_actors_episodes_go_on_next_to_them_and_a_later_label_reaches_it():
    replay, router = make_router()
    begin, *others = parts(episode(5, "online"))
    for a, b in zip([begin._replace(demonstration=False), *others], parts(episode(0)), strict=True):
        router.insert("actor/a", a)
        router.insert(SESSION, b, demonstrations=True)
    assert demo_rows(replay) == (1, ROWS, 1)
    router.insert("actor/a", label := Amend("online", Outcome.FAILURE, "operator"))
    taken = router.take()
    assert (taken.env_steps, taken.corrections, router.take().corrections) == (LENGTH, [("actor/a", label)], [])
    router.insert(SESSION, Amend("d0", Outcome.FAILURE, "operator"))
    assert not replay.imitates_demos
    router.insert(SESSION, Amend("d0", discard=True))
    feed(router, parts(episode(0)))  # its file is still there: a discarded one does not come back
    assert demo_rows(replay) == (0, 0, 1)


BEGIN, FIRST, SECOND, END = parts(episode(0))
FLAT = {"state": np.zeros((LENGTH, 2), np.float32)}
NARROW = episode(0)._replace(steps=dataclasses.replace(episode(0).steps, observation=FLAT))


@pytest.mark.parametrize(("rows", "named"), [
    ([BEGIN, SECOND], ("d0", "tick 3", "tick 0")), ([BEGIN, FIRST, END], ("d0", "7 steps", "3 arrived")),
    ([BEGIN, END], ("d0", "0 arrived")), (parts(NARROW), ("d0", "state", "(7, 2)")),
])  # fmt: skip
def test_what_does_not_fit_is_refused(rows, named):
    replay, router = make_router()
    with pytest.raises(DataError, match=naming(*named)):
        feed(router, rows)
    assert demo_rows(replay) == (0, 0, 0)


def test_more_than_the_partition_holds_is_refused_with_the_setting():
    replay, router = make_router(demo_capacity=21)
    feed(router, parts(episode(0)))
    feed(router, parts(episode(1)))
    with pytest.raises(DataError, match=naming("d2", "replay.demo_capacity")):
        feed(router, parts(episode(2)))
    assert demo_rows(replay) == (2, 2 * ROWS, 0)
