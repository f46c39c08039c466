"""Who controls a served robot: commands and leases, without sockets and on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from errors import naming
from robot_fronts import NoDoor
from robot_limits import J
from robot_served import HERE, server
from robot_world import DT, FaultyArms

from serl_chunk_robot.safety.table import OPERATOR
from serl_chunk_robot.server.admission import Address
from serl_chunk_robot.server.door import A_PASS, Request
from serl_chunk_robot.server.leases import MOST_CLIENTS, SILENCE, Client, Clients, Lease
from serl_chunk_robot.wire import arrays
from serl_chunk_robot.wire.protocol import PROTOCOL


class Cell:
    """A robot in HOLD; a desk, the actor "left" that has the lease, and "other", each by a connection of its name."""

    def __init__(self) -> None:
        self.now, self.door, self.arms = 100.0, NoDoor(), FaultyArms()
        self.server = server(self.arms, Address(HERE, 1), lambda: self.now, door=self.door, needs_go=False)
        for name, role in (("desk", OPERATOR), ("left", "controller"), ("other", "any")):
            self.greet(name, name=name, role=role)
        self.run(2)
        self.ask("desk", "clear")

    def greet(self, connection: str, **values: Any) -> dict[str, Any]:
        return self.ask(connection, "hello", process="1", protocol=PROTOCOL, **values)

    def run(self, passes: int = 1) -> None:
        for _ in range(passes):
            self.now += DT
            self.server.run_pass(self.now)

    def send(self, connection: str, op: str, **values: Any) -> None:
        values = {"op": op, "stamp": self.now, "generation": self.state["generation"], **values}
        self.door.requests.append(Request(connection.encode(), arrays.pack(values)))

    def ask(self, connection: str, op: str, **values: Any) -> dict[str, Any]:
        """Send a request; returns its reply, once a pass has taken it. Raises AssertionError with its error."""
        self.door.replies.clear()
        self.send(connection, op, id=1, **values)
        self.run()
        reply = arrays.unpack(self.door.replies[0], 1 << 20)
        assert reply["ok"], reply["error"]
        return reply

    def until(self, state: str) -> str:
        """Run until the robot is in a state; returns the word."""
        for _ in range(200):
            if self.state["state"] == state:
                return str(self.state["word"])
            self.run()
        raise AssertionError(f"{self.state['state']}, not {state}")

    @property
    def state(self) -> dict[str, Any]:
        return arrays.unpack(self.door.states[0], 1 << 20) if self.door.states else {"generation": 0}


@pytest.fixture
def cell() -> Cell:
    return Cell()


def test_the_newest_command_of_the_controller_is_taken_and_none_of_another_or_of_an_older_generation(cell: Cell):
    at = cell.arms.q.copy()
    cell.ask("left", "arm")
    older = cell.state["generation"]
    for number in range(1, 11):  # before the next pass
        cell.send("left", "command", target=at + 0.001 * number, number=number)
    cell.run()
    assert (cell.state["number"], cell.state["counts"]["overtaken"]) == (10, 9)
    cell.run(3)
    assert (cell.state["set_point"] > at + 0.005).all(), "of the newest: the oldest one's target is 0.001 away"
    for number in range(11, 14):
        cell.send("other", "command", target=at + 0.05, number=number)
    cell.run()
    assert (cell.state["number"], cell.state["counts"]["refused"]) == (10, 3)
    with pytest.raises(AssertionError, match=naming("command", "left")):
        cell.ask("other", "command", target=at, number=99)
    cell.ask("left", "release")
    cell.until("HOLD")
    cell.ask("left", "arm")
    held = cell.state["set_point"]
    cell.send("left", "command", target=held + 0.05, number=99, generation=older)
    cell.run(3)
    assert (cell.state["counts"]["generation"], cell.state["number"], cell.state["state"]) == (1, -1, "RUN")
    np.testing.assert_array_equal(cell.state["set_point"], held)


def test_a_second_actor_is_refused_with_the_first_ones_name_until_that_drops_its_lease(cell: Cell):
    cell.ask("left", "arm")
    for connection, op, named in (("other", "lease", "left"), ("other", "arm", "left"), ("desk", "arm", "left")):
        with pytest.raises(AssertionError, match=naming(named)):
            cell.ask(connection, op)
    cell.send("left", "command", target=cell.arms.q + 0.05, number=1)
    cell.run(2)
    assert cell.ask("left", "drop")["state"] == "BRAKE"
    assert cell.state["controller"] == ""
    assert "gone" in cell.until("HOLD")
    cell.ask("other", "lease")
    assert cell.ask("other", "arm")["word"] == "armed by other"


def test_an_actor_that_comes_back_gets_its_lease_and_the_robot_brakes_first(cell: Cell):
    cell.ask("left", "arm")
    assert cell.greet("again", name="left", role="controller")["state"] == "BRAKE"
    assert "another connection" in cell.until("HOLD")
    cell.run(300)
    assert cell.state["state"] == "HOLD", "it is not expected to command before it arms"
    with pytest.raises(AssertionError, match=naming("release", "left")):
        cell.ask("left", "release")
    assert cell.ask("again", "arm")["state"] == "RUN"


def test_the_lease_of_a_silent_actor_ends_after_two_seconds_and_stops_its_reset(cell: Cell):
    assert cell.ask("left", "reset", by=0.0, lasts=True)["draws"]["step 0"].shape == (J,)
    began = cell.now
    while cell.state["controller"]:
        cell.ask("other", "ping")  # another client's messages renew nothing
        assert cell.now - began < 3
    assert 1.9 < cell.now - began < 2.1
    assert "gone" in cell.until("HOLD")
    cell.ask("left", "lease")
    for _ in range(30):
        cell.run(20)
        cell.ask("left", "ping")
    assert cell.state["controller"] == "left", "its own messages renew it"


def test_requests_that_last_hold_no_pass_up(cell: Cell):
    take = cell.door.take

    def slow() -> Request | None:
        cell.now += DT / 5
        return take()

    cell.door.take = slow  # type: ignore[method-assign]
    for _ in range(10):
        cell.send("left", "ping")
    cell.server.run_pass(cell.now)
    assert len(cell.door.requests) == 8, "a quarter of a pass is for requests"
    assert cell.server.loop._last_pass == (cell.now, cell.now), "the pass begins after them"
    cell.server._inbox.taken = A_PASS
    cell.server._wait(cell.now + DT)
    assert len(cell.door.requests) == 8, "nor more than so many until the next one"


LATER = SILENCE + 0.01


@pytest.mark.parametrize("state", ["STOPPED", "HOLD", "MOVE", "BRAKE"])
def test_silence_ends_it_outside_run_alone(state):
    lease = Lease()
    lease.take(b"1", Client("left", "any", "1"), 0.0)
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
