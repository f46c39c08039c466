"""The inference thread: newest request, newest parameters, errors."""

from __future__ import annotations

import threading
import traceback

import numpy as np
import pytest
from actor_helpers import NoisyAgent, make_policy

from serl_chunk.actor.clock import MonotonicClock
from serl_chunk.actor.inference import InferenceThread, Request
from serl_chunk.types import Snapshot

CLOCK = MonotonicClock()


def request(tick):
    return Request({"state": np.array([0, 0, tick], np.float32)}, tick, 0, True, np.zeros((0, 2), np.float32))


class SlowAgent(NoisyAgent):
    """Waits for `go` before it decides."""

    def __init__(self):
        super().__init__(4)
        self.begun, self.go = threading.Event(), threading.Event()

    def sample(self, params, observation, key, *, explore, prefix=None):
        self.begun.set()
        assert self.go.wait(10)
        return super().sample(params, observation, key, explore=explore, prefix=prefix)


def test_only_the_newest_request_waits():
    agent = SlowAgent()
    inference = InferenceThread(make_policy(agent), CLOCK)
    inference.submit(request(1))
    assert agent.begun.wait(10)
    assert inference.poll() is None
    inference.submit(request(2))
    inference.submit(request(3))
    agent.go.set()
    ticks = []
    while 3 not in ticks:
        result = inference.wait(CLOCK.now() + 10)
        assert result is not None
        ticks.append(result.request.tick)
        np.testing.assert_array_equal(result.decision.record["q"], ticks[-1])
    inference.close()
    assert set(agent.prefixes) == {1, 3}


def test_waiting_ends_at_its_moment():
    inference = InferenceThread(make_policy(NoisyAgent(4)), CLOCK)
    assert inference.wait(CLOCK.now() + 0.001) is None
    inference.close()


def test_newer_parameters_are_loaded_after_a_decision_and_never_go_back():
    class Source:
        versions = iter((7, 7, 5, 9))

        def latest(self):
            version = next(self.versions)
            return Snapshot(version, {"bias": np.float32(version)})

    agent = NoisyAgent(4)
    policy = make_policy(agent, source=Source())
    inference = InferenceThread(policy, CLOCK)
    used = []
    for _ in range(4):
        inference.submit(request(0))
        result = inference.wait(CLOCK.now() + 10)
        assert result is not None
        used.append(result.decision.version)
    inference.close()
    assert used == [3, 7, 7, 7]
    assert policy.version == 9
    assert agent.loaded == [3, 7, 9]  # each once


def test_an_error_reaches_the_control_thread_with_its_traceback():
    class Broken(NoisyAgent):
        def sample(self, params, observation, key, *, explore, prefix=None):
            raise ZeroDivisionError("in the network")

    inference = InferenceThread(make_policy(Broken(4)), CLOCK)
    inference.submit(request(0))
    with pytest.raises(ZeroDivisionError, match="in the network") as caught:
        inference.wait(CLOCK.now() + 10)
    assert "sample" in [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(ZeroDivisionError):
        inference.poll()
    inference.close()
