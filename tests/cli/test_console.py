"""The operator of a process: what it needs, and the alarm that it is given."""

from __future__ import annotations

import dataclasses
import signal
import types

import pytest
from actor_helpers import make_config
from errors import naming
from operator_desk import Pedal

from serl_chunk import signals
from serl_chunk.cli import console
from serl_chunk.cli.console import console_of
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.config.operator import DeviceConfig, OperatorConfig
from serl_chunk.console.bindings import ActorState
from serl_chunk.types import ConfigError

PAGE = types.SimpleNamespace(begin=lambda *shown, **options: None)


def test_leaders_are_driven_under_an_operator_alone():
    config = dataclasses.replace(
        make_config(), actor=ActorConfig(intervention="leader"), device=DeviceConfig(align="drive")
    )
    console = console_of(config, "a", amend=lambda record: None, end=lambda: None)
    with pytest.raises(ConfigError, match=naming("device.align", "operator", "terminal", "near")), console:
        pass  # standard output is no terminal


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
        operated = OperatorConfig(pedal="foot" if pedal else "", gestures=gestures)
        robot = dataclasses.replace(make_config().robot, is_real=True)
        config, shown = dataclasses.replace(make_config(), robot=robot, operator=operated), PAGE if page else None
        with console_of(config, "a", amend=lambda record: None, end=lambda: None, page=shown) as operator:
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
