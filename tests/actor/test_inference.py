"""The inference thread: newest request, newest parameters, errors."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import traceback
import types

import numpy as np
import pytest
from actor_helpers import SPEC, NoisyAgent, identity, identity_normaliser, make_policy
from errors import naming
from hypothesis import given
from hypothesis import strategies as st
from transport_tools import eventually

from serl_chunk.actor.chunk_queue import ChunkQueue
from serl_chunk.actor.clock import Clock
from serl_chunk.actor.inference import InferenceThread
from serl_chunk.actor.policy import Decision, LocalPolicy, PolicyError, Request, blank_request
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.types import CameraSpec, ConfigError, PolicyOrigin, Snapshot

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


NEWER = types.SimpleNamespace(latest=lambda: Snapshot(9, {"bias": np.float32(9)}))


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
    policy = make_policy(agent, source=NEWER)
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

    inference = make(make_policy(Broken(4), source=NEWER))

    def decide_for_long():
        for _ in range(1000):
            inference.submit(request(0))
            inference.wait(CLOCK.now() + 0.01)

    with pytest.raises(ConfigError, match="another shape") as caught:
        decide_for_long()
    assert where in [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(ConfigError):
        inference.poll()


def chunk(tick: int, epoch: int = 0, horizon: int = 6) -> Decision:
    """Action i of the chunk decided on tick t is 100 t + i."""
    return Decision((100 * tick + np.arange(horizon, dtype=np.float32))[:, None], {}, tick, tick=tick, epoch=epoch)


@given(execute=st.integers(1, 6), events=st.lists(st.sampled_from(["pass", "plan", "join", "flush"]), max_size=60))
def test_random_histories(execute, events):
    queue = ChunkQueue(execute, lambda action: action)
    planned: Decision | None = None
    current: Decision | None = None
    tick = 0
    for event in events:
        if event == "plan":
            planned = chunk(tick, queue.epoch)
        elif event == "flush":
            queue.flush()
            current = None
        elif event == "join" and planned is not None:
            fits = planned.epoch == queue.epoch and tick - planned.tick < execute
            newer = current is None or planned.tick > current.tick
            expected = tick - planned.tick if fits and newer else None
            assert queue.join(planned, tick) == expected
            current = planned if expected is not None else current
        index = tick - current.tick if current else execute
        left = max(0, execute - index) if current else 0
        assert queue.remaining(tick) == left
        queued = queue.pop(tick)
        assert (queued and queued.command[0]) == (100 * current.tick + index if current and left else None)
        tick += event == "pass"


OBSERVATION = {"state": np.array([0.25, -0.5, 4], np.float32), "images/front": np.zeros((8, 10, 3), np.uint8)}


class EchoAgent(NoisyAgent):
    """Gives a fixed chunk and keeps what it was asked."""

    def __init__(self, chunk):
        super().__init__(len(chunk))
        self.chunk = np.asarray(chunk, np.float32)

    def sample(self, params, observation, key, *, explore, committed=None, alone=False):
        self.asked = observation, committed
        return self.chunk, {"q": np.float32(0.5)}


def policy_of(agent, normaliser=None, *cameras):
    preprocess = Preprocess(normaliser or identity_normaliser(agent.horizon), tuple(map(SPEC.camera, cameras)))
    policy = LocalPolicy(agent, preprocess, SPEC)
    policy.swap(Snapshot(1, {"bias": np.float32(0)}))
    return policy


def relative_normaliser(horizon):
    return dataclasses.replace(
        identity_normaliser(horizon),
        mode="relative",
        state_mean=np.array([0.25, 0, 0], np.float32),
        state_std=np.array([0.5, 1, 2], np.float32),
        scale=np.full((horizon, 2), 0.1, np.float32),
        joint=np.array([0, 1], np.int32),
    )


def test_model_space_in_and_robot_units_out():
    agent = EchoAgent([[1, 0], [2, -1]])
    decision = policy_of(agent, relative_normaliser(2), "front").decide(Request(OBSERVATION, explore=False))
    observation, prefix = agent.asked
    np.testing.assert_allclose(observation["state"], [0, -0.5, 2])
    assert observation["images/front"] is OBSERVATION["images/front"]
    assert prefix is None
    np.testing.assert_allclose(decision.actions, [[0.35, -0.5], [0.45, -0.6]], rtol=1e-6)
    assert decision.actions.dtype == np.float32
    np.testing.assert_array_equal(decision.record["chunk"], agent.chunk)
    assert (decision.record["q"], decision.version) == (np.float32(0.5), 1)


def test_frames_enter_with_the_size_that_the_agent_reads():
    agent = EchoAgent([[1, 0]])
    preprocess = Preprocess(identity_normaliser(1), (CameraSpec("front", 5, 4),), recorded=(SPEC.camera("front"),))
    policy = LocalPolicy(agent, preprocess, SPEC)
    with pytest.raises(PolicyError, match=naming("snapshot")):
        policy.decide(Request(OBSERVATION))
    policy.swap(Snapshot(1, {"bias": np.float32(0)}))
    policy.decide(Request(OBSERVATION))
    assert policy.image_keys == ("front",)
    assert agent.asked[0]["images/front"].shape == (5, 4, 3)
    blank = blank_request(SPEC, policy.image_keys, explore=False, task="lift")
    assert blank.observation["images/front"].shape == (8, 10, 3)
    assert blank.task == "lift"  # inference is compiled for the length of its prompt


def test_the_prefix_enters_in_model_space_and_leaves_exactly():
    agent = EchoAgent(np.zeros((3, 2)))
    prefix = np.array([[0.35, -0.5], [0.3, -0.45]], np.float32)
    decision = policy_of(agent, relative_normaliser(3)).decide(Request(OBSERVATION, explore=False, prefix=prefix))
    actions, mask = agent.asked[1]
    np.testing.assert_allclose(actions, [[1, 0], [0.5, 0.5], [0, 0]], atol=1e-6)
    np.testing.assert_array_equal(mask, np.array([1, 1, 0], np.float32))
    np.testing.assert_array_equal(decision.actions[:2], prefix)
    np.testing.assert_allclose(decision.actions[2], [0.25, -0.5])


def test_limits_clip_and_count():
    agent = EchoAgent([[1.0, -1.0], [1.5, 0], [-3, 2]])
    policy = policy_of(agent)
    decision = policy.decide(Request(OBSERVATION, explore=True))
    np.testing.assert_array_equal(decision.actions, [[1, -1], [1, 0], [-1, 1]])
    assert decision.clipped == 3


def test_a_snapshot_for_another_normaliser_is_refused():
    """Its chunks would be decoded to other commands."""
    ours, theirs = identity_normaliser(2).digest(), relative_normaliser(2).digest()
    agent = EchoAgent(np.zeros((2, 2)))
    policy = policy_of(agent)
    with pytest.raises(PolicyError, match=naming("normaliser", ours, theirs, 5)):
        policy.swap(Snapshot(5, {"bias": np.float32(5)}, origin=PolicyOrigin("run", theirs)))
    assert (policy.version, agent.loaded) == (1, [0])
    policy.swap(Snapshot(5, {"bias": np.float32(5)}, origin=PolicyOrigin("run", ours)))
    assert policy.version == 5


def test_only_snapshots_of_the_policys_own_run_are_taken():
    ours, theirs = identity_normaliser(2).digest(), relative_normaliser(2).digest()
    found: list[Snapshot | None] = [None]
    agent, source = EchoAgent(np.zeros((2, 2))), types.SimpleNamespace(latest=lambda: found[0])
    policy = LocalPolicy(agent, identity(2), SPEC, source=source, run="b")
    assert not policy.refresh()
    for run, digest, taken in (("a", ours, False), ("b", theirs, False), ("", ours, False), ("b", ours, True)):
        version = 1 if taken else 9
        found[0] = Snapshot(version, {"bias": np.float32(version)}, origin=PolicyOrigin(run, digest))
        assert policy.refresh() is taken  # else of another run, or it needs another normaliser
    found[0] = None  # the learner was replaced meanwhile
    assert policy.refresh()
    assert (policy.version, agent.loaded) == (1, [1])
