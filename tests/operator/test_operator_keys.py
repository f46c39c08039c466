"""Every key in every state: what it leaves in the records, and what the robot's server gets."""

from __future__ import annotations

import contextlib
import dataclasses

import evdev_stand_in
import numpy as np
import pytest
from actor_helpers import make_config
from errors import naming
from evdev_stand_in import AbsInfo
from operator_desk import Desk, Pedal, PedalEvent, Press, human_from
from ptys import Pty
from robot_served import wait

from serl_chunk.cli.console import console_of
from serl_chunk.config.experiment import ActorConfig, ExperimentConfig
from serl_chunk.config.operator import DeviceConfig, OperatorConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.console.bindings import Action, ActorState, bind_keys
from serl_chunk.devices.operator import make_human
from serl_chunk.operator.devices import OperatorDevices
from serl_chunk.robots.registry import make_env
from serl_chunk.types import ConfigError, End, Outcome
from serl_chunk_robot.devices.evdev_device import BUTTONS, MOVES

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
    Action.CLEAR: (Action.CLEAR, Action.GO),
    Action.PARK: (Action.PARK, Action.YES),
}
PEDALS = {  # action -> pedal, and whether it is let go at once
    Action.HOLD: ("left", True),
    Action.STOP: ("left", False),
    Action.GO: ("middle", True),
    Action.SUCCESS: ("right", True),
    Action.FAILURE: ("right", False),
}
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


@pytest.mark.parametrize(("what", "sent"), [
    ((b"\r",), ["go"]), ((Action.GO,), ["go"]), ((("middle", True), ("middle", False)), []), ((b"s",), []),
])  # fmt: skip
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


STICK = dict.fromkeys(("ABS_X", "ABS_Y", "ABS_RX", "ABS_RY"), AbsInfo(0, -32768, 32767))


class Keyboard(Pedal):
    def press(self, name: str, stamp: float, *, lets_go: bool = True) -> None:
        self.events += [PedalEvent(name, True, stamp), PedalEvent(name, False, stamp)][: 1 + lets_go]


@pytest.fixture
def typed():
    keyboard, devices = Keyboard(), OperatorDevices()
    devices.watch(keyboard)
    return keyboard, devices


def actions(devices: OperatorDevices) -> list[Action]:
    devices.look()
    return list(devices.actions())


def test_keys_of_a_device_are_those_of_a_terminal(typed):
    keyboard, devices = typed
    for k, (name, action) in enumerate(bind_keys().items()):
        if action in (Action.CLEAR, Action.QUIT, Action.END):
            continue
        keyboard.press(name, k)
        assert actions(devices) == [action]
    keyboard.press("c", 100.0)
    assert actions(devices) == []
    assert "clear the stop" in devices.question(100.0)
    keyboard.press("enter", 101.0)
    assert actions(devices) == [Action.CLEAR]
    for stamp in (110.0, 111.0):
        keyboard.press("q", stamp)
    assert actions(devices) == [Action.QUIT]


def test_repeats_count_once_and_stops_come_first(typed):
    keyboard, devices = typed
    for stamp in (1.0, 1.2, 1.4):
        keyboard.press("s", stamp)
    keyboard.press("x", 1.5)
    assert actions(devices) == [Action.STOP, Action.SUCCESS]
    keyboard.press("x", 2.0)
    keyboard.press("enter", 2.1)
    devices.look()
    devices.empty()
    assert list(devices.actions()) == [Action.STOP]


def test_a_modifier_leaves_ctrl_c_and_stops(typed):
    keyboard, devices = typed
    for k, name in enumerate(("s", "enter", "space", "x", "c")):
        keyboard.press("leftalt", k, lets_go=False)
        keyboard.press(name, k)
    assert actions(devices) == [Action.HOLD, Action.STOP]
    keyboard.events.append(PedalEvent("leftalt", False, 9.0))
    keyboard.press("rightctrl", 10.0, lets_go=False)
    keyboard.press("c", 10.0)
    assert actions(devices) == [Action.END]


def test_keys_typed_before_an_operator_was_there_do_nothing_but_for_stops():
    keyboard, devices = Keyboard(), OperatorDevices()
    for name in ("enter", "space", "s"):
        keyboard.press(name, 1.0)
    devices.watch(keyboard)
    assert actions(devices) == [Action.HOLD]


def test_no_key_of_the_operator_moves_by_default():
    assert {*MOVES, *BUTTONS}.isdisjoint(bind_keys())


def real(kind: str, keys: tuple[str, ...], **device) -> ExperimentConfig:
    config = make_config()
    return dataclasses.replace(
        config,
        robot=dataclasses.replace(config.robot, is_real=True),
        actor=ActorConfig(intervention=kind),
        operator=OperatorConfig(keys=keys),
        device=DeviceConfig(**device),
    )


@pytest.mark.parametrize(("kind", "axes", "key", "keys"), [
    ("keyboard", None, "KEY_SPACE", ()), ("gamepad", STICK, "BTN_SELECT", ("hold=space select",)),
])  # fmt: skip
def test_a_device_without_a_terminal_holds_the_robot_and_the_key_moves_nothing(tmp_path, kind, axes, key, keys):
    env = make_env(FakeAlohaConfig())
    with evdev_stand_in.installed(tmp_path) as inputs, contextlib.ExitStack() as opened:
        user = inputs.device(f"usb-{kind}-event-x", axes)
        config = real(kind, keys, paths=(kind,))
        human = make_human(dataclasses.replace(config, robot=FakeAlohaConfig()), env)
        opened.callback(human.close)
        operator = opened.enter_context(console_of(config, "a", amend=lambda record: None, end=lambda: None))
        operator.attach(env, human)
        operator.poll(ActorState.POLICY)
        assert not operator.holding
        user.press(key)

        def holds() -> bool:
            operator.poll(ActorState.POLICY)
            return operator.holding

        wait(holds)
        reading = human._arms[0].device.read()
        assert not any(reading.buttons)
        assert not np.any(reading.twist)


@pytest.mark.parametrize(("kind", "keys", "device", "key"), [
    ("keyboard", "success=s i", {}, "'i'"), ("keyboard", "park=v", {}, "'v'"),
    ("gamepad", "success=south", {}, "'south'"), ("gamepad", "hold=space tl", {"dead_man": 4}, "'tl'"),
    ("gamepad", "hold=space start", {"switch_button": 7}, "'start'"),
])  # fmt: skip
def test_a_key_that_moves_and_has_a_meaning_is_refused(kind, keys, device, key):
    config = real(kind, (keys,), paths=("/dev/input/by-id/mine",), **device)
    with pytest.raises(ConfigError, match=naming(key, keys.partition("=")[0], kind, "by-id/mine")) as error:
        console_of(config, "a", amend=lambda record: None, end=lambda: None).__enter__()
    assert error.value.parameter == "operator.keys"
