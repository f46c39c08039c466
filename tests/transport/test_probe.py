"""Probes: what they measure, that no actor is admitted for one, and that asking much gains nothing.

What a doctor is told by them is in tests/cli/doctor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from errors import naming
from flaky_proxy import flaky
from ports import free_port
from transport_tools import CONFIG, CONTRACT, LIMITS, Inbox, eventually, linked, raw, send_episode, serving

from serl_chunk.cli.doctor.probe import DiagnosticsClient
from serl_chunk.transport.server import sockets
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import AT_ONCE, MAX_ECHO_BYTES, PER_S, StatusRequest, UnreachableError
from serl_chunk_robot.wire import codec

HERE = "127.0.0.1"


@contextlib.contextmanager
def probing(port: int) -> Iterator[DiagnosticsClient]:
    """A prober that has been told which run it is."""
    with contextlib.closing(DiagnosticsClient(CONFIG, HERE, port, None)) as p:
        assert p.identify(10) == "run"
        yield p


def echo(number: Any = 1, **arrays: np.ndarray) -> list[Any]:
    return codec.encode(handshake.ECHO, {"number": number}, arrays)


def test_no_actor_is_admitted_displaced_or_forgotten(port):
    inbox, config = Inbox(), dataclasses.replace(CONFIG, max_sessions=1)
    with serving(port, config=config, on_record=inbox) as server:
        with linked(port, actor_id="a") as link, probing(port) as p:
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
    assert len(inbox.episodes()) == 1


def test_round_trips_and_the_clocks(port):
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


def test_a_flood_of_probes_is_dropped_while_actors_are_served(port):
    inbox, payload = Inbox(), np.zeros(100_000, np.uint8)
    with serving(port, on_record=inbox) as server, linked(port) as link, raw(port) as s, raw(port) as t:
        began = time.monotonic()
        for i in range(2000):
            for flood in (s, t):
                flood.send_multipart(echo(i, payload=payload), copy=False)
            if i % 100 == 0:
                send_episode(link, f"e{i}", 5)
        assert link.flush(20)
        assert len(inbox.episodes()) == 20
        assert link.stats()["connections"] == 1
        eventually(lambda: server.stats()["probes"] + server.stats()["probes_dropped"] == 4000, 30)
        assert server.stats()["probes"] <= AT_ONCE + PER_S * (time.monotonic() - began) + 1
        assert (server.stats()["records"], server.stats()["sessions"]) == (20 * 7, 1)  # nothing of it was inserted
        time.sleep(2 / PER_S)
        with probing(port) as p:  # another one is answered once the flood is over
            assert len(p.round_trips(1, 5)) == 1


def test_a_malformed_probe_is_counted_and_not_answered(port, monkeypatch):
    about = {"actor_id": "a", "contract": {}}
    hostile = [
        echo(payload=np.zeros(MAX_ECHO_BYTES + 1, np.uint8)),
        echo(payload=np.zeros(1, np.uint8), other=np.zeros(1, np.uint8)),
        *map(echo, ("1", -1, 2**63)),
        codec.encode(handshake.ECHO, {}),
        codec.encode(handshake.INSPECT, about, {"x": np.zeros(9)}),
        *(
            codec.encode(handshake.INSPECT, fields)
            for fields in (
                {},
                {"actor_id": "a"},
                about | {"actor_id": "a" * 129},
                about | {"contract": {"a": 1}},
                about | {"contract": {str(i): "" for i in range(257)}},
            )
        ),
    ]
    monkeypatch.setattr(sockets, "MAX_MALFORMED", 10**6)
    with serving(port) as server:
        for n, frames in enumerate(hostile, 1):
            with raw(port) as s:
                s.send_multipart(frames)
                s.send_multipart(echo(5))
                answer = codec.decode(s.recv_multipart(), LIMITS)  # of the second
                assert (answer.kind, answer.header["number"], answer.header["nbytes"]) == (handshake.ECHOED, 5, 0)
                assert server.stats()["malformed"] == n
