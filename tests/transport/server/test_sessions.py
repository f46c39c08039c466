"""Who may connect, what a session is told, and when it counts as gone."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import resource
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from errors import naming
from growth import Growth
from key_tools import invited
from ports import free_port
from socket_attacks import READY, frame_of, greeted
from transport_tools import (
    CONFIG,
    CONTRACT,
    LIMITS,
    Inbox,
    RawActor,
    eventually,
    linked,
    raw,
    send_episode,
    serving,
    step,
)

from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.server import sessions
from serl_chunk.transport.server import sockets as server_sockets
from serl_chunk.transport.server.sessions import RefuseError, Sessions
from serl_chunk.transport.server.sockets import RateLimiter, sessions_that_fit
from serl_chunk.transport.storage.record_store import SessionState
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire import handshake, records
from serl_chunk.transport.wire.handshake import CREDIT_BYTES, Hello, UnreachableError
from serl_chunk.transport.wire.records import Item
from serl_chunk.types import Begin, ConfigError, StepBlock
from serl_chunk_robot.wire import codec

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


@pytest.mark.parametrize(
    ("soft", "hard", "fit", "raised"),
    [(1024, 4096, 10, 1024), (200, 4096, 10, 248), (200, 200, 6, 200), (64, 140, 1, 140), (64, 100, 0, 100)],
)
def test_as_many_sessions_as_there_are_files_for(monkeypatch, caplog, soft, hard, fit, raised):
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.append(new))
    with contextlib.nullcontext() if fit else pytest.raises(ConfigError, match=naming(100, 140, "ulimit")):
        assert sessions_that_fit(10) == fit
    assert limits[-1] == (raised, hard)
    assert ("max_sessions=10" in caplog.text) is (0 < fit < 10)


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
    with pytest.raises(ConfigError, match=naming("port", 65536, "1..65535")), serving(65536):
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


BOUND = 200 << 20  # bytes that the process may grow by
PART = bytes(1 << 20)
ATTACK_S = 1.0


def endless_parts(port: int, part: bytes, beginning: bytes = b"") -> None:
    """Send parts of one message that never ends, again and again; `beginning` comes first on each connection."""
    block = frame_of(part, more=True) * max(1, (1 << 20) // (len(part) + 9))
    end = time.monotonic() + ATTACK_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError), greeted(port) as s:
            s.settimeout(1)
            s.sendall(bytes([4, len(READY)]) + READY + beginning)
            while time.monotonic() < end:
                s.sendall(block)


def endless_parts_of_a_session(port: int, part: bytes) -> None:
    """The same by an actor that was let in, and whose heart beats."""
    actor = RawActor(port, session="bad", actor_id="bad")
    token, (ping,) = actor.token, codec.encode(handshake.PING, {})

    def beat() -> None:
        while True:
            actor.control.send_multipart(codec.encode(handshake.PING, {"token": token}))
            time.sleep(0.1)

    threading.Thread(target=beat, daemon=True).start()
    endless_parts(port, part, frame_of(token, more=True) + frame_of(ping, more=False))
    os._exit(0)


def half_handshakes(port: int, n: int) -> None:
    """Connections that begin a key exchange with a command of 60 MiB and do not end it."""
    connections = []
    for _ in range(n):
        with contextlib.suppress(OSError):
            s = greeted(port, b"CURVE")
            s.settimeout(0.2)
            connections.append(s)
            s.sendall(b"\x06" + struct.pack(">Q", 60 << 20))
    end = time.monotonic() + ATTACK_S
    while time.monotonic() < end:
        for s in connections:
            with contextlib.suppress(OSError):
                s.send(PART)
    os._exit(0)


@contextlib.contextmanager
def attacked(target, *args):
    """A process that attacks while the body runs; ended at its end."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(("attack", "part", "bound"), [
    (endless_parts, PART, BOUND),
    (endless_parts, b"", 2 * BOUND),  # a frame of two bytes costs libzmq 64, and a look that comes late more
    (endless_parts_of_a_session, PART, BOUND), (half_handshakes, 50, BOUND),  # before any key is shown
])  # fmt: skip
def test_a_message_that_never_ends(learner, tmp_path, monkeypatch, attack, part, bound):
    """Episodes go on until the attack is over; all arrive over one connection."""
    inbox, port, n, end = Inbox(), free_port(), 0, time.monotonic() + 20.0
    of_session, keyed = attack is endless_parts_of_a_session, attack is half_handshakes
    config = dataclasses.replace(CONFIG, max_message_bytes=8 << 20) if of_session else CONFIG
    monkeypatch.setattr(server_sockets, "CREDIT_BYTES", 8 << 20 if of_session else CREDIT_BYTES)
    keys = {"keys": invited(learner, tmp_path / "robot", port=port)} if keyed else {}
    with (
        serving(port, config=config, on_record=inbox, **({"keys": learner} if keyed else {})) as server,
        linked(port, config=config, **keys) as link,
    ):
        growth = Growth()
        with attacked(attack, port, part) as process:
            while (process.is_alive() or n < 3) and time.monotonic() < end:
                send_episode(link, f"e{n}", 20)
                assert link.flush(10)
                n += 1
            assert not process.is_alive()
        assert growth.close() < bound
        assert keyed or not part or server.stats()["connections_cut"] > 0
        assert link.stats()["connections"] == 1
        assert inbox.episodes() == {f"e{i}": list(range(20)) for i in range(n)}


def test_connections_without_a_session_are_limited_in_number(port, inbox):
    """The oldest go; an actor that is there stays, and one that comes is let in."""
    few = dataclasses.replace(CONFIG, max_sessions=20)
    with (
        serving(port, config=few, on_record=inbox) as server,
        linked(port) as link,
        contextlib.ExitStack() as stack,
    ):
        send_episode(link, "a", 5)
        assert link.flush(10)
        for _ in range(90):
            stack.enter_context(greeted(port))
        eventually(lambda: server.stats()["connections_cut"] >= 90 - 3 * 20)
        with linked(port, actor_id="late") as late:
            send_episode(late, "b", 5)
            assert late.flush(10)
        send_episode(link, "c", 5)
        assert link.flush(10)
        assert link.stats()["connections"] == 1


def test_after_the_limit_one_a_second_is_read(clock):
    limiter, x = RateLimiter(3, 1.0, clock), b"x"

    def read(after: float) -> bool:
        clock.now += after
        return not limiter.is_reached(x)

    assert read(0)
    assert [limiter.add(x) for _ in range(3)] == [False, False, True]
    assert not read(0)
    assert not limiter.is_reached(b"y")
    assert read(0.01)
    assert limiter.add(x)
    assert not read(0.9)
    assert read(0.2)
    assert limiter.add(x)
    assert read(10)
    assert not limiter.add(x)  # all is forgiven
    for _ in range(100):  # rare mistakes never add up
        clock.now += 1.0
        assert not limiter.add(x)
    for i in range(5000):  # and what is remembered is bounded
        limiter.add(b"%d" % i)
    assert len(limiter._levels) == 1024


def test_a_flood_is_dropped_unread_and_counted_while_others_are_served(monkeypatch, port, inbox):
    monkeypatch.setattr(server_sockets, "MAX_MALFORMED", 5)
    who = codec.encode(handshake.WHO, {"protocol": handshake.PROTOCOL})
    with serving(port, on_record=inbox) as server, linked(port) as link, raw(port) as s, raw(port) as t:
        for _ in range(300):
            s.send_multipart([b"garbage"])
        eventually(lambda: server.stats()["malformed"] + server.stats()["ignored"] == 300)
        assert 5 <= server.stats()["malformed"] <= 15
        send_episode(link, "e", 20)
        assert link.flush(10)
        assert inbox.episodes() == {"e": list(range(20))}
        s.send_multipart(who)  # not heard
        t.send_multipart(who)
        assert codec.decode(t.recv_multipart(), codec.Limits(1 << 20, 4)).kind == handshake.IDENTITY
        assert not s.poll(0)
