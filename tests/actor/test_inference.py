"""The inference thread: newest request, newest parameters, errors."""

from __future__ import annotations

import contextlib
import threading
import traceback

import numpy as np
import pytest
from actor_helpers import NoisyAgent, make_policy
from transport_tools import eventually

from serl_chunk.actor.clock import Clock
from serl_chunk.actor.inference import InferenceThread
from serl_chunk.actor.policy import Request
from serl_chunk.types import ConfigError, Snapshot

CLOCK = Clock()


def request(tick):
    return Request({"state": np.array([0, 0, tick], np.float32)}, tick, 0, True, np.zeros((0, 2), np.float32))


def decided(inference, tick=0, seconds=10.0):
    """One decision."""
    inference.submit(request(tick))
    result = inference.wait(CLOCK.now() + seconds)
    assert result is not None, "none in time"
    return result


@pytest.fixture
def make():
    """Makes the thread of a policy."""
    with contextlib.ExitStack() as stack:
        yield lambda policy: stack.enter_context(contextlib.closing(InferenceThread(policy, CLOCK)))


class SlowAgent(NoisyAgent):
    """Waits for `go` before it decides, and tells the parameters."""

    def __init__(self):
        super().__init__(4)
        self.begun, self.go = threading.Event(), threading.Event()

    def sample(self, params, observation, key, **more):
        self.begun.set()
        assert self.go.wait(10)
        chunk, record = super().sample(params, observation, key, **more)
        return chunk, record | {"params": np.float32(params)}


class Source:
    """Has a snapshot of `version`; counts the looks at it."""

    def __init__(self, version):
        self.version, self.looks = version, 0

    def latest(self):
        self.looks += 1
        return Snapshot(self.version, {"bias": np.float32(self.version)})


def test_only_the_newest_request_waits_and_a_flush_drops_what_was_requested_before_it(make):
    agent = SlowAgent()
    inference = make(make_policy(agent))
    assert inference.wait(CLOCK.now() + 0.001) is None
    inference.submit(request(1))
    assert agent.begun.wait(10)
    assert inference.poll() is None
    inference.submit(request(2))
    inference.flush()  # request 1 is under way, request 2 waits
    inference.submit(request(3))
    agent.go.set()
    assert decided(inference, 4).tick in (3, 4)
    eventually(lambda: 4 in agent.prefixes)
    inference.flush()
    assert inference.wait(CLOCK.now() + 0.1) is None
    assert 2 not in agent.prefixes


def test_newer_parameters_are_loaded_after_a_decision_and_never_go_back(make):
    agent, source = NoisyAgent(4), Source(7)
    policy = make_policy(agent, source=source)
    inference, used = make(policy), []
    for looks, (version, newest) in enumerate([(7, 7), (7, 7), (5, 7), (9, 9)], 1):
        source.version = version
        used.append(decided(inference).version)
        eventually(lambda n=looks, v=newest: source.looks == n and policy.version == v)
    assert (used, policy.version, agent.loaded) == ([3, 7, 7, 7], 9, [3, 7, 9])  # each once


def test_decisions_go_on_while_newer_parameters_are_loaded(make):
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
    inference = make(policy)
    assert decided(inference).version == 3
    assert agent.begun.wait(10)
    assert decided(inference, 5, seconds=3).version == 3
    agent.go.set()
    eventually(lambda: policy.version == 9)
    assert decided(inference).version == 9


@pytest.mark.parametrize("where", ["sample", "load_params"])
def test_an_error_reaches_the_control_thread_with_its_traceback(make, where):
    class Broken(NoisyAgent):
        def load_params(self, flat):
            if where == "load_params" and flat["bias"] == 9:
                raise ConfigError("parameter a/w has another shape")
            return super().load_params(flat)

        def sample(self, *args, **more):
            if where == "sample":
                raise ConfigError("another shape in the network")
            return super().sample(*args, **more)

    inference = make(make_policy(Broken(4), source=Source(9)))

    def decide_for_long():
        for _ in range(1000):
            inference.submit(request(0))
            inference.wait(CLOCK.now() + 0.01)

    with pytest.raises(ConfigError, match="another shape") as caught:
        decide_for_long()
    assert where in [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(ConfigError):
        inference.poll()
