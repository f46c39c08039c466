"""The loop of a robot server with an injected clock: what stops it, time that did not pass, and passes that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from robot_limits import HOME
from robot_model import RobotModel
from robot_served import drive, served, until
from robot_world import DT, JOINTS, REST, Way, World, moving, speed

from serl_chunk_robot.client.client import boot_time
from serl_chunk_robot.control.loop import ANSWER, Refused


def stop(world: World) -> None:
    world.ask("stop", "any")


def test_one_arm_without_torque_stops_both_and_is_held_where_it_is():
    world = moving()
    world.arms.lose_torque(1)
    before = len(world.arms.sent)
    status = world.run()
    assert (world.state, status.set_point) == ("STOPPED", None)
    assert "an arm has no torque" in status.word
    world.run(100)
    assert len(world.arms.sent) == before, "nothing is known that could be braked"
    with pytest.raises(Refused, match="no torque"):
        world.ask("clear", "operator")
    world.run(2)
    world.ask("clear", "operator")
    fallen = world.arms.q[8]
    assert abs(fallen - REST[8]) < 0.25 < abs(fallen - world.arms.sent[-1][8]) + 0.25
    measured = world.loop._measured.good
    assert measured is not None
    world.run()
    assert np.array_equal(world.arms.sent[-1], measured.q)


@pytest.mark.parametrize("tick", [0.02, 0.1])
def test_a_command_is_valid_for_its_time_and_a_robot_that_gets_none_stands_and_is_stopped_after_a_second(tick: float):
    world = World(tick=tick).armed()
    world.drive(round(0.3 / tick) + 4, speed=0.7, accelerates=4.0)
    world.send(world.arms.sent[-1] + speed(world) * tick)
    began = world.now
    assert world.until("BRAKE") * DT == pytest.approx(world.loop.validity, abs=1.01 * DT)
    world.until("HOLD")
    assert world.loop.machine.word == "no valid command in time"
    held = world.arms.sent[-1]
    world.run(round((began + 0.95 - world.now) / DT))
    assert world.state == "HOLD"
    assert np.array_equal(world.arms.sent[-1], held)
    world.run(round(0.1 / DT) + 1)
    assert (world.state, world.loop.machine.word) == ("STOPPED", "no command for a second")


def test_a_driver_that_does_not_answer_gets_the_next_level():
    world = moving()
    world.arms.answers = False
    stop(world)
    start = world.now
    status = world.run(65)
    assert not status.answered
    assert world.state == "STOPPED"
    levels = [level for _, _, level in world.arms.stops]
    assert levels == sorted(levels)
    assert set(levels) == {0, 1, 2, 3}
    for level in (1, 2, 3):
        first = next(moment for moment, _, of in world.arms.stops if of == level)
        assert first == pytest.approx(start + ANSWER * level, abs=(level + 1) * DT)
    with pytest.raises(Refused, match="has not answered"):
        world.ask("clear", "operator")
    world.arms.answers = True
    assert world.run().answered
    world.ask("clear", "operator")
    good = world.loop._measured.good
    assert good is not None
    world.run()
    assert np.array_equal(world.arms.sent[-1], good.q), "it stopped by its own means"


def test_what_a_clear_needs():
    world = World()
    for role in ("any", "controller"):
        with pytest.raises(Refused, match="for the operator"):
            world.ask("clear", role)
    with pytest.raises(Refused, match="nothing was measured"):
        world.ask("clear", "operator")
    world.run(2)
    world.arms.fault = "overload"
    world.run()
    with pytest.raises(Refused):
        world.ask("clear", "controller")
    assert world.arms.clears == 0, "a controller clears nothing"
    with pytest.raises(Refused, match="overload"):
        world.ask("clear", "operator")
    assert world.arms.clears == 1
    world.arms.minus_pi = 3
    world.run(1)
    with pytest.raises(Refused, match="cannot be trusted"):
        world.ask("clear", "operator")
    world.run(2)
    with pytest.raises(Refused, match="cannot be trusted"):
        world.ask("clear", "operator")
    world.arms.spin = 9.0
    world.run()
    with pytest.raises(Refused, match="overspeed"):
        world.ask("clear", "operator")
    world.arms.spin, world.arms.read_errors = 0.0, 1
    world.run()
    with pytest.raises(Refused, match="last reading failed"):
        world.ask("clear", "operator")
    world.run()
    world.ask("clear", "operator")
    assert world.state == "HELD"
    moved = moving()
    stop(moved)
    with pytest.raises(Refused, match="BRAKE"):
        moved.ask("clear", "operator")


def test_torque_off_leaves_no_set_point_and_arms_that_were_moved_by_hand_are_believed_again_when_cleared():
    world = World().ready()
    world.arms.minus_pi = 1
    world.run()
    for event, role in (("arm", "controller"), ("torque_off", "operator"), ("end", "operator")):
        with pytest.raises(Refused, match=f"{event}: the measured state cannot be trusted"):
            world.ask(event, role)
    world.run()
    world.ask("arm", "controller")
    world.ask("release", "controller")
    world.until("HOLD")
    world.ask("torque_off", "operator")
    status = world.run(50)
    assert (status.state, status.set_point) == ("STOPPED", None)
    assert not world.arms.read().torque
    assert world.loop.machine.word == "torque off by K"
    world.arms.q += 0.6
    world.run(3)
    for _ in range(2):  # torque; the jump
        with pytest.raises(Refused):
            world.ask("clear", "operator")
        world.run(2)
    world.ask("clear", "operator")
    world.run()
    assert np.abs(world.arms.sent[-1] - HOME).max() > 0.2


class Setting(Way):
    def __init__(self, world: World) -> None:
        super().__init__(HOME + 0.4 * JOINTS)
        self.world = world

    def goal(self, *args: object) -> np.ndarray | None:
        self.world.arms.set("load", 0.0)
        return super().goal(*args)  # type: ignore[arg-type]


def moved_in(state: str) -> World:
    return moving(state, motion=Setting)


def between(world: World, seconds: float) -> None:
    world.now += seconds


def suspended(world: World, seconds: float) -> None:
    world.slept += seconds


def hangs(call: str) -> Callable[[World, float], None]:
    return lambda world, seconds: world.hang(call, seconds)


WHAT = {"gap": between, "suspend": suspended, **{name: hangs(name) for name in ("read", "command", "set", "stop")}}
CASES = [
    (state, what)
    for state in ("RUN", "MOVE", "BRAKE")
    for what in WHAT
    if (what != "set" or state == "MOVE") and (what != "stop" or state == "BRAKE")
]


@pytest.mark.parametrize("seconds", [0.11, 1.0, 60.0])
@pytest.mark.parametrize(("state", "what"), CASES)
def test_the_set_point_stands_where_it_is(state: str, what: str, seconds: float):
    world = moved_in(state)
    generation, last = world.loop.machine.generation, world.arms.sent[-1]
    if what == "stop":
        world.loop._stopping.begin(world.now, "again")
    WHAT[what](world, seconds)
    world.send(last + 0.01)  # one that is under way
    count = len(world.arms.sent)
    world.run()
    if what in ("command", "stop"):  # the time passed after a set point was given to the driver
        last, count = world.arms.sent[-1], len(world.arms.sent)
    world.run(2)
    assert all(np.array_equal(sent, last) for sent in world.arms.sent[count:]), "the set points before and after"
    assert world.state == "STOPPED"
    assert world.loop.machine.generation > generation
    if state != "BRAKE":
        assert "between two passes" in world.loop.machine.word
        assert ("suspended" in world.loop.machine.word) == (what == "suspend")
    world.run(1)
    world.ready().ask("arm", "controller")
    world.run(5)
    assert np.array_equal(world.arms.sent[-1], last), "nothing from before the gap is left"


@pytest.mark.parametrize("seconds", [0.05, 0.09])
@pytest.mark.parametrize("what", ["gap", "suspend", "read", "command"])
def test_a_shorter_gap_stops_nothing(what: str, seconds: float):
    world = moved_in("MOVE")
    before = world.arms.sent[-1]
    WHAT[what](world, seconds)
    world.run(2)
    assert world.state == "MOVE"
    assert (np.abs(world.arms.sent[-1] - before)[JOINTS] > 0.4 * DT).all()


def test_a_server_notices_that_its_machine_was_suspended():
    slept = [0.0]
    with patch("serl_chunk_robot.server.server.boot_time", lambda: boot_time() + slept[0]), served() as robot:
        operator = robot.ready()
        slept[0] = 60.0
        assert "60" in (word := str(until(operator, "STOPPED")["word"]))
        assert "suspended" in word


WORD = "the server failed: "


def fail(world: World) -> None:
    def pause() -> None:
        world.now += DT

    try:
        world.run(2)
    except Exception as e:
        pause()
        world.loop.fail(e, pause)
    else:
        raise AssertionError("no pass failed")


OF_EVENTS = ("loop.machine.apply", "loop._on_transition")
OF_PASSES = ("gate.step", "measured.judge", "loop._watchdog.event", "loop._grip.measured")


@pytest.mark.parametrize(
    ("part", "state"),
    [
        *((part, state) for part in (*OF_EVENTS, *OF_PASSES, "pursuit.place") for state in ("RUN", "MOVE")),
        *((part, "BRAKE") for part in OF_PASSES),
    ],
)
def test_it_brakes_whatever_is_broken(part: str, state: str, monkeypatch: pytest.MonkeyPatch):
    world = moving(state)
    generation, began = world.loop.machine.generation, len(world.arms.sent)

    def broken(*args: Any, **more: Any) -> None:
        raise ZeroDivisionError(part)

    owner, _, name = part.rpartition(".")
    monkeypatch.setattr(attrgetter(owner)(world), name, broken)
    if part in OF_EVENTS:
        world.arms.fault = "so that there is an event"
    fail(world)
    path = np.array(world.arms.sent)
    v = np.diff(path, axis=0) / DT
    a = np.diff(v, axis=0) / DT
    model = RobotModel(world)
    for k in range(began - 1, len(v)):
        assert np.abs(v[k] - model.braked(v[k - 1], a[k - 2])).max() < 1e-4, "braking as hard as allowed"
    assert not v[-1].any()
    assert len(v) - began < 60
    machine = world.loop.machine
    assert (machine.state, machine.word) == ("STOPPED", WORD + part)
    assert machine.generation > generation
    assert world.arms.stops[-1][1:] == (WORD + part, 0)


def test_a_driver_that_takes_nothing_then_stops_by_its_own_means(monkeypatch: pytest.MonkeyPatch):
    world = moving("RUN")
    monkeypatch.setattr(world.gate, "step", None)
    world.arms.command_errors = 10**6
    attempts = world.arms.attempts
    fail(world)
    assert world.arms.attempts - attempts == 20
    assert world.arms.stops[-1][2] == 1


@pytest.mark.parametrize("call", ["", "command"])
def test_time_that_did_not_pass_moves_nothing_there_either(call: str, monkeypatch: pytest.MonkeyPatch):
    world = moving("RUN")
    monkeypatch.setattr(world.gate, "step", None)
    last, count = world.arms.sent[-1], len(world.arms.sent)
    if call:
        world.hang(call, 5.0)
    try:
        world.run()
    except TypeError as e:
        world.now += 0.0 if call else 5.0
        world.loop.fail(e, lambda: None)
    if call:
        last = world.arms.sent[count]  # that lasted
    assert all(np.array_equal(sent, last) for sent in world.arms.sent[count:])


def test_a_standing_robot_is_commanded_nothing_more(monkeypatch: pytest.MonkeyPatch):
    world = World()
    world.run(2)
    monkeypatch.setattr(world.measured, "judge", None)
    fail(world)
    assert not world.arms.sent
    assert world.state == "STOPPED"


def test_the_server_brakes_publishes_and_ends(monkeypatch: pytest.MonkeyPatch):
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda error: raised.append(error.exc_type))

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("of a bug")

    with served() as robot:
        operator, actor = robot.ready(), robot.client()
        actor.request("arm")
        drive(actor, 10, step=0.002)
        robot.server._drives.run_pass = broken  # type: ignore[method-assign]
        assert until(operator, "STOPPED")["word"] == WORD + "of a bug"
        robot._thread.join(10)
    assert raised == [ZeroDivisionError]
    assert np.array_equal(robot.arms.sent[-1], robot.arms.sent[-2]), "it stands"
