"""Policies leave [-1, 1] where model space has no bounds, and nowhere else."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from agent_tools import FLOW, build, config_of

WIDE = dataclasses.replace(FLOW, noise_low=1.0, steps=1)
CHUNK = dataclasses.replace(WIDE, predicts="chunk")
OBSERVATION = {"state": np.full(4, 40.0, np.float32)}  # fresh networks give small numbers


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("variant", "flow"),
    [("acfql", WIDE), ("acfql", CHUNK), ("acfql-policy", WIDE), ("acfql-distill", WIDE), ("bc", WIDE)],
)
def test_chunks_are_clipped_by_the_bounds_of_model_space(variant, flow):
    most = []
    for bounded in (True, False):
        agent = build(config_of(variant, flow=flow))
        agent = type(agent)(agent.config, dataclasses.replace(agent.spec, bounded=bounded))
        params = agent.policy_params(agent.init(jax.random.key(0)))
        keys = jax.random.split(jax.random.key(1), 8)
        most.append(max(float(np.abs(agent.sample(params, OBSERVATION, key, explore=True)[0]).max()) for key in keys))
    assert most[0] <= 1 < most[1]
