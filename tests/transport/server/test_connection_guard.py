"""What a peer makes the learner hold before a message is complete: measured in the memory of a learner's process."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import struct
import threading
import time

import pytest
from growth import Growth
from key_tools import invited
from ports import free_port
from socket_attacks import READY, frame_of, greeted
from transport_tools import CONFIG, Inbox, RawActor, eventually, linked, raw, send_episode, serving

from serl_chunk.transport.server import sockets as server_sockets
from serl_chunk.transport.server.sockets import RateLimiter
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import CHANNELS, CREDIT_BYTES
from serl_chunk_robot.wire import codec

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
    for i in range(n):
        with contextlib.suppress(OSError):
            s = greeted(port + i % len(CHANNELS), b"CURVE")
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


@pytest.mark.parametrize(("attack", "channel", "part", "bound"), [
    (endless_parts, "data", PART, BOUND), (endless_parts, "control", PART, BOUND),
    (endless_parts, "data", b"", 2 * BOUND),  # a frame of two bytes costs libzmq 64, and a look that comes late more
    (endless_parts_of_a_session, "data", PART, BOUND), (half_handshakes, "data", 50, BOUND),  # before any key is shown
])  # fmt: skip
def test_a_message_that_never_ends(learner, tmp_path, monkeypatch, attack, channel, part, bound):
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
        with attacked(attack, port + CHANNELS.index(channel), part) as process:
            while (process.is_alive() or n < 3) and time.monotonic() < end:
                send_episode(link, f"e{n}", 20)
                assert link.flush(10)
                n += 1
            assert not process.is_alive()
        assert growth.close() < bound
        assert keyed or server.stats()["connections_cut"] > 0
        assert link.stats()["connections"] == 1
        assert inbox.episodes() == {f"e{i}": list(range(20)) for i in range(n)}


def test_connections_without_a_session_are_limited_in_number(port, inbox):
    """The oldest go; an actor that is there stays, and one that comes is let in."""
    with serving(port, on_record=inbox) as server, linked(port) as link, contextlib.ExitStack() as stack:
        send_episode(link, "a", 5)
        assert link.flush(10)
        for _ in range(100):
            stack.enter_context(greeted(port))
        eventually(lambda: server.stats()["connections_cut"] >= 100 - 64)
        with linked(port, actor_id="late") as late:
            send_episode(late, "b", 5)
            assert late.flush(10)
        send_episode(link, "c", 5)
        assert link.flush(10)
        assert link.stats()["connections"] == 1


# -- a connection that sends too much nonsense is not read for a while ---------------------------------------------


def test_after_the_limit_one_a_second_is_read(clock):
    limiter, x = RateLimiter(3, 1.0, clock), ("data", b"x")

    def read(after: float) -> bool:
        clock.now += after
        return not limiter.is_reached(x)

    assert read(0)
    assert [limiter.add(x) for _ in range(3)] == [False, False, True]
    assert not read(0)
    assert not limiter.is_reached(("data", b"y"))
    assert not limiter.is_reached(("control", b"x"))
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
        limiter.add(("data", b"%d" % i))
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
