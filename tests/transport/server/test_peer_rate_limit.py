"""A connection that sends too much nonsense is not read for a while; others are."""

from __future__ import annotations

from ports import free_port
from transport_tools import Inbox, eventually, linked, raw, send_episode, serving

from serl_chunk.transport.server import sockets
from serl_chunk.transport.server.sockets import RateLimiter
from serl_chunk.transport.wire import handshake
from serl_chunk_robot.wire import codec


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


def test_a_flood_is_dropped_unread_and_counted_while_others_are_served(monkeypatch):
    inbox, port = Inbox(), free_port()
    monkeypatch.setattr(sockets, "MAX_MALFORMED", 5)
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
