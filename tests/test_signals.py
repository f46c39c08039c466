"""Signals: the first one stops, a second one interrupts, a closed terminal counts once."""

from __future__ import annotations

import queue
import signal
import threading

import pytest

from serl_chunk import signals
from serl_chunk.signals import SIGNALS, holding_at_hangup, stop_on_signals


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """Puts the handlers of the tests' own Ctrl-C back. They may run under nohup."""
    before = {n: signal.getsignal(n) for n in SIGNALS}
    monkeypatch.setattr(signals, "_first", None)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_stops_and_a_second_one_interrupts_even_while_a_line_is_logged(monkeypatch):
    stop, logging, logged = threading.Event(), threading.Lock(), queue.SimpleQueue()

    def log(text: str) -> None:
        with logging:
            logged.put(text)

    monkeypatch.setattr(signals.logger, "info", log)
    stop_on_signals(stop, "ending")
    with logging:  # the handler interrupts a thread that holds this lock: waiting for it would be for ever
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
    assert logged.get(timeout=10) == "SIGTERM: ending (once more: at once)"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_interrupts_what_does_not_listen_yet():
    stop = threading.Event()
    stop_on_signals(stop, "ending", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert not stop.is_set()


def test_a_drain_ends_what_has_recorded_nothing_yet_as_sigterm_does():
    stop, drain, recorded, before = threading.Event(), threading.Event(), [], signal.getsignal(signals.DRAIN)
    stop_on_signals(stop, "ending", lambda: bool(recorded))
    signals.drain_on_signal(stop, drain, "draining", lambda: bool(recorded))
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signals.DRAIN)
        assert not stop.is_set()
        recorded.append(1)
        for _ in range(2):  # a second one changes nothing
            signal.raise_signal(signals.DRAIN)
            assert stop.is_set()
            assert drain.is_set()
    finally:
        signal.signal(signals.DRAIN, before)


def test_a_closed_terminal_stops_and_adds_nothing_to_a_signal_before_it():
    """Service managers send SIGTERM and SIGHUP together, a shell sends SIGHUP after the kernel has."""
    for first in SIGNALS:
        stop = threading.Event()
        stop_on_signals(stop, "ending")
        signal.raise_signal(first)
        assert stop.is_set()
        signal.raise_signal(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_a_closed_terminal_that_was_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_on_signals(threading.Event(), "ending")
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_closed_terminal_holds_where_other_inputs_go_on_and_other_signals_stop():
    stop, held = threading.Event(), []
    stop_on_signals(stop, "ending")
    with holding_at_hangup(lambda: held.append(1)):
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        assert not stop.is_set()
        assert len(held) == 2
        assert signals.exit_status(0) == 0
    signal.raise_signal(signal.SIGHUP)
    assert stop.is_set()
    assert len(held) == 2
