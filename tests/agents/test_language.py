"""Every agent reads the task's text where `agent.language` says so, and none of it otherwise."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from agent_tools import ENCODER, critic_gradient, fresh, made, one_batch, policy_gradient

from serl_chunk.config.agents.gripper import GripperConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.data.prompts import ByteTokenizer, Prompts
from serl_chunk.types import PROMPT, PROMPT_MASK

LANGUAGE, PROMPTS = LanguageConfig("bytes", 8), Prompts(ByteTokenizer(), 8)
VARIANTS = {
    **{variant: {} for variant in ("acfql", "published", "published-distill", "acrlpd", "bc", "bc-gaussian")},
    "acfql-shared": {"encoder": dataclasses.replace(ENCODER, trained_by="critic")},
    "bc-grasp": {"gripper": GripperConfig(choices=(-1.0, 1.0))},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_agents_learn_from_texts_and_act_by_them(variant):
    agent, state = fresh(variant, language=LANGUAGE, **VARIANTS[variant])
    tokens, mask = (np.stack(part) for part in zip(*map(PROMPTS, ["left", "right"] * 4), strict=True))
    text, batch = {PROMPT: tokens, PROMPT_MASK: mask}, one_batch(agent)
    batch = batch._replace(observations=batch.observations | text, next_observations=batch.next_observations | text)
    inner = getattr(agent, "inner", agent)
    grads = [policy_gradient(inner, state, agent.arm_batch(state, batch) if inner is not agent else batch)[0]]
    if agent.has_critic:
        grads.append(critic_gradient(agent, state, batch)[0])
    found = [leaf for path, leaf in jax.tree.leaves_with_path(grads) if "tokens" in str(path)]
    assert len(found) == {"bc": 1, "published-distill": 3}.get(variant.removesuffix("-gaussian").removesuffix("-grasp"),
                                                              1 if variant == "acfql-shared" else 2)  # fmt: skip
    assert all(leaf.shape == (258, 64) and np.any(leaf) for leaf in found)
    params = agent.policy_params(state)

    def chunk(row):
        seen = {"state": np.zeros(4, np.float32), PROMPT: tokens[row], PROMPT_MASK: mask[row]}
        return np.asarray(agent.sample(params, seen, jax.random.key(1), explore=True)[0]).tobytes()

    assert chunk(0) == chunk(2) != chunk(1)
    plain = made(variant, **VARIANTS[variant])
    assert ["language" in a.network_shape() for a in (plain, agent)] == [False, True]
    assert [{PROMPT, PROMPT_MASK} <= set(a.perception.seen_example()) for a in (plain, agent)] == [False, True]
