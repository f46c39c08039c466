"""What must hold before an operator's robot moves: permissions, countdowns, holds, lost devices, q q, parking."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pytest
from live_desk import Silent
from operator_desk import COUNTDOWN, DT, Desk, Hand, Pedal, Press
from robot_limits import GRIPPERS, HIGH, LOW, J
from robot_served import HERE, Way, served, wait
from robot_world import TICK

from serl_chunk.actor.interfaces import RobotInProcess
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.operator.operator import Operator
from serl_chunk.robots.base import DeviceActivity
from serl_chunk.robots.served.operator import ServedOperator
from serl_chunk.robots.served.robot import ServedRobot
from serl_chunk.types import RobotSpec, Source


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


def polls_until(desk: Desk, condition, seconds: float = 10.0) -> float:
    began = desk.time
    while not condition():
        desk.operator.poll(ActorState.RESET)
        assert desk.time - began < seconds
    return desk.time - began


def moves_after(desk: Desk, seconds: float = 10.0) -> float:
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
    polls_until(desk, lambda: desk.operator._permit.granted)
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
    polls_until(desk, lambda: desk.robot.requests == ["proceed"])
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


ARMS = RobotSpec("arms", 1 / TICK, J, tuple(LOW), tuple(HIGH), tuple(range(J)), GRIPPERS, (), 500, ((0, 7), (7, 14)))

Q_Q = [Press(0.4, Action.QUIT), Press(0.4, Action.QUIT)]


def moves(desk: Desk) -> Callable[[], bool]:
    return lambda: desk.robot.moving and desk.word is ActorState.RESET


def waits(desk: Desk) -> bool:
    desk.robot.waiting = desk.robot.moving
    return desk.robot.waiting and desk.word is ActorState.WAITING


def counts(desk: Desk) -> bool:
    return desk.operator.view.countdown is not None and desk.operator.view.countdown < COUNTDOWN / 2


def park(desk: Desk) -> float:
    began = desk.time

    def pause(seconds: float) -> None:
        desk.time += seconds
        desk.robot.moving = desk.robot.moving and desk.robot.requests[-1] != "park"

    desk.operator._pause = pause
    desk.operator.park()
    return desk.time - began


def ends_at_once(desk: Desk) -> None:
    summary = desk.runner.run_episode(0)
    assert (summary.length, desk.script, desk.operator.quits, desk.robot.moving) == (0, [], True, False)
    assert desk.pressed_at is not None
    assert desk.time - desk.pressed_at < 0.2, "the reset is not waited for"


@pytest.mark.parametrize("going_on", [False, True])
def test_a_held_reset_ends_at_once_and_the_robot_is_parked_after_a_countdown(desk, going_on):
    counted = [Press(0.4, b"\r"), Press(0.05, Action.QUIT), Q_Q[1]]  # a countdown to go on with the reset
    desk.script = [Press(moves(desk), b" "), *(counted if going_on else Q_Q)]
    ends_at_once(desk)
    assert (len(desk.env.options), desk.robot.requests, desk.word) == (1, ["hold"], ActorState.HOLD)
    assert not desk.operator._permit.counts
    assert park(desk) >= COUNTDOWN
    assert desk.robot.requests == ["hold", "park"]


def test_a_reset_that_waits_for_the_scene_is_held(desk):
    desk.script = [Press(lambda: waits(desk), Action.QUIT), Press(0.4, Action.QUIT)]
    ends_at_once(desk)
    assert desk.robot.requests == ["hold"]
    assert park(desk) >= COUNTDOWN


def test_a_reset_under_way_is_finished(desk):
    desk.script = [Press(lambda: counts(desk), Action.QUIT), Press(moves(desk), Action.QUIT)]
    assert desk.runner.run_episode(0).length == 0
    assert (desk.script, desk.operator.quits, desk.robot.requests, desk.env.tick) == ([], True, [], 0)
    assert park(desk) >= COUNTDOWN
    assert desk.robot.requests == ["park"]


@pytest.mark.parametrize("stops", [Action.HOLD, Action.STOP])
def test_what_stops_the_reset_after_q_q_leaves_the_robot_where_it_is(desk, stops):
    quits = lambda: desk.robot.moving and desk.operator.quits  # noqa: E731
    desk.script = [Press(lambda: counts(desk), Action.QUIT), Press(moves(desk), Action.QUIT), Press(quits, stops)]
    ends_at_once(desk)
    assert park(desk) < COUNTDOWN
    assert {*desk.robot.requests} == {stops.value}, "no motion follows a hold without a key"


def test_a_reset_that_begins_after_q_q_is_braked(desk):
    """Its request was on its way while the view showed a robot that stands."""
    desk.operator.attach(desk.env, None)
    desk.operator._stage.resets = True
    desk.operator.poll(ActorState.RESET)
    for _ in range(2):
        desk.operator.request(Action.QUIT, "page")
        desk.operator.poll(ActorState.RESET)
        desk.time += 0.4
    desk.robot.moving = True
    desk.operator.poll(ActorState.RESET)
    assert desk.robot.requests == ["hold"]


def test_a_held_reset_of_a_real_server_ends_and_the_robot_is_parked(monkeypatch):
    events: list[str] = []

    def motion(event, arguments, start, limits):
        events.append(event)
        return Way(start + (0.3 if event == "reset" else 0.0), lasts=event == "reset")

    with served() as robot, contextlib.ExitStack() as stack:
        monkeypatch.setattr(robot.server, "_motions", motion)
        robot.ready()
        config = FakeAlohaConfig(server=f"{HERE}:{robot.port}")
        env = stack.enter_context(contextlib.closing(ServedRobot(config, ARMS, name="actor")))
        requests = stack.enter_context(contextlib.closing(ServedOperator(config, "actor console")))
        operator = Operator(
            Silent(), requests, amend=lambda record: None, end=lambda: None, now=time.monotonic, countdown=0.3
        )
        operator.attach(env, None)
        env.stop = operator.stopping(lambda: None)
        ended: list[object] = []
        thread = threading.Thread(target=lambda: ended.append(operator.reset(env, 1)), daemon=True)
        thread.start()
        wait(lambda: requests.moving and operator.view.word is ActorState.RESET)
        operator.request(Action.HOLD, "page")
        wait(lambda: operator.view.word is ActorState.HOLD)
        for _ in range(2):
            time.sleep(0.4)
            operator.request(Action.QUIT, "page")
        thread.join(5.0)
        assert ended == [None], "it waits for go on"
        env.close()
        began = time.monotonic()
        operator.park()
        assert time.monotonic() - began >= 0.3
        assert (events, robot.client(role="any").next_state()["state"]) == (["reset", "park"], "HOLD")
