"""Policies leave [-1, 1] where model space has no bounds, and nowhere else."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from agent_tools import FLOW, build, config_of

ONE = dataclasses.replace(FLOW, steps=1)
OBSERVATION = {"state": np.full(4, 40.0, np.float32)}  # fresh networks give small numbers


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("variant", "changes"),
    [("acfql", {"flow": ONE}), ("published", {"flow_steps": 1}), ("published-distill", {}), ("bc", {"flow": ONE})],
)
def test_chunks_are_clipped_by_the_bounds_of_model_space(variant, changes):
    most = []
    for bounded in (True, False):
        agent = build(config_of(variant, **changes))
        agent = type(agent)(agent.config, dataclasses.replace(agent.spec, bounded=bounded))
        params = agent.policy_params(agent.init(jax.random.key(0)))
        keys = jax.random.split(jax.random.key(1), 8)
        most.append(max(float(np.abs(agent.sample(params, OBSERVATION, key, explore=True)[0]).max()) for key in keys))
    assert most[0] <= 1 < most[1]
