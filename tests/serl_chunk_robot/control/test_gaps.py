"""Time that did not pass moves nothing: gaps between passes, suspends, and calls of a driver that last."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
from robot_limits import HOME
from robot_served import served, until
from robot_world import DT, JOINTS, Way, World, moving

from serl_chunk_robot.client.client import boot_time


class Setting(Way):
    """A motion that sets a quantity of the driver in each pass."""

    def __init__(self, world: World) -> None:
        super().__init__(HOME + 0.4 * JOINTS)
        self.world = world

    def goal(self, *args: object) -> np.ndarray | None:
        self.world.arms.set("load", 0.0)
        return super().goal(*args)  # type: ignore[arg-type]


def moved(state: str) -> World:
    return moving(state, motion=Setting)


def between(world: World, seconds: float) -> None:
    world.now += seconds


def suspended(world: World, seconds: float) -> None:
    world.slept += seconds


def hangs(call: str) -> Callable[[World, float], None]:
    return lambda world, seconds: world.hang(call, seconds)


WHAT = {"gap": between, "suspend": suspended, **{name: hangs(name) for name in ("read", "command", "set", "stop")}}
CASES = [
    (state, what) for state in ("RUN", "MOVE", "BRAKE") for what in WHAT
    if (what != "set" or state == "MOVE") and (what != "stop" or state == "BRAKE")
]  # fmt: skip


@pytest.mark.parametrize("seconds", [0.11, 1.0, 60.0])
@pytest.mark.parametrize(("state", "what"), CASES)
def test_the_set_point_stands_where_it_is(state: str, what: str, seconds: float):
    world = moved(state)
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
    world = moved("MOVE")
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
