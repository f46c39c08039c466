"""The loop of a robot server with an injected clock: what stops it, how far it travels, and how it follows commands."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from robot_limits import GRIPPERS, HOME, J
from robot_world import DT, REST, Way, World, speed

from serl_chunk_robot.control.loop import ANSWER, Refused
from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.safety.motion import stopping_distance
from serl_chunk_robot.safety.table import STOPS

JOINTS = [j for j in range(J) if j not in GRIPPERS]


def moving(state: str = "RUN") -> World:
    """A robot at 0.8 rad/s, that a controller commands or the server moves."""
    world = World()
    if state == "RUN":
        world.armed().drive(12)
    else:
        world.ready().ask("reset", "controller", motion=Way(HOME + np.where(np.isin(range(J), GRIPPERS), 0, 0.4)))
        world.run(30)
    assert world.state == state
    assert np.abs(speed(world)[JOINTS]).min() > 0.5
    return world


def stop(world: World) -> None:
    world.ask("stop", "any")


def injected(name: str, value: object) -> Callable[[World], None]:
    return lambda world: setattr(world.arms, name, value)


def jump_clock(seconds: float) -> Callable[[World], None]:
    def jump(world: World) -> None:
        world.now += seconds

    return jump


def reject(world: World) -> None:
    for _ in range(10):
        assert world.send(HOME * np.nan) == "not_finite"


SOURCES: dict[str, tuple[Callable[[World], None], str, int]] = {  # what happens, word, passes until it is known
    "stop": (stop, "stopped by K", 1),
    "fault": (injected("fault", "left elbow: overload"), "left elbow: overload", 1),
    "read": (injected("read_errors", 1), "the bus is gone", 1),
    "command": (injected("command_errors", 1), "the bus is gone", 2),
    "minus_pi": (injected("minus_pi", 2), "cannot reach", 2),
    "nan": (injected("nan", 2), "finite", 2),
    "jump": (injected("jumps", 2), "jumped", 2),
    "overspeed": (injected("spin", 9.0), "joint 9 at 9.00", 1),
    "clock": (jump_clock(0.2), "between two passes", 1),
    "clock back": (jump_clock(-1.0), "between two passes", 1),
    "rejected": (reject, "ten commands in a row were rejected: not_finite", 1),
}


@pytest.mark.parametrize("state", ["RUN", "MOVE"])
@pytest.mark.parametrize("source", [name for name in SOURCES if "clock" not in name])  # that stands: see test_gaps
def test_every_stop_brakes_in_the_next_pass(state: str, source: str):
    act, word, passes = SOURCES[source]
    if (state, source) == ("MOVE", "rejected"):
        return
    world = moving(state)
    generation, before, first = world.loop.machine.generation, len(world.arms.sent), np.abs(speed(world)) + 0.2
    act(world)
    world.run(passes)
    assert world.state == "BRAKE"
    assert word in world.loop.machine.word
    assert world.loop.machine.generation == generation + 1
    start = world.arms.sent[-1].copy()
    assert world.until("STOPPED") < 40
    path = np.array(world.arms.sent[before - 1 :])
    rates = np.abs(np.diff(path, axis=0)[:, JOINTS]) / DT
    assert (rates <= first[JOINTS]).all(), "no joint goes on"
    bound = stopping_distance(first, np.full(J, 8.0), world.limits.rates, DT)
    assert (np.abs(path[-1] - start) <= bound + 1e-9).all()
    count = len(world.arms.sent)
    world.run(50)
    assert len(world.arms.sent) == count, "nothing is commanded in STOPPED"


@pytest.mark.parametrize("state", ["HOLD", "STOPPED"])
@pytest.mark.parametrize("source", sorted(set(SOURCES) - {"rejected", "command"}))
def test_a_standing_robot_is_stopped_at_once(state: str, source: str):
    world = World()
    world.run(2)
    if state == "HOLD":
        world.ready().run(5)
    act, word, passes = SOURCES[source]
    generation, word_before = world.loop.machine.generation, world.loop.machine.word
    act(world)
    world.run(passes)
    assert world.state == "STOPPED"
    assert world.loop.machine.generation == generation + 1, "a stop in STOPPED raises it too"
    if state == "HOLD":
        assert word in world.loop.machine.word
    else:
        assert world.loop.machine.word == word_before
    world.run(5)
    assert world.loop.machine.generation == generation + 1, "once for each cause"
    assert world.arms.stops


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


def test_after_a_stop_the_set_point_stays():
    world = moving()
    stop(world)
    world.until("STOPPED")
    last = world.arms.sent[-1]
    world.run(200)
    world.arms.q += 0.01  # a push from outside
    world.run(2)
    world.ask("clear", "operator")
    world.run(20)
    assert all(np.array_equal(sent, last) for sent in world.arms.sent[-20:])


@pytest.mark.parametrize("tick", [0.02, 0.1])
def test_travel_after_the_last_command_is_bounded(tick: float):
    """v x validity, and the profile's braking distance."""
    world = World(tick=tick).armed()
    world.drive(round(0.3 / tick) + 4, speed=0.7, accelerates=4.0)
    last, v = world.arms.sent[-1].copy(), np.abs(speed(world))
    world.send(last + v * np.sign(speed(world)) * tick)
    began = world.now
    passes = world.until("BRAKE")
    assert passes * DT == pytest.approx(world.loop.validity, abs=1.01 * DT)
    world.until("HOLD")
    assert world.loop.machine.word == "no valid command in time"
    travel = np.abs(world.arms.sent[-1] - last)
    rates = world.limits.rates
    assert (travel <= v * world.loop.validity + stopping_distance(v, np.zeros(J), rates, DT) + 1e-6).all()
    held = world.arms.sent[-1]
    world.run(round((began + 0.95 - world.now) / DT))
    assert world.state == "HOLD"
    assert np.array_equal(world.arms.sent[-1], held)
    world.run(round(0.1 / DT) + 1)
    assert (world.state, world.loop.machine.word) == ("STOPPED", "no command for a second")


def test_a_lapse_drops_older_commands_and_the_controller_may_arm_again():
    world = moving()
    old = world.loop.machine.generation
    world.until("HOLD")
    assert world.loop.machine.generation == old + 1
    assert world.send(HOME) == "state"
    world.ask("arm", "controller")
    held = world.arms.sent[-1]
    assert world.send(held, generation=old) == "generation"
    assert world.send(held + 0.11) == "first"
    world.run(5)
    assert np.array_equal(world.arms.sent[-1], held)
    assert world.send(held + 0.01) == ""
    assert world.gate.counts["generation"] == world.gate.counts["first"] == world.gate.counts["state"] == 1


def test_release_brakes_to_hold_for_as_long_as_it_takes():
    world = moving()
    world.ask("release", "controller")
    assert world.state == "BRAKE"
    world.until("HOLD")
    world.run(600)
    assert world.state == "HOLD"


def test_a_lost_controller_brakes_to_hold():
    world = moving()
    with pytest.raises(Refused):
        world.ask("lost", "controller")
    world.ask("lost", "server")
    assert world.state == "BRAKE"
    world.until("HELD")
    world.run(600)
    assert world.state == "HELD"


def test_three_lapses_within_a_minute_latch():
    world = World().ready()
    for _ in range(2):
        world.ask("arm", "controller")
        world.until("HOLD")
    world.ask("arm", "controller")
    world.until("STOPPED")
    assert world.loop.machine.word == "three lapses within a minute"


@pytest.mark.parametrize("error", [DriverError("no answer of ID 4"), KeyError("q"), ZeroDivisionError(), MemoryError()])
@pytest.mark.parametrize("call", ["read_errors", "command_errors"])
def test_no_exception_of_a_driver_ends_the_loop(call: str, error: Exception):
    world = moving()
    world.arms.error = error
    setattr(world.arms, call, 3)
    world.run(3)
    assert "the driver reports a fault" in world.loop.machine.word
    assert str(error) in world.loop.machine.word
    world.until("STOPPED")


@pytest.mark.parametrize("broken", [None, 3, "reading"])
def test_a_reading_that_is_none_is_a_fault(broken: object, monkeypatch: pytest.MonkeyPatch):
    world = moving()
    monkeypatch.setattr(world.arms, "read", lambda: broken)
    world.run()
    assert world.state == "BRAKE"
    world.until("STOPPED")


def test_a_driver_that_takes_no_set_points_is_stopped_and_cleared_where_it_is():
    world = moving()
    world.arms.command_errors = 10**6
    count = len(world.arms.sent)
    world.until("STOPPED", 25)
    assert len(world.arms.sent) == count
    status = world.run(20)
    assert status.set_point is None
    world.arms.command_errors = 0
    world.ask("clear", "operator")
    good = world.loop._measured.good
    assert good is not None
    world.run()
    assert np.array_equal(world.arms.sent[-1], good.q)


def test_after_one_lost_set_point_braking_goes_on_from_the_last_one_taken():
    world = moving()
    last, before = world.arms.sent[-1].copy(), speed(world)
    world.arms.command_errors = 1
    world.run(2)
    assert (np.abs(world.arms.sent[-1] - last) <= np.abs(before) * DT + 40 * DT**2).all()


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


def test_a_driver_that_answers_is_told_once():
    world = moving()
    stop(world)
    world.run(100)
    assert [(reason, level) for _, reason, level in world.arms.stops] == [("stopped by K", 0)]


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


def test_arms_that_were_moved_by_hand_are_believed_again_when_an_operator_clears():
    world = World().ready()
    world.run()
    world.arms.lose_torque(0)
    world.arms.lose_torque(1)
    world.arms.q += 0.6
    world.run(3)
    for _ in range(2):  # torque; the jump
        with pytest.raises(Refused):
            world.ask("clear", "operator")
        world.run(2)
    world.ask("clear", "operator")
    world.run()
    assert np.abs(world.arms.sent[-1] - HOME).max() > 0.2


def test_a_request_of_an_older_generation_is_refused_but_for_stops():
    world = moving()
    old = world.loop.machine.generation
    stop(world)
    world.ask("stop", "any", generation=old)
    world.until("STOPPED")
    world.ask("clear", "operator")
    world.ask("go", "operator")
    with pytest.raises(Refused, match=f"reset: it is of generation {old}, and the robot is in {old + 4} now .HOLD"):
        world.ask("reset", "controller", motion=Way(HOME), generation=old)
    world.ask("arm", "controller", generation=world.loop.machine.generation)


def test_torque_off_is_for_a_standing_robot_and_leaves_no_set_point():
    world = World().ready()
    world.run(3)
    world.ask("torque_off", "operator")
    status = world.run(50)
    assert (status.state, status.set_point) == ("STOPPED", None)
    assert not world.arms.read().torque
    assert world.loop.machine.word == "torque off by K"


def test_nothing_arms_on_a_doubtful_sample():
    world = World().ready()
    world.arms.minus_pi = 1
    world.run()
    with pytest.raises(Refused, match="cannot be trusted"):
        world.ask("arm", "controller")
    world.run()
    world.ask("arm", "controller")


def test_events_are_those_of_the_table():
    assert set(STOPS) == {"stop", "fault", "doubtful", "overspeed", "clock"}
