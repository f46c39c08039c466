"""Every agent reads the task's text where `agent.language` says so, and none of it otherwise."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import ENCODER, build, config_of, make_batches, named

from serl_chunk.config.agents.gripper import GripperConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.data.prompts import ByteTokenizer, Prompts
from serl_chunk.types import PROMPT, PROMPT_MASK

LANGUAGE = LanguageConfig("bytes", 8)
PROMPTS = Prompts(ByteTokenizer(), 8)
VARIANTS = ("acfql", "published", "published-distill", "acrlpd", "bc", "bc-gaussian")
SHARED = dataclasses.replace(ENCODER, trained_by="critic")


def with_prompts(batches):
    """The batches with texts: every other window has another one."""
    lead = batches.mask.shape
    rows = [PROMPTS(("left", "right")[i % 2]) for i in range(lead[1])]
    tokens, mask = (np.broadcast_to(np.stack(part), (*lead, 8)) for part in zip(*rows, strict=True))
    both = (observations | {PROMPT: tokens, PROMPT_MASK: mask}
            for observations in (batches.observations, batches.next_observations))  # fmt: skip
    return batches._replace(**dict(zip(("observations", "next_observations"), both, strict=True)))


def chunk(agent, params, text):
    tokens, mask = PROMPTS(text)
    observation = {"state": np.zeros(4, np.float32), PROMPT: tokens, PROMPT_MASK: mask}
    return np.asarray(agent.sample(params, observation, jax.random.key(1), explore=True)[0])


@pytest.mark.compiles
@pytest.mark.parametrize("variant", [*VARIANTS, "acfql-shared", "acfql-grasp"])
def test_agents_learn_from_texts_and_act_by_them(variant):
    special = {"acfql-shared": {"encoder": SHARED}, "acfql-grasp": {"gripper": GripperConfig(choices=(-1.0, 1.0))}}
    config = config_of(variant.removesuffix("-shared").removesuffix("-grasp"), language=LANGUAGE,
                       **special.get(variant, {}))  # fmt: skip
    agent = build(config)
    state = agent.init(jax.random.key(0))
    tokens = [leaf for path, leaf in jax.tree.leaves_with_path((state.policy, state.critic)) if "tokens" in str(path)]
    assert tokens
    assert all(leaf.shape == (258, 64) for leaf in tokens)
    before = jax.tree.map(jnp.copy, (state.policy, state.critic))
    state, metrics = agent.update(state, {}, named(agent, with_prompts(make_batches(agent.spec))))
    assert all(np.isfinite(v).all() for v in metrics.values())
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), before, (state.policy, state.critic))
    assert all(move > 0 for path, move in jax.tree.leaves_with_path(moved) if "tokens" in str(path))
    params = agent.policy_params(state)
    np.testing.assert_array_equal(chunk(agent, params, "left"), chunk(agent, params, "left"))
    assert not np.array_equal(chunk(agent, params, "left"), chunk(agent, params, "right"))
    assert agent.load_params(agent.flatten_params(params)) is not None


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_agent_without_language_is_as_it_was(variant):
    plain, reading = build(config_of(variant)), build(config_of(variant, language=LANGUAGE))
    assert "language" not in plain.network_shape()
    assert "language" in reading.network_shape()
    assert PROMPT not in plain.seen_example()
    assert {PROMPT, PROMPT_MASK} < set(reading.seen_example())
