"""Actions that other threads request."""

from __future__ import annotations

import threading

import pytest

from serl_chunk.console.bindings import REPEAT, SECOND_STEP, STOPS, Action, RequestQueue


def put(inlet: RequestQueue, *requests: tuple[float, Action], source: str = "page") -> list[Action]:
    for now, action in requests:
        inlet.put(action, source, now)
    return list(inlet.actions())


@pytest.mark.parametrize("action", [*sorted(STOPS), Action.SUCCESS])
def test_requests_come_in_order_and_repeats_once_but_for_stops(action):
    inlet = RequestQueue()
    assert put(inlet, (1.0, Action.PARK), (1.1, action)) == [Action.PARK, action]
    assert put(inlet) == []
    assert len(put(inlet, (1.1 + REPEAT - 0.01, action))) == (action in STOPS)
    assert len(put(inlet, (1.1 + 2 * REPEAT, action))) == 1


def test_a_clear_and_a_quit_take_two_requests_of_one_source():
    inlet = RequestQueue()
    assert put(inlet, (1.0, Action.CLEAR)) == []
    assert "Enter" not in inlet.question(1.1)
    assert "go" in inlet.question(1.1)
    assert put(inlet, (1.5, Action.GO), source="phone") == [Action.GO], "not of the other one's clear"
    assert put(inlet, (2.0, Action.GO)) == [Action.CLEAR]
    assert put(inlet, (3.0, Action.QUIT), (3.0 + SECOND_STEP + 0.1, Action.QUIT)) == []
    assert put(inlet, (7.0, Action.QUIT)) == [Action.QUIT]


def test_nothing_that_was_requested_ahead_is_left_but_stops_also_where_they_are_taken():
    inlet = RequestQueue()
    for k, action in enumerate(Action):
        inlet.put(action, "page", float(k))
    inlet.empty()
    assert set(inlet.actions()) == STOPS
    inlet = RequestQueue()
    for action in (Action.SUCCESS, Action.GO, Action.STOP):
        inlet.put(action, "page", 1.0)
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
