"""A critic on pi0's features: what updates read and change, stored features, and edited candidates."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import critic, make_batches, same
from pi0_agents import CONFIG, SMALL, SPEC, lora, shown, started

from serl_chunk.agents.acfql import Acfql
from serl_chunk.agents.spec import POLICY_FEATURES, AgentSpec, BatchSpec
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.types import PROMPT, PROMPT_MASK

IMAGES = ("images/top", "images/wrist")


def acting(**changes) -> Acfql:
    """pi0 with a critic on its features; `changes` of its Pi0Config, or `edit_scale`."""
    edit = changes.pop("edit_scale", 0.0)
    common = {name: getattr(CONFIG, name) for name in ("policy", "image_keys", "encoder", "language", "policy_ema")}
    pi0 = dataclasses.replace(SMALL, **changes)
    return Acfql(AcfqlConfig(pi0=pi0, critic=critic(), candidates=4, edit_scale=edit, policy_updates=1, **common), SPEC)


def batches(agent: Acfql):
    """As the replay gives them: a critic's without pixels, the policy's with them."""
    of_critic = make_batches(SPEC, updates=2)
    features = np.random.default_rng(0).normal(size=(2, 8, 3, 16)).astype(np.float16)
    seen = {"state": of_critic.observations["state"], POLICY_FEATURES: features}
    out = {"critic": of_critic._replace(observations=seen, next_observations=seen)}
    return out | {name: jax.tree.map(lambda x: x[None], shown(agent)) for name in agent.wants() if name == "policy"}


@pytest.mark.parametrize("trainable", ["none", "expert"])
def test_each_loss_changes_its_own_network_by_its_own_batch(trainable):
    agent = acting(trainable=trainable)
    wants = agent.wants()
    assert (wants["critic"].frames, list(wants)) == (False, ["critic", "policy"][: 1 + (trainable == "expert")])
    if trainable == "expert":
        assert wants["policy"] == BatchSpec(None, each=False, next_observations=False, frames=True, imitated=True)
    state, base = started(agent), agent.new_base(jax.random.key(0))
    before = jax.tree.map(np.array, (state.critic, state.policy, base))
    after, metrics = agent.update(state, base, batches(agent))
    assert not same(before[0], after.critic)
    assert same(before[1], after.policy) == (trainable == "none")
    assert same(before[2], base)
    assert ("actor/bc_loss" in metrics) == (trainable == "expert")
    assert (int(after.critic_updates), int(after.policy_updates)) == (2, trainable == "expert")


@pytest.mark.parametrize("trainable", ["expert", "lora", "lora_expert"])
def test_stored_features_are_those_that_a_decision_computes_of_the_imported_leaves(trainable):
    """Also with LoRA of the first expert among what is not trained."""
    agent = acting(trainable=trainable, **(lora() if "lora" in trainable else {}))
    state = started(agent)
    base = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), agent.new_base(jax.random.key(0))
    )
    seen = {name: np.asarray(value) for name, value in shown(agent).observations.items()}
    assert set(agent.cached_features()[POLICY_FEATURES].reads) == {*IMAGES, PROMPT, PROMPT_MASK}
    stored = agent.embedder(base)({name: seen[name] for name in (*IMAGES, PROMPT, PROMPT_MASK)})[POLICY_FEATURES]
    assert (stored.shape, stored.dtype) == ((8, 3, 16), np.float16)

    @jax.jit
    def decided(policy):
        return agent.net.described(agent.net.context(policy, base, seen), base, seen)[POLICY_FEATURES]

    for scale in (1.0, 2.0):  # what is trained changes none of them
        found = decided(jax.tree.map(lambda x, s=scale: s * x, state.policy))
        np.testing.assert_allclose(np.float32(found), np.float32(stored), atol=2e-3)
    assert np.abs(np.float32(stored)).std(axis=0).max() > 0.01


def test_candidates_are_the_first_ones_chunk_and_its_edits_and_the_best_acts():
    agent = acting(trainable="none", edit_scale=0.1)
    params = agent.policy_params(started(agent)) | {"base": agent.new_base(jax.random.key(0))}
    one = {name: value[0] for name, value in shown(agent).observations.items()}
    decide = lambda key, **how: agent.sample(params, one, jax.random.key(key), **how)  # noqa: E731
    first = decide(0, explore=True, alone=True)[0]
    assert not same(first, decide(1, explore=True, alone=True)[0])
    chunk, record = decide(0, explore=True)
    assert record["values"].shape == (4,)
    assert float(record["q"]) == float(jnp.max(record["values"]))
    step = np.asarray(chunk - first)
    np.testing.assert_allclose(step, np.broadcast_to(step[:1], step.shape), atol=1e-6)
    assert (np.abs(step).max() > 0) == (int(jnp.argmax(record["values"])) > 0)
    assert same(decide(0, explore=False)[0], decide(1, explore=False)[0])
    assert len(set(np.asarray(record["values"]).tolist())) == 4


def test_of_two_modes_the_best_of_some_samples_and_then_one_sample_is_the_rewarded_one():
    """A chunk of one number goes left or right, as demonstrated; only right is rewarded."""
    pi0 = dataclasses.replace(SMALL, trainable="expert", action_dim=2, steps=4)
    config = AcfqlConfig(
        policy="pi0", pi0=pi0, language=LanguageConfig("bytes", 16), lr=3e-3, policy_ema=0.0, policy_updates=1,
        critic=critic(), candidates=8, improve_by="distil",
    )  # fmt: skip
    agent = Acfql(config, AgentSpec(2, 1, 2, 2, (), 0.9, (0.0, 1.0)))
    state, base, rng = agent.new_state(jax.random.key(0)), agent.new_base(jax.random.key(0)), np.random.default_rng(0)
    text = {PROMPT: np.tile(np.int32([1, 5, 6]), (64, 1)), PROMPT_MASK: np.ones((64, 3), bool)}
    seen = {"state": np.zeros((64, 2), np.float32), **text}

    def batch(shown, updates: int = 50):
        """Of one number an action, and a reward at once for those to the right; nothing follows."""
        side = rng.choice(np.float32([-0.6, 0.6]), size=(updates, 64, 1, 1))
        of = make_batches(AgentSpec(2, 1, 2, 2, (), 0.9), updates, 64)
        actions = side + rng.normal(0, 0.02, (updates, 64, 2, 1)).astype(np.float32)
        rewards = np.concatenate([side[..., 0] > 0, np.zeros_like(side[..., 0])], -1).astype(np.float32)
        ones = np.ones((updates, 64, 2), np.float32)
        shown = jax.tree.map(lambda x: np.broadcast_to(x, (updates, *x.shape)), shown)
        return of._replace(observations=shown, next_observations=shown, actions=actions, rewards=rewards, valid=ones,
                           bc_weight=ones, mask=np.zeros((updates, 64), np.float32))  # fmt: skip

    def right(state, *, alone: bool) -> float:
        params = agent.policy_params(state) | {"base": base}
        chunks, _ = agent.decide(params, seen, jax.random.split(jax.random.key(3), 64), explore=True, alone=alone)
        return float((np.asarray(chunks).mean((1, 2)) > 0).mean())

    for _ in range(8):
        state, _ = agent.update_policy(state, base, batch(seen))
    assert 0.25 < right(state, alone=True) < 0.75
    features = {"state": seen["state"], POLICY_FEATURES: agent.embedder(base)(text)[POLICY_FEATURES]}
    for _ in range(4):
        state, _ = agent.update_critic(state, base, batch(features))
    assert right(state, alone=False) > 0.9
    for k in range(5):
        one = jax.tree.map(lambda x: x[0], batch(seen, 1))
        chunks, metrics = agent.relabel(state, base, one, jax.random.key(k))
        assert float(metrics["relabel/q_best"]) >= float(metrics["relabel/q_first"])
        again = one._replace(actions=np.asarray(chunks))
        state, _ = agent.update_policy(state, base, jax.tree.map(lambda x: np.broadcast_to(x, (50, *x.shape)), again))
    assert right(state, alone=True) > 0.9
