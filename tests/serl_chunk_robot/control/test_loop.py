"""The loop of a robot server with an injected clock: what stops it, how far it travels, and how it follows commands."""

from __future__ import annotations

import numpy as np
import pytest
from robot_limits import HOME
from robot_world import DT, REST, Way, World, moving, speed

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
