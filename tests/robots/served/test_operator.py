"""In which order an operator's requests reach a robot's server, and what becomes of those that a stop overtakes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from ptys import wait_until

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots import served
from serl_chunk.robots.served import operator as served_operator
from serl_chunk.robots.served.operator import ServedOperator
from serl_chunk.types import ShownRobot
from serl_chunk_robot.client.client import UNCONFIRMED, RobotError

STATE = {
    "state": "MOVE", "waiting": False, "word": "", "moment": 0.0, "held": None, "generation": 7, "controller": "actor",
    "process": "p",
}  # fmt: skip


class Client:
    """A robot's server: `slow` requests are answered once `answers` is set, `errors` are raised in turn."""

    made: list[Client] = []  # noqa: RUF012
    refuses = ""  # role

    def __init__(self, *args: Any, **more: Any) -> None:
        self.sent: list[str] = []
        self.slow, self.answers, self.states = "", threading.Event(), True
        self.errors: list[Exception] = []
        self.arguments: list[dict[str, Any]] = []
        self.after = "BRAKE"  # state of a reply
        self.role = more["role"]
        Client.made.append(self)

    def hello(self) -> dict[str, Any]:
        if Client.refuses == self.role:
            raise RobotError("no operator's key")
        return {}

    def request(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.sent.append(op)
        self.arguments.append(arguments)
        if op == self.slow:
            self.answers.wait(10)
        if self.errors:
            raise self.errors.pop(0)
        return {"state": self.after}

    def newest_state(self) -> dict[str, Any] | None:
        return dict(STATE) if self.states else None

    def next_state(self, seconds: float) -> dict[str, Any]:
        if self.states:
            return dict(STATE)
        threading.Event().wait(seconds)
        raise RobotError("no state")

    def close(self) -> None: ...


@pytest.fixture
def operator(monkeypatch):
    monkeypatch.setattr(served, "RobotClient", Client)
    operator = ServedOperator(FakeAlohaConfig(server="127.0.0.1:1"), "test")
    yield operator
    Client.made[-1].answers.set()
    operator.close()


@pytest.mark.parametrize(("first", "then", "sent"), [
    ("hold", ("clear", "go", "proceed", "park", "hold", "stop"), ["hold", "stop"]),
    ("clear", ("go", "park", "hold"), ["clear", "hold"]), ("stop", ("clear",), ["stop", "clear"]),
])  # fmt: skip
def test_what_stops_goes_first_and_drops_what_would_move_the_robot_after_it(operator, first, then, sent):
    client = Client.made[-1]
    client.slow = first
    operator.request(first)
    assert wait_until(lambda: client.sent == [first])
    for op in then:
        operator.request(op)
    client.answers.set()
    assert wait_until(lambda: operator.idle)
    assert client.sent == sent


def test_a_stop_does_not_wait_for_the_state_after_another_request(operator, monkeypatch):
    monkeypatch.setattr(served_operator, "FOLLOWS", 300.0)
    client = Client.made[-1]
    client.states = False
    operator.request("hold")
    assert wait_until(lambda: client.sent == ["hold"])
    operator.request("stop")
    assert wait_until(lambda: client.sent == ["hold", "stop"])
    client.states = True


def test_a_stop_that_was_not_answered_is_sent_again_and_a_clear_after_it_follows(operator):
    client = Client.made[-1]
    client.errors, client.slow = [RobotError("no answer"), RobotError("no answer")], "stop"
    operator.request("stop")
    assert wait_until(lambda: client.sent == ["stop"])
    operator.request("clear")
    client.answers.set()
    assert wait_until(lambda: operator.idle)
    assert client.sent == ["stop", "stop", "stop", "clear"]


def test_an_error_of_any_kind_ends_no_requests(operator):
    client = Client.made[-1]
    client.errors = [KeyError("waiting")]
    operator.request("hold")
    operator.request("stop")
    assert wait_until(lambda: operator.idle)
    assert client.sent in (["hold", "stop"], ["stop", "stop"])


def test_at_the_end_a_stop_is_sent_and_no_motion(operator):
    client = Client.made[-1]
    client.slow = "hold"
    operator.request("hold")
    assert wait_until(lambda: client.sent == ["hold"])
    operator.request("hold")
    operator.request("park")
    threading.Timer(0.2, client.answers.set).start()
    operator.close()
    assert client.sent == ["hold", "hold"]


SHOWN = ShownRobot(3, "actor", "p", "desk", 1.0)


@pytest.mark.parametrize(("op", "carried"), [
    ("clear", {"generation": 3}), ("proceed", {"generation": 3}), ("park", {"generation": 3}),
    ("go", {"generation": 3, "controller": "actor", "process": "p"}), ("stop", {}), ("hold", {}),
])  # fmt: skip
def test_a_request_carries_what_was_shown_and_a_refusal_is_shown_until_the_state_changes(operator, op, carried):
    client = Client.made[-1]
    client.errors = [RobotError("of generation 3, and the robot is in 7 now")]
    operator.request(op, SHOWN)
    assert wait_until(lambda: operator.idle)
    assert client.arguments[0] == carried
    assert ("in 7 now" in operator.refused) is bool(carried)
    operator._shown = SHOWN
    assert operator.refused == ""


@pytest.mark.parametrize("how", ["no answer", "not confirmed", "goes on", "stalled", "no reply yet"])
@pytest.mark.parametrize("op", ["stop", "hold"])
def test_what_the_robot_did_not_confirm_is_known_until_it_does(operator, monkeypatch, op, how, caplog):
    monkeypatch.setattr(served_operator, "CONFIRMS", 0.05)
    client = Client.made[-1]
    client.after = {"goes on": "RUN", "stalled": "STALLED"}.get(how, "BRAKE")
    client.errors = [RobotError(how)] * 3 if how in ("no answer", "not confirmed") else []
    client.slow = op if how == "no reply yet" else ""
    operator.request(op)
    assert wait_until(lambda: operator.unconfirmed)
    client.after = "BRAKE"
    client.answers.set()
    assert wait_until(lambda: not operator.unconfirmed)
    assert set(client.sent) == {op}
    assert (UNCONFIRMED in caplog.text) is (how != "no reply yet")


def test_without_an_operators_key_a_hold_stops(monkeypatch):
    """The server refuses such a client a hold, and space must not do nothing in a reset."""
    monkeypatch.setattr(served, "RobotClient", Client)
    monkeypatch.setattr(Client, "refuses", "operator")
    operator = ServedOperator(FakeAlohaConfig(server="127.0.0.1:1"), "test")
    operator.request("hold")
    operator.close()
    assert (operator.may_clear, Client.made[-1].sent) == (False, ["stop"])


def test_states_that_cannot_be_read_are_logged_once_and_a_stop_is_sent(operator, monkeypatch, caplog):
    client = Client.made[-1]
    monkeypatch.setattr(served_operator, "SILENT", 0.1)
    monkeypatch.setattr(client, "newest_state", lambda: {"state": "RUN", "moment": 1.0})
    assert wait_until(lambda: operator.silent)
    assert not operator.stopped
    operator.request("stop")
    assert wait_until(lambda: client.sent == ["stop"])
    assert len([r for r in caplog.records if "cannot be read" in r.message]) == 1
    monkeypatch.undo()
    assert wait_until(lambda: not operator.silent)
