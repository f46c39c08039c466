"""Best of N with a Gaussian policy, in decisions."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from agent_tools import bandit, build, config_of, sac_critic


@pytest.mark.parametrize("candidates", [8])
def test_acting_by_the_best_of_several_is_better_than_by_one(candidates):
    """A critic trained on the bandit, and a policy that was not: only the choice can find what is rewarded."""
    heads = sac_critic(hidden=(32,), target_subset=2, target_aggregate="mean")
    many, one = (build(config_of("acrlpd", critic=heads, candidates=n), horizon=2, actions=1) for n in (candidates, 1))
    state = many.init(jax.random.key(0))
    for i in range(15):
        state, _ = many.update_critic(state, {}, jax.device_put(bandit(many.spec, 20, 64, i)[0]))
    batch, best = bandit(many.spec, 1, 64, 10_000)
    errors = []
    for agent in (many, one):
        chunks = [
            agent.sample(agent.policy_params(state), {"state": s}, jax.random.key(i), explore=True)[0]
            for i, s in enumerate(batch.observations["state"][0])
        ]
        errors.append(np.abs(np.array(chunks) - best[0]).mean())
    assert errors[0] < 0.7 * errors[1]
