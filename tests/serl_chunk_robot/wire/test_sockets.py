from __future__ import annotations

import select
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from errors import naming

from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.wire import sockets
from serl_chunk_robot.wire.sockets import Waker


@pytest.fixture
def waker() -> Iterator[Waker]:
    waker = Waker()
    yield waker
    waker.close()


def awake(waker: Waker, seconds: float = 0.0) -> bool:
    return bool(select.select([waker.fileno()], [], [], seconds)[0])


def test_many_wakes_are_one_and_a_drain_without_one_or_a_wake_of_the_closed_is_harmless(waker: Waker):
    assert not awake(waker)
    waker.drain()
    for wakes in (1, 1, 100_000):  # more than any socket's buffer holds
        for _ in range(wakes):
            waker.wake()
        assert awake(waker)
        waker.drain()
        assert not awake(waker)
    waker.close()
    waker.wake()


def test_no_item_is_overlooked(waker: Waker):
    """Items are appended, then the consumer is woken; it drains, then looks. It must never sleep beside an item."""
    items: list[int] = []
    n, threads = 20_000, 3

    def produce() -> None:
        for i in range(n):
            items.append(i)
            waker.wake()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many interleavings as possible
    try:
        producers = [threading.Thread(target=produce) for _ in range(threads)]
        for p in producers:
            p.start()
        seen, deadline = 0, time.monotonic() + 60
        while seen < n * threads and time.monotonic() < deadline:
            assert awake(waker, 5.0), f"asleep with {len(items) - seen} items"
            waker.drain()
            seen = len(items)
        for p in producers:
            p.join()
    finally:
        sys.setswitchinterval(before)
    assert seen == n * threads


@pytest.mark.parametrize(("families", "ipv6"), [
    ([socket.AF_INET6, socket.AF_INET], 0), ([socket.AF_INET], 0), ([socket.AF_INET6], 1), (None, 0),
])  # fmt: skip
def test_a_name_with_both_kinds_of_address_is_reached_over_ipv4(monkeypatch, families, ipv6):
    """libzmq would try the first address alone, and learners nearly always listen on IPv4."""

    def resolve(host, port):
        if families is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(f, socket.SOCK_STREAM, 6, "", ("::1" if f == socket.AF_INET6 else "127.0.0.1", 0)) for f in families]

    monkeypatch.setattr(sockets.socket, "getaddrinfo", resolve)
    with zmq.Context() as context, sockets.make_socket(context, zmq.DEALER, 1 << 20) as s:
        sockets._known.clear()
        sockets.connect(s, "gpu.lab", 5588)
        assert s.getsockopt(zmq.IPV6) == ipv6


def test_a_network_that_is_away_changes_nothing_about_the_address(monkeypatch):
    """A host that has IPv6 alone keeps it while no name server answers, and no caller waits for that."""
    sockets._known.clear()
    asked, answer = [], threading.Event()

    def resolve(host, port):
        asked.append(host)
        if len(asked) > 1:
            answer.wait(10)
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 0))]

    monkeypatch.setattr(sockets.socket, "getaddrinfo", resolve)
    with zmq.Context() as context:
        for _ in range(2):
            with sockets.make_socket(context, zmq.DEALER, 1 << 20) as s:
                sockets.connect(s, "gpu6.lab", 5588)
                assert s.getsockopt(zmq.IPV6) == 1
        assert asked == ["gpu6.lab"] * 2  # the second one has no answer yet
        answer.set()
        while not sockets._asking.acquire(timeout=0.01):
            pass
        sockets._asking.release()
        for host in ("http://gpu:5588", "gpu box"):
            with sockets.make_socket(context, zmq.DEALER, 1 << 20) as s, pytest.raises(ConfigError, match=naming(host)):
                sockets.connect(s, host, 5588)


def test_a_host_that_moved_is_found_by_its_name(monkeypatch):
    """With addresses of another kind: the first connection after that asks, and the second one has the answer."""
    sockets._known.clear()
    families = [socket.AF_INET]
    monkeypatch.setattr(sockets.socket, "getaddrinfo", lambda *_: [(f, None, 6, "", ()) for f in families])
    assert sockets._families("gpu.lab") == {socket.AF_INET}
    families[:] = [socket.AF_INET6]
    deadline = time.monotonic() + 10
    while sockets._families("gpu.lab") != {socket.AF_INET6}:
        assert time.monotonic() < deadline
