"""Who may connect, what a session is told, and when it counts as gone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from errors import naming
from ports import free_port
from transport_tools import CONFIG, CONTRACT, LIMITS, Inbox, RawActor, eventually, linked, send_episode, serving, step

from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.server import sessions
from serl_chunk.transport.server.sessions import RefuseError, Sessions
from serl_chunk.transport.storage.record_store import SessionState
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.handshake import Hello, UnreachableError
from serl_chunk.transport.wire.records import Item
from serl_chunk.types import Begin, ConfigError, StepBlock

HELLO = Hello("s", 1, "a", CONTRACT, "", -1, 0, 5, 0, 3)


def test_an_absent_learner_is_waited_for(monkeypatch):
    """And its welcome carries plain values and arrays."""
    monkeypatch.setattr("serl_chunk.transport.client.link._REPORT_EVERY_S", 0.05)
    port, said, heard = free_port(), [], threading.Event()
    with linked(port, connect=False) as link, ThreadPoolExecutor(1) as pool:
        with pytest.raises(UnreachableError, match=naming(f"127.0.0.1:{port}", 0.05)):
            link.connect(timeout=0.05)
        connected = pool.submit(link.connect, 10, lambda sentence: said.append(sentence) or heard.set())
        assert heard.wait(10)
        with serving(port, welcome=lambda: ({"digest": "x", "n": 3}, {"mean": np.arange(3, dtype=np.float32)})):
            welcome = connected.result(10)
            assert link.stats()["connected"] == 1
    assert (welcome.fields, welcome.run) == ({"digest": "x", "n": 3}, "run")
    np.testing.assert_array_equal(welcome.arrays["mean"], [0, 1, 2])
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


@pytest.mark.parametrize("episode_timeout", [None, 60.0])
def test_a_silent_session_ends_its_episode_once_and_may_come_back(episode_timeout):
    """Within the episode's time-out it goes on as if nothing had been."""
    inbox, port, silent = Inbox(), free_port(), []
    options = {} if episode_timeout is None else {"episode_timeout": episode_timeout}
    with serving(port, on_record=inbox, on_silent=lambda info, gone: silent.append(gone), **options) as server:
        actor = RawActor(port)
        actor.record(records.encode_record(Begin("e"), 0))
        eventually(lambda: server.sessions()[0].live is False)
        eventually(lambda: episode_timeout or silent == [False])
        late = StepBlock.from_steps("e", [step(0)])
        assert actor.record(records.encode_record(late, 1)).header["next"] == 2
        assert server.stats()["orphans"] == 0
        assert [type(r) for r in inbox.records] == [Begin, StepBlock]
        eventually(lambda: server.sessions()[0].live is False)
        eventually(lambda: silent == [False] * (0 if episode_timeout else 2))


def test_a_higher_incarnation_takes_over_and_fences_the_lower(port, inbox):
    with serving(port, on_record=inbox) as server:
        old = RawActor(port)
        old.record(records.encode_record(Begin("e"), 0))
        new = RawActor(port, incarnation=2)
        assert (new.welcome.header["known"], new.welcome.header["next"]) == (True, 1)
        old.data.send_multipart([old.token, *records.encode_record(Begin("late"), 1)])
        eventually(lambda: server.stats()["stale"] == 1)
        assert inbox.records == [Begin("e")]
        with pytest.raises(AssertionError, match=naming("refused", "raw", "incarnation", 2, 1)):
            RawActor(port)


def test_the_allowance_follows_the_learner_and_counts_what_the_actor_counts(tmp_path):
    """A learner that starts in the middle of a session allows steps beyond those it never saw."""
    port, limits = free_port(), {"n": 10}
    with linked(port, connect=False, spools=lambda run: Spool(tmp_path / run, LIMITS, segment_bytes=1)) as link:
        with serving(port, allowance=lambda session: limits["n"]) as server:
            link.connect(10)
            assert link.allowance == 10
            limits["n"] = 25
            server.push_allowances()
            assert link.wait_until(lambda: link.allowance == 25, 10)
            limits["n"] = None
            assert link.wait_until(lambda: link.allowance is None, 10)
            send_episode(link, "e", 30)
            link.begin(Begin("f"))
            link.step(step(0))
            assert link.flush(10)
        with serving(port, allowance=lambda session: 10):
            assert link.wait_until(lambda: link.allowance == 40, 10)  # 30 that it never got, and 10
            assert link.steps_recorded == 31


def test_the_end_of_training_is_told_to_old_and_new_actors(port):
    with serving(port) as server, linked(port) as link:
        assert link.finished is None
        server.finish("max_steps reached")
        assert link.wait_until(lambda: link.finished == "max_steps reached", 10)
        assert link.can_begin() == (False, "max_steps reached")
        with linked(port, actor_id="late") as late:
            assert late.finished == "max_steps reached"


@pytest.fixture
def table(places):
    return Sessions(CONTRACT, "run", 2, places.get)


def test_too_many_sessions_a_rolled_back_spool_and_a_lost_stretch(table):
    session, _ = (table.admit(HELLO._replace(session=n, actor_id=n), "peer", 0.0).session for n in "ab")
    with pytest.raises(RefuseError, match=naming("transport.max_sessions", 2)) as e:
        table.admit(HELLO._replace(session="c", actor_id="c"), "peer", 0.0)
    assert e.value.retry
    session.state = session.state._replace(expected=5)
    hello = HELLO._replace(session="a", actor_id="a")
    with pytest.raises(RefuseError, match=naming("session", 5, 4)) as e:
        table.admit(hello._replace(next=4, steps_before_next=0), "peer", 0.0)
    assert e.value.renew
    admission = table.admit(hello._replace(first=9, next=12), "peer", 0.0)
    assert (admission.lost, admission.session.state.expected) == (4, 9)


def test_bad_addresses_are_named(port):
    with serving(port), pytest.raises(ConfigError, match=naming(port, "127.0.0.1", "port")), serving(port):
        pass  # in use
    for bind in ("0.0.0.0", "*", "192.168.1.7", "::"):
        with pytest.raises(ConfigError, match=naming("bind", bind, "insecure")), serving(port, bind=bind):
            pass
    with serving(port, bind="0.0.0.0", insecure=True) as server:
        assert server.stats()["sessions"] == 0
    with pytest.raises(ConfigError, match=naming("port", 65534, "1..65533")), serving(65534):
        pass
    with (
        pytest.raises(ConfigError, match=naming("bind", "203.0.113.9")),
        serving(port, bind="203.0.113.9", insecure=True),
    ):
        pass
    with pytest.raises(ConfigError, match=naming("ip", "no-such-host.invalid")):
        LearnerLink(CONFIG, host="no-such-host.invalid", port=5588, actor_id="a", contract={})


@pytest.fixture
def places():
    """States of sessions in the journal."""
    return {}


def test_silent_sessions_are_remembered_but_not_without_bound(table, places, monkeypatch):
    """Those that sent nothing, as evaluations, go first; a spool may come back with what the learner has already."""
    monkeypatch.setattr(sessions, "_REMEMBERED", 3)
    for i in range(8):
        session = table.admit(HELLO._replace(session=str(i), actor_id=str(i)), "peer", float(i)).session
        if i < 3:
            session.advance(Item.of(Begin("e"), session.state.expected), delivered=True)
        table.leave(session)
    assert [s.info.session for s in table] == ["0", "1", "2", "5", "6", "7"]
    table.restore([s.state._replace(session="old") for s in list(table)[:1]], 0.5)
    table.admit(HELLO._replace(session="8", actor_id="8"), "peer", 8.0)
    assert {"1", "2", "old"} <= {s.info.session for s in table}
    assert not {"3", "4", "5", "0"} & {s.info.session for s in table}
    places["0"] = SessionState("0", "0", 1, 17, 12, 0, None)
    again = table.admit(HELLO._replace(session="0", actor_id="0", next=20), "peer", 9.0)
    assert (again.known, again.session.state.expected) == (True, 17)
