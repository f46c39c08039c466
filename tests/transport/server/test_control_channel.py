"""Heartbeats, hellos and refusals are answered whatever the records wait for; nothing is lost or reordered by that."""

from __future__ import annotations

import threading
import time

import pytest
from errors import naming
from ports import free_port
from transport_tools import CONFIG, LIMITS, Inbox, RawActor, eventually, linked, send_episode, serving

from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.handshake import RefusedError
from serl_chunk.types import Begin

BLOCKED_S = 3 * CONFIG.timeout_s  # an actor that hears nothing for `timeout_s` connects anew


class Gate:
    """An `on_record` that waits while it is shut."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()

    def wait(self) -> None:
        if not self.open.is_set():
            self.waiting.set()
            assert self.open.wait(30)

    def __call__(self, info, record):
        self.wait()
        self.inbox(info, record)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


def test_an_actor_that_returns_while_its_record_waits_is_let_in_behind_it(gate, port):
    """What it is told then to be next must not be what is being written."""
    with serving(port, on_record=gate) as server:
        old = RawActor(port)
        gate.open.clear()
        old.data.send_multipart([old.token, *records.encode_record(Begin("e"), 0)])
        assert gate.waiting.wait(10)
        with pytest.raises(AssertionError, match=naming("refused", "retry", True)):
            RawActor(port, incarnation=2)
        assert gate.inbox.records == []
        gate.open.set()
        eventually(lambda: server.sessions()[0].state.expected == 1)
        new = RawActor(port, incarnation=2)
        assert (new.welcome.header["known"], new.welcome.header["next"]) == (True, 1)
        assert new.record(records.encode_record(Begin("f"), 1)).header["next"] == 2
        assert gate.inbox.records == [Begin("e"), Begin("f")]


def test_an_episode_is_closed_before_its_successor_begins(gate):
    """A session that another one ousts while a record waits: its end comes first, and only once."""
    port, calls = free_port(), []

    def on_record(info, record):
        gate(info, record)
        calls.append((info.session, type(record)))

    with serving(port, on_record=on_record, on_silent=lambda info, gone: calls.append((info.session, gone))) as server:
        blocker, old = RawActor(port, session="blocker", actor_id="blocker"), RawActor(port, session="old")
        old.record(records.encode_record(Begin("e"), 0))
        gate.open.clear()
        blocker.data.send_multipart([blocker.token, *records.encode_record(Begin("x"), 0)])
        assert gate.waiting.wait(10)
        eventually(lambda: not {s.info.session: s.live for s in server.sessions()}["old"])
        new = RawActor(port, session="new")  # of the same actor id
        new.data.send_multipart([new.token, *records.encode_record(Begin("f"), 0)])
        time.sleep(0.1)
        gate.open.set()
        eventually(lambda: ("new", Begin) in calls)
        assert calls.index(("old", True)) < calls.index(("new", Begin))
        assert calls.count(("old", True)) == 1


@pytest.mark.parametrize("where", ["record", "journal"])
def test_heartbeats_hellos_and_refusals_are_answered_while_a_record_waits(gate, tmp_path, monkeypatch, where):
    """For the learner to take it, or for the disk."""
    port, inbox = free_port(), gate.inbox
    store = RecordStore(tmp_path, LIMITS, min_steps=10_000)
    if where == "journal":
        append = store.append
        monkeypatch.setattr(store, "append", lambda *args, **kw: (gate.wait(), append(*args, **kw))[1])
    with serving(port, on_record=gate if where == "record" else inbox, store=store) as server:
        server.resume()
        with linked(port) as link:
            send_episode(link, "before", 5)
            assert link.flush(10)
            gate.open.clear()
            send_episode(link, "during", 20)
            assert gate.waiting.wait(10)
            with linked(port, actor_id="late") as late:  # is let in meanwhile
                assert late.stats()["connections"] == 1
            refused = pytest.raises(RefusedError, match=naming("robot", "another"))
            with linked(port, actor_id="other", contract={"robot": "another"}, connect=False) as other, refused:
                other.connect(timeout=10)
            time.sleep(BLOCKED_S)
            assert (link.stats()["connected"], link.stats()["connections"]) == (1, 1)
            assert {s.info.actor_id: s.live for s in server.sessions()}["a"]
            gate.open.set()
            assert link.flush(10)
            assert (link.stats()["connections"], link.stats()["retransmitted"]) == (1, 0)
    store.close()
    assert inbox.episodes() == {"before": list(range(5)), "during": list(range(20))}
