"""A robot's server over real sockets on loopback, in front of simulated arms."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq
from errors import naming
from robot_fronts import NoDoor
from robot_limits import HOME, J
from robot_served import HERE, Served, Stepped, drive, free_port, served, server, until, wait, write, write_keys
from robot_world import DT, FaultyArms

from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.drivers.base import Event, Reading
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.server import serve
from serl_chunk_robot.server.admission import Address
from serl_chunk_robot.server.leases import MOST_CLIENTS
from serl_chunk_robot.server.server import REPORTED
from serl_chunk_robot.wire import arrays
from serl_chunk_robot.wire.protocol import MAX_FRAME, MAX_REQUEST, PROTOCOL
from serl_chunk_robot.wire.sockets import make_socket

LAB = Path(__file__).resolve().parents[2] / "support" / "lab_client.py"


@pytest.fixture
def robot():
    with served() as robot:
        yield robot


@pytest.fixture
def cell() -> Stepped:
    return Stepped()


def send(robot: Served, *frames: bytes) -> dict | None:
    context = zmq.Context()
    try:
        s = make_socket(context, zmq.DEALER, 1 << 24)
        s.connect(f"tcp://{HERE}:{robot.port}")
        s.send_multipart(frames)
        return arrays.unpack(s.recv_multipart()[-1], 1 << 20) if s.poll(1000) else None
    finally:
        context.destroy(linger=0)


def test_it_starts_stopped_commands_move_the_robot_and_silence_lets_it_stand(robot):
    actor = robot.client("watcher", "any")
    first, later = actor.next_state(), actor.next_state()
    assert (first["state"], first["controller"], first["profile"]) == ("STOPPED", "", "fast")
    assert later["pass"] > first["pass"]
    wait(lambda: actor.next_state()["late"]["max"] > 0)
    operator, actor = robot.ready(), robot.client()
    assert actor.hello()["spec"]["low"] == list(robot.arms.spec().low)
    actor.request("arm")
    drive(actor, 20, 0.002)
    wait(lambda: actor.next_state()["number"] == 20)
    state = actor.newest_state()
    assert (state["state"], state["controller"]) == ("RUN", "left")
    assert state["set_point"][0] > HOME[0] + 0.03
    held = until(operator, "HOLD")
    assert "no valid command" in held["word"]
    actor.request("arm")
    assert actor.generation == held["generation"] + 1  # of this arm
    drive(actor, 5)
    assert actor.request("release")["state"] == "BRAKE"
    until(actor, "HOLD")


@pytest.mark.parametrize("late", [3, 60, -60])
def test_requests_of_another_time_do_not_move_the_robot(cell: Stepped, late: int):
    operator = cell.ready()
    with pytest.raises(RobotError, match=naming("jog", f"{late:.1f} s ago")):
        operator.request("jog", by=0.1, stamp=cell.now - late)
    assert operator.next_state()["state"] == "HOLD"
    operator.request("stop", stamp=cell.now - late)


def test_profiles_are_for_the_operator_of_a_standing_robot(cell: Stepped):
    operator, actor = cell.ready(), cell.client("controller")
    for client, name, named in ((actor, "slow", ("profile", "operator")), (operator, "quick", ("quick", "slow"))):
        with pytest.raises(RobotError, match=naming(*named)):
            client.request("profile", name=name)
    operator.request("profile", name="slow")
    state = operator.next_state()
    assert (state["profile"], state["digest"]) == ("slow", "0.5")
    operator.request("jog", by=0.05)
    with pytest.raises(RobotError, match=naming("profile", "MOVE")):
        operator.request("profile", name="fast")
    assert abs(until(operator, "HOLD")["set_point"][0] - HOME[0] - 0.05) < 1e-6


def bad_messages() -> list[tuple[bytes, ...]]:
    ask = {"op": "command", "id": 1, "number": 1, "generation": 0, "stamp": 0.0}
    hello = {"op": "hello", "id": 1, "name": "x", "role": "any", "protocol": PROTOCOL}
    maps = [
        {}, {"op": 3}, {"op": "fly"}, {"op": "x" * 33}, {"id": -1, "op": "ping"}, {"id": "a", "op": "ping"}, ask,
        {**hello, "name": ""}, {**hello, "name": "a\nb"}, {**hello, "name": "x" * 65}, {**hello, "role": "god"},
        {**hello, "protocol": 2}, {**hello, "protocol": True}, {**hello, "name": b"x"},
    ]  # fmt: skip
    raw = [b"", b"\xc1", b"\x90", b"\x00" * 100, os.urandom(200), msgpack.packb([1, 2]), msgpack.packb({1: 2})]
    forged = {"op": "command", "target": {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": b"x"}}
    large = {"op": "ping", "more": b"x" * (MAX_REQUEST + 1)}
    deep = b"\x81\xa1a" * 2000 + b"\x80"
    singles = [*map(arrays.pack, maps), *raw, msgpack.packb(forged), arrays.pack(large), deep]
    return [*((m,) for m in singles), (b"a", b"b"), (b"", b""), (b"",) * 9, (arrays.pack(hello), b"x")]


def test_a_motion_that_cannot_be_is_refused_and_none_begins(cell: Stepped):
    def unreached(*_: object) -> None:
        raise ConfigError("the tip cannot get there", parameter="reset.step[0]")

    with pytest.raises(RobotError, match=naming("jog", "STOPPED", "serl-chunk robot clear")):
        cell.client("operator").request("jog")
    operator = cell.ready()
    for motions, named in ((unreached, "reset.step[0]"), (lambda event, given, *_: given["joint"], "'joint'")):
        cell.server._motions = motions
        with pytest.raises(RobotError, match=naming(named)):
            operator.request("reset")
    assert operator.next_state()["state"] == "HOLD"


def test_motors_are_rebooted_by_name_and_the_robot_stands_where_it_is_measured(cell: Stepped):
    """For whom and in which state is in the interleavings."""
    operator = cell.ready()
    operator.request("stop")
    stopped = until(operator, "STOPPED")
    with pytest.raises(RobotError, match="answers no one"):
        operator.request("reboot", name="right/gripper")
    for name in (None, 7, "left\x1b[2J", "left/gripper" * 9):
        with pytest.raises(RobotError, match="name"):
            operator.request("reboot", **({} if name is None else {"name": name}))
    assert operator.next_state()["set_point"] is not None, "a motor that is not rebooted keeps its set point"
    assert operator.request("reboot", name="left/gripper")["state"] == "STOPPED"
    state = operator.next_state()
    assert (state["set_point"], state["generation"]) == (None, stopped["generation"])
    assert cell.arms.rebooted == ["left/gripper"]
    operator.request("clear")
    state = until(operator, "HOLD")
    np.testing.assert_allclose(state["set_point"], state["q"], atol=0.05)


def test_no_message_ends_the_server(robot):
    robot.ready()
    actor = robot.client()
    actor.request("arm")
    for k, frames in enumerate(bad_messages()):
        reply = send(robot, *frames)
        assert reply is not None, k
        assert not reply["ok"], k
        assert reply["error"].isprintable()
    assert send(robot, b"x" * (MAX_FRAME + 1)) is None  # disconnected
    assert actor.request("ping")["ok"]
    assert actor.next_state()["counts"]["malformed"] > 10


@pytest.mark.parametrize(("wrong", "names"), [
    ({"target": np.full(J, np.nan)}, "not_finite"), ({"target": "x"}, "target"), ({"number": True}, "number"),
    ({"generation": -1}, "generation"), ({"stamp": "now"}, "stamp"), ({"held": None}, "held"),
    ({"target": HOME + 3}, "first"), ({"number": 2**63}, "number"), ({"stamp": 0.0}, "age"),
    ({"stamp": 1e12}, "age"), ({"stamp": np.nan}, "age"),
])  # fmt: skip
def test_a_bad_command_is_refused_by_name(cell: Stepped, wrong, names):
    cell.ready()
    actor = cell.client("controller")
    actor.request("arm")
    right = {"target": cell.state["set_point"], "number": 1, "generation": actor.generation}
    with pytest.raises(RobotError, match=names):
        actor.request("command", **{**right, **wrong})
    assert actor.next_state()["number"] == -1


def test_reconnects_leave_nothing_behind_and_push_no_operator_out(robot):
    def count() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    desk = robot.operator()
    desk.hello()
    for k in range(MOST_CLIENTS + 16):
        client = robot.client(f"actor {k % 3}", "any")
        client.request("lease")
        client.next_state()
        client.close()
        if k == 20:
            robot._clients[1:] = []
            before = count()
    wait(lambda: count()[1] <= before[1] + 2)
    assert count()[0] <= before[0]
    assert len(robot.server._clients) == MOST_CLIENTS
    assert desk._exchange("ping", {})["greet"] is False
    assert desk.next_state()["controller"] == ""


def test_a_client_of_twenty_lines_drives_the_robot(robot):
    lines = LAB.read_text().split('"""')[2].splitlines()
    assert len([line for line in lines if line and not line.startswith("import")]) <= 20
    operator = robot.ready()
    at = operator.next_state()["set_point"]
    command = [sys.executable, str(LAB), str(robot.port), "25", "0.002"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    until(operator, "HOLD")
    moved = operator.next_state()["set_point"] - at
    assert 0.03 < moved[0] < 0.06


def test_the_end_brakes_and_keeps_torque(robot):
    robot.ready()
    actor = robot.client()
    actor.request("arm")
    drive(actor, 20, 0.01)
    robot.server.end("SIGTERM")
    robot._thread.join(5)
    assert not robot._thread.is_alive()
    assert robot.server.loop.machine.state == "HOLD"
    assert robot.server.loop.machine.word == "held by SIGTERM"
    assert robot.arms.read().torque
    steps = np.diff([q[0] for q in robot.arms.sent[-3:]])
    np.testing.assert_allclose(steps, 0, atol=1e-6)


def test_a_late_pass_is_reported_and_not_caught_up(cell: Stepped, monkeypatch):
    for k in range(REPORTED):
        cell.now += DT
        cell.server.run_pass(cell.now - (0.004 if k == 7 else 0.001))
    late = arrays.unpack(cell.door.states[0], 1 << 20)["late"]
    assert (late["max"], late["p50"]) == (pytest.approx(0.004), pytest.approx(0.001)), "after a pass's requests"

    class Slow(FaultyArms):
        def read(self) -> Reading:
            moments.append(now[0])
            now[0] += 0.023 if len(moments) == 10 else 0.001
            if len(moments) == 2 * REPORTED:
                slow.end("the test")
            return super().read()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    now, moments, door = [100.0], [], NoDoor()
    slow = server(Slow(), Address(HERE, 1), lambda: now[0], door=door)
    monkeypatch.setattr("serl_chunk_robot.server.server.sleep", sleep)
    slow.run()
    steps = np.diff(moments) / DT
    assert sorted(np.flatnonzero(np.abs(steps - 1) > 1e-6)) == [9]  # at the next deadline that is still to come
    assert round(float(steps[9]), 6) == 5
    last = arrays.unpack(door.states[0], 1 << 20)
    assert (last["pass"], last["late"]["max"] < 1e-9) == (2 * REPORTED, True)


def test_what_no_message_can_hold_does_not_end_the_loop_and_events_are_numbered():
    class Odd(FaultyArms):
        extra: object = None

        def read(self) -> Reading:
            done = super().read()
            return done if self.extra is None else done._replace(extra=self.extra, events=(Event(1.0, success=True),))

    cell = Stepped(Odd())
    client = cell.client("any")
    cell.arms.extra = {"\ud800": np.zeros(2)}
    assert client.next_state()["q"] is None
    cell.arms.extra = {"object": np.arange(3)}
    cell.advance(2)
    state = client.next_state()
    assert (state["causes"], state["extra"]["object"].tolist()) == ({}, [0, 1, 2])
    assert state["events"][-1][1:] == [1.0, True, False]
    assert len({e[0] for e in state["events"]}) == len(state["events"])
    cell.server._greeting["spec"]["state"] = np.array([None])
    with pytest.raises(RobotError, match=naming("hello", "spec.state")):
        client.hello()
    assert client.request("stop")["ok"]


def test_keys_are_required_off_loopback_and_a_port_in_use_is_refused_by_name(robot):
    with pytest.raises(ConfigError, match=naming(str(robot.port))):
        Served(port=robot.port)
    with pytest.raises(ConfigError, match=naming("0.0.0.0", "keys")):
        Served(host="0.0.0.0")
    for host in ("*", "eth0", "192.0.2.1"):
        with pytest.raises(ConfigError, match="keys"):
            Served(host=host)


def test_keys_admit_their_clients_and_make_operators(tmp_path):
    keys = write_keys(tmp_path / "keys", left="", right="", desk="operator")
    stranger = keys["left"]._replace(pair=keys["left"].pair.new())
    with served(keys=tmp_path / "keys") as robot:
        desk = robot.client("desk", "operator", keys["desk"])
        wait(lambda: bool(desk.next_state()["answered"]))
        desk.request("clear")
        with pytest.raises(RobotError, match=naming("operator", "left")):
            robot.client("desk", "operator", keys["left"]).hello()
        actor = robot.client("actor", "controller", keys["left"])
        actor.request("arm")
        with pytest.raises(RobotError, match=naming("actor", "left")):  # a name alone takes no lease from another key
            robot.client("actor", "controller", keys["right"]).hello()
        for unknown in (stranger, None):
            client = robot.client("desk", "operator", unknown)
            client._answer = 0.5
            with pytest.raises(RobotError, match=naming("no answer", str(robot.port))):
                client.hello()
            with pytest.raises(RobotError, match="no state"):
                client.next_state(0.3)
        write(tmp_path / "keys" / "allowed" / "left.json", {"public": keys["left"].pair.public, "revoked": True})
        wait(lambda: len(robot.front.admission.keys) == 2)
        with pytest.raises(RobotError, match=naming("key", "not admitted")):
            actor.request("ping")
        write(tmp_path / "keys" / "allowed" / "desk.json", {"public": keys["desk"].pair.public})
        wait(lambda: robot.front.admission.keys[keys["desk"].pair.public].role == "any")
        with pytest.raises(RobotError, match=naming("hold", "for the operator")):
            desk.request("hold")
        assert desk.request("stop")["ok"]


@pytest.mark.parametrize(("file", "content"), [
    ("allowed/left.json", {"public": "short"}), ("server.json", {"secret": 3}), ("server.json", None),
])  # fmt: skip
def test_damaged_keys_are_refused_before_anything_is_served(tmp_path, file, content):
    write_keys(tmp_path / "keys", left="")
    path = tmp_path / "keys" / file
    path.unlink()
    if content is not None:
        write(path, content)
    port = free_port()
    with pytest.raises(ConfigError, match=path.name):
        Served(keys=tmp_path / "keys", port=port)


ALONE = """
import os, threading
from serl_chunk_robot.server.serve import PRIORITY, prioritise

def policy():
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK

assert prioritise()
assert policy() == os.SCHED_FIFO
assert os.sched_getparam(0).sched_priority == PRIORITY
found = []
other = threading.Thread(target=lambda: found.append(policy()))
other.start()
other.join()
assert found == [os.SCHED_OTHER], found
child = os.fork()
if not child:
    os._exit(policy() != os.SCHED_OTHER)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such priority")
def test_the_loop_alone_runs_before_other_programs():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=False)
    if "rtprio" in done.stderr:
        pytest.skip("this user may not have real-time priority")
    assert done.returncode == 0, done.stderr


def test_without_the_right_to_it_the_remedy_is_logged(monkeypatch, caplog):
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refused, raising=False)
    assert not serve.prioritise()
    assert "rtprio 20" in caplog.text
    assert "Operation not permitted" in caplog.text
