"""Probes: what a doctor gets, that no actor is admitted for it, and that asking much gains nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from errors import naming
from flaky_proxy import flaky
from ports import free_port
from transport_tools import CONFIG, CONTRACT, LIMITS, Inbox, eventually, linked, send_episode, serving

from serl_chunk.cli.doctor import probe
from serl_chunk.cli.doctor.probe import DiagnosticsClient, KeyRefusedError, probe_ports
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk.transport.security.server import ServerKeys
from serl_chunk.transport.server.sockets import RateLimiter
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import RefusedError, UnreachableError
from serl_chunk.transport.wire.probe import (
    AT_ONCE,
    MAX_ECHO_BYTES,
    PAYLOAD,
    PER_S,
    LearnerStatus,
    StatusRequest,
)
from serl_chunk.types import ConfigError, Snapshot
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import WireError
from serl_chunk_robot.wire.curve import use_keys

HERE = "127.0.0.1"
FINDINGS = LearnerStatus("run", "", "", "", "", None, "", 0, 32, -1, 0, -1)


@contextlib.contextmanager
def probing(port: int, keys: ClientKeys | None = None, host: str = HERE) -> Iterator[DiagnosticsClient]:
    """A prober that has been told which run it is."""
    p = DiagnosticsClient(CONFIG, host, port, keys)
    try:
        assert p.identify(10) == "run"
        yield p
    finally:
        p.close()


@contextlib.contextmanager
def raw(port: int) -> Iterator[zmq.Socket[bytes]]:
    """A plain socket to the control port."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    s = context.socket(zmq.DEALER)
    s.linger, s.rcvtimeo, s.sndtimeo = 0, 5000, 5000
    s.connect(f"tcp://{HERE}:{port + 2}")
    try:
        yield s
    finally:
        context.destroy(linger=0)


def echo(number: Any = 1, **arrays: np.ndarray) -> list[Any]:
    return codec.encode(handshake.ECHO, {"number": number}, arrays)


# What is told.


def test_an_inspection_tells_what_an_actor_would_be_told():
    port = free_port()
    with serving(port) as server, probing(port) as p:
        assert p.inspect(StatusRequest("a", CONTRACT), 5) == FINDINGS
        assert p.inspect(StatusRequest("a", {}), 5).differs == ""  # nothing to compare
        found = p.inspect(StatusRequest("a", {"robot": "other", "horizon": "6", "extra": "1"}), 5)
        for words in ("robot is 'fake'", "'other' at the actor", "horizon is '5'", "'6'", "extra is absent"):
            assert words in found.differs
        server.publish(Snapshot(7, {"w": np.zeros(1000, np.float32)}), {})
        eventually(lambda: p.inspect(StatusRequest("a", {}), 5)[-3:-1] == (7, 4000))
        server.finish("enough")
        assert p.inspect(StatusRequest("a", {}), 5).finished == "enough"


def test_a_learner_that_is_not_ready_says_so_and_serves_on():
    def welcome() -> Any:
        raise ConfigError("still reading")

    port = free_port()
    with serving(port, welcome=welcome), probing(port) as p:
        assert p.inspect(StatusRequest("a", CONTRACT), 5).not_ready == "still reading"
        assert len(p.round_trips(3, 5)) == 3


def test_no_actor_is_admitted_displaced_or_forgotten():
    port, inbox = free_port(), Inbox()
    config = dataclasses.replace(CONFIG, max_sessions=1)
    with serving(port, config=config, on_record=inbox) as server:
        with linked(port, actor_id="a") as link:
            send_episode(link, "e", 5)
            assert link.flush(10)
            with probing(port) as p:
                found = p.inspect(StatusRequest("a", CONTRACT), 5)
                assert (found.taken_by, found.actors, found.max_actors) == (HERE, 1, 1)
                send_episode(link, "f", 5)  # it goes on
                assert link.flush(10)
                assert link.stats()["connections"] == 1
        for _ in range(5):  # each evaluation would be remembered as a session, and make an older one forgotten
            with probing(port) as p:
                assert p.inspect(StatusRequest("a", CONTRACT), 5).taken_by == ""
                with linked(port, actor_id="a"):  # the id is free meanwhile
                    pass
        assert {s.info.actor_id for s in server.sessions()} == {"a"}
    assert len(inbox.episodes()) == 2


def test_round_trips_and_the_clocks():
    port = free_port()
    with serving(port), flaky(free := free_port(), port) as proxy, probing(free) as p:
        proxy.delay = 0.02
        trips = p.round_trips(5, 10)
        assert len(trips) == 5
        assert all(0.04 <= t.seconds < 2 for t in trips)
        best = min(trips)
        assert abs(best.offset) <= best.seconds / 2 + 0.001  # the same clock
        proxy.cut = True
        proxy.break_connections()
        start = time.monotonic()
        assert p.round_trips(50, 0.5) == []
        assert time.monotonic() - start < 5
        with pytest.raises(UnreachableError, match=naming(f"{HERE}:{free}", "answer")):
            p.inspect(StatusRequest("a", CONTRACT), 0.2)


def test_a_slow_link_is_measured_within_the_time_given():
    port = free_port()
    with serving(port), flaky(free := free_port(), port) as proxy, probing(free) as p:
        proxy.rate = 2e6
        start = time.monotonic()
        measured = p.throughput(2.0)
        assert time.monotonic() - start < 3.0
        assert 0 < measured[0] < 2.4e6
        proxy.rate = 0
        assert p.throughput(2.0)[0] > 2 * measured[0]  # loopback


def test_a_link_that_carries_nothing_is_measured_too():
    port = free_port()
    with serving(port), flaky(free := free_port(), port) as proxy, probing(free) as p:
        proxy.delay = 5.0
        assert p.throughput(0.3) == (0.0, 0)


def test_rates_leave_the_beginning_out():
    assert probe._rate([(0.0, 0)]) == 0.0
    assert probe._rate([(0.0, 0), (2.0, 100)]) == 50.0
    assert probe._rate([(0.0, 0), (1.0, 10), (4.0, 310), (5.0, 410)]) == 100.0


# Who may ask, and how much.


def test_probes_are_limited_in_number_however_many_connect():
    now = [0.0]
    limiter = RateLimiter(AT_ONCE, PER_S, lambda: now[0])

    def answered():
        return sum(not limiter.is_reached("") and (limiter.add("") or True) for _ in range(3 * AT_ONCE))

    assert answered() == AT_ONCE
    now[0] += 2.0
    assert answered() == 2 * PER_S
    now[0] += 1e6  # no credit is saved up beyond the first
    assert answered() == AT_ONCE


def test_a_flood_of_probes_is_dropped_while_actors_are_served():
    port, inbox = free_port(), Inbox()
    with serving(port, on_record=inbox) as server, linked(port) as link, raw(port) as s, raw(port) as t:
        began = time.monotonic()
        for i in range(2000):
            for flood in (s, t):
                flood.send_multipart(echo(i, payload=np.zeros(100_000, np.uint8)), copy=False)
            if i % 100 == 0:
                send_episode(link, f"e{i}", 5)
        assert link.flush(20)
        assert len(inbox.episodes()) == 20
        assert link.stats()["connections"] == 1
        eventually(lambda: server.stats()["probes"] + server.stats()["probes_dropped"] == 4000, 30)
        answered = server.stats()["probes"]
        assert answered <= AT_ONCE + PER_S * (time.monotonic() - began) + 1
        assert server.stats()["records"] == 20 * 7  # nothing of it was inserted
        assert server.stats()["sessions"] == 1
        # Another one is answered once the flood is over.
        time.sleep(2 / PER_S)
        with probing(port) as p:
            assert len(p.round_trips(1, 5)) == 1


@pytest.mark.parametrize(
    "frames",
    [
        echo(payload=np.zeros(MAX_ECHO_BYTES + 1, np.uint8)),
        echo(payload=np.zeros(MAX_ECHO_BYTES // 8 + 1, np.float64)),
        echo(other=np.zeros(1, np.uint8)),
        echo(payload=np.zeros(1, np.uint8), other=np.zeros(1, np.uint8)),
        echo("1"),
        echo(-1),
        echo(2**63),
        codec.encode(handshake.ECHO, {}),
        codec.encode(handshake.INSPECT, {}),
        codec.encode(handshake.INSPECT, {"actor_id": "a"}),
        codec.encode(handshake.INSPECT, {"actor_id": "a" * 129, "contract": {}}),
        codec.encode(handshake.INSPECT, {"actor_id": "a", "contract": {"a": 1}}),
        codec.encode(handshake.INSPECT, {"actor_id": "a", "contract": {str(i): "" for i in range(257)}}),
        codec.encode(handshake.INSPECT, {"actor_id": "a", "contract": {}}, {"x": np.zeros(9)}),
    ],
)
def test_a_malformed_probe_is_counted_and_not_answered(frames):
    port = free_port()
    with serving(port) as server, raw(port) as s:
        s.send_multipart(frames)
        s.send_multipart(echo(5))
        answer = codec.decode(s.recv_multipart(), LIMITS)  # of the second
        assert (answer.kind, answer.header["number"], answer.header["nbytes"]) == (handshake.ECHOED, 5, 0)
        assert server.stats()["malformed"] == 1


def test_a_message_beyond_the_limit_of_all_messages_is_no_probe():
    port = free_port()
    config = dataclasses.replace(CONFIG, max_message_bytes=1 << 16, piece_bytes=1 << 16, credit_bytes=1 << 16)
    with serving(port, config=config) as server, raw(port) as s:
        s.send_multipart(echo(1, **{PAYLOAD: np.zeros((1 << 16) - 10, np.uint8)}))  # with its header: too much
        eventually(lambda: server.stats()["malformed"] == 1)
        p = DiagnosticsClient(config, HERE, port, None)
        try:
            p.identify(5)
            assert p.throughput(1.0)[1] > 0  # what it sends keeps to the limit
        finally:
            p.close()


def test_without_a_right_key_no_probe_is_answered(tmp_path):
    keys, _ = ServerKeys.ensure(tmp_path / "learner")
    port = free_port()
    robot = ClientKeys.accept(tmp_path / "robot", keys.invite("left", [HERE], port))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with serving(port, keys=keys) as server:
        try:
            s = context.socket(zmq.DEALER)
            s.linger, s.rcvtimeo = 0, 5000
            use_keys(s, keys.pair.public, robot.ticket)
            s.connect(f"tcp://{HERE}:{port + 2}")
            for frames in (echo(), StatusRequest("a", CONTRACT).encode()):
                s.send_multipart(frames)
                answer = codec.decode(s.recv_multipart(), LIMITS)
                assert answer.kind == handshake.REFUSED
                assert "for joining only" in answer.header["reason"]
        finally:
            context.destroy(linger=0)
        stranger = DiagnosticsClient(CONFIG, HERE, port, dataclasses.replace(robot, ticket=None))
        with pytest.raises(KeyRefusedError, match=naming(f"{HERE}:{port}", "left", "serl-chunk keys add NAME")):
            stranger.identify(5)
        stranger.close()
        assert keys.enrol(robot.ticket.public, robot.pair.public) == "left"
        with probing(port, dataclasses.replace(robot, ticket=None)) as p:
            assert p.secured
            assert p.inspect(StatusRequest("a", CONTRACT), 5).key == "left"
            keys.revoke("left")  # its connection is open, and no longer heard
            with pytest.raises(RefusedError, match=naming("left", "revoked")):
                p.inspect(StatusRequest("a", CONTRACT), 5)
        assert server.stats()["probes"] == 1


def test_answers_that_are_none_are_refused():
    for change in ({"run": 1}, {"actors": "1"}, {"finished": 0}, {"free_bytes": 0.5}):
        with pytest.raises(WireError):
            LearnerStatus.decode(codec.decode(FINDINGS._replace(**change).encode(), LIMITS))
    assert LearnerStatus.decode(codec.decode(FINDINGS.encode(), LIMITS)) == FINDINGS


def test_what_is_no_learner_is_told_apart():
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    port = free_port()
    router = context.socket(zmq.ROUTER)
    try:
        router.bind(f"tcp://{HERE}:{port + 2}")
        p = DiagnosticsClient(CONFIG, HERE, port, None)
        with pytest.raises(UnreachableError, match=naming(f"{HERE}:{port}", "listens")):
            p.identify(0.5)
        identity = router.recv_multipart()[0]
        router.send_multipart([identity, b"garbage"])
        with pytest.raises(UnreachableError, match=naming(f"{HERE}:{port}", "msgpack")):
            p.identify(5)
        p.close()
    finally:
        context.destroy(linger=0)


# Ports.


def test_ports_are_told_apart():
    port = free_port()
    assert [r.trouble for r in probe_ports(HERE, port, 2)] == ["refused"] * 3
    with serving(port):
        found = probe_ports(HERE, port, 2)
        assert [(r.channel, r.port, r.trouble) for r in found] == [
            ("data", port, ""), ("snapshots", port + 1, ""), ("control", port + 2, ""),
        ]  # fmt: skip
        assert all(0 < r.seconds < 2 for r in found)
    with socket.create_server((HERE, port)) as listener:
        listener.settimeout(5)
        assert [r.trouble for r in probe_ports(HERE, port, 1)] == ["no greeting", "refused", "refused"]
    assert {r.trouble for r in probe_ports("no-such-host.invalid", port, 2)} == {"no host"}


def test_a_name_that_takes_for_ever_is_not_waited_for(monkeypatch):
    def hang(*args: Any, **kwargs: Any) -> socket.socket:
        time.sleep(3)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", hang)
    start = time.monotonic()
    assert [r.trouble for r in probe_ports("absent", 5588, 0.3)] == ["timeout"] * 3
    assert time.monotonic() - start < 1.5
