"""The acting policy: encoding, limits, keys."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from actor_helpers import SPEC, NoisyAgent, identity, identity_normaliser
from errors import naming

from serl_chunk.actor.policy import ChunkPolicy, PolicyError, Request, blank_request
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.data.prompts import ByteTokenizer, Prompts
from serl_chunk.types import CameraSpec, PolicyOrigin, Snapshot

OBSERVATION = {"state": np.array([0.25, -0.5, 4], np.float32), "images/front": np.zeros((8, 10, 3), np.uint8)}


class EchoAgent(NoisyAgent):
    """Gives a fixed chunk and keeps what it was asked."""

    def __init__(self, chunk):
        super().__init__(len(chunk))
        self.chunk = np.asarray(chunk, np.float32)

    def sample(self, params, observation, key, *, explore, committed=None, alone=False):
        self.asked = observation, committed
        return self.chunk, {"q": np.float32(0.5)}


def policy_of(agent, normaliser=None, *, image_keys=(), prompts=None):
    cameras = tuple(map(SPEC.camera, image_keys))
    preprocess = Preprocess(normaliser or identity_normaliser(agent.horizon), cameras, prompts)
    policy = ChunkPolicy(agent, preprocess, SPEC)
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


def test_a_decision_reads_the_text_of_its_episode_and_no_camera_that_the_agent_does_not_look_at():
    prompts, agent = Prompts(ByteTokenizer(), 8), EchoAgent([[1, 0]])
    policy = policy_of(agent, prompts=prompts)
    for text in ("left", "right", ""):
        policy.decide(Request(OBSERVATION, task=text))
        seen, _ = agent.asked
        assert [seen["prompt"] is prompts(text)[0], seen["prompt_mask"] is prompts(text)[1]] == [True, True]
    policy_of(agent).decide(Request(OBSERVATION, task="left"))
    assert set(agent.asked[0]) == {"state"}


def test_model_space_in_and_robot_units_out():
    agent = EchoAgent([[1, 0], [2, -1]])
    decision = policy_of(agent, relative_normaliser(2), image_keys=("front",)).decide(
        Request(OBSERVATION, explore=False)
    )
    observation, prefix = agent.asked
    np.testing.assert_allclose(observation["state"], [0, -0.5, 2])
    assert observation["images/front"] is OBSERVATION["images/front"]
    assert prefix is None
    np.testing.assert_allclose(decision.actions, [[0.35, -0.5], [0.45, -0.6]], rtol=1e-6)
    assert decision.actions.dtype == np.float32
    np.testing.assert_array_equal(decision.record["chunk"], agent.chunk)
    assert decision.record["q"] == np.float32(0.5)
    assert decision.version == 1


def test_frames_enter_with_the_size_that_the_agent_reads():
    agent = EchoAgent([[1, 0]])
    preprocess = Preprocess(identity_normaliser(1), (CameraSpec("front", 5, 4),), recorded=(SPEC.camera("front"),))
    policy = ChunkPolicy(agent, preprocess, SPEC)
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
    assert (policy.clipped, policy.values) == (3, 6)


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
    agent = EchoAgent(np.zeros((2, 2)))
    source = type("Source", (), {"latest": lambda self: found[0]})()
    policy = ChunkPolicy(agent, identity(2), SPEC, source=source, run="b")
    assert not policy.refresh()
    for run, digest, taken in (("a", ours, False), ("b", theirs, False), ("", ours, False), ("b", ours, True)):
        version = 1 if taken else 9
        found[0] = Snapshot(version, {"bias": np.float32(version)}, origin=PolicyOrigin(run, digest))
        assert policy.refresh() is taken  # else of another run, or it needs another normaliser
    found[0] = None  # the learner was replaced meanwhile
    assert policy.refresh()
    assert (policy.version, agent.loaded) == (1, [1])
