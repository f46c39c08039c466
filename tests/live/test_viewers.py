"""Who of several viewers has control, on a clock of the test's own; and the rows that they read without a lock."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from errors import naming
from hypothesis import given
from hypothesis import strategies as st
from live_desk import NAMES, Desk, Recorded, Viewer, serving, wait_until

from serl_chunk.console.bindings import REPEAT, Action, ActorState, bind_keys
from serl_chunk.console.feed import Ring
from serl_chunk.live.content import state_json
from serl_chunk.live.viewers import GONE, MOST, RefusedError, Viewers
from serl_chunk_robot.client.client import UNCONFIRMED


def robot(desk: Desk) -> list[object]:
    return state_json(desk.view)["robot"]


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def viewers(clock):
    return Viewers(Recorded(), bind_keys(), lambda: clock.now)


def holder(viewers: Viewers) -> int | None:
    return viewers.view("")["holder"]


def test_the_first_viewer_has_control_and_the_next_gets_it_when_that_one_is_gone(viewers, clock):
    viewers.here("a")
    viewers.here("b")
    viewers.here("c")
    for _ in range(10):
        clock.now += GONE / 2
        viewers.here("b")
        viewers.here("a")
        assert holder(viewers) == 1
    clock.now += GONE / 2
    viewers.here("b")
    viewers.here("d")
    clock.now += GONE / 2 + 0.1
    assert (holder(viewers), viewers.view("b")["mine"]) == (2, True)
    assert viewers.view("b")["viewers"] == 2
    viewers.here("a")
    assert (holder(viewers), viewers.view("a")["you"]) == (2, 5)


def test_a_viewer_that_releases_control_leaves_it_to_the_first_that_takes_it(viewers, clock):
    viewers.here("a")
    viewers.here("b")
    viewers.release("b")  # it has none
    assert holder(viewers) == 1
    viewers.release("a")
    clock.now += 1
    viewers.here("b")
    assert holder(viewers) is None
    with pytest.raises(RefusedError, match="take control"):
        viewers.press("b", "s", ActorState.POLICY, clock.now)
    viewers.take("b")
    with pytest.raises(RefusedError, match=naming(2)):
        viewers.take("a")
    clock.now += GONE + 1
    viewers.here("c")  # all had gone
    assert viewers.view("c")["mine"]


def test_there_are_so_many_viewers_and_even_one_too_many_stops_at_once(viewers):
    for n in range(MOST):
        viewers.here(str(n))
    with pytest.raises(RefusedError, match=naming(MOST)):
        viewers.here("more")
    viewers.press("more", "x", "", 0.0)
    viewers.press("more", "space", "", 0.0)
    assert viewers._operator.taken() == [Action.STOP, Action.HOLD]
    with viewers._lock:  # a viewer's request is being worked on
        done = threading.Thread(target=viewers.press, args=("a", "x", "", 0.0), daemon=True)
        done.start()
        done.join(5)
        assert not done.is_alive()
    assert viewers._operator.taken() == [Action.STOP]


def test_a_stop_and_its_two_step_clear_reach_the_robot_and_an_unconfirmed_stop_is_shown():
    with Desk().polled() as desk, serving(desk.operator) as (page, _):
        viewer = Viewer(page.url, NAMES[0])
        viewer.post("here")
        wait_until(lambda: desk.view.word is ActorState.POLICY)
        assert viewer.press("x").status == 200
        assert desk.robot.requests[0] == "stop"  # at once
        wait_until(lambda: desk.view.word is ActorState.STOPPED)
        wait_until(lambda: len(desk.robot.requests) == 2)  # and by the control loop
        assert viewer.press("enter", ActorState.STOPPED).status == 409
        wait_until(lambda: desk.view.robot == desk.robot.shown)
        assert viewer.press("c", ActorState.STOPPED, robot=robot(desk)).status == 200
        wait_until(lambda: desk.view.question)
        assert set(desk.robot.requests) == {"stop"}
        assert viewer.press("enter", ActorState.STOPPED, robot=robot(desk)).status == 200
        wait_until(lambda: desk.view.word is ActorState.HOLD)
        assert desk.robot.requests[-1] == "clear"
        time.sleep(REPEAT)  # Enter was pressed just now
        viewer.press("enter", ActorState.HOLD, robot=robot(desk))
        wait_until(lambda: desk.view.countdown is not None)
        viewer.press("space", ActorState.HOLD)
        wait_until(lambda: desk.view.countdown is None)
        assert desk.operator.holding
        assert desk.robot.held
        for unconfirmed, alarm in ((False, ""), (True, UNCONFIRMED)):
            desk.robot.unconfirmed = unconfirmed
            wait_until(lambda unconfirmed=unconfirmed: bool(desk.view.alarm) is unconfirmed)
            assert next(viewer.events())["state"]["alarm"] == alarm


@pytest.mark.parametrize("what", ["clear", "go"])
def test_a_page_requests_for_the_robot_that_the_browser_showed_at_the_press(what):
    with Desk(countdown=0.1).polled() as desk, serving(desk.operator) as (page, _):
        viewer = Viewer(page.url, NAMES[0])
        viewer.post("here")
        if what == "clear":
            viewer.press("x")
            wait_until(lambda: desk.view.word is ActorState.STOPPED)
        else:
            desk.robot.hold()
        wait_until(lambda: desk.view.word is not ActorState.POLICY and desk.view.robot == desk.robot.shown)
        word, keys = desk.view.word, ["c", "enter"] if what == "clear" else ["enter"]
        before = robot(desk)
        desk.robot.generation += 1  # another operator stopped or held it again meanwhile
        wait_until(lambda: desk.view.robot == desk.robot.shown)
        for shown, done in ((before, False), (None, False), (["7", "actor", "p"], False), (robot(desk), True)):
            time.sleep(REPEAT)
            for key in keys:
                viewer.press(key, word, robot=shown)
            time.sleep(0.4)  # a countdown, and a poll
            assert (desk.view.word is not word) is done, shown
        assert desk.robot.requests[-1] == what


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 8), st.integers(1, 5))
def test_a_reader_gets_every_row_that_is_kept_in_order(puts, size, most):
    ring, row, seen, lost = Ring[int](size), 0, [], 0
    at = 0
    for n in puts:
        for _ in range(n):
            ring.put(row)
            row += 1
        got = ring.since(at, most)
        assert all(number == value for number, value in got)
        if got:
            lost += got[0][0] - at
            assert got[0][0] == max(at, row - size)
            at = got[-1][0] + 1
        seen += [value for _, value in got]
    assert seen == sorted(set(seen))
    assert at <= row
    assert len(seen) == at - lost


def test_a_row_that_is_overwritten_while_it_is_read_is_left_out():
    ring = Ring[int](4)

    class Overtaken(list):
        def __getitem__(self, i):
            if ring.count < 6:
                ring.put(ring.count)
            return super().__getitem__(i)

    for n in range(4):
        ring.put(n)
    ring._slots = Overtaken(ring._slots)
    assert ring.since(0) == [(2, 2), (3, 3)]
