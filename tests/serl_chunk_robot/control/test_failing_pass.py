"""A pass that raises, a bug of the server: the robot brakes without the loop and is latched, and the server ends."""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from robot_model import RobotModel
from robot_served import HERE, Reading, drive, free_port, server, until, wait
from robot_world import DT, FaultyArms, World, moving

from serl_chunk_robot.server.admission import Address

WORD = "the server failed: "


def fail(world: World) -> None:
    """Run passes until one raises, then what the server does."""

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


@pytest.mark.parametrize(("part", "state"), [
    *((part, state) for part in (*OF_EVENTS, *OF_PASSES, "pursuit.place") for state in ("RUN", "MOVE")),
    *((part, "BRAKE") for part in OF_PASSES),
])  # fmt: skip
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


def test_the_server_brakes_publishes_and_ends():
    arms, address, raised = FaultyArms(), Address(HERE, free_port()), []
    with patch("serl_chunk_robot.control.loop.GAP", 1.0), patch("serl_chunk_robot.safety.watchdog.LEAST_VALIDITY", 0.5):
        robot = server(arms, address)

        def run() -> None:
            try:
                robot.run()
            except ZeroDivisionError as e:
                raised.append(e)

        thread = threading.Thread(target=run)
        thread.start()
        clients = [Reading(f"{HERE}:{address.port}", name=n, role=r, answer=5.0)
                   for n, r in (("desk", "operator"), ("left", "controller"))]  # fmt: skip
        try:
            wait(lambda: bool(clients[0].next_state()["answered"]))
            clients[0].request("clear")
            clients[1].hello()
            clients[0].request("go")
            clients[1].request("arm")
            drive(clients[1], 10, step=0.002)

            def broken(*args: Any) -> None:
                raise ZeroDivisionError("of a bug")

            robot._drives.run_pass = broken  # type: ignore[method-assign]
            assert until(clients[0], "STOPPED")["word"] == WORD + "of a bug"
        finally:
            robot.end("the test")
            thread.join(10)
            for client in clients:
                client.close()
    assert len(raised) == 1
    assert np.array_equal(arms.sent[-1], arms.sent[-2]), "it stands"
