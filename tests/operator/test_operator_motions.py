"""What must hold before an operator's robot moves: countdowns, holds, lost devices, parking."""

from __future__ import annotations

import os

import pytest
from operator_desk import COUNTDOWN, DT, Desk, Pedal, Press
from ptys import Pty

from serl_chunk.actor.interfaces import RobotInProcess
from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.robots.base import DeviceActivity
from serl_chunk.types import Source


class Hand:
    """A device of a human who does not move it."""

    def __init__(self) -> None:
        self.hands_now, self.resumed = DeviceActivity(), 0

    def reset(self, seed): ...

    def poll(self, *_): ...

    def close(self): ...

    def hands(self) -> DeviceActivity:
        return self.hands_now

    def resume(self) -> None:
        self.resumed += 1


def test_a_reset_and_each_go_on_follow_a_countdown(desk):
    desk.script = [Press(desk.at(ActorState.POLICY, 3), b" "), Press(0.5, b"\r")]
    desk.runner.run_episode(0)
    counts = [state.countdown for state in desk.states]
    assert counts[0] is None or counts[0] == COUNTDOWN
    first_tick = next(k for k, state in enumerate(desk.states) if state.word is ActorState.POLICY)
    assert any(count is not None for count in counts[:first_tick])
    held = [step.source for step in desk.sink.steps].count(Source.HOLD)
    assert held * DT >= 0.5 + COUNTDOWN - 2 * DT


@pytest.mark.parametrize("word", [ActorState.RESET, ActorState.HOLD, ActorState.WAITING])
def test_a_hold_ends_a_countdown(make_desk, word):
    desk = make_desk(ready="first" if word is ActorState.WAITING else "")
    begins = {ActorState.RESET: [], ActorState.HOLD: [Press(desk.at(ActorState.POLICY, 3), b" "), Press(0.1, b"\r")],
              ActorState.WAITING: [Press(desk.at(ActorState.WAITING), b"\r")]}  # fmt: skip
    counting = lambda: desk.operator.view.countdown is not None and desk.word is word  # noqa: E731
    desk.script = [*begins[word], Press(counting, b" ")]
    desk.runner.run_episode(0)
    assert (desk.word, desk.operator.view.countdown, desk.script) == (ActorState.HOLD, None, [])


def test_a_reset_that_begins_after_its_hold_is_braked(desk):
    desk.operator.attach(desk.env, None)
    desk.operator.request(Action.HOLD, "page")
    desk.operator.poll(ActorState.RESET)
    assert desk.robot.requests == []
    desk.robot.moving = True  # the request was on its way
    desk.operator.poll(ActorState.RESET)
    assert desk.robot.requests == ["hold"]


def test_a_reset_that_waits_for_the_scene_goes_on_after_the_countdown(desk):
    desk.robot.moving = desk.robot.waiting = True
    desk.operator.poll(ActorState.RESET)
    assert desk.operator.view.obstacles[0].remedy == "arrange it, then press Enter"
    desk.operator.request(Action.GO, "page")
    began = desk.time
    while desk.robot.requests != ["proceed"]:
        desk.operator.poll(ActorState.RESET)
        assert desk.time - began < 2 * COUNTDOWN
    assert desk.time - began >= COUNTDOWN


def test_a_robot_that_is_cleared_elsewhere_waits_for_go_on(desk):
    desk.robot.stopped = True
    desk.operator.poll(ActorState.RESET)
    desk.robot.stopped = False
    for _ in range(200):
        assert not desk.operator.may_move()
    assert desk.word is ActorState.HOLD
    desk.operator.request(Action.GO, "page")
    while not desk.operator.may_move():
        assert desk.time < 100
    assert desk.states[-1].countdown is None


@pytest.mark.parametrize("served", [True, False])
def test_a_stop_is_latched_with_and_without_a_server(desk, served):
    if not served:
        desk.operator._robot = desk.operator._consent._robot = RobotInProcess()
        desk.operator._served = False
    desk.operator.request(Action.STOP, "page")
    for _ in range(3):
        desk.operator.poll(ActorState.POLICY)
    assert desk.word is ActorState.STOPPED
    for action in (Action.CLEAR, Action.GO):
        desk.operator.request(action, "page", robot=desk.shown)
    desk.operator.poll(ActorState.POLICY)
    assert (desk.word, desk.operator.holding) == (ActorState.HOLD, True)


def test_a_lost_device_holds_and_blocks_until_it_is_back(make_desk):
    desk = make_desk(intervention=(hand := Hand()))

    def unplugged() -> bool:
        if (there := desk.at(ActorState.POLICY, 3)()) and not hand.hands_now.lost:
            hand.hands_now = DeviceActivity(lost=("mouse",))
        return there and desk.env.tick >= 5

    desk.script = [Press(lambda: unplugged() or desk.word is ActorState.HOLD, b"\r"), Press(0.5, b"\r")]
    desk.runner.run_episode(0)
    assert desk.word is ActorState.HOLD, "Enter does not go on while the device is lost"
    assert [o.what for o in desk.operator.view.obstacles] == ["device mouse is lost"]
    hand.hands_now = DeviceActivity()
    desk.operator.request(Action.GO, "page")
    for _ in range(100):
        desk.operator.poll(ActorState.POLICY)
    assert (desk.word, hand.resumed) == (ActorState.POLICY, 1)


def test_a_lost_pedal_holds(desk):
    desk.script = [Press(desk.at(ActorState.POLICY, 3), ("right", True))]
    desk.pedal.alive = True
    one = Pedal.read

    def read(self):
        self.alive = desk.env.tick < 6
        return one(self)

    desk.pedal.read = read.__get__(desk.pedal)
    desk.runner.run_episode(0)
    assert desk.word is ActorState.HOLD


@pytest.mark.parametrize("lost", ["device", "pedal"])
def test_a_device_or_pedal_that_is_lost_in_a_reset_holds(make_desk, lost):
    desk = make_desk(intervention=(hand := Hand()))

    def unplugged() -> bool:
        if there := desk.robot.moving and desk.word is ActorState.RESET:
            hand.hands_now = DeviceActivity(lost=("mouse",)) if lost == "device" else DeviceActivity()
            desk.pedal.alive = lost == "device"
        return there

    def plugged() -> bool:
        hand.hands_now, desk.pedal.alive = DeviceActivity(), True
        return True

    # `u` does nothing there. Enter goes on with the reset, which has its own countdown.
    desk.script = [Press(unplugged, b"u"), Press(1.0, b"u"), Press(lambda: plugged(), b"u"), Press(0.5, b"\r")]
    desk.runner.run_episode(0)
    assert desk.robot.requests == ["hold", "go"]
    assert len(desk.env.options) == 2  # the reset was ended, and begun again
    assert ActorState.HOLD in [state.word for state in desk.states]
    assert len(desk.sink.steps) > 0


@pytest.mark.parametrize("begun", [True, False])
def test_a_pedal_that_is_lost_while_the_robot_parks_holds(desk, begun):
    def pause(seconds: float) -> None:
        desk.time += seconds
        if "park" in desk.robot.requests:
            desk.pedal.alive = False
            desk.robot.moving = desk.robot.moving and "hold" not in desk.robot.requests

    requested = desk.robot.request

    def request(op: str, shown: object = None) -> None:
        requested(op, shown)
        if op == "park" and not begun:  # the server answers later
            desk.robot.moving, desk.robot.idle = False, False

    def poll(word: ActorState, *waits_for) -> None:
        polled(word, *waits_for)
        if not desk.robot.idle and desk.time > COUNTDOWN + 0.3:
            desk.robot.idle = desk.robot.moving = True

    desk.robot.request, desk.operator._pause = request, pause
    polled, desk.operator.poll = desk.operator.poll, poll
    desk.operator.park()
    assert desk.robot.requests[:2] == ["park", "hold"]


def test_a_camera_that_is_gone_is_listed_and_blocks(desk):
    desk.env.lost = (("camera 'top': no new picture for 0.5 s", "look at its cable"),)
    for _ in range(200):
        assert not desk.operator.may_move()
    assert desk.word is ActorState.WAITING
    assert desk.operator.view.obstacles[0].remedy == "look at its cable"


@pytest.mark.parametrize("cancel", [None, Action.HOLD, Action.STOP])
def test_parking_at_the_end(desk, cancel):
    def pause(seconds: float) -> None:
        desk.time += seconds
        if cancel is not None and desk.time > 0.5:
            desk.operator.request(cancel, "page")
        if desk.time > 3:
            desk.robot.moving = False

    desk.operator._pause = pause
    desk.operator.park()
    assert ("park" in desk.robot.requests) is (cancel is None)
    assert desk.time >= COUNTDOWN or cancel is not None


def test_quit_ends_before_an_episode_begins(desk):
    for _ in range(2):
        desk.operator.request(Action.QUIT, "page")
        desk.operator.waits()
        desk.time += 1
    summary = desk.runner.run_episode(0)
    assert (summary.length, desk.env.options, desk.sink.records) == (0, [], [])


def test_what_is_typed_ahead_of_a_change_does_not_move(desk):
    desk.script = [Press(desk.at(ActorState.POLICY, 3), b" \r\rrgy")]
    desk.runner.run_episode(0)
    assert (desk.word, desk.operator.view.countdown, len(desk.env.options)) == (ActorState.HOLD, None, 1)


def test_a_label_lets_the_robot_stand_before_anything_is_waited_for(desk):
    desk.script = [Press(desk.at(ActorState.POLICY, 3), b"s")]
    summary = desk.runner.run_episode(0)
    assert desk.env.rested == [summary.length], "else the server's watchdog stops it"


def test_a_stop_typed_with_a_label_wins(desk):
    desk.script = [Press(desk.at(ActorState.POLICY, 3), b"sx")]
    desk.runner.run_episode(0)
    assert (desk.sink.last_end.outcome_by, desk.sink.last_end.truncated) == ("operator", True)


def test_a_closed_terminal_holds_and_the_loop_goes_on(pty, desk):
    desk.script = [Press(lambda: desk.at(ActorState.POLICY, 5)() and (pty.hang_up() or True), Action.UNDO)]
    desk.runner.run_episode(0)
    assert len(desk.sink.steps) > 50, "the loop goes on"
    assert desk.sink.steps[-1].source in (Source.HOLD, Source.SCRIPTED, Source.POLICY)


@pytest.mark.usefixtures("terminal")
def test_a_stuck_terminal_does_not_delay_the_loop():
    pty = Pty()  # no one reads what is written to it, as after Ctrl-S in another program
    desk = Desk(pty)
    for _ in range(30):
        os.write(pty.slave, b"x" * 100)
    desk.script = [Press(desk.at(ActorState.POLICY, 3), b" ")]
    desk.runner.run_episode(0)
    assert desk.word is ActorState.HOLD
    pty.look()
    desk.close()
    pty.close()
