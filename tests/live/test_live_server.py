"""The live page as viewers meet it: who is let in, what they are sent, and what leaves the control loop alone."""

from __future__ import annotations

import io
import itertools
import socket
import threading
import time

import numpy as np
import pytest
from errors import naming
from live_desk import NAMES, Recorded, Viewer, serving, step, wait_until
from PIL import Image

from serl_chunk.console.bindings import EFFECTIVE, KEYS, STOPS, Action, ActorState
from serl_chunk.console.feed import Frame
from serl_chunk.console.view import ConsoleState
from serl_chunk.live import content
from serl_chunk.live.server import LivePage
from serl_chunk.main import main
from serl_chunk.types import ConfigError, Source

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
    """Stops are requested in every state; the operator knows what they mean there."""
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


def test_any_viewer_holds_and_stops_and_one_does_all_else(desk, viewers):
    _, other = viewers
    answer = other.press("s")
    assert (answer.status, desk[0].taken()) == (409, [])
    assert "has control" in answer.json["error"]
    for key in ("space", "x"):
        assert other.press(key).status == 200
    assert desk[0].taken() == [Action.HOLD, Action.STOP]
    assert other.post("take").status == 409
    viewers[0].post("release")
    assert viewers[0].press("s").status == 409
    assert other.post("take").json["mine"]
    assert other.press("s").status == 200
    assert desk[0].taken() == [Action.SUCCESS]


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
