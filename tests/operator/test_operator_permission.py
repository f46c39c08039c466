"""That a permission to move is for one motion at once, and that what stops comes before it, whatever comes between."""

from __future__ import annotations

import pytest
from operator_desk import COUNTDOWN, Desk, Press

from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.robots.base import DeviceActivity
from serl_chunk.types import Source


def wait(desk: Desk, condition, seconds: float = 10.0) -> float:
    """Poll until `condition`; returns the seconds that it took."""
    began = desk.time
    while not condition():
        desk.operator.poll(ActorState.RESET)
        assert desk.time - began < seconds
    return desk.time - began


def moves_after(desk: Desk, seconds: float = 10.0) -> float:
    """Return the seconds until the robot may be reset."""
    began = desk.time
    while not desk.env.may_move():
        assert desk.time - began < seconds
    return desk.time - began


def test_a_reset_that_met_resistance_begins_again_after_a_countdown(desk):
    assert moves_after(desk) >= COUNTDOWN
    desk.robot.moving = True
    desk.operator.poll(ActorState.RESET)
    desk.robot.moving = False  # the server gave it up, or an operator elsewhere holds it
    assert moves_after(desk) >= COUNTDOWN


def test_a_permission_that_was_not_used_at_once_is_over(desk):
    desk.operator._permitted()
    wait(desk, lambda: desk.operator._permit.granted)
    desk.time += 5.0  # another actor had the lease
    assert moves_after(desk) >= COUNTDOWN


@pytest.mark.parametrize("begin", [Action.RESET, Action.PARK])
def test_a_countdown_that_no_one_saw_moves_nothing(desk, begin):
    if begin is Action.PARK:
        desk.operator._begin_parking()
    else:
        assert not desk.env.may_move()
    desk.time += 10.0  # another learner was waited for
    for _ in range(5):
        assert not desk.env.may_move()
    assert (desk.word, desk.robot.requests) == (ActorState.HOLD, [])


def test_a_session_that_ended_in_a_countdown_leaves_none_to_the_next(desk):
    assert not desk.env.may_move()
    desk.time += COUNTDOWN - 0.1
    desk.script = []
    began = desk.time
    desk.runner.run_episode(0)
    first = next(k for k, state in enumerate(desk.states) if state.word is ActorState.POLICY)
    assert max(state.countdown or 0 for state in desk.states[:first]) > COUNTDOWN - 0.1
    assert desk.time - began > COUNTDOWN


@pytest.mark.parametrize("what", [b"r", b"s", b"f", b"\x7f"])
def test_the_rest_of_a_countdown_is_not_for_another_motion(desk, what):
    """Go on, and shortly before its end the episode ends: its reset has a countdown of its own."""
    desk.script = [
        Press(desk.at(ActorState.POLICY, 3), b" "), Press(0.4, b"\r"), Press(COUNTDOWN - 0.2, what),
    ]  # fmt: skip
    desk.runner.run_episode(0)
    ended = desk.time
    desk.script = [] if what == b"r" else [Press(0.4, Action.GO)]
    moved: list[float] = []
    desk.env.may_move = lambda: desk.operator.may_move() and not moved.append(desk.time)
    desk.runner.run_episode(1)
    assert moved[0] - ended >= COUNTDOWN


def test_a_repeat_of_the_reset_ends_the_countdown_to_the_first_tick(make_desk):
    desk = make_desk(ready="first")
    starts, pressed, reset = [], [], desk.env.reset
    desk.env.reset = lambda **more: (starts.append(desk.time), reset(**more))[1]
    almost = lambda: desk.operator.view.countdown is not None and desk.operator.view.countdown < 0.2  # noqa: E731
    desk.script = [
        Press(desk.at(ActorState.WAITING), b"\r"),
        Press(lambda: almost() and desk.word is ActorState.WAITING and not pressed.append(desk.time), b"r"),
    ]
    desk.runner.run_episode(0)
    assert len(starts) == 2
    assert starts[1] - pressed[-1] >= COUNTDOWN - 0.1


def test_a_hold_of_one_input_wins_over_go_on_of_another(desk):
    desk.operator.request(Action.HOLD, "page")
    desk.operator.poll(ActorState.POLICY)
    assert desk.word is ActorState.HOLD
    desk.time += 1.0
    desk.script = [Press(lambda: True, b" "), Press(lambda: True, Action.GO)]
    desk.operator.poll(ActorState.POLICY)
    assert desk.script == []
    for _ in range(100):
        desk.operator.poll(ActorState.POLICY)
    assert (desk.word, desk.operator.view.countdown) == (ActorState.HOLD, None)


def test_go_on_counts_once_for_a_reset_that_waits_until_the_server_answered(desk):
    desk.robot.moving = desk.robot.waiting = True
    desk.operator.poll(ActorState.RESET)
    desk.operator.request(Action.GO, "page")
    wait(desk, lambda: desk.robot.requests == ["proceed"])
    desk.robot.idle = False  # the state is of before its answer
    desk.operator.request(Action.GO, "another page")
    for _ in range(10):
        desk.operator.poll(ActorState.RESET)
    assert desk.operator.view.countdown is None


def test_the_robot_is_parked_though_its_device_was_closed_with_it(desk):
    class Closed:
        def hands(self) -> DeviceActivity:
            return DeviceActivity(lost=("mouse",))

    desk.operator.attach(desk.env, Closed())  # type: ignore[arg-type]

    def pause(seconds: float) -> None:
        desk.time += seconds
        if desk.time > 3:
            desk.robot.moving = False

    desk.operator._pause = pause
    desk.operator.park()
    assert desk.robot.requests == ["park"]


def test_a_robot_that_was_parked_before_its_first_tick_is_reset_again(make_desk):
    desk = make_desk(ready="first")

    def parked() -> bool:
        if desk.robot.moving and "park" in desk.robot.requests:
            desk.robot.moving = False
        return "park" in desk.robot.requests and desk.word is ActorState.HOLD

    desk.script = [
        Press(desk.at(ActorState.WAITING), b" "), Press(0.4, b"p"), Press(0.4, b"y"), Press(parked, b"\r"),
        Press(desk.at(ActorState.WAITING), Action.GO), Press(desk.at(ActorState.POLICY, 3), b"s"),
    ]  # fmt: skip
    summary = desk.runner.run_episode(0)
    assert (len(desk.env.options), desk.script, summary.length > 0) == (2, [], True)


def test_go_on_for_a_hold_before_the_last_one_begins_nothing(desk):
    """A page's key is on its way for a second, and the robot is held again meanwhile."""
    desk.operator.request(Action.HOLD, "page")
    desk.operator.poll(ActorState.POLICY)
    seen = desk.time
    desk.operator.request(Action.HOLD, "terminal")
    desk.operator.poll(ActorState.POLICY)
    desk.operator.request(Action.GO, "page", seen)
    for _ in range(10):
        desk.operator.poll(ActorState.POLICY)
    assert desk.operator.view.countdown is None
    desk.time += 1.0
    desk.operator.request(Action.GO, "page", desk.time)
    for _ in range(10):
        desk.operator.poll(ActorState.POLICY)
    assert desk.operator.view.countdown is not None


def test_a_robot_that_another_machine_holds_in_an_episode_waits_for_go_on(desk):
    """Else the next tick arms it again, and the policy goes on."""

    def held() -> bool:
        there = desk.at(ActorState.POLICY, 3)()
        desk.robot.why = "held by desk" if there and desk.env.tick < 8 else "armed by actor"
        return there and desk.env.tick >= 8

    desk.script = [Press(held, Action.UNDO)]
    desk.runner.run_episode(0)
    assert desk.word is ActorState.HOLD
    assert {step.source for step in desk.sink.steps[5:]} == {Source.HOLD}
