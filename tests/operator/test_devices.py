"""Keys of a keyboard or gamepad that moves the robot, as keys of the operator."""

from __future__ import annotations

import contextlib
import dataclasses

import evdev_stand_in
import numpy as np
import pytest
from actor_helpers import make_config
from errors import naming
from evdev_stand_in import AbsInfo
from operator_desk import PedalEvent
from robot_served import wait

from serl_chunk.cli.console import console_of
from serl_chunk.config.experiment import ActorConfig, ExperimentConfig
from serl_chunk.config.operator import DeviceConfig, OperatorConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.console.bindings import Action, ActorState, bind_keys
from serl_chunk.devices.operator import make_human
from serl_chunk.operator.devices import OperatorDevices
from serl_chunk.robots.registry import make_env
from serl_chunk.types import ConfigError
from serl_chunk_robot.devices.evdev_device import BUTTONS, MOVES

STICK = dict.fromkeys(("ABS_X", "ABS_Y", "ABS_RX", "ABS_RY"), AbsInfo(0, -32768, 32767))


class Keyboard:
    def __init__(self) -> None:
        self.events: list[PedalEvent] = []

    def press(self, name: str, stamp: float, *, lets_go: bool = True) -> None:
        self.events += [PedalEvent(name, True, stamp), PedalEvent(name, False, stamp)][: 1 + lets_go]

    def keys(self):
        events, self.events = self.events, []
        return events


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
        config, robot=dataclasses.replace(config.robot, is_real=True), actor=ActorConfig(intervention=kind),
        operator=OperatorConfig(keys=keys), device=DeviceConfig(**device),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "axes", "key", "keys"),
    [("keyboard", None, "KEY_SPACE", ()), ("gamepad", STICK, "BTN_SELECT", ("hold=space select",))],
)
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
