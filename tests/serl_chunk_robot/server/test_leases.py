"""The lease of a robot's controller, and who is connected."""

from __future__ import annotations

import pytest
from errors import naming

from serl_chunk_robot.control.loop import Refused
from serl_chunk_robot.server.leases import MOST_CLIENTS, SILENCE, Client, Clients, Lease

LATER = SILENCE + 0.01
LEFT, RIGHT = Client("left", "any", "1"), Client("right", "any", "2")


def test_a_second_actor_is_refused_with_the_first_ones_name():
    lease = Lease()
    assert not lease.take(b"1", LEFT, 0.0)
    with pytest.raises(Refused, match=naming("left")):
        lease.take(b"2", RIGHT, 1.0)
    with pytest.raises(Refused, match=naming("command", "left")):
        lease.check(b"2", "command")
    lease.check(b"1", "command")
    with pytest.raises(Refused, match=naming("another process of left", "robot take")):
        lease.take(b"2", LEFT._replace(process="9"), 1.0)
    lease.check(b"1", "command")


def test_an_actor_gets_its_own_lease_back_and_its_older_connection_loses_it():
    lease = Lease()
    lease.take(b"1", LEFT, 0.0)
    assert not lease.take(b"1", LEFT, 0.1)
    assert lease.take(b"2", LEFT, 0.2)
    with pytest.raises(Refused):
        lease.check(b"1", "command")
    assert not lease.drop(b"1")
    assert lease.drop(b"2")
    assert lease.holder == ""
    assert not lease.take(b"3", RIGHT, 0.3)


def test_nothing_is_dropped_where_no_actor_holds_it():
    with pytest.raises(Refused, match=naming("arm", "lease")):
        Lease().check(b"", "arm")
    assert not Lease().drop(b"")


@pytest.mark.parametrize("state", ["STOPPED", "HOLD", "MOVE", "BRAKE"])
def test_silence_ends_it_outside_run_alone(state):
    lease = Lease()
    lease.take(b"1", LEFT, 0.0)
    lease.renew(b"1", 10.0)
    lease.renew(b"2", 20.0)
    assert lease.expire(10.0 + LATER, "RUN") == ""
    assert lease.expire(10.0 + SILENCE, state) == ""
    assert lease.expire(10.0 + LATER, state) == "left"
    assert lease.expire(10.0 + 2 * LATER, state) == ""
    assert lease.holder == ""


def test_the_longest_silent_clients_are_forgotten_but_for_the_controller():
    clients = Clients()
    for k in range(MOST_CLIENTS + 50):
        clients.add(b"%d" % k, Client(f"client {k}", "any"), keep=b"0")
        if k == 60:
            assert clients.heard_from(b"1") == Client("client 1", "any")
    assert len(clients) == MOST_CLIENTS
    assert clients.heard_from(b"0") is not None
    assert clients.heard_from(b"2") is None
    assert clients.heard_from(b"1") is not None  # it was heard since
    assert clients.heard_from(b"50") is None  # but this one was not
    assert clients.heard_from(b"%d" % (MOST_CLIENTS + 49)) is not None


def test_strangers_make_no_operator_leave():
    clients = Clients()
    clients.add(b"desk", Client("desk", "operator"), keep=b"")
    for k in range(200):
        clients.add(b"%d" % k, Client(f"client {k}", "any"), keep=b"0")
    assert clients.heard_from(b"desk") == Client("desk", "operator")
    assert clients.heard_from(b"0") == Client("client 0", "any")
    for k in range(200):
        clients.add(b"operator %d" % k, Client("desk", "operator"), keep=b"0")
    assert len(clients) == MOST_CLIENTS
    assert clients.heard_from(b"desk") is None
    assert clients.heard_from(b"0") is not None
