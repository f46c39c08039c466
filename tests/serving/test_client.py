"""The client of policy servers: answers, losses, refusals, addresses and keys."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time

import numpy as np
import pytest
from errors import naming
from policy_servers import MAX_BYTES, StatePolicy, request, server_of
from transport_tools import eventually

from serl_chunk.serving import client as client_module
from serl_chunk.serving import codec, endpoint
from serl_chunk.serving.client import PolicyClient, RefusedError, ServerAwayError
from serl_chunk.serving.endpoint import Address, authorization, client_key, is_authorized, read_key, websockets
from serl_chunk.types import ConfigError

websockets_server = pytest.importorskip("websockets.server")
sync_server = pytest.importorskip("websockets.sync.server")


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(client_module, "BACKOFF_S", (0.05, 0.2))


@contextlib.contextmanager
def client_of(port, **options):
    with contextlib.closing(PolicyClient(Address("127.0.0.1", port), **options)) as client:
        yield client


@contextlib.contextmanager
def connected(policy=None, **options):
    """A server of a policy, and a client that is connected to it."""
    with server_of(policy or StatePolicy(), **options) as server, client_of(server.port) as client:
        assert client.wait(10)
        yield client


def answers(client, first=0.7):
    np.testing.assert_allclose(client.infer(request(first))["actions"][0], [first, 0.5])


def test_a_wait_repeats_its_remedy_and_ends_in_time(monkeypatch, caplog):
    monkeypatch.setattr(client_module, "REPEAT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with client_of(port, timeout=0.6) as client:
        with pytest.raises(RefusedError, match=naming(f"127.0.0.1:{port}", "actor.policy")):
            client.wait(10)
        lines = [record.getMessage() for record in caplog.records if "trying again" in record.getMessage()]
    assert len(lines) >= 2
    assert all(client_module.REMEDY in line for line in lines)


def test_it_waits_for_a_server_and_gets_its_answers():
    with server_of(StatePolicy()) as server:
        port = server.port
    with client_of(port) as client:
        assert not client.wait(0.3)
        assert f"127.0.0.1:{port}" in client.waiting
        with pytest.raises(ServerAwayError):
            client.infer(request())
        with server_of(StatePolicy(), port=port):
            assert client.wait(10)
            assert client.waiting == ""
            assert client.metadata == {"robot": "line"}
            answers(client, 0.25)


def test_a_lost_server_is_connected_to_again():
    with contextlib.ExitStack() as stack:
        with server_of(StatePolicy()) as server:
            client = stack.enter_context(client_of(server.port))
            assert client.wait(10)
            answers(client)
        eventually(lambda: not client.wait(0))  # closed while it was idle
        assert f"{server.port}" in client.waiting
        with pytest.raises(ServerAwayError):
            client.infer(request())
        with server_of(StatePolicy(), port=server.port):
            assert client.wait(10)
            answers(client)


def test_a_refused_request_is_tried_again_then_given_up():
    def refused(error) -> None:
        assert client.wait(10)
        with pytest.raises(error, match="state"):
            client.infer(request(state=np.zeros(9)))

    with connected() as client:
        for _ in range(2):
            for _ in range(client_module.REFUSALS - 1):
                refused(ServerAwayError)
            assert client.wait(10)
            client.infer(request())  # an answer in between
        for _ in range(client_module.REFUSALS - 1):
            refused(ServerAwayError)
        refused(RefusedError)
        for again in (lambda: client.infer(request()), lambda: client.wait(1)):
            with pytest.raises(RefusedError):
                again()


def test_a_server_that_wants_another_key_and_another_server_at_the_same_address_are_not_asked_again():
    with server_of(StatePolicy(), key="k" * 20, metadata={"experiment": "pick", "images": {"a": [8, 10, 3]}}) as server:
        with client_of(server.port, key="m" * 20) as client, pytest.raises(RefusedError, match="API key"):
            client.wait(10)
        client = PolicyClient(Address("127.0.0.1", server.port), key="k" * 20)
        assert client.wait(10)
        client.infer(request())
    port, other = server.port, {"experiment": "place"}
    with contextlib.closing(client), server_of(StatePolicy(), key="k" * 20, port=port, metadata=other):
        with pytest.raises(RefusedError, match=r"experiment, images .*Start this process again"):
            eventually(lambda: client.wait(0))
        with pytest.raises(RefusedError):
            client.infer(request())


def test_a_silent_server_is_lost_after_its_time(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_ANSWER_S", 0.3)
    with connected(StatePolicy(seconds=1.0)) as client:
        began = time.monotonic()
        with pytest.raises(ServerAwayError, match="in time"):
            client.infer(request())
        assert time.monotonic() - began < 0.9


@pytest.mark.parametrize("how", ["interrupt", "stop"])
def test_a_wait_for_a_reply_can_be_ended(how):
    stop = threading.Event()
    with server_of(StatePolicy(seconds=1.5)) as server:
        client = PolicyClient(Address("127.0.0.1", server.port), stop=stop.is_set)
        assert client.wait(10)
        threading.Timer(0.2, client.interrupt if how == "interrupt" else stop.set).start()
        began = time.monotonic()
        with pytest.raises(ServerAwayError):
            client.infer(request())
        assert time.monotonic() - began < 1.0
        client.close()


def test_a_reply_after_an_interrupt_is_not_taken_for_the_next(monkeypatch):
    with connected(StatePolicy(seconds=0.3)) as client:
        threading.Timer(0.05, client.interrupt).start()
        with pytest.raises(ServerAwayError):
            client.infer(request(0.1))
        assert client.wait(10)
        answers(client)
        pack = codec.pack
        with monkeypatch.context() as patch:  # a request that is not sent yet can be ended, too
            patch.setattr(codec, "pack", lambda values: (client.interrupt(), pack(values))[1])
            with pytest.raises(ServerAwayError):
                client.infer(request(0.1))
        assert client.waiting == ""  # nothing is under way, and the connection stays
        answers(client)


@contextlib.contextmanager
def serving(handler):
    """A server of another program; `handler` has each connection. Yields its port."""
    with sync_server.serve(handler, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.socket.getsockname()[1]
        server.shutdown()
        thread.join()


def test_a_second_reply_is_not_taken_for_that_of_the_next_request_and_text_moves_no_cursor_of_the_log(caplog):
    def twice(connection):
        connection.send(codec.pack({}))
        for message in connection:
            first = float(codec.unpack(message, MAX_BYTES)["state"][0])
            for _ in range(2):
                connection.send(codec.pack({"first": first}) if first else "\x1b[2J\nFORGED")

    with serving(twice) as port, client_of(port) as client:
        assert client.wait(10)
        assert client.infer(request(0.25))["first"] == 0.25
        time.sleep(0.2)
        with pytest.raises(ServerAwayError, match="not requested"):
            client.infer(request(0.5))
        assert client.wait(10)
        assert client.infer(request(0.75))["first"] == 0.75
    with serving(twice) as port, client_of(port) as client:
        assert client.wait(10)
        with pytest.raises(ServerAwayError, match=r"\\x1b\[2J\\nFORGED") as error:
            client.infer(request(0.0))
    assert str(error.value).isprintable()
    assert "FORGED" in caplog.text
    assert not [line for line in caplog.messages if not line.isprintable()]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="of Linux")
@pytest.mark.parametrize("ends", [None, "close"])
def test_a_server_that_reads_nothing_is_lost_after_its_time(ends, monkeypatch):
    """A request larger than the kernel's buffers is not sent for minutes."""
    monkeypatch.setattr(client_module, "ANSWER_S", 0.5 if ends is None else 60)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            protocol = websockets_server.ServerProtocol()
            connection, _ = listener.accept()
            protocol.receive_data(connection.recv(65536))
            [received] = protocol.events_received()
            protocol.send_response(protocol.accept(received))
            protocol.send_binary(codec.pack({}))
            connection.sendall(b"".join(protocol.data_to_send()))
            ended.wait(60)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with client_of(listener.getsockname()[1]) as client:
            assert client.wait(10)
            if ends is not None:
                threading.Timer(0.3, getattr(client, ends)).start()
            with pytest.raises(ServerAwayError):
                client.infer({"x": np.zeros(64 << 20, np.uint8)})
            assert thread.is_alive()  # the server did not end it
            ended.set()
    thread.join()


def test_an_error_of_any_kind_is_no_end_of_the_attempts():
    """A host that cannot be encoded is a UnicodeError, a redirect to no address a ValueError."""
    with client_of(0) as client:
        client.address = Address.parse("openpi://gpu..lab:8000", "actor.policy")
        eventually(lambda: "gpu..lab:8000 cannot be reached (" in client.waiting)
        with server_of(StatePolicy()) as server:
            client.address = Address("127.0.0.1", server.port)
            assert client.wait(10)


def test_closing_waits_for_no_handshake_and_no_server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = PolicyClient(Address("127.0.0.1", listener.getsockname()[1]))
        connection, _ = listener.accept()
        assert connection.recv(100)
        for each in (client, PolicyClient(Address("127.0.0.1", 9))):
            began = time.monotonic()
            each.close()
            assert time.monotonic() - began < 1
        connection.close()


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("openpi://10.0.0.7", "10.0.0.7", 8000, "ws://10.0.0.7:8000"),
        ("openpi://[::1]:8001/", "::1", 8001, "ws://[::1]:8001"),
    ],
)
def test_addresses(text, host, port, url):
    address = Address.parse(text, "actor.policy")
    assert (*address, address.url) == (host, port, url)


@pytest.mark.parametrize(
    "text", ["ws://robot:8000", "openpi://", "openpi://a:70000", "openpi://a b:1", "openpi://key@robot:8000",
             "openpi://robot:8000/path"],
)  # fmt: skip
def test_other_addresses_are_refused(text):
    with pytest.raises(ConfigError, match=naming("actor.policy", "openpi://HOST:PORT")):
        Address.parse(text, "actor.policy")


@pytest.mark.parametrize("text", [b"", b"a key with spaces", b"k" * 20 + b"\n" + b"m" * 20, b"\xff" * 20])
def test_other_files_are_no_keys_and_stay_secret(tmp_path, text):
    (tmp_path / "key").write_bytes(text)
    with pytest.raises(ConfigError, match=naming("api_key", tmp_path / "key")) as error:
        read_key(str(tmp_path / "key"), "api_key")
    assert "kkkk" not in str(error.value)


def test_a_clients_key_comes_from_the_setting_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(endpoint.KEY_VARIABLE, raising=False)
    assert client_key("", "actor.policy_key") == ""
    with pytest.raises(ConfigError, match=naming("actor.policy_key", tmp_path / "absent")):
        client_key(str(tmp_path / "absent"), "actor.policy_key")
    (tmp_path / "a").write_text("a" * 16 + "\n")
    (tmp_path / "b").write_text("b" * 20)
    monkeypatch.setenv(endpoint.KEY_VARIABLE, str(tmp_path / "a"))
    assert client_key("", "actor.policy_key") == "a" * 16
    assert client_key(str(tmp_path / "b"), "actor.policy_key") == "b" * 20
    monkeypatch.setenv(endpoint.KEY_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=naming(endpoint.KEY_VARIABLE)):
        client_key("", "actor.policy_key")


def test_headers_and_without_the_library_its_extra(monkeypatch):
    key = "k" * 16
    header = authorization(key)["Authorization"]
    assert (header, authorization("")) == (f"Api-Key {key}", {})
    assert is_authorized(None, "")
    assert is_authorized(header, key)
    others = (None, "", key, f"Api-Key {key}x", f"Bearer {key}", "Api-Key \xe9\udce9")
    assert not [other for other in others if is_authorized(other, key)]
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(ConfigError, match=r"serl-chunk\[serve\]"):
        websockets()
