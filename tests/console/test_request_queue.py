"""Actions that other threads request."""

from __future__ import annotations

import threading

import pytest

from serl_chunk.console.bindings import REPEAT, SECOND_STEP, STOPS, Action
from serl_chunk.console.request_queue import RequestQueue


def put(inlet: RequestQueue, *requests: tuple[float, Action], source: str = "page") -> list[Action]:
    for now, action in requests:
        inlet.put(action, source, now)
    return list(inlet.actions())


def test_requests_come_in_order_and_once():
    inlet = RequestQueue()
    assert put(inlet, (1.0, Action.HOLD), (1.1, Action.GO)) == [Action.HOLD, Action.GO]
    assert put(inlet) == []


@pytest.mark.parametrize(("after", "counts"), [(REPEAT - 0.01, 1), (REPEAT + 0.01, 2)])
def test_repeats_count_once(after, counts):
    assert len(put(RequestQueue(), (1.0, Action.SUCCESS), (1.0 + after, Action.SUCCESS))) == counts


@pytest.mark.parametrize("action", sorted(STOPS))
def test_each_stop_counts(action):
    assert len(put(RequestQueue(), (1.0, action), (1.01, action))) == 2


def test_a_clear_and_a_quit_take_two_requests_of_one_source():
    inlet = RequestQueue()
    assert put(inlet, (1.0, Action.CLEAR)) == []
    assert "Enter" not in inlet.question(1.1)
    assert "go" in inlet.question(1.1)
    assert put(inlet, (1.5, Action.GO), source="phone") == [Action.GO], "not of the other one's clear"
    assert put(inlet, (2.0, Action.GO)) == [Action.CLEAR]
    assert put(inlet, (3.0, Action.QUIT), (3.0 + SECOND_STEP + 0.1, Action.QUIT)) == []
    assert put(inlet, (7.0, Action.QUIT)) == [Action.QUIT]


def test_nothing_that_was_requested_ahead_is_left_but_stops():
    inlet = RequestQueue()
    for k, action in enumerate(Action):
        inlet.put(action, "page", float(k))
    inlet.empty()
    assert set(inlet.actions()) == STOPS


def test_emptied_while_they_are_taken():
    inlet = RequestQueue()
    for now, action in ((1.0, Action.SUCCESS), (1.1, Action.GO), (1.2, Action.STOP)):
        inlet.put(action, "page", now)
    taken = []
    for action in inlet.actions():
        taken.append(action)
        inlet.empty()
    assert taken == [Action.SUCCESS, Action.STOP]


def test_threads_lose_no_stop():
    inlet, count = RequestQueue(), 200
    threads = [
        threading.Thread(target=lambda: [inlet.put(Action.STOP, "page", float(k)) for k in range(count)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    taken = 0
    while any(thread.is_alive() for thread in threads):
        inlet.empty()
        taken += len(list(inlet.actions()))
    assert taken + len(list(inlet.actions())) == 4 * count
