"""The policy server: several clients, bad ones among them, and keys."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import pytest
from errors import naming
from policy_servers import HORIZON, MAX_BYTES, StatePolicy, request, server_of

from serl_chunk.serving import codec
from serl_chunk.serving.server import BEYOND
from serl_chunk.types import ConfigError

client = pytest.importorskip("websockets.sync.client")
exceptions = pytest.importorskip("websockets.exceptions")


@pytest.fixture
def policy():
    return StatePolicy()


@pytest.fixture
def server(policy):
    with server_of(policy) as server:
        yield server


def connect(server, **options):
    connection = client.connect(f"ws://127.0.0.1:{server.port}", compression=None, **options).__enter__()
    return connection, codec.unpack(connection.recv(timeout=10), MAX_BYTES)


def infer(connection, values):
    connection.send(values if isinstance(values, bytes | str) else codec.pack(values))
    reply = connection.recv(timeout=10)
    return reply if isinstance(reply, str) else codec.unpack(reply, MAX_BYTES)


def expected(first, value=0):
    seen = np.float32(2 * value / 1000)  # of two cameras
    return np.tile(np.array([first, 0.5], np.float32) + seen, (HORIZON, 1))


def test_a_reply_has_actions_times_and_plain_figures(policy, server):
    connection, metadata = connect(server)
    assert metadata == {"robot": "line"}
    reply = infer(connection, request(0.25))
    np.testing.assert_allclose(reply["actions"], expected(0.25))
    assert reply["actions"].dtype == np.float32
    assert type(reply["q"]) is float
    assert reply["policy_version"] == 3.0
    assert reply["policy_timing"].keys() == {"infer_ms"}
    assert reply["server_timing"].keys() == {"infer_ms"}
    second = infer(connection, request(0.25))["server_timing"]
    assert second.keys() == {"infer_ms", "prev_total_ms"}
    assert second["prev_total_ms"] > 0
    policy.seconds = 0.05
    reply = infer(connection, request())
    assert reply["policy_timing"]["infer_ms"] == pytest.approx(50)
    assert reply["server_timing"]["infer_ms"] >= 50
    connection.close()


def test_clients_at_once_share_batches_and_get_their_own_answers(policy, server):
    policy.seconds = 0.02
    barrier = threading.Barrier(6)

    def run(number):
        connection, _ = connect(server)
        barrier.wait(10)
        for i in range(5):
            first = number / 10 + i / 100
            np.testing.assert_allclose(infer(connection, request(first, value=number))["actions"],
                                       expected(first, number), rtol=1e-6)  # fmt: skip
        connection.close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(6)))
    assert set(policy.batches) <= {1, 2, 4, 8}
    assert max(policy.batches) > 1
    assert sum(n * count for n, count in server.batch_counts.items()) == 30


BAD = {
    "text": ("hello", "text"),
    "no msgpack": (b"\xc1\xc1", "msgpack"),
    "a list": (msgpack.packb([1]), "map"),
    "pickled": (b"\x80\x04N.", "msgpack"),
    "objects": (msgpack.packb({"state": {b"nd": True, b"type": "|O", b"kind": b"O", b"data": b"\x80\x04N."}}), "state"),
    "a missing camera": (request(images={}), "images.front"),
    "a wrong shape": (request(state=np.zeros(7)), "state"),
    "a wrong dtype": (request(images={"front": np.zeros((3, 8, 10)), "wrist": np.zeros(3)}), "images.front"),
    "no number": (request(state=np.full(3, np.nan)), "state[0]"),
    "too big": (request(extra=np.zeros(MAX_BYTES, np.uint8)), MAX_BYTES),
    "an error of its own": (request(-9.0), "answer"),
    "an error of the program": (request(-99.0), "See its log"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_client_gets_a_text_and_harms_no_other(name, server):
    bad, named = BAD[name]
    good, _ = connect(server)
    worse, _ = connect(server)
    text = infer(worse, bad)
    assert isinstance(text, str)
    assert str(named) in text
    assert "Traceback" not in text
    with pytest.raises(exceptions.ConnectionClosed) as closed:
        worse.recv(timeout=10)
    assert closed.value.rcvd.code == 1011
    np.testing.assert_allclose(infer(good, request(0.5))["actions"], expected(0.5))
    again, _ = connect(server)
    np.testing.assert_allclose(infer(again, request(0.5))["actions"], expected(0.5))
    for connection in (good, worse, again):
        connection.close()


def test_clients_that_send_no_good_request_keep_nobody_out(server, monkeypatch, caplog):
    """Those give their place to a newcomer, the oldest first; a client at work keeps its own."""
    monkeypatch.setattr("serl_chunk.serving.server.CLIENTS", 4)
    working, _ = connect(server)
    infer(working, request(0.5))
    silent = [connect(server)[0] for _ in range(3)]
    for i in range(5):
        newcomer, _ = connect(server)
        np.testing.assert_allclose(infer(newcomer, request(0.5))["actions"], expected(0.5))
        np.testing.assert_allclose(infer(working, request(i / 10))["actions"], expected(i / 10))
        newcomer.close()
        silent.append(connect(server)[0])
    for gone in silent[:3]:
        with pytest.raises(exceptions.ConnectionClosed) as closed:
            gone.recv(timeout=10)
        assert closed.value.rcvd.code == 1013
    assert "sends no request" in caplog.text
    for connection in silent[5:]:
        infer(connection, request(0.5))
    with pytest.raises(exceptions.InvalidStatus) as refused:  # all are at work
        connect(server)
    assert refused.value.response.status_code == 503
    monkeypatch.setattr("serl_chunk.serving.server.IDLE_S", 0.0)
    connect(server)[0].close()
    for connection in (working, *silent):
        connection.close()


def test_a_message_far_too_big_ends_its_connection_and_the_log_is_of_one_line_each(server, caplog):
    good, _ = connect(server)
    worse, _ = connect(server)
    with pytest.raises(exceptions.ConnectionClosed) as closed:
        infer(worse, b"\x00" * (BEYOND * MAX_BYTES + 1))
    assert closed.value.rcvd is None or closed.value.rcvd.code == 1009
    np.testing.assert_allclose(infer(good, request(0.5))["actions"], expected(0.5))
    infer(good, {"state": np.zeros(3), "images": {}, "\x1b[2J\nFORGED": 1})
    assert "\\x1b[2J\\nFORGED" in caplog.text
    assert not [line for line in caplog.messages if not line.isprintable()]


KEY = "secret-of-this-test-0123456789"


def test_the_health_page_needs_no_key_and_no_slow_decision_delays_it():
    headers = {"Authorization": f"Api-Key {KEY}"}
    with server_of(StatePolicy(seconds=1.0), key=KEY) as server:
        connection, _ = connect(server, additional_headers=headers)
        connection.send(codec.pack(request()))
        began = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz", timeout=10) as response:
            assert (response.status, response.read()) == (200, b"OK\n")
        assert time.monotonic() - began < 0.8
        assert connection.recv(timeout=10)
        connection.close()


def test_another_key_is_refused_and_no_key_is_in_a_log(caplog):
    with server_of(StatePolicy(), key=KEY) as server:
        others = ("", " guess-of-a-key", f" {KEY}x", " \xe9")
        for header in (None, KEY, f"Bearer {KEY}", *(f"Api-Key{other}" for other in others)):
            headers = {} if header is None else {"Authorization": header}
            with pytest.raises(exceptions.InvalidStatus) as refused:
                connect(server, additional_headers=headers)
            assert refused.value.response.status_code == 401, header
            assert b"Api-Key" in refused.value.response.body
        connection, _ = connect(server, additional_headers={"Authorization": f"Api-Key {KEY}"})
        assert isinstance(infer(connection, request()), dict)
        connection.close()
    assert "another API key" in caplog.text
    assert KEY not in caplog.text
    assert "guess-of-a-key" not in caplog.text


@pytest.mark.parametrize("key", ["", KEY])
def test_a_web_page_is_refused(key, caplog):
    """A browser lets any page connect to servers of its own machine."""
    headers = {"Authorization": f"Api-Key {key}"} if key else {}
    with server_of(StatePolicy(), key=key) as server:
        with pytest.raises(exceptions.InvalidStatus) as refused:
            connect(server, origin="https://page.example", additional_headers=headers)
        assert refused.value.response.status_code == 403
        connect(server, additional_headers=headers)[0].close()
    assert "web page" in caplog.text


def test_a_port_in_use_is_named_and_plain_http_is_answered(server):
    other = server_of(StatePolicy(), port=server.port)
    with pytest.raises(ConfigError, match=naming(server.port)):
        other.start()
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=10)
    assert answer.value.code == 426  # it is for WebSockets


def test_closing_ends_every_connection_soon(server):
    connections = [connect(server)[0] for _ in range(3)]
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 5
    for connection in connections:
        with pytest.raises(exceptions.ConnectionClosed):
            connection.recv(timeout=10)
