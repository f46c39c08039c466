"""Every key in every state: what it leaves in the records, and what the robot's server gets."""

from __future__ import annotations

import contextlib

import pytest
from operator_desk import Desk, Press, human_from
from ptys import Pty

from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.types import End, Outcome

KEYS = {  # action -> what is typed for it; two keys are typed one after the other
    Action.HOLD: (b" ",),
    Action.GO: (b"\r",),
    Action.STOP: (b"x", b"\x1b"),
    Action.CLEAR: (b"c\r",),
    Action.SUCCESS: (b"s", b"1"),
    Action.FAILURE: (b"f", b"0"),
    Action.DISCARD: (b"\x7f",),
    Action.UNDO: (b"u",),
    Action.RESET: (b"r",),
    Action.RESET_NEW: (b"g",),
    Action.PARK: (b"py",),
    Action.END: (b"\x03",),
    None: (b"y", b"\x1a", b"\x13", b"\x11", b"\x1b[A", b"h", b"\t"),  # no action, and Ctrl-Z, Ctrl-S, Ctrl-Q
}
PAGE = {action: (action,) for action in KEYS if action is not None} | {
    Action.CLEAR: (Action.CLEAR, Action.GO), Action.PARK: (Action.PARK, Action.YES),
}  # fmt: skip
PEDALS = {  # action -> pedal, and whether it is let go at once
    Action.HOLD: ("left", True), Action.STOP: ("left", False), Action.GO: ("middle", True),
    Action.SUCCESS: ("right", True), Action.FAILURE: ("right", False),
}  # fmt: skip
ACTING = {
    Action.HOLD: {"held"}, Action.STOP: {"stop", "truncated"}, Action.END: {"stop", "truncated", "ends"},
    Action.SUCCESS: {"success"}, Action.FAILURE: {"failure"}, Action.DISCARD: {"truncated", "discard"},
}  # fmt: skip
# What follows; of all other actions what would have followed anyway.
EXPECTED: dict[ActorState, dict[Action, set[str]]] = {
    ActorState.POLICY: ACTING,
    ActorState.HUMAN: ACTING,
    ActorState.LEARNER_LOST: ACTING,
    ActorState.HOLD: {
        Action.GO: {"countdown"}, Action.STOP: {"stop", "truncated"}, Action.END: {"stop", "truncated", "ends"},
        Action.SUCCESS: {"success", "held"}, Action.FAILURE: {"failure", "held"},
        Action.DISCARD: {"truncated", "discard", "held"}, Action.RESET: {"truncated", "countdown", "reset"},
        Action.RESET_NEW: {"truncated", "countdown", "reset", "new_object"},
        Action.PARK: {"truncated", "countdown", "park"},
    },
    ActorState.WAITING: {
        Action.HOLD: {"held"}, Action.GO: {"countdown"}, Action.STOP: {"stop"}, Action.END: {"stop", "ends"},
        Action.RESET: {"countdown", "reset"}, Action.RESET_NEW: {"countdown", "reset", "new_object"},
    },
    ActorState.RESET: {Action.HOLD: {"held", "hold"}, Action.STOP: {"stop"}, Action.END: {"stop", "ends"}},
    ActorState.STOPPED: {
        Action.STOP: {"stop"}, Action.END: {"stop", "ends"}, Action.CLEAR: {"clear", "held"},
        Action.DISCARD: {"discard"},
    },
}  # fmt: skip


def expected(word: ActorState, action: Action | None) -> set[str]:
    return EXPECTED[word].get(action, {"held"} if word is ActorState.HOLD else set())


@pytest.fixture(scope="module")
def pty(terminal):
    with contextlib.closing(Pty()) as pty:
        pty.look()
        yield pty


def facts(pty: Pty, word: ActorState, *presses: Press) -> set[str]:
    """Bring an actor into a state, press, and return what followed within 2.5 s."""
    human = human_from(2) if word is ActorState.HUMAN else None
    desk = Desk(pty, ready="first" if word is ActorState.WAITING else "", intervention=human)
    desk.operator.actor.learner_lost = lambda: word is ActorState.LEARNER_LOST
    requests = resets = shown = 0

    def reached() -> bool:
        nonlocal requests, resets, shown
        inside = word not in (ActorState.WAITING, ActorState.RESET, ActorState.STOPPED)
        there = (
            desk.word is word
            and (not inside or desk.env.tick >= 5)
            and (word is not ActorState.RESET or desk.robot.moving)
        )
        if there:
            requests, resets, shown = len(desk.robot.requests), len(desk.env.options), len(desk.states)
        return there

    leads = {ActorState.HOLD: b" ", ActorState.STOPPED: b"x"}
    if word in leads:
        desk.script.append(Press(desk.at(ActorState.POLICY, 3), leads[word]))
    desk.script += [Press(reached, presses[0].what), *presses[1:]]
    try:
        desk.runner.run_episode(0)
        if word in leads:
            desk.runner.run_episode(1)
    finally:
        desk.close()
    assert not desk.script, f"{word} was not reached"
    desk.operator.send_pending()
    found = set(desk.robot.requests[requests:])
    ends = [record for record in desk.sink.records if isinstance(record, End)]
    if word is not ActorState.STOPPED and ends and ends[0].outcome_by == "operator":
        found.add({Outcome.SUCCESS: "success", Outcome.FAILURE: "failure"}.get(ends[0].outcome, "truncated"))
    if any(state.countdown is not None for state in desk.states[shown:]):
        found.add("countdown")
    if len(desk.env.options) > resets:
        found |= {"reset", "new_object"} if desk.env.options[-1] else {"reset"}
    marks = {"held": desk.word is ActorState.HOLD, "discard": bool(desk.amends), "ends": desk.ended}
    return found | {name for name, true in marks.items() if true} | ({"quits"} if desk.operator.quits else set())


@pytest.mark.parametrize("word", ActorState)
def test_keys_of_the_terminal(pty, word):
    wanted = {key: expected(word, action) for action, keys in KEYS.items() for key in keys}
    assert {key: facts(pty, word, Press(0, key)) for key in wanted} == wanted


@pytest.mark.parametrize("word", ActorState)
def test_requests_of_a_page(pty, word):
    found = {action: facts(pty, word, *(Press(0, each) for each in requests)) for action, requests in PAGE.items()}
    assert found == {action: expected(word, action) for action in PAGE}


@pytest.mark.parametrize("word", ActorState)
def test_pedals(pty, word):
    for action, (pedal, short) in PEDALS.items():
        found = facts(pty, word, Press(0, (pedal, True)), *[Press(0.1, (pedal, False))] * short)
        held_first = {"hold"} if (word, action) == (ActorState.RESET, Action.STOP) else set()
        assert found == expected(word, action) | held_first, action


@pytest.mark.parametrize(
    ("what", "sent"),
    [((b"\r",), ["go"]), ((Action.GO,), ["go"]), ((("middle", True), ("middle", False)), []), ((b"s",), [])],
)
def test_only_a_key_lets_a_robot_go_on_that_its_server_holds(pty, what, sent):
    """A pedal goes on after a hold of the console alone."""
    desk = Desk(pty, length=1000)

    def held() -> bool:
        if desk.at(ActorState.POLICY, 5)():
            desk.robot.hold()
        return desk.robot.held and desk.word is ActorState.HOLD

    desk.script = [Press(held, what[0]), *(Press(0.1, each) for each in what[1:])]
    try:
        desk.runner.run_episode(0)
    finally:
        desk.close()
    assert (desk.robot.requests, desk.robot.held) == (sent, not sent)
    assert desk.script == []
