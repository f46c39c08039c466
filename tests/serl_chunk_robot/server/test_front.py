"""The front of a robot's server: what peers can make it, and the loop, hold or take; a front that ends; requests."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np
import pytest
import zmq
from errors import naming
from growth import Growth
from robot_fronts import FrontedDoor, FrontOfProcess
from robot_served import HERE, Stepped, drive, free_port, served, until, wait, write_keys
from robot_world import DT
from socket_attacks import ATTACKS, attacked

from serl_chunk_robot.client.client import RobotClient, RobotError
from serl_chunk_robot.server import admission
from serl_chunk_robot.server.admission import Address
from serl_chunk_robot.server.door import A_PASS, GREETED, LEADS, MOST_UNDER_WAY, REQUEST, Door, Request
from serl_chunk_robot.server.leases import MOST_CLIENTS, Client, Clients
from serl_chunk_robot.server.peers import MOST_PEERS, OF_OTHERS, QUEUED, Peers, Waiting
from serl_chunk_robot.wire import arrays
from serl_chunk_robot.wire.link import PART, SIGNAL, Link, make_pair
from serl_chunk_robot.wire.protocol import MAX_REQUEST

BOUND = 32 << 20  # bytes that a process may grow by
ATTACK_S = 0.8


@pytest.mark.parametrize("name", ATTACKS)
def test_no_peer_holds_the_loop_or_memory(tmp_path, name):
    """Requests per pass, parts and bytes are bounded, and an operator is answered meanwhile."""
    keys = write_keys(tmp_path / "keys", desk="operator")["desk"] if name == "foreign_keys" else None
    door = FrontOfProcess(free_port(), None if keys is None else tmp_path / "keys")
    with served(port=door.port, door=door) as robot:
        desk = robot.client("desk", "operator", keys)
        wait(lambda: bool(desk.next_state()["answered"]))
        desk.request("clear")
        taken, run_pass = [], robot.server.run_pass
        robot.server.run_pass = lambda due: (run_pass(due), taken.append(robot.server._inbox.taken))[0]
        growths = [Growth(process) for process in (door.pid, "self")]
        with attacked(name, door.port, ATTACK_S, **({} if keys is None else {"server": keys.server})) as goes_on:
            while goes_on():
                assert desk.request("ping")["ok"]
                time.sleep(0.01)
        assert max(growth.close() for growth in growths) < BOUND
        assert desk.request("stop")["ok"]
        assert desk.request("ping")["greet"] is False, "an operator's registration and connection stay"
        assert max(taken) <= A_PASS
        if name not in ("peers", "foreign_keys"):
            wait(lambda: desk.next_state()["counts"].get("cut", 0) > 0)
            assert desk.newest_state()["counts"].get("malformed", 0) == 0, "none of these reaches the loop"


def test_a_message_of_too_many_parts_is_read_in_pieces(monkeypatch):
    """Those that came whole before the guard looked; other peers are answered, and its own connection ends."""
    monkeypatch.setattr("serl_chunk_robot.server.front.SKIPPED", 10)
    door = FrontedDoor(Address(HERE, free_port()), stepped=True)
    with contextlib.closing(door), contextlib.closing(RobotClient(f"{HERE}:{door.front_port}", name="x")) as client:
        reads: list[int] = []
        skip = door.front._skip
        monkeypatch.setattr(door.front, "_skip", lambda: (skip(), reads.append(1))[0])
        wait(lambda: door.front.step() or client._requests.poll(0, zmq.POLLOUT))
        client._requests.send_multipart([b""] * 100)
        wait(lambda: door.front.step() or door.front.peers.counts["cut"])
        wait(lambda: door.front.step() or not door.front._skipping)
        assert len(reads) == 9  # of 10, after the first 17 of 101
        assert not door._receive()


def test_what_a_peer_sends_at_once_is_one_request_and_its_stop():
    door = FrontedDoor(Address(HERE, free_port()), stepped=True)
    with contextlib.closing(door), contextlib.closing(RobotClient(f"{HERE}:{door.front_port}", name="x")) as client:
        taken: list[Request] = []
        wait(lambda: door.front.step() or client._requests.poll(0, zmq.POLLOUT))
        assert sum(client.send_command(np.zeros(3)) for _ in range(500)) > 20
        wait(lambda: door.front.step() or client._requests.poll(0, zmq.POLLOUT))
        client._requests.send(arrays.pack({"op": "stop", "id": 1}))
        wait(lambda: door.front.step() or taken.extend(iter(door.take, None)) or any(each.stop for each in taken))
        assert sorted(each.stop for each in taken) == [False, True]


def request(connection: bytes, op: str = "ping", number: int | None = 1, size: int = 10) -> Waiting:
    made = Request(connection, bytes(size), stop=op == "stop")
    return Waiting(made, op, (), number, op == "command" and number is None)


def test_one_request_of_a_peer_is_under_way_and_peers_take_turns():
    peers = Peers()
    for name in (b"a", b"b"):
        for k in range(QUEUED + 3):
            peers.add(request(name, number=k))
    assert peers.counts["dropped"] == 6
    first, second = peers.next(), peers.next()
    assert (first.request.connection, second.request.connection) == (b"a", b"b")
    assert peers.next() is None
    assert peers.returned(second.request.serial, GREETED) == second
    assert peers.returned(second.request.serial, GREETED) is None, "once"
    assert peers.returned(1, LEADS) is None, "of another front"
    assert peers.next().request.connection == b"b"
    peers, turns = Peers(), []
    for name in (b"a", b"a", b"b", b"b"):
        peers.add(request(name))
    while (waiting := peers.next()) is not None:
        turns.append(waiting.request.connection)
        peers.returned(waiting.request.serial, GREETED)
    assert turns == [b"a", b"b", b"a", b"b"]


def test_the_newest_command_replaces_one_that_waits():
    peers = Peers()
    for k in range(5):
        peers.add(request(b"a", "command", None, size=k + 1))
    peers.add(request(b"a", "release"))
    peers.add(request(b"a", "command", None))
    assert peers.counts["overtaken"] == 4
    sent = []
    while (waiting := peers.next()) is not None:
        sent.append((waiting.op, len(waiting.request.body)))
        peers.returned(waiting.request.serial, GREETED)
    assert sent == [("command", 5), ("release", 10), ("command", 10)], "in their order"


def test_operators_come_before_others_and_a_stop_before_all():
    peers = Peers()
    peers.add(request(b"desk"))
    peers.returned(peers.next().request.serial, LEADS)
    for k in range(100):
        peers.add(request(b"%d" % k))
    sent = [peers.next() for _ in range(OF_OTHERS)]
    assert peers.next() is None, "others leave places"
    stop = peers.stop(request(b"50", "stop"))
    assert stop is not None
    assert peers.stop(request(b"50", "stop")) is None, "one of a peer"
    peers.add(request(b"desk"))
    assert peers.next().request.connection == b"desk"
    assert {each.request.connection for each in sent} == {b"%d" % k for k in range(OF_OTHERS)}
    assert peers.leading() == [b"desk"]
    for k in range(3 * MOST_PEERS):
        peers.add(request(b"new %d" % k))
    assert len(peers) == MOST_PEERS
    assert peers.leading() == [b"desk"], "strangers make room for strangers"


def test_bytes_under_way_are_bounded():
    peers = Peers()
    for k in range(MOST_UNDER_WAY):
        peers.add(request(b"%d" % k))
        peers.returned(peers.next().request.serial, LEADS)
        peers.add(request(b"%d" % k, size=MAX_REQUEST))
    sent = 0
    while peers.next() is not None:
        sent += 1
    assert sent == 8


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 5 * PART])
def test_messages_of_any_length_pass_the_link(size):
    own, theirs = map(Link, make_pair())
    payload = os.urandom(size)
    assert own.send(70, payload)
    os.write(own.fileno(), b"\x0f")
    assert theirs.receive() == (70, payload)
    assert theirs.receive() == (SIGNAL, b"\x0f")
    assert theirs.receive() is None
    own.close()
    assert theirs.receive() is None
    assert theirs.ended
    theirs.close()


def test_a_full_link_loses_whole_messages_and_keeps_replies():
    own, theirs = map(Link, make_pair())
    payloads = [bytes([k]) * (PART * 2) for k in range(200)]
    sent = [payload for payload in payloads if own.send(70, payload)]
    assert 0 < len(sent) < len(payloads)
    assert own.send(71, b"reply", keep=True)
    assert not own.send(70, b"state")
    got = []
    while (message := theirs.receive()) is not None:
        got.append(message)
    assert [payload for _, payload in got] == sent
    own.flush()
    assert own.send(70, b"state")
    assert [theirs.receive(), theirs.receive()] == [(71, b"reply"), (70, b"state")]
    for each in (own, theirs):
        each.close()


def test_a_front_that_ends_stops_the_robot_and_the_next_one_receives():
    door = FrontOfProcess(free_port())
    with served(port=door.port, door=door) as robot:
        operator = robot.ready()
        actor = robot.client()
        actor.request("arm")
        drive(actor, 10, 0.002)
        os.kill(door.pid, signal.SIGKILL)
        wait(lambda: robot.server.loop.machine.state == "STOPPED")
        assert "requests cannot be received, SIGKILL" in robot.server.loop.machine.word
        again = robot.client("desk", "operator")
        assert "requests cannot be received" in again.next_state(30)["word"]
        for client in (again, actor, operator):  # libzmq numbers the connections of each front anew
            assert client._exchange("ping", {})["greet"], "no connection is taken for one of the front before"
        assert again.request("clear")["ok"]
        assert until(again, "HOLD")


def test_a_silent_front_is_one_that_ended():
    now = [10.0]
    own, theirs = make_pair()
    door = Door(Link(own), lambda: now[0])
    for _ in range(19):
        now[0] += 0.05
        assert door.fault() == ""
    now[0] += 0.1
    assert "silent" in door.fault()
    now[0] += 5.0
    assert door.fault() == "", "the loop stood: nothing is sent to one that does"
    for each in (own, theirs):
        each.close()


def test_a_stop_is_taken_before_what_came_before_it():
    own, theirs = map(Link, make_pair())
    with contextlib.closing(Door(own)) as door, contextlib.closing(theirs):
        for stop in (False, False, True):
            theirs.send(REQUEST, Request(b"x", b"", stop=stop).packed(), keep=True)
        assert [door.take().stop for _ in range(3)] == [True, False, False]


def test_keys_are_read_once_per_change_of_their_folder(tmp_path, monkeypatch):
    keys = write_keys(tmp_path / "keys", desk="operator")
    time.sleep(2 * admission.SETTLED)
    reads, read = [], admission.read_allowed
    monkeypatch.setattr(admission, "read_allowed", lambda folder: (reads.append(1), read(folder))[1])
    with served(keys=tmp_path / "keys") as robot:
        for _ in range(20):
            with contextlib.closing(robot.client("desk", "operator", keys["desk"])) as client:
                client.hello()
        assert len(reads) == 1
        new = write_keys(tmp_path / "other", late="")["late"]
        path = tmp_path / "keys" / "allowed" / "late.json"
        (tmp_path / "other" / "allowed" / "late.json").rename(path)
        time.sleep(2 * admission.LOOK_AGAIN)
        late = new._replace(server=keys["desk"].server)
        assert robot.client("late", "any", late).hello()["ok"]
        assert len(reads) > 1


@pytest.fixture
def robot() -> Stepped:
    return Stepped()


def test_the_newest_command_of_the_controller_is_taken_and_none_of_another_or_of_an_older_generation(robot: Stepped):
    robot.ready()
    actor, other = robot.client("controller", "left"), robot.client("any", "other")
    actor.request("arm")
    at, older = robot.state["set_point"], actor.generation
    for number in range(1, 11):  # before the next pass
        actor.send_command(at + 0.001 * number)
    robot.advance()
    assert (robot.state["number"], robot.state["counts"]["overtaken"]) == (10, 9)
    robot.advance(3)
    assert (robot.state["set_point"] > at + 0.005).all(), "of the newest: the oldest one's target is 0.001 away"
    other.hello()
    for number in range(11, 14):
        other.send_command(at + 0.05, number)
    robot.advance()
    assert (robot.state["number"], robot.state["counts"]["refused"]) == (10, 3)
    with pytest.raises(RobotError, match=naming("command", "left")):
        other.request("command", target=at, number=99)
    actor.request("release")
    until(actor, "HOLD")
    actor.request("arm")
    held, actor.generation = robot.state["set_point"], older
    actor.send_command(held + 0.05, 99)
    robot.advance(3)
    assert (robot.state["counts"]["generation"], robot.state["number"], robot.state["state"]) == (1, -1, "RUN")
    np.testing.assert_array_equal(robot.state["set_point"], held)


def test_requests_that_last_hold_no_pass_up(robot: Stepped):
    take, server = robot.door.take, robot.server

    def slow() -> Request | None:
        robot.now += DT / 5
        return take()

    robot.door.take = slow  # type: ignore[method-assign]
    robot.door.requests = [Request(b"x", arrays.pack({"op": "ping", "id": 1}))] * 10
    server.run_pass(robot.now)
    assert len(robot.door.requests) == 8, "a quarter of a pass is for requests"
    assert server.loop._last_pass == (robot.now, robot.now), "the pass begins after them"
    server._inbox.taken = A_PASS
    server._wait(robot.now + DT)
    assert len(robot.door.requests) == 8, "nor more than so many until the next one"


def test_a_request_that_waited_for_the_loop_lets_nothing_move(robot: Stepped):
    desk = robot.ready()
    desk.request("stop")
    robot.advance(2)
    for op, waited, error in (("ping", 0.0, ""), ("clear", 0.3, "it waited"), ("stop", 60.0, ""), ("hold", 60.0, "")):
        message = {"op": op, "id": 1, "stamp": robot.now, "generation": robot.state["generation"]}
        reply = robot.take(desk.connection, message, waited=waited)
        assert (reply["ok"], error in reply["error"]) == (not error, True), reply


def test_the_longest_silent_clients_are_forgotten_but_for_the_controller_and_operators_last():
    clients = Clients()
    clients.add(b"desk", Client("desk", "operator"), keep=b"")
    for k in range(MOST_CLIENTS + 50):
        clients.add(b"%d" % k, Client(f"client {k}", "any"), keep=b"0")
        if k == 60:
            assert clients.heard_from(b"1") == Client("client 1", "any")
    assert len(clients) == MOST_CLIENTS
    here = {name: clients.heard_from(name) is not None for name in (b"desk", b"0", b"2", b"1", b"50", b"113")}
    assert [name for name, kept in here.items() if not kept] == [b"2", b"50"], "1 was heard since"
    for k in range(200):
        clients.add(b"operator %d" % k, Client("desk", "operator"), keep=b"0")
    assert len(clients) == MOST_CLIENTS
    assert (clients.heard_from(b"desk"), clients.heard_from(b"0") is None) == (None, False)
