"""The end of a session by q, q in a reset: it ends at once where the robot stands, and is parked after a countdown."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pytest
from live_desk import Silent
from operator_desk import COUNTDOWN, Desk, Press
from robot_limits import GRIPPERS, HIGH, LOW, J
from robot_served import HERE, Way, served, wait
from robot_world import TICK

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.operator.operator import Operator
from serl_chunk.robots.served.operator import ServedOperator
from serl_chunk.robots.served.robot import ServedRobot
from serl_chunk.types import RobotSpec

ARMS = RobotSpec("arms", 1 / TICK, J, tuple(LOW), tuple(HIGH), tuple(range(J)), GRIPPERS, (), 500, ((0, 7), (7, 14)))

Q_Q = [Press(0.4, Action.QUIT), Press(0.4, Action.QUIT)]


def moves(desk: Desk) -> Callable[[], bool]:
    """A condition: the reset is under way."""
    return lambda: desk.robot.moving and desk.word is ActorState.RESET


def waits(desk: Desk) -> bool:
    """Let the reset wait for the scene, from its first tick on."""
    desk.robot.waiting = desk.robot.moving
    return desk.robot.waiting and desk.word is ActorState.WAITING


def counts(desk: Desk) -> bool:
    return desk.operator.view.countdown is not None and desk.operator.view.countdown < COUNTDOWN / 2


def park(desk: Desk) -> float:
    """Park, as the end of a session does; returns the seconds of the countdown."""
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
    """Real sockets, the server's own states; the reset would never end."""
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
