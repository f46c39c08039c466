"""The live page as viewers meet it: who is let in, what they are sent, and what leaves the control loop alone."""

from __future__ import annotations

import io
import itertools
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from errors import naming
from hypothesis import given
from hypothesis import strategies as st
from live_desk import NAMES, Desk, Recorded, Viewer, serving, step
from PIL import Image
from robot_served import wait as wait_until

from serl_chunk.console.bindings import EFFECTIVE, KEYS, REPEAT, STOPS, Action, ActorState, bind_keys
from serl_chunk.console.feed import Frame, Ring
from serl_chunk.console.view import ConsoleState
from serl_chunk.live import content
from serl_chunk.live.content import state_json
from serl_chunk.live.server import LivePage
from serl_chunk.live.viewers import GONE, MOST, RefusedError, Viewers
from serl_chunk.main import main
from serl_chunk.types import ConfigError, Source
from serl_chunk_robot.client.client import UNCONFIRMED

RESOURCES = ["", "live.js", "live.css", "info", "picture/front/1"]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def desk():
    operator = Recorded()
    with serving(operator) as (page, feed):
        feed.step(step(0, image=np.zeros((12, 16, 3), np.uint8)), {})
        yield operator, page, feed


@pytest.fixture
def viewers(desk):
    operator, page, _ = desk
    operator.view = ConsoleState(ActorState.POLICY)
    operator.taken()
    found = [Viewer(page.url, name) for name in NAMES[:2]]
    for viewer in found:
        viewer.post("release")
    found[0].post("take")
    return found


def test_nothing_is_shown_or_taken_without_the_token_and_the_page_of_this_server(desk, viewers):
    viewer = viewers[0]
    token = viewer.prefix.strip("/")
    for path in RESOURCES:
        assert viewer.request(path).status == 200
        for wrong in ("", "/x", f"/{token[:-1]}", f"/{token}x"):
            answer = viewer.request(f"{wrong}/{path}", whole=True)
            assert answer.status == 403
            assert token.encode() not in answer.body
        assert viewer.request(path, headers={"Host": "evil.example"}).status == 403
    body, press = b'{"key":"x"}', f"press/{NAMES[0]}"
    assert viewer.request(f"/no/{press}", whole=True, body=body, headers=JSON).status == 403
    assert viewer.request(press, body=body, headers={**JSON, "Origin": "http://evil"}).status == 403
    assert viewer.request(press, body=body, headers={"Content-Type": "text/plain"}).status == 400
    assert viewer.request("press/me", body=body, headers=JSON).status == 400
    assert desk[0].taken() == []
    with pytest.raises(ConnectionRefusedError):  # it listens on loopback alone
        socket.create_connection(("127.0.0.2", viewer.port), timeout=5)


@pytest.mark.parametrize(
    ("body", "headers", "status", "text"),
    [(b"[" * 2000 + b"]" * 2000, {}, 400, "nested too deeply"),
     (b'{"key":' * 500 + b"0" + b"}" * 500, {}, 409, "does nothing"), (b'{"k":' * 800, {}, 400, "JSON"),
     (b'{"key":"x","word":"?","seen":1' + b"0" * 400 + b"}", {}, 200, "viewers"), (b"[]", {}, 400, "object"),
     (b"", {"Content-Length": "9" * 5000}, 413, "")],
    ids=["deep", "not that deep", "never closed", "a huge moment", "no object", "a long length"],
)  # fmt: skip
def test_a_body_that_is_none_is_refused_without_a_traceback(viewers, caplog, body, headers, status, text):
    answer = viewers[0].request(f"press/{NAMES[0]}", body=body, headers={**JSON, **headers})
    assert (answer.status, text in answer.body.decode()) == (status, True), answer
    assert "Traceback" not in caplog.text


def test_a_port_in_use_is_named_before_anything_moves(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=naming(port)) as error:
            LivePage(port)
        assert error.value.parameter == "viewer"
        # A served robot without a server: opening it would fail before the port does.
        served = "--config.robot.server=127.0.0.1:9"
        assert main(["--exp_name", "fake_aloha", "--actor", "--viewer", str(port), served]) == 2
        assert f"--viewer: {port}" in capsys.readouterr().err


@pytest.mark.parametrize("word", ActorState)
def test_a_key_requests_its_action_where_it_counts(desk, viewers, word):
    desk[0].view = ConsoleState(word)
    for action, keys in KEYS.items():
        for key in keys:
            answer = viewers[0].press(key, word)
            counts = action in STOPS or action in EFFECTIVE[word]
            assert desk[0].taken() == [action] * counts, (key, word)
            assert answer.status == (200 if counts else 409)


def test_a_second_key_counts_while_there_is_a_question_and_keys_without_an_action_do_nothing(desk, viewers):
    for key in ("enter", "ctrl_c", "z", "", "None"):
        assert viewers[0].press(key, ActorState.POLICY).status == 409
    desk[0].view = ConsoleState(ActorState.STOPPED, question="clear the stop?")
    assert viewers[0].press("enter", ActorState.STOPPED).status == 200
    assert desk[0].taken() == [Action.GO]


def test_what_was_pressed_for_another_state_does_nothing_but_for_stops(desk, viewers):
    desk[0].view = ConsoleState(ActorState.HOLD)
    now = time.monotonic()
    for word, seen in (("POLICY", now), ("HOLD", now - 2), ("HOLD", now + 60), ("HOLD", float("inf"))):
        assert viewers[0].press("enter", word, seen).status == 409
        assert desk[0].taken() == []
        for key, action in (("space", Action.HOLD), ("x", Action.STOP), ("escape", Action.STOP)):
            assert viewers[0].press(key, word, seen).status == 200
            assert desk[0].taken() == [action]


def test_events_have_each_tick_once_the_decisions_and_the_actors_end():
    with serving(Recorded()) as (page, feed):
        chunk = np.arange(12, dtype=np.float32).reshape(4, 3)
        feed.decided(0, chunk, {"q": np.float32(0.5), "values": np.array([0.5, np.nan, 0.1]), "q_spread": 0.25})
        for tick in range(100):
            feed.step(step(tick, Source.HUMAN if tick % 2 else Source.POLICY), {})
        events, ticks, plans = Viewer(page.url, NAMES[0]).events(), [], []
        while len(ticks) < 100:
            event = next(events)
            ticks += event["ticks"]
            plans += event["plans"]
        feed.step(step(100, Source.HOLD), {})
        while len(ticks) < 101:
            ticks += next(events)["ticks"]
        page.close()
        assert not list(events)[-1], "the actor ends"
    assert [row[1] for row in ticks] == [*range(101)]
    assert [row[2] for row in ticks[:2]] == ["policy", "human"]
    assert ticks[7][4:] == [[-7.0, 7.0, None], [7.0, 0.5, 0.0]]  # the joints of the actions, and no third one
    assert [plan["chunk"] for plan in plans] == [chunk.tolist()]
    assert (plans[0]["q"], plans[0]["q_spread"]) == (0.5, 0.25)


def test_a_picture_is_encoded_once_and_only_for_a_viewer(monkeypatch):
    encoded = []
    encode = content.to_jpeg
    monkeypatch.setattr(content, "to_jpeg", lambda *args: encoded.append(1) or encode(*args))
    with serving(Recorded()) as (page, feed):
        viewer = Viewer(page.url, NAMES[0])
        assert viewer.request("picture/front/1").status == 404
        for tick in range(5):
            feed.step(step(tick, image=np.full((12, 16, 3), 40 * tick, np.uint8)), {"front": tick})
        assert encoded == []
        files = [viewer.request("picture/front/5") for _ in range(3)]
        assert len(encoded) == 1
        image = np.asarray(Image.open(io.BytesIO(files[-1].body)))
        assert image.shape == (12, 16, 3)
        np.testing.assert_allclose(image, 160, atol=3)
        (camera,) = next(viewer.events())["cameras"]
        assert (camera["name"], camera["count"], camera["height"], camera["width"]) == ("front", 5, 12, 16)
        feed.step(step(5, image=np.zeros((12, 16, 3), np.uint8)), {"front": 4})  # the same number: the same frame
        assert feed.frames["front"].serial == 5
        assert viewer.request("picture/none/1").status == 404


class Cameras:
    looks = rests = 0

    def newest(self):
        self.looks += 1
        return {"robot": Frame(np.full((8, 8, 3), 200, np.uint8), self.looks, time.monotonic(), None)}

    def rest(self) -> None:
        self.rests += 1


def test_cameras_of_their_own_show_pictures_while_someone_looks():
    cameras = Cameras()
    with serving(Recorded(), cameras=cameras) as (page, feed):
        feed.step(step(0, image=np.zeros((12, 16, 3), np.uint8)), {})
        time.sleep(0.3)
        assert cameras.looks == 0
        viewer = Viewer(page.url, NAMES[0])
        with viewer.stream() as connection:
            wait_until(lambda: connection.recv(1 << 16))
            assert viewer.request("picture/robot/1").status == viewer.request("picture/front/1").status == 200
            assert cameras.rests == 0
        wait_until(lambda: cameras.rests)
        events = viewer.events()
        assert [c["name"] for c in next(events)["cameras"]] == ["front", "robot"]


def test_a_killed_browser_and_one_that_reads_nothing_delay_neither_the_loop_nor_the_others(monkeypatch):
    monkeypatch.setattr("serl_chunk.live.server.PERIOD", 0.002)
    monkeypatch.setattr("serl_chunk.live.server.STALL", 0.3)
    threads = threading.active_count()
    with serving(Recorded()) as (page, feed):
        stuck, killed, other = (Viewer(page.url, name) for name in NAMES[:3])
        ending, slowest = threading.Event(), []

        def loop() -> None:
            for tick in itertools.count():
                began = time.thread_time()
                feed.decided(tick, np.zeros((50, 3), np.float32), {"q": np.float32(tick)})
                feed.step(step(tick), {})
                slowest.append(time.thread_time() - began)
                if ending.wait(0.001):
                    return

        control = threading.Thread(target=loop)
        control.start()
        try:
            with stuck.stream(), killed.stream() as connection:
                connection.recv(100)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.close()  # as a process that is killed: a reset
                wait_until(lambda: not any("process_request" in t.name for t in threading.enumerate()))  # both are over
                before = feed.ticks.count
                events = other.events()
                assert any(next(events)["ticks"] for _ in range(20))
                wait_until(lambda: feed.ticks.count > before)
                assert other.press("x").status == 200
        finally:
            ending.set()
            control.join()
        assert np.median(slowest) < 3e-4
    wait_until(lambda: threading.active_count() <= threads)


def shown_robot(desk: Desk) -> list[object]:
    return state_json(desk.view)["robot"]


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def controls(clock):
    return Viewers(Recorded(), bind_keys(), lambda: clock.now)


def holder(controls: Viewers) -> int | None:
    return controls.view("")["holder"]


def test_the_first_viewer_has_control_and_the_next_gets_it_when_that_one_is_gone(controls, clock):
    controls.here("a")
    controls.here("b")
    controls.here("c")
    for _ in range(10):
        clock.now += GONE / 2
        controls.here("b")
        controls.here("a")
        assert holder(controls) == 1
    clock.now += GONE / 2
    controls.here("b")
    controls.here("d")
    clock.now += GONE / 2 + 0.1
    assert (holder(controls), controls.view("b")["mine"]) == (2, True)
    assert controls.view("b")["viewers"] == 2
    controls.here("a")
    assert (holder(controls), controls.view("a")["you"]) == (2, 5)


def test_a_viewer_that_releases_control_leaves_it_to_the_first_that_takes_it(controls, clock):
    controls.here("a")
    controls.here("b")
    controls.release("b")  # it has none
    assert holder(controls) == 1
    controls.release("a")
    clock.now += 1
    controls.here("b")
    assert holder(controls) is None
    with pytest.raises(RefusedError, match="take control"):
        controls.press("b", "s", ActorState.POLICY, clock.now)
    controls.take("b")
    with pytest.raises(RefusedError, match=naming(2)):
        controls.take("a")
    clock.now += GONE + 1
    controls.here("c")  # all had gone
    assert controls.view("c")["mine"]


def test_there_are_so_many_viewers_and_even_one_too_many_stops_at_once(controls):
    for n in range(MOST):
        controls.here(str(n))
    with pytest.raises(RefusedError, match=naming(MOST)):
        controls.here("more")
    controls.press("more", "x", "", 0.0)
    controls.press("more", "space", "", 0.0)
    assert controls._operator.taken() == [Action.STOP, Action.HOLD]
    with controls._lock:  # a viewer's request is being worked on
        done = threading.Thread(target=controls.press, args=("a", "x", "", 0.0), daemon=True)
        done.start()
        done.join(5)
        assert not done.is_alive()
    assert controls._operator.taken() == [Action.STOP]


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
        assert viewer.press("c", ActorState.STOPPED, robot=shown_robot(desk)).status == 200
        wait_until(lambda: desk.view.question)
        assert set(desk.robot.requests) == {"stop"}
        assert viewer.press("enter", ActorState.STOPPED, robot=shown_robot(desk)).status == 200
        wait_until(lambda: desk.view.word is ActorState.HOLD)
        assert desk.robot.requests[-1] == "clear"
        time.sleep(REPEAT)  # Enter was pressed just now
        viewer.press("enter", ActorState.HOLD, robot=shown_robot(desk))
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
        before = shown_robot(desk)
        desk.robot.generation += 1  # another operator stopped or held it again meanwhile
        wait_until(lambda: desk.view.robot == desk.robot.shown)
        for shown, done in ((before, False), (None, False), (["7", "actor", "p"], False), (shown_robot(desk), True)):
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
