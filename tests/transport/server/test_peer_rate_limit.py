"""A connection that sends too much nonsense is not read for a while; others are."""

from __future__ import annotations

import dataclasses

import zmq
from ports import free_port
from transport_tools import CONFIG, Inbox, eventually, linked, send_episode, serving

from serl_chunk.transport.server.sockets import RateLimiter
from serl_chunk.transport.wire import handshake
from serl_chunk_robot.wire import codec


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_after_the_limit_one_a_second_is_read():
    clock = Clock()
    offenders = RateLimiter(3, 1.0, clock)
    assert not offenders.is_reached(("data", b"x"))
    assert [offenders.add(("data", b"x")) for _ in range(3)] == [False, False, True]
    assert offenders.is_reached(("data", b"x"))
    assert not offenders.is_reached(("data", b"y"))
    assert not offenders.is_reached(("control", b"x"))
    clock.now += 0.01
    assert not offenders.is_reached(("data", b"x"))
    assert offenders.add(("data", b"x"))
    clock.now += 0.9
    assert offenders.is_reached(("data", b"x"))
    clock.now += 0.2
    assert not offenders.is_reached(("data", b"x"))
    assert offenders.add(("data", b"x"))
    clock.now += 10
    assert not offenders.is_reached(("data", b"x"))
    assert not offenders.add(("data", b"x"))  # all is forgiven


def test_rare_mistakes_never_add_up():
    clock = Clock()
    offenders = RateLimiter(2, 1.0, clock)
    for _ in range(100):
        assert not offenders.add(("data", b"x"))
        clock.now += 1.0


def test_what_is_remembered_is_bounded():
    offenders = RateLimiter(1, 1.0, Clock())
    for i in range(5000):
        offenders.add(("data", b"%d" % i))
    assert len(offenders._levels) == 1024
    assert offenders.is_reached(("data", b"4999"))
    assert not offenders.is_reached(("data", b"1"))


def test_a_flood_is_dropped_unread_and_counted_while_others_are_served():
    inbox, port = Inbox(), free_port()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    config = dataclasses.replace(CONFIG, max_malformed=5)
    try:
        with serving(port, config=config, on_record=inbox) as server, linked(port) as link:
            s = context.socket(zmq.DEALER)
            s.linger, s.rcvtimeo = 0, 5000
            s.connect(f"tcp://127.0.0.1:{port + 2}")
            for _ in range(300):
                s.send_multipart([b"garbage"])
            eventually(lambda: server.stats()["malformed"] + server.stats()["ignored"] == 300)
            assert 5 <= server.stats()["malformed"] <= 15
            send_episode(link, "e", 20)
            assert link.flush(10)
            assert inbox.episodes() == {"e": list(range(20))}
            s.send_multipart(codec.encode(handshake.WHO, {"protocol": handshake.PROTOCOL}))  # not heard
            other = context.socket(zmq.DEALER)
            other.linger, other.rcvtimeo = 0, 5000
            other.connect(f"tcp://127.0.0.1:{port + 2}")
            other.send_multipart(codec.encode(handshake.WHO, {"protocol": handshake.PROTOCOL}))
            assert codec.decode(other.recv_multipart(), codec.Limits(1 << 20, 4)).kind == handshake.IDENTITY
            assert not s.poll(0)
    finally:
        context.destroy(linger=0)
