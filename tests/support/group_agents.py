"""Tiny agents that train on groups, and rows that they sampled."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from agent_tools import FLOW, drawn

from serl_chunk.agents.groups.agent import GroupAgent
from serl_chunk.agents.groups.rows import Episodes, GroupRows, uncredited
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState
from serl_chunk.config.agents.groups import GroupAgentConfig
from serl_chunk.config.groups import GroupConfig

HEAD = {"density": "tick", "sigma": 0.0}
ODE = {"noise": 1.0, "sigma": 0.0}
# Two groups; the decisions of each episode.
EPISODES = Episodes(np.array([1, 0, 0, 1], np.float32), np.array([0, 0, 1, 1]), np.array([3, 1, 2, 2]))


@functools.cache
def _made(config: GroupAgentConfig, group: GroupConfig) -> GroupAgent:
    return GroupAgent(config, AgentSpec(4, 2, 3, 3, (), 0.9, group=group))


def group_agent(sampling: dict[str, Any] | None = None, **changes: Any) -> GroupAgent:
    """One of 4 states and chunks of 3 actions of 2 numbers; the same for all tests. `sampling`: of its group."""
    config = GroupAgentConfig(**{"flow": FLOW, "hidden": (16,), "policy_ema": 0.9, "iteration_lr": 3e-3, **changes})
    return _made(config, GroupConfig(**{"minibatch": 8, **(sampling or {})}))


def iterating(agent: GroupAgent) -> AgentState:
    return agent.begin_iterations(drawn(agent))


def sampled_rows(agent: GroupAgent, state: AgentState, seed: int = 0) -> GroupRows:
    """Eight decisions as an actor sampled them; of the first one a single action was executed."""
    rng = np.random.default_rng(seed)
    seen = {"state": rng.normal(size=(8, 4)).astype(np.float32)}
    keys = jax.random.split(jax.random.key(seed), 8)
    _, record = agent.decide({"policy": state.policy}, seen, keys, explore=True)
    executed = np.ones((8, 3), np.float32)
    executed[0, 1:] = 0
    return uncredited(seen, {name: np.asarray(value) for name, value in record.items()}, executed)


def credited(agent: GroupAgent, state: AgentState, rows: GroupRows, episodes: Episodes = EPISODES) -> GroupRows:
    return agent.credit(state, {}, rows, episodes, agent.prepare(state, {}, rows))[1]
