"""The inference thread: newest request, newest parameters, errors."""

from __future__ import annotations

import threading
import traceback

import numpy as np
import pytest
from actor_helpers import NoisyAgent, make_policy
from transport_tools import eventually

from serl_chunk.actor.clock import MonotonicClock
from serl_chunk.actor.inference import InferenceThread
from serl_chunk.actor.policy import Request
from serl_chunk.types import ConfigError, Snapshot

CLOCK = MonotonicClock()


def request(tick):
    return Request({"state": np.array([0, 0, tick], np.float32)}, tick, 0, True, np.zeros((0, 2), np.float32))


class SlowAgent(NoisyAgent):
    """Waits for `go` before it decides."""

    def __init__(self):
        super().__init__(4)
        self.begun, self.go = threading.Event(), threading.Event()

    def sample(self, params, observation, key, *, explore, committed=None, alone=False):
        self.begun.set()
        assert self.go.wait(10)
        return super().sample(params, observation, key, explore=explore, committed=committed)


def test_a_flush_drops_what_was_requested_before_it():
    agent = SlowAgent()
    inference = InferenceThread(make_policy(agent), CLOCK)
    inference.submit(request(1))
    assert agent.begun.wait(10)
    inference.submit(request(2))
    inference.flush()  # request 1 is under way, request 2 waits
    inference.submit(request(3))
    agent.go.set()
    result = inference.wait(CLOCK.now() + 10)
    assert result is not None
    assert result.tick == 3
    inference.submit(request(4))
    eventually(lambda: 4 in agent.prefixes)
    inference.flush()
    assert inference.wait(CLOCK.now() + 0.1) is None
    inference.close()
    assert 2 not in agent.prefixes


def test_waiting_ends_at_its_moment():
    inference = InferenceThread(make_policy(NoisyAgent(4)), CLOCK)
    assert inference.wait(CLOCK.now() + 0.001) is None
    inference.close()


class Source:
    """Has a snapshot of `version`; counts the looks at it."""

    def __init__(self, version):
        self.version, self.looks = version, 0

    def latest(self):
        self.looks += 1
        return Snapshot(self.version, {"bias": np.float32(self.version)})


def decided(inference):
    """One decision."""
    inference.submit(request(0))
    result = inference.wait(CLOCK.now() + 10)
    assert result is not None
    return result


def test_newer_parameters_are_loaded_after_a_decision_and_never_go_back():
    agent, source = NoisyAgent(4), Source(7)
    policy = make_policy(agent, source=source)
    inference = InferenceThread(policy, CLOCK)
    used = []
    for looks, (version, newest) in enumerate([(7, 7), (7, 7), (5, 7), (9, 9)], 1):
        source.version = version
        used.append(decided(inference).version)
        eventually(lambda n=looks, v=newest: source.looks == n and policy.version == v)
    inference.close()
    assert used == [3, 7, 7, 7]
    assert policy.version == 9
    assert agent.loaded == [3, 7, 9]  # each once


def test_decisions_go_on_while_newer_parameters_are_loaded():
    """Loading a hundred megabytes takes longer than a chunk lasts."""

    class SlowToLoad(NoisyAgent):
        begun, go = threading.Event(), threading.Event()

        def load_params(self, flat):
            if flat["bias"] == 9:
                self.begun.set()
                assert self.go.wait(20)
            return super().load_params(flat)

    agent = SlowToLoad(4)
    policy = make_policy(agent, source=Source(9))
    inference = InferenceThread(policy, CLOCK)
    assert decided(inference).version == 3
    assert agent.begun.wait(10)
    inference.submit(request(5))
    result = inference.wait(CLOCK.now() + 3)
    agent.go.set()
    assert result is not None, "the decision waited for the parameters"
    assert result.version == 3
    eventually(lambda: policy.version == 9)
    assert decided(inference).version == 9
    inference.close()


def test_a_decision_uses_one_set_of_parameters_whatever_is_loaded_meanwhile():
    class Telling(SlowAgent):
        def sample(self, params, observation, key, *, explore, committed=None, alone=False):
            chunk, record = super().sample(params, observation, key, explore=explore, committed=committed)
            return chunk, record | {"params": np.float32(params)}

    agent = Telling()
    policy = make_policy(agent)
    inference = InferenceThread(policy, CLOCK)
    inference.submit(request(1))
    assert agent.begun.wait(10)
    policy.swap(Snapshot(9, {"bias": np.float32(9)}))
    agent.go.set()
    result = inference.wait(CLOCK.now() + 10)
    inference.close()
    assert result is not None
    assert (result.version, result.record["params"]) == (3, 3)


def test_an_error_of_loading_reaches_the_control_thread():
    class Broken(NoisyAgent):
        def load_params(self, flat):
            if flat["bias"] == 9:
                raise ConfigError("parameter a/w has another shape")
            return super().load_params(flat)

    inference = InferenceThread(make_policy(Broken(4), source=Source(9)), CLOCK)

    def decide_for_long():
        for _ in range(1000):
            inference.submit(request(0))
            inference.wait(CLOCK.now() + 0.01)

    with pytest.raises(ConfigError, match="another shape"):
        decide_for_long()
    inference.close()


def test_an_error_reaches_the_control_thread_with_its_traceback():
    class Broken(NoisyAgent):
        def sample(self, params, observation, key, *, explore, committed=None, alone=False):
            raise ZeroDivisionError("in the network")

    inference = InferenceThread(make_policy(Broken(4)), CLOCK)
    inference.submit(request(0))
    with pytest.raises(ZeroDivisionError, match="in the network") as caught:
        inference.wait(CLOCK.now() + 10)
    assert "sample" in [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(ZeroDivisionError):
        inference.poll()
    inference.close()
