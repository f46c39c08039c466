"""What must hold before an operator's robot moves: permissions, countdowns, holds, lost devices, q q, parking."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from actor_helpers import HumanOnTicks, NoisyAgent, make_policy
from operator_desk import COUNTDOWN, DT, Desk, Hand, Press
from ports import free_port
from transport_tools import LIMITS, Inbox, linked, serving

from serl_chunk.actor.interfaces import RobotInProcess
from serl_chunk.attention.alarm import Alarm
from serl_chunk.attention.attention import Attention
from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.operator.labels import EpisodeLabels
from serl_chunk.outcomes.judge import OPERATOR
from serl_chunk.robots.base import AS_IS, DeviceActivity
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.types import Amend, End, Outcome, Source


def polls(desk: Desk, count: int, word: ActorState = ActorState.POLICY) -> None:
    for _ in range(count):
        desk.operator.poll(word)


@pytest.mark.parametrize("word", [ActorState.RESET, ActorState.HOLD, ActorState.WAITING])
def test_a_hold_ends_a_countdown(make_desk, word):
    desk = make_desk(ready="first" if word is ActorState.WAITING else "")
    begins = {
        ActorState.RESET: [],
        ActorState.HOLD: [Press(desk.at(ActorState.POLICY, 3), b" "), Press(0.1, b"\r")],
        ActorState.WAITING: [Press(desk.at(ActorState.WAITING), b"\r")],
    }
    counting = lambda: desk.operator.view.countdown is not None and desk.word is word  # noqa: E731
    desk.script = [*begins[word], Press(counting, b" ")]
    desk.runner.run_episode(0)
    assert (desk.word, desk.operator.view.countdown, desk.script) == (ActorState.HOLD, None, [])


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


@pytest.fixture(params=["mouse", "pedal"])
def lost(request: pytest.FixtureRequest) -> str:
    """A device, or the pedal."""
    return request.param


def unplug(desk: Desk, hand: Hand, lost: str = "") -> bool:
    """Lose a device or the pedal; have all of them back by default."""
    hand.hands_now = DeviceActivity(lost=(lost,) * (lost == "mouse"))
    desk.pedal.alive = lost != "pedal"
    return True


def test_a_device_or_pedal_that_is_lost_in_a_reset_holds(make_desk, lost):
    desk = make_desk(intervention=(hand := Hand()))
    unplugged = lambda: desk.robot.moving and desk.word is ActorState.RESET and unplug(desk, hand, lost)  # noqa: E731
    # `u` does nothing there. Enter goes on with the reset, which has its own countdown.
    desk.script = [Press(unplugged, b"u"), Press(1.0, b"u"), Press(lambda: unplug(desk, hand), b"u"), Press(0.5, b"\r")]
    desk.runner.run_episode(0)
    assert desk.robot.requests == ["hold", "go"]
    assert len(desk.env.options) == 2  # the reset was ended, and begun again
    assert ActorState.HOLD in [state.word for state in desk.states]
    assert len(desk.sink.steps) > 0


def test_a_camera_that_is_gone_is_listed_and_blocks(desk):
    desk.env.lost = (("camera 'top': no new picture for 0.5 s", "look at its cable"),)
    for _ in range(200):
        assert not desk.operator.may_move()
    assert desk.word is ActorState.WAITING
    assert desk.operator.view.obstacles[0].remedy == "look at its cable"


@pytest.mark.parametrize("what", [b"r", b"s", b"f", b"\x7f"])
def test_the_rest_of_a_countdown_is_not_for_another_motion(desk, what):
    desk.script = [Press(desk.at(ActorState.POLICY, 3), b" "), Press(0.4, b"\r"), Press(COUNTDOWN - 0.2, what)]
    desk.runner.run_episode(0)
    ended = desk.time
    desk.script = [] if what == b"r" else [Press(0.4, Action.GO)]
    moved: list[float] = []
    desk.env.may_move = lambda: desk.operator.may_move() and not moved.append(desk.time)
    desk.runner.run_episode(1)
    assert moved[0] - ended >= COUNTDOWN


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


def test_a_scene_that_is_left_as_it_is_is_not_confirmed(make_desk):
    desk = make_desk(ready="each")
    desk.env.init_states = (AS_IS,)
    desk.script = [Press(desk.at(ActorState.POLICY, 3), b"s")]
    summary = desk.runner.run_episode(0, init_state=AS_IS)
    assert (desk.env.options, desk.script, summary.success) == ([{"init_state": AS_IS}], [], True)


Q_Q = [Press(0.4, Action.QUIT), Press(0.4, Action.QUIT)]


def moves(desk: Desk) -> Callable[[], bool]:
    return lambda: desk.robot.moving and desk.word is ActorState.RESET


def waits(desk: Desk) -> bool:
    desk.robot.waiting = desk.robot.moving
    return desk.robot.waiting and desk.word is ActorState.WAITING


def counts(desk: Desk) -> bool:
    return desk.operator.view.countdown is not None and desk.operator.view.countdown < COUNTDOWN / 2


@pytest.mark.parametrize("going_on", [False, True])
def test_a_held_reset_ends_at_once_and_the_robot_is_parked_after_a_countdown(desk, going_on):
    counted = [Press(0.4, b"\r"), Press(0.05, Action.QUIT), Q_Q[1]]  # a countdown to go on with the reset
    desk.script = [Press(moves(desk), b" "), *(counted if going_on else Q_Q)]
    ends_at_once(desk)
    assert (len(desk.env.options), desk.robot.requests, desk.word) == (1, ["hold"], ActorState.HOLD)
    assert not desk.operator._permit.counts
    assert park(desk) >= COUNTDOWN
    assert desk.robot.requests == ["hold", "park"]


@pytest.mark.parametrize("stops", [Action.HOLD, Action.STOP])
def test_what_stops_the_reset_after_q_q_leaves_the_robot_where_it_is(desk, stops):
    quits = lambda: desk.robot.moving and desk.operator.quits  # noqa: E731
    desk.script = [Press(lambda: counts(desk), Action.QUIT), Press(moves(desk), Action.QUIT), Press(quits, stops)]
    ends_at_once(desk)
    assert park(desk) < COUNTDOWN
    assert {*desk.robot.requests} == {stops.value}, "no motion follows a hold without a key"


@pytest.mark.parametrize("quits", [False, True])
def test_a_reset_that_begins_after_its_hold_or_after_q_q_is_braked(desk, quits):
    """Its request was on its way while the view showed a robot that stands."""
    desk.operator.attach(desk.env, None)
    desk.operator._stage.resets = quits
    desk.operator.poll(ActorState.RESET)
    for _ in range(1 + quits):
        desk.operator.request(Action.QUIT if quits else Action.HOLD, "page")
        polls(desk, 1, ActorState.RESET)
        desk.time += 0.4
    assert desk.robot.requests == []
    desk.robot.moving = True
    desk.operator.poll(ActorState.RESET)
    assert desk.robot.requests == ["hold"]


def test_a_reset_that_waits_for_the_scene_goes_on_once_after_the_countdown(desk):
    desk.robot.moving = desk.robot.waiting = True
    desk.operator.poll(ActorState.RESET)
    assert desk.operator.view.obstacles[0].remedy == "arrange it, then press Enter"
    desk.operator.request(Action.GO, "page")
    began = desk.time
    while desk.robot.requests != ["proceed"]:
        desk.operator.poll(ActorState.RESET)
        assert desk.time - began < 2 * COUNTDOWN
    assert desk.time - began >= COUNTDOWN
    desk.robot.idle = False  # the state is of before its answer
    desk.operator.request(Action.GO, "another page")
    polls(desk, 10, ActorState.RESET)
    assert desk.operator.view.countdown is None


def test_a_lost_device_or_pedal_holds_and_blocks_until_it_is_back(make_desk, lost):
    desk = make_desk(intervention=(hand := Hand()))

    def unplugged() -> bool:
        if there := desk.at(ActorState.POLICY, 3)():
            unplug(desk, hand, lost)
        return (there and desk.env.tick >= 5) or desk.word is ActorState.HOLD

    desk.script = [Press(unplugged, b"\r"), Press(0.5, b"\r")]
    desk.runner.run_episode(0)
    assert desk.word is ActorState.HOLD, "Enter does not go on while it is lost"
    assert [o.what for o in desk.operator.view.obstacles] == [f"device {lost} is lost"]
    unplug(desk, hand)
    desk.operator.request(Action.GO, "page")
    polls(desk, 100)
    assert (desk.word, hand.resumed) == (ActorState.POLICY, 1)


@pytest.mark.parametrize("begun", [True, False])
def test_a_pedal_that_is_lost_while_the_robot_parks_holds(desk, begun):
    def pause(seconds: float) -> None:
        desk.time += seconds
        if "park" in desk.robot.requests:
            desk.pedal.alive = False
            desk.robot.moving = desk.robot.moving and "hold" not in desk.robot.requests

    def request(op: str, shown: object = None) -> None:
        requested(op, shown)
        if op == "park" and not begun:  # the server answers later
            desk.robot.moving, desk.robot.idle = False, False

    def poll(word: ActorState, *waits_for) -> None:
        polled(word, *waits_for)
        if not desk.robot.idle and desk.time > COUNTDOWN + 0.3:
            desk.robot.idle = desk.robot.moving = True

    requested, desk.robot.request, desk.operator._pause = desk.robot.request, request, pause
    polled, desk.operator.poll = desk.operator.poll, poll
    desk.operator.park()
    assert desk.robot.requests[:2] == ["park", "hold"]


def park(desk: Desk, cancel: Action | None = None) -> float:
    began = desk.time

    def pause(seconds: float) -> None:
        desk.time += seconds
        if cancel is not None and desk.time > 0.5:
            desk.operator.request(cancel, "page")
        desk.robot.moving = desk.robot.moving and desk.robot.requests[-1] != "park"

    desk.operator._pause = pause
    desk.operator.park()
    return desk.time - began


@pytest.mark.parametrize("cancel", [None, Action.HOLD, Action.STOP])
def test_the_robot_is_parked_after_a_countdown_though_its_device_was_closed_with_it(desk, cancel):
    closed = Hand()
    closed.hands_now = DeviceActivity(lost=("mouse",))
    desk.operator.attach(desk.env, closed)
    took = park(desk, cancel)
    assert ("park" in desk.robot.requests) is (cancel is None)
    assert took >= COUNTDOWN or cancel is not None


@pytest.mark.parametrize(("typed", "left"), [(b" \r\rrgy", ActorState.HOLD), (b"sx", ActorState.STOPPED)])
def test_what_is_typed_ahead_of_a_change_does_not_move_and_a_stop_wins(desk, typed, left):
    desk.script = [Press(desk.at(ActorState.POLICY, 3), typed)]
    desk.runner.run_episode(0)
    assert (desk.word, desk.operator.view.countdown, len(desk.env.options)) == (left, None, 1)
    assert left is ActorState.HOLD or desk.sink.last_end.truncated


def moves_after(desk: Desk) -> float:
    began = desk.time
    while not desk.env.may_move():
        assert desk.time - began < 10.0
    return desk.time - began


def test_a_permission_is_for_one_motion_and_over_where_it_is_not_used_at_once(desk):
    assert moves_after(desk) >= COUNTDOWN
    desk.robot.moving = True
    desk.operator.poll(ActorState.RESET)
    desk.robot.moving = False  # the server gave it up, or an operator elsewhere holds it
    assert moves_after(desk) >= COUNTDOWN
    desk.operator._permitted()
    while not desk.operator._permit.granted:
        desk.operator.poll(ActorState.RESET)
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


def test_a_hold_wins_over_go_on_of_another_input_and_over_one_of_before(desk):
    """A page's key is on its way for a second, and the robot is held again meanwhile."""
    desk.operator.request(Action.HOLD, "page")
    desk.operator.poll(ActorState.POLICY)
    seen = desk.time
    desk.time += 1.0
    desk.script = [Press(lambda: True, b" "), Press(lambda: True, Action.GO)]
    desk.operator.poll(ActorState.POLICY)
    assert desk.script == []
    polls(desk, 100)
    assert (desk.word, desk.operator.view.countdown) == (ActorState.HOLD, None)
    desk.operator.request(Action.GO, "page", seen)
    polls(desk, 10)
    assert desk.operator.view.countdown is None
    desk.operator.request(Action.GO, "page", desk.time)
    polls(desk, 10)
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


def ends_at_once(desk: Desk) -> None:
    summary = desk.runner.run_episode(0)
    assert (summary.length, desk.script, desk.operator.quits, desk.robot.moving) == (0, [], True, False)
    assert desk.time - desk.pressed_at < 0.2, "the reset is not waited for"


def test_after_q_q_a_reset_that_waits_for_the_scene_is_held_and_one_under_way_is_finished(make_desk):
    desk = make_desk()
    desk.script = [Press(lambda: waits(desk), Action.QUIT), Press(0.4, Action.QUIT)]
    ends_at_once(desk)
    assert desk.robot.requests == ["hold"]
    assert park(desk) >= COUNTDOWN
    desk.close()
    desk = make_desk()
    desk.script = [Press(lambda: counts(desk), Action.QUIT), Press(moves(desk), Action.QUIT)]
    assert desk.runner.run_episode(0).length == 0
    assert (desk.script, desk.operator.quits, desk.robot.requests, desk.env.tick) == ([], True, [], 0)
    assert park(desk) >= COUNTDOWN
    assert desk.robot.requests == ["park"]


@pytest.mark.parametrize(("key", "outcome"), [(b"s", Outcome.SUCCESS), (b"f", Outcome.FAILURE)])
@pytest.mark.parametrize("success_at", [None, 7])
def test_a_label_ends_the_episode_on_its_tick_and_goes_before_the_environment(desk, key, outcome, success_at):
    desk.env.success_at = success_at
    desk.script = [Press(desk.at(ActorState.POLICY, 7), key)]
    desk.runner.run_episode(5)
    end = desk.sink.last_end
    assert (end.length, end.terminated, end.outcome, end.outcome_by) == (8, True, outcome, OPERATOR)
    assert desk.sink.steps[-1].reward == float(outcome is Outcome.SUCCESS)
    assert desk.env.rested == [8], "the robot stands before anything is waited for: else the server's watchdog stops it"


class Device(HumanOnTicks):
    restarts = 0

    def restart(self) -> None:
        self.restarts += 1


def test_a_hold_lasts_until_go_on_and_its_countdown_and_a_human_commands_nothing_in_it(make_desk):
    device = Device(frozenset(range(10, 30)))
    desk = make_desk(intervention=device)
    desk.script = [Press(desk.at(ActorState.POLICY, 5), b" "), Press(0.1, b" "), Press(0.4, b"\r")]
    desk.runner.run_episode(5)
    steps = desk.sink.steps
    held = [k for k, step in enumerate(steps) if step.source is Source.HOLD]
    assert held == list(range(5, held[-1] + 1)), "one hold"
    assert (held[-1] - 5) * DT >= 0.5 + COUNTDOWN - 2 * DT, "a countdown"
    assert all(np.array_equal(steps[k].action, steps[4].action) for k in held)
    assert device.restarts == len(held), "devices have to be neutral first"
    words = [state.word for state in desk.states]
    shown = [word for k, word in enumerate(words) if k == 0 or words[k - 1] is not word]
    assert shown == [ActorState.RESET, ActorState.POLICY, ActorState.HOLD, ActorState.POLICY]
    counts = [state.countdown for state in desk.states[: words.index(ActorState.POLICY)]]
    assert any(count is not None for count in counts), "the reset follows a countdown, too"


def ended(labels: EpisodeLabels, name: str, **more: object) -> None:
    labels.ended(End(name, 1, None, False, True, **{"outcome": Outcome.UNKNOWN, **more}))  # type: ignore[arg-type]
    labels.begin()


class Notes:
    def __init__(self) -> None:
        self.taken: list[str] = []
        self.discard_noted = False

    def note_discard(self, episode_id: str) -> None:
        self.taken.append(episode_id)
        self.discard_noted = False


def test_a_discard_is_sent_when_the_next_episode_or_the_session_ends_and_can_be_undone_until_then():
    labels, notes = EpisodeLabels((amends := list[Amend]()).append), Notes()
    labels.notes = notes
    labels.discard()
    ended(labels, "a")
    assert (amends, notes.taken) == ([], ["a"])
    labels.discard()
    ended(labels, "b")
    assert (amends, notes.taken) == ([Amend("a", discard=True)], ["a", "", "b"]), "noted at its end"
    labels.send()
    assert amends == [Amend("a", discard=True), Amend("b", discard=True)]
    ended(labels, "c")
    labels.discard_last()
    labels.undo()
    ended(labels, "d")
    assert len(amends) == 2


@pytest.mark.parametrize(("by", "outcome"), [
    (OPERATOR, Outcome.UNKNOWN), ("classifier", Outcome.FAILURE), ("environment", None),
])  # fmt: skip
def test_a_label_or_a_success_of_the_classifiers_can_be_undone_once(by, outcome):
    """A robot that the classifier took for successful had not succeeded: its frames are those of a failure."""
    labels = EpisodeLabels((amends := list[Amend]()).append)
    labels.outcome = Outcome.SUCCESS if by == OPERATOR else None
    ended(labels, "a", outcome=Outcome.SUCCESS, outcome_by=by)
    for _ in range(2):
        labels.undo()
    assert amends == [Amend("a", outcome, OPERATOR, terminated=False, reward=0.0)] * (outcome is not None)


def test_a_success_that_was_undone_is_none_of_the_consoles(desk):
    operator = desk.operator
    operator._figures.tick(0.0, by_human=False, late=None)
    shown = []
    for name in ("a", "b"):
        operator.labels.outcome = Outcome.SUCCESS
        operator.episode_ended(End(name, 3, None, True, False, Outcome.SUCCESS))
        shown.append(operator._figures.fields(600.0)["successes"])
    operator.labels.undo()
    assert [*shown, operator._figures.fields(600.0)["successes"]] == [1, 2, 1]


class Values(NoisyAgent):
    """An agent of chunks of 8 steps whose Q falls from 0.8 to 0.2 at tick 16."""

    def sample(self, params, observation, key, **more):
        chunk, record = super().sample(params, observation, key, **more)
        return chunk, {**record, "q": np.float32(0.8 if int(record["q"]) < 16 else 0.2)}


@pytest.fixture
def watched(make_desk):
    def watched(*presses, holds=True, **more):
        attention = Attention(Alarm(0.5, 0.0, 1.0, 0.05), holds=holds)
        desk = make_desk(acts=make_policy(Values(8)), attention=attention, length=300, **more)
        desk.script = [Press(desk.at(word, tick), what) for word, tick, what in presses]
        desk.runner.run_episode(5)
        desk.close()  # its terminal would take the next one's keys
        notices = [state.notice for state in desk.states]
        return [s.source for s in desk.sink.steps], [n for k, n in enumerate(notices) if k == 0 or n != notices[k - 1]]

    return watched


def test_where_asked_a_fall_of_q_holds_until_go_on(watched):
    sources, notices = watched((ActorState.HOLD, 40, b"\r"))
    held = [t for t, source in enumerate(sources) if source is Source.HOLD]
    assert held == list(range(17, held[-1] + 1)), "from the tick after the decision on, and once"
    assert held[-1] > 40, "a countdown"
    assert notices == ["", "look: Q fell from 0.8 to 0.2", ""]


def test_a_fall_across_an_intervention_or_a_hold_is_none(watched):
    assert watched(intervention=HumanOnTicks(frozenset(range(10, 20))))[1] == [""]
    assert watched((ActorState.POLICY, 10, b" "), (ActorState.HOLD, 20, b"\r"))[1] == [""]
    sources, notices = watched(holds=False)
    assert (Source.HOLD in sources, notices) == (False, ["", "look: Q fell from 0.8 to 0.2"])


KILLED = """
import os, signal, sys, time
from pathlib import Path
from transport_tools import LIMITS, linked, send_episode
from serl_chunk.operator.labels import EpisodeLabels
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.types import End, Outcome

folder, port, keys = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
context = linked(port, spools=lambda run: Spool(folder, LIMITS))
link = context.__enter__()
labels = EpisodeLabels(link.amend)
labels.notes = link
send_episode(link, "e0", 4)
labels.ended(End("e0", 4, None, True, False, Outcome.SUCCESS))
for key in keys:
    labels.discard_last() if key == "d" else labels.undo()
    while labels.shown not in ("discarded", "kept"):
        assert labels.shown.endswith("not on disk yet")
        time.sleep(0.001)
assert link.flush(10)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.system
@pytest.mark.parametrize(("keys", "discarded"), [("du", False), ("dud", True)])
def test_what_was_shown_when_the_actor_was_killed_holds(tmp_path, keys, discarded):
    inbox, port, folder = Inbox(), free_port(), tmp_path / "s"
    paths = os.pathsep.join(path for path in sys.path if path)
    with serving(port, on_record=inbox):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, str(folder), str(port), keys],
            timeout=30,
            check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert killed.returncode == -signal.SIGKILL
        assert not [record for record in inbox.records if isinstance(record, Amend)], "it can be undone until then"
        for _ in range(2):  # the second actor finds nothing to do
            with linked(port, spools=lambda run: Spool(folder, LIMITS)) as link:
                assert link.flush(10)
    amends = [record for record in inbox.records if isinstance(record, Amend)]
    assert amends == [Amend("e0", discard=True)] * discarded
    assert not folder.exists()


def test_the_screen_shows_a_discard_as_such_once_it_is_on_disk():
    labels, notes = EpisodeLabels([].append), Notes()
    labels.notes = notes
    labels.ended(End("a", 3, None, True, False, Outcome.SUCCESS))
    assert labels.shown == "success"
    for act, word in ((labels.discard_last, "discarded"), (labels.undo, "kept"), (labels.discard_last, "discarded")):
        act()
        assert labels.shown == f"{word}, not on disk yet"
        notes.discard_noted = True
        assert labels.shown == word
    labels.ended(End("b", 3, None, True, False, Outcome.FAILURE))
    assert (labels.shown, notes.taken) == ("failure", ["a", "", "a", ""])


def test_a_spool_whose_session_ended_with_a_note_is_kept_and_a_disk_that_takes_none_is_tried_again(tmp_path, caplog):
    """The learner has all of it, and the session ended by an error before the discard was final."""
    spool = Spool(tmp_path / "s", LIMITS)
    (tmp_path / "s" / "discard.json").mkdir()
    for _ in range(3):
        spool.note_discard("a")
    assert (spool.noted, caplog.text.count("discard.json cannot be written")) == ("", 1)
    (tmp_path / "s" / "discard.json").rmdir()
    spool.note_discard("a")
    session = spool.session
    spool.close()
    again = Spool(tmp_path / "s", LIMITS)
    assert (again.session, again.next, again.noted) == (session, 1, "")
    again.acknowledge(again.next)
    again.close()
    assert not (tmp_path / "s").exists()
