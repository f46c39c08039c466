"""The policy server: several clients, bad ones among them, keys, and requests of several in one batch."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import CancelledError, ThreadPoolExecutor

import msgpack
import numpy as np
import pytest
from errors import naming
from policy_servers import HORIZON, MAX_BYTES, StatePolicy, request, server_of

from serl_chunk.serving import codec
from serl_chunk.serving.server import BEYOND, BatchThread, batch_sizes
from serl_chunk.types import ConfigError, SerlChunkError

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


def test_a_reply_has_actions_times_and_plain_figures(server):
    connection, metadata = connect(server)
    assert metadata == {"robot": "line"}
    reply = infer(connection, request(0.25))
    np.testing.assert_allclose(reply["actions"], expected(0.25))
    assert (reply["actions"].dtype, type(reply["q"]), reply["policy_version"]) == (np.float32, float, 3.0)
    assert reply["policy_timing"].keys() == {"infer_ms"}
    assert infer(connection, request(0.25))["server_timing"].keys() == {"infer_ms", "prev_total_ms"}
    connection.close()


def test_clients_at_once_share_batches_and_get_their_own_answers(policy, server):
    policy.seconds = 0.02
    barrier = threading.Barrier(6)

    def run(number):
        connection, _ = connect(server)
        barrier.wait(10)
        for i in range(5):
            first = number / 10 + i / 100
            np.testing.assert_allclose(
                infer(connection, request(first, value=number))["actions"], expected(first, number), rtol=1e-6
            )
        connection.close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(6)))
    assert set(policy.batches) <= {1, 2, 4, 8}
    assert max(policy.batches) > 1
    assert sum(n * count for n, count in server.batch_counts.items()) == 30


BAD = {
    "text": ("hello", "text"),
    "pickled": (b"\x80\x04N.", "msgpack"),
    "objects": (msgpack.packb({"state": {b"nd": True, b"type": "|O", b"kind": b"O", b"data": b"\x80\x04N."}}), "state"),
    "a missing camera": (request(images={}), "images.front"),
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


def test_a_web_page_is_refused(caplog):
    """A browser lets any page connect to servers of its own machine."""
    headers = {"Authorization": f"Api-Key {KEY}"}
    with server_of(StatePolicy(), key=KEY) as server:
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


class Held:
    """Doubles numbers, once it is let go; -1 has an error of its own, -2 fails the whole batch."""

    def __init__(self):
        self.go, self.begun, self.batches = threading.Event(), threading.Event(), []

    def __call__(self, items):
        self.begun.set()
        assert self.go.wait(10)
        self.batches.append(list(items))
        if -2 in items:
            raise ZeroDivisionError
        return [SerlChunkError("none") if item == -1 else 2 * item for item in items]


@pytest.fixture
def held():
    return Held()


@pytest.fixture
def batches(held):
    """A thread that makes batches of four at most, and has begun with 1 alone."""
    batches = BatchThread(held, 4)
    batches.first = batches.submit(1)
    assert held.begun.wait(10)
    yield batches
    batches.close()


def test_what_gathers_meanwhile_is_one_batch_padded_with_its_first(held, batches):
    assert [batch_sizes(most) for most in (1, 8, 6)] == [(1,), (1, 2, 4, 8), (1, 2, 4, 6)]
    others = [batches.submit(i) for i in (2, 3, 4)]
    held.go.set()
    assert [f.result(10) for f in (batches.first, *others)] == [2, 4, 6, 8]
    assert held.batches == [[1], [2, 3, 4, 2]]
    assert {n: count for n, count in batches.counts.items() if count} == {1: 1, 3: 1}


def test_no_batch_is_larger_than_the_largest_and_one_that_fails_ends_no_other(held, batches):
    futures = [batches.submit(i) for i in range(9)]
    held.go.set()
    assert [f.result(10) for f in futures] == list(range(0, 18, 2))
    assert max(map(len, held.batches)) == 4
    with pytest.raises(ZeroDivisionError):
        batches.submit(-2).result(10)
    assert batches.submit(3).result(10) == 6


def test_an_error_of_one_is_of_that_one_alone_and_a_client_that_left_costs_nothing(held, batches):
    gone, bad, good = (batches.submit(i) for i in (7, -1, 5))
    assert gone.cancel()
    held.go.set()
    assert (batches.first.result(10), good.result(10)) == (2, 10)
    with pytest.raises(SerlChunkError, match="none"):
        bad.result(10)
    assert held.batches == [[1], [-1, 5]]


def test_what_waits_at_the_end_is_cancelled(held):
    batches = BatchThread(held, 1)
    first, second = batches.submit(1), batches.submit(2)
    assert held.begun.wait(10)
    closing = threading.Thread(target=batches.close)
    closing.start()
    while not batches._closed:
        pass
    held.go.set()
    closing.join(10)
    assert first.result(10) == 2
    with pytest.raises(CancelledError):
        second.result(10)
