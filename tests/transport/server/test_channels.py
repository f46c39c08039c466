"""Heartbeats, hellos and refusals are answered whatever the records wait for; nothing is lost or reordered by that."""

from __future__ import annotations

import dataclasses
import math
import threading
import time

import numpy as np
import pytest
from errors import naming
from ports import free_port
from transport_tools import CONFIG, LIMITS, Inbox, RawActor, eventually, linked, send_episode, serving, step

from serl_chunk.transport.server import sockets
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.handshake import REFUSED, RefusedError
from serl_chunk.transport.wire.records import PART, encode_part
from serl_chunk.types import Begin, StepBlock
from serl_chunk_robot.wire import codec

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
    """Its next number is not that of the record that is being written."""
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


def test_more_records_than_may_wait_are_sent_again(gate, port, monkeypatch):
    """What the control thread receives while the data thread stands still is bounded."""
    monkeypatch.setitem(sockets._INBOXES, "data", (2, math.inf))
    with serving(port, on_record=gate), linked(port) as link:
        gate.open.clear()
        for i in range(5):
            send_episode(link, f"e{i}", 5)
        assert gate.waiting.wait(10)
        time.sleep(BLOCKED_S)
        assert link.stats()["connections"] == 1
        gate.open.set()
        assert link.flush(10)
        assert (link.stats()["connections"], link.stats()["retransmitted"] > 0) == (1, True)
    assert gate.inbox.episodes() == {f"e{i}": list(range(5)) for i in range(5)}


FRAMES = records.encode_record(StepBlock.from_steps("e", [step(t, t) for t in range(12)]), 1)
TOTAL = codec.size_of(FRAMES)


def session_of(server, name):
    return next(s for s in server._sessions if s.info.session == name)


def send(actor, offset, nbytes, first=1, span=12, frames=FRAMES):
    """(next, partial, gap) as the learner answers a part."""
    h = actor.record(encode_part(first, span, frames, offset, nbytes)).header
    return h["next"], h["partial"] and h["partial"]["received"], h["gap"]


def test_a_record_is_taken_with_its_last_part(learner, actor):
    _, server, inbox = learner
    actor.data.send_multipart([b"\xc1" * 16, *encode_part(1, 12, FRAMES, 0, 700)])  # a stranger's
    eventually(lambda: server.stats()["stale"] == 1)
    assert server.stats()["parts"] == 0
    assert send(actor, 0, 300) == (1, 300, False)
    assert send(actor, 300, 300) == (1, 600, False)
    assert len(inbox.records) == 1
    assert send(actor, 600, TOTAL - 600) == (13, None, False)
    assert inbox.episodes() == {"e": list(range(12))}
    assert send(actor, 600, TOTAL - 600) == (13, None, False)  # once more: it is here
    assert send(actor, 0, 300) == (13, None, False)
    assert (server.stats()["parts"], server.stats()["gaps"]) == (5, 0)
    assert server.stats()["received_bytes"] == TOTAL + codec.size_of(records.encode_record(Begin("e"), 0))


def test_a_part_whose_predecessor_is_missing_is_told_once(learner, actor):
    _, server, inbox = learner
    assert send(actor, 300, 300) == (1, None, True)
    assert actor.receive(actor.data).header["gap"] is False  # what follows every turn
    assert send(actor, 600, 300) == (1, None, False)
    assert send(actor, 0, 300) == (1, 300, False)
    assert send(actor, 500, 300) == (1, 300, True)
    actor.receive(actor.data)
    assert send(actor, 0, 10, first=13) == (1, 300, False)  # of the next record: the same gap
    # A whole record in the middle: the learner was not sure to keep it, and the actor sends it once more.
    answer = actor.record(records.encode_record(Begin("e"), 0)).header
    assert (answer["taken"], answer["partial"]) == (1, {"first": 1, "received": 300})
    assert send(actor, 300, TOTAL - 300) == (13, None, False)
    assert (server.stats()["gaps"], server.stats()["duplicates"]) == (4, 1)
    assert inbox.episodes() == {"e": list(range(12))}


@pytest.mark.parametrize(("incarnation", "kept"), [(1, 700), (2, None)])
def test_a_process_goes_on_within_its_record_and_its_successor_does_not(learner, actor, incarnation, kept):
    port, _, inbox = learner
    send(actor, 0, 700)
    actor.close()
    again = RawActor(port, incarnation=incarnation)
    partial = again.welcome.header["partial"]
    assert (partial and partial["received"]) == kept
    assert send(again, kept or 0, TOTAL - (kept or 0)) == (13, None, False)
    assert inbox.episodes() == {"e": list(range(12))}


def test_silent_sessions_together_keep_no_more_parts_than_one_message():
    port, config = free_port(), dataclasses.replace(CONFIG, max_message_bytes=2 * TOTAL - 1)
    with serving(port, config=config) as server:
        for actor in [begun(port, session=name, actor_id=name) for name in ("first", "second")]:
            send(actor, 0, 700)
        sessions = [session_of(server, name) for name in ("first", "second")]
        eventually(lambda: not any(s.live for s in sessions))
        assert [s.assembly is not None for s in sessions] == [False, True]


@pytest.mark.parametrize("change", ["size", "content"])
def test_a_record_in_parts_that_is_malformed_refuses_the_session(learner, actor, change):
    """Sent again it would be as malformed."""
    _, server, inbox = learner
    header = {"first": 1, "span": 12, "sizes": [CONFIG.max_message_bytes + 1], "offset": 0}
    frames = codec.encode(PART, header, {"data": np.zeros(10, np.uint8)})
    actor.data.send_multipart(
        [actor.token, *(frames if change == "size" else encode_part(1, 12, [b"\xc1" * 50], 0, 50))]
    )
    refusal = actor.receive(actor.control)
    assert (refusal.kind, refusal.header["retry"]) == (REFUSED, False)
    assert "record after 1 of this session is malformed" in refusal.header["reason"]
    eventually(lambda: server.stats()["malformed"] == 1)
    assert session_of(server, "raw").assembly is None
    assert len(inbox.records) == 1


@pytest.fixture
def learner():
    """(port, server, inbox)"""
    inbox, port = Inbox(), free_port()
    with serving(port, on_record=inbox) as server:
        yield port, server, inbox


@pytest.fixture
def actor(learner):
    return begun(learner[0])


def begun(port, **changes):
    """An actor whose episode is open."""
    actor = RawActor(port, **changes)
    assert actor.record(records.encode_record(Begin("e"), 0)).header["next"] == 1
    return actor
