"""Who may connect, what a session is told, and when it counts as gone."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from errors import naming
from ports import free_port
from transport_tools import CONFIG, CONTRACT, LIMITS, Inbox, RawActor, eventually, linked, send_episode, serving, step

from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.server import sessions
from serl_chunk.transport.server.handler import ServerHandler
from serl_chunk.transport.server.server import LearnerServer
from serl_chunk.transport.server.sessions import RefuseError, Sessions
from serl_chunk.transport.sockets import CHANNELS
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.stream import SessionState
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.handshake import Hello, UnreachableError
from serl_chunk.transport.wire.records import Item
from serl_chunk.types import Begin, ConfigError, StepBlock

HELLO = Hello("s", 1, "a", CONTRACT, "", -1, 0, 5, 0, 3)


def test_the_welcome_carries_plain_values_and_arrays():
    port = free_port()
    normaliser = {"mean": np.arange(3, dtype=np.float32)}
    with serving(port, welcome=lambda: ({"digest": "x", "n": 3}, normaliser)), linked(port) as link:
        welcome = link.connect()
        assert welcome.fields == {"digest": "x", "n": 3}
        np.testing.assert_array_equal(welcome.arrays["mean"], [0, 1, 2])
        assert welcome.run == "run"


def test_an_absent_learner_is_waited_for(monkeypatch):
    monkeypatch.setattr("serl_chunk.transport.client.link._REPORT_EVERY_S", 0.05)
    port, said = free_port(), []
    with linked(port, connect=False) as link:
        with pytest.raises(UnreachableError, match=naming(f"127.0.0.1:{port}", 0.05)):
            link.connect(timeout=0.05)
        heard = threading.Event()

        def on_waiting(sentence):
            said.append(sentence)
            heard.set()

        caller = threading.Thread(target=lambda: link.connect(10, on_waiting))
        caller.start()
        assert heard.wait(10)
        with serving(port):
            caller.join(10)
            assert link.stats()["connected"] == 1
    assert "waiting" in said[0]


def test_two_live_actors_with_one_id():
    """The second is told, waits, and gets in when the first has left."""
    port, silent = free_port(), []
    with (
        serving(port, on_silent=lambda info, gone: silent.append((info.session, gone))),
        linked(port, connect=False) as second,
    ):
        with linked(port) as first:
            session = first._out.spool.session
            with pytest.raises(UnreachableError, match=naming("'a'", "127.0.0.1", "another actor id")):
                second.connect(timeout=0.5)
            send_episode(first, "e", 3)
            assert first.flush(10)
        second.connect(timeout=10)
        eventually(lambda: silent == [(session, False), (session, True)])


def test_two_actors_with_different_ids_feed_one_learner():
    inbox, port = Inbox(), free_port()
    with serving(port, on_record=inbox) as server, linked(port, actor_id="a") as a, linked(port, actor_id="b") as b:
        for e in range(5):
            send_episode(a, f"a{e}", 20)
            send_episode(b, f"b{e}", 20)
        assert a.flush(10)
        assert b.flush(10)
        assert inbox.episodes() == {f"{x}{e}": list(range(20)) for e in range(5) for x in "ab"}
        assert {s.info.actor_id: s.state.steps for s in server.sessions()} == {"a": 100, "b": 100}


def test_a_silent_session_ends_its_episode_once_and_may_come_back():
    inbox, port = Inbox(), free_port()

    def on_silent(info, gone):
        assert not gone
        inbox.silent.append(info.session)

    with serving(port, on_record=inbox, on_silent=on_silent) as server:
        actor = RawActor(port)
        try:
            actor.record(records.encode_record(Begin("e"), 0))
            eventually(lambda: inbox.silent == ["raw"])
            assert server.sessions()[0].live is False
            late = StepBlock.from_steps("e", [step(0)])
            assert actor.record(records.encode_record(late, 1)).header["next"] == 2
            assert server.stats()["orphans"] == 0
            assert [type(r) for r in inbox.records] == [Begin, StepBlock]
            eventually(lambda: inbox.silent == ["raw", "raw"])
        finally:
            actor.close()


def test_a_silent_session_within_the_episode_timeout_continues_its_episode():
    inbox, port = Inbox(), free_port()
    with serving(
        port, on_record=inbox, episode_timeout=60.0, on_silent=lambda i, gone: inbox.silent.append("x")
    ) as server:
        actor = RawActor(port)
        try:
            actor.record(records.encode_record(Begin("e"), 0))
            eventually(lambda: server.sessions()[0].live is False)
            actor.record(records.encode_record(StepBlock.from_steps("e", [step(0)]), 1))
            assert len(inbox.records) == 2
            assert inbox.silent == []
        finally:
            actor.close()


def test_a_higher_incarnation_takes_over_and_fences_the_lower():
    inbox, port = Inbox(), free_port()
    with serving(port, on_record=inbox) as server:
        old, new = RawActor(port), None
        try:
            old.record(records.encode_record(Begin("e"), 0))
            new = RawActor(port, incarnation=2)
            assert new.welcome.header["known"] is True
            assert new.welcome.header["next"] == 1
            old.data.send_multipart([old.token, *records.encode_record(Begin("late"), 1)])
            eventually(lambda: server.stats()["stale"] == 1)
            assert inbox.records == [Begin("e")]
            with pytest.raises(AssertionError, match=naming("refused", "raw", "incarnation", 2, 1)):
                RawActor(port)
        finally:
            old.close()
            if new is not None:
                new.close()


def test_the_allowance_follows_the_learner():
    port, limits = free_port(), {"n": 10}
    with serving(port, allowance=lambda session: limits["n"]) as server, linked(port) as link:
        assert link.allowance == 10
        limits["n"] = 25
        server.push_allowances()
        assert link.wait_until(lambda: link.allowance == 25, 10)
        limits["n"] = None
        assert link.wait_until(lambda: link.allowance is None, 10)


def test_the_allowance_counts_what_the_actor_counts(tmp_path):
    """A learner that starts in the middle of a session allows steps beyond those it never saw."""
    port = free_port()
    with linked(port, connect=False, spools=lambda run: Spool(tmp_path / run, LIMITS, segment_bytes=1)) as link:
        with serving(port):
            link.connect(10)
            send_episode(link, "e", 30)
            link.begin(Begin("f"))
            link.step(step(0))
            assert link.flush(10)
        with serving(port, allowance=lambda session: 10):
            assert link.wait_until(lambda: link.allowance == 40, 10)  # 30 that it never got, and 10
            assert link.steps_recorded == 31


def test_the_end_of_training_is_told_to_old_and_new_actors():
    port = free_port()
    with serving(port) as server, linked(port) as link:
        assert link.finished is None
        server.finish("max_steps reached")
        assert link.wait_until(lambda: link.finished == "max_steps reached", 10)
        assert link.can_begin() == (False, "max_steps reached")
        with linked(port, actor_id="late") as late:
            assert late.finished == "max_steps reached"


def test_a_port_in_use_is_named():
    port = free_port()
    with (
        serving(port),
        pytest.raises(ConfigError, match=naming(port, "127.0.0.1", "port")),
        serving(port),
    ):
        pass


def test_other_addresses_need_insecure():
    for bind in ("0.0.0.0", "*", "192.168.1.7", "::"):
        with pytest.raises(ConfigError, match=naming("bind", bind, "insecure")), serving(free_port(), bind=bind):
            pass
    with serving(free_port(), bind="0.0.0.0", insecure=True) as server:
        assert server.stats()["sessions"] == 0


def test_bad_addresses_are_named():
    with pytest.raises(ConfigError, match=naming("port", 65534, "1..65533")), serving(65534):
        pass
    with pytest.raises(ConfigError, match=naming("bind", "203.0.113.9")):
        LearnerServer(CONFIG, ServerHandler(), bind="203.0.113.9", port=free_port(), contract={}, insecure=True)
    with pytest.raises(ConfigError, match=naming("ip", "no-such-host.invalid")):
        LearnerLink(CONFIG, host="no-such-host.invalid", port=5588, actor_id="a", contract={})


def table(limit=2):
    return Sessions(CONTRACT, "run", limit, {}.get)


def test_too_many_sessions():
    t = table()
    for name in "ab":
        t.admit(HELLO._replace(session=name, actor_id=name), "peer", 0.0)
    with pytest.raises(RefuseError, match=naming("transport.max_sessions", 2)) as e:
        t.admit(HELLO._replace(session="c", actor_id="c"), "peer", 0.0)
    assert e.value.retry


HELLO_STANDING = SessionState("0", "0", 1, 17, 12, 0, None)


def test_silent_sessions_are_remembered_but_not_without_bound(monkeypatch):
    """Those that sent nothing, as evaluations, go first; a spool may come back with what the learner has already."""
    monkeypatch.setattr(sessions, "_REMEMBERED", 3)
    places = {}
    t = Sessions(CONTRACT, "run", 2, places.get)
    for i in range(8):
        session = t.admit(HELLO._replace(session=str(i), actor_id=str(i)), "peer", float(i)).session
        if i < 3:
            session.advance(Item.of(Begin("e"), session.state.expected), delivered=True)
        t.leave(session)
    assert [s.info.session for s in t] == ["0", "1", "2", "5", "6", "7"]
    t.restore([s.state._replace(session="old") for s in list(t)[:1]], 0.5)
    t.admit(HELLO._replace(session="8", actor_id="8"), "peer", 8.0)
    assert {"1", "2", "old"} <= {s.info.session for s in t}
    assert not {"3", "4", "5", "0"} & {s.info.session for s in t}
    places["0"] = HELLO_STANDING
    again = t.admit(HELLO._replace(session="0", actor_id="0", next=20), "peer", 9.0)
    assert (again.known, again.session.state.expected) == (True, 17)


def test_a_rolled_back_spool_is_refused_and_a_lost_stretch_counted():
    t = table()
    session = t.admit(HELLO, "peer", 0.0).session
    session.state = session.state._replace(expected=5)
    with pytest.raises(RefuseError, match=naming("session", 5, 4)) as e:
        t.admit(HELLO._replace(next=4, steps_before_next=0), "peer", 0.0)
    assert e.value.renew
    admission = t.admit(HELLO._replace(first=9, next=12), "peer", 0.0)
    assert (admission.lost, admission.session.state.expected) == (4, 9)


def test_free_ports_are_three():
    port = free_port()
    for offset in range(len(CHANNELS)):
        with socket.create_server(("127.0.0.1", port + offset)):
            pass
