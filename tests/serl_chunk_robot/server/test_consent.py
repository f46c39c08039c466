"""Whose consent moves a robot: an operator's go, of the state that was shown, for the process that has the lease.

A controller of these tests does what the worst one does: it requests the lease, a reset and arms again and again.
"""

from __future__ import annotations

import numpy as np
import pytest
from errors import naming
from robot_limits import HOME, J
from robot_served import Stepped, drive, until
from robot_simulated_time import SimulatedClient
from robot_world import Way, World

from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.control import loop
from serl_chunk_robot.safety.table import RUN
from serl_chunk_robot.server.history import RECENT, WAITING, History
from serl_chunk_robot.server.server import MOVING


@pytest.fixture
def robot() -> Stepped:
    return Stepped(needs_go=True)


def released(robot: Stepped) -> tuple[SimulatedClient, SimulatedClient]:
    operator, actor = robot.ready(), robot.client("controller", "left")
    actor.hello()
    operator.request("go")
    return operator, actor


@pytest.mark.parametrize("during", ["RUN", "MOVE", "STOPPED"])
def test_an_operators_hold_or_clear_lasts_until_a_go(robot: Stepped, during: str):
    operator, actor, rng = robot.ready(), robot.client("controller", "left"), np.random.default_rng(0)
    robot.server._motions = lambda *_: Way(HOME + rng.uniform(-0.3, 0.3, J))
    actor.hello()

    def insist(state: dict[str, object]) -> None:
        """Do what the worst controller does, after each pass."""
        for op in rng.choice(["lease", "arm", "reset", "release", "command"], 2).tolist():
            try:
                actor.send_command(state["set_point"] + 0.002) if op == "command" else actor.request(op)
            except RobotError:
                continue

    robot.each_pass = insist
    if during != "STOPPED":  # a clear alone sets nothing in motion either
        operator.request("go")
        until(operator, during)
        operator.request("hold")
    held = until(operator, "HELD")
    robot.advance(100)
    state = robot.state
    assert (state["state"], state["held"]["by"], state["generation"]) == ("HELD", "operator", held["generation"])
    np.testing.assert_array_equal(state["set_point"], held["set_point"])
    operator.request("go")
    until(operator, "MOVE")


def test_a_controller_of_a_held_robot_is_told_who_holds_it(robot: Stepped):
    robot.ready()
    (actor := robot.client("controller", "left")).hello()
    for op, more in (("arm", {}), ("reset", {}), ("drive", {"number": 5, "first": {"left": 0}})):
        with pytest.raises(RobotError, match=naming(op, "held by operator", "0 s", "serl-chunk robot go")):
            actor.request(op, **more)


HOLDS, ARMS, RELEASES = ("hold", "operator"), ("arm", "controller"), ("release", "controller")
LOST, STOPS, MOVED = ("lost", "server"), ("stop", "any"), ("moved", "server")
ENDS = {  # what is asked one after the other, the passes after it, and the state then
    "lost": ([LOST], 0, "HELD"), "hold": ([HOLDS], 0, "HELD"), "minutes": ([], 402, "HELD"),
    "jog": ([("jog", "operator")], 2, "HELD"), "lapse": ([ARMS], 60, "HOLD"), "release": ([ARMS, RELEASES], 5, "HOLD"),
    "moved": ([ARMS, MOVED], 5, "HOLD"), "lost in run": ([ARMS, LOST], 5, "HELD"),
    "hold in brake": ([ARMS, RELEASES, HOLDS], 5, "HELD"), "hold in a stop": ([ARMS, STOPS, HOLDS], 5, "STOPPED"),
    "clear": ([STOPS, ("clear", "operator")], 0, "HELD"),
}  # fmt: skip


@pytest.mark.parametrize(("events", "passes", "state"), ENDS.values(), ids=ENDS)
def test_what_ends_a_go(events: list[tuple[str, str]], passes: int, state: str, monkeypatch: pytest.MonkeyPatch):
    assert loop.GO_LASTS == 600.0, "ten minutes, as the documents say"
    monkeypatch.setattr(loop, "GO_LASTS", 2.0)
    world = World().ready()
    world.run(2)
    for event, role in events:
        if event == "clear":
            world.run(2)
        world.ask(event, role)
    world.run(passes) if passes else None
    assert world.state == state


def test_a_go_is_for_the_process_that_was_shown(robot: Stepped):
    operator = robot.ready()
    with pytest.raises(RobotError, match=naming("go", "no actor holds the lease")):
        operator.request("go", controller="left", process="1")
    shown = robot.client("controller", "left", "1")
    shown.hello()
    state = shown.next_state()
    lease = {"controller": state["controller"], "process": state["process"]}
    assert lease == {"controller": "left", "process": "1"}
    shown.close()
    assert not operator.next_state()["controller"]
    again = robot.client("controller", "left", "2")
    again.hello()
    with pytest.raises(RobotError, match=naming("go", "left", "process 2", "process 1")):
        operator.request("go", **lease)
    operator.request("go")
    again.request("arm")
    until(operator, "HOLD")
    assert "no valid command" in robot.state["word"]
    again.request("release")
    assert "controller is gone" in until(operator, "HELD")["word"], "one that is silent in HOLD"


@pytest.mark.parametrize("op", sorted(MOVING))
@pytest.mark.parametrize("given", ["missing", "older", "later"])
def test_what_lets_something_move_is_of_the_generation_that_was_shown(robot: Stepped, op: str, given: str):
    operator, actor = released(robot)
    if op == "clear":
        operator.request("stop")
    generation = operator.request("ping")["generation"]
    more = {"missing": {}, "older": {"generation": generation - 1}, "later": {"generation": generation + 1}}[given]
    with pytest.raises(RobotError, match="no generation" if given == "missing" else f"is in {generation} now"):
        (actor if op in ("arm", "drive") else operator).send(op, **more)
    assert operator.next_state()["generation"] == generation
    if op == "drive":
        actor.send(op, number=5, first={}, generation=0)  # its end only calms


@pytest.mark.parametrize("calms", ["release", "lost"])
def test_who_lets_go_after_a_lapse_is_not_expected_to_command(calms: str):
    world = World().ready()
    world.ask("arm", "controller")
    world.until("HOLD")
    world.ask(calms, "controller" if calms == "release" else "server")
    world.run(600)
    assert world.state == ("HOLD" if calms == "release" else "HELD"), world.loop.machine.word


def test_a_lease_is_of_one_process_and_an_operator_ends_it(robot: Stepped):
    operator, actor = released(robot)
    actor.request("arm")
    drive(actor, 3)
    second = robot.client("controller", "left", "2")
    with pytest.raises(RobotError, match=naming("another process of left", "serl-chunk robot take")):
        second.hello()
    drive(actor, 3)
    assert robot.state["state"] == RUN
    with pytest.raises(RobotError, match=naming("take", "operator")):
        actor.request("take")
    operator.request("take")
    assert "controller is gone" in until(operator, "HELD")["word"]
    second.hello()
    assert operator.next_state()["process"] == "2"


def test_who_held_stopped_cleared_and_let_go_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "left.jsonl"
    history = History(path)
    for k in range(3):
        history.add("hold", by=f"desk {k}", address="10.0.0.1", generation=k)
    history.close()
    path.write_text(path.read_text() + "no json\n[1]\n")
    again = History(path)
    assert [e["by"] for e in again.recent()] == ["desk 0", "desk 1", "desk 2"]
    monkeypatch.setattr(again, "_path", tmp_path / "none" / "left.jsonl")
    for k in range(WAITING + 2 * RECENT):
        again.add("stop", by="desk", address="10.0.0.1", generation=k)  # never waits
    assert again.recent()[-1]["generation"] == WAITING + 2 * RECENT - 1
    again.close()


def test_the_server_keeps_what_was_obeyed_alone(robot: Stepped):
    operator, actor = released(robot)
    actor.request("stop")
    with pytest.raises(RobotError):
        actor.request("clear")
    entries = operator.request("history")["history"]
    assert [(e["op"], e["by"]) for e in entries] == [("clear", "operator"), ("go", "operator"), ("stop", "left")]
    assert all("127.0.0.1" in e["address"] and e["generation"] > 0 and e["time"] for e in entries)
