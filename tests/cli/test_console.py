"""The operator of a process: what it needs, and the alarm that it is given."""

from __future__ import annotations

import dataclasses
import signal
import types

import pytest
from actor_helpers import make_config
from errors import naming

from serl_chunk import signals
from serl_chunk.attention.alarm import Alarm
from serl_chunk.cli import console
from serl_chunk.cli.console import console_of
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.config.operator import DeviceConfig, OperatorConfig
from serl_chunk.console.bindings import ActorState
from serl_chunk.types import ConfigError

PAGE = types.SimpleNamespace(begin=lambda *shown, **options: None)


class Pedal:
    name = "pedal"
    alive = True

    def read(self):
        return self

    def keys(self):
        return []

    def close(self): ...


def served(operator: OperatorConfig, *, real: bool = True):
    config = make_config()
    return dataclasses.replace(config, robot=dataclasses.replace(config.robot, is_real=real), operator=operator)


def opened_on(config, **more):
    return console_of(config, "a", amend=lambda record: None, end=lambda: None, **more)


def opened(file, *, real: bool, **more):
    return opened_on(served(OperatorConfig(attention=str(file)), real=real), **more)


def test_an_alarm_is_for_an_operator_of_a_real_robot(tmp_path):
    file = tmp_path / "alarm.json"
    Alarm(0.5, 0.0, 1.0, 0.05).save(file)
    with pytest.raises(ConfigError, match=naming(file, "terminal")) as caught, opened(file, real=True):
        pass  # standard output is no terminal
    assert caught.value.parameter == "operator.attention"
    with opened(file, real=False) as operator:
        assert operator is None
    with opened(file, real=True, page=PAGE) as operator:
        operator.decided({"q": 0.8})
        operator.decided({"q": 0.2})
        assert not operator.holding


def test_leaders_are_driven_under_an_operator_alone():
    config = dataclasses.replace(
        make_config(), actor=ActorConfig(intervention="leader"), device=DeviceConfig(align="drive")
    )
    console = console_of(config, "a", amend=lambda record: None, end=lambda: None)
    with pytest.raises(ConfigError, match=naming("device.align", "operator", "terminal", "near")), console:
        pass  # standard output is no terminal


def test_a_file_that_is_no_alarm_is_refused(tmp_path):
    refused = opened(tmp_path / "none", real=True, page=PAGE)
    with pytest.raises(ConfigError, match=naming(tmp_path / "none", "no such file")) as caught, refused:
        pass
    assert caught.value.parameter == "operator.attention"


@pytest.mark.parametrize(("page", "pedal", "gestures", "goes_on"), [
    (True, False, (), True), (False, True, (), True), (False, True, ("go=mouse_long",), False),
])  # fmt: skip
def test_a_closed_terminal_holds_where_a_page_or_a_pedal_can_go_on(monkeypatch, page, pedal, gestures, goes_on):
    ended, before = [], signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monkeypatch.setattr(signals, "_interrupt", lambda number, frame: ended.append(number))
    monkeypatch.setattr(console, "open_pedal", lambda path: Pedal())
    try:
        signals._install(signals._interrupt)
        config = served(OperatorConfig(pedal="foot" if pedal else "", gestures=gestures))
        with console_of(
            config, "a", amend=lambda record: None, end=lambda: None, page=PAGE if page else None
        ) as operator:
            signal.raise_signal(signal.SIGHUP)
            operator.poll(ActorState.POLICY)
            assert operator.holding == goes_on
        assert ended == ([] if goes_on else [signal.SIGHUP])
        signal.raise_signal(signal.SIGHUP)
        assert ended[-1:] == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
