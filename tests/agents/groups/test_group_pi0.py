"""A pi0 with LoRA in iterations on groups: all numbers of the model are sampled, and trained leaves alone are kept."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import close, same
from group_agents import ODE
from pi0_agents import CONFIG, SMALL, SPEC, lora, shown, started

from serl_chunk.agents.groups.agent import GroupAgent
from serl_chunk.agents.groups.rows import Episodes, uncredited
from serl_chunk.config.agents.groups import GroupAgentConfig
from serl_chunk.config.groups import GroupConfig
from serl_chunk.models.pi0 import tree

EPISODES = Episodes(np.array([1, 0], np.float32), np.array([0, 0]), np.array([2, 2]))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "sampling"), [("ppo", {}), ("flow_ipo", ODE)])
def test_all_numbers_are_sampled_and_trained_leaves_alone_are_kept(rule, sampling, monkeypatch):
    model = dataclasses.replace(SMALL, trainable="lora_expert", **lora())
    own = {f.name: getattr(CONFIG, f.name) for f in dataclasses.fields(CONFIG)}
    config = GroupAgentConfig(**{**own, "pi0": model, "rule": rule})
    agent = GroupAgent(config, dataclasses.replace(SPEC, group=GroupConfig(minibatch=4, **sampling)))
    rng, shapes = np.random.default_rng(0), jax.eval_shape(agent.new_base, jax.random.key(0))
    base = jax.device_put(jax.tree.map(lambda x: (0.1 * rng.normal(size=x.shape)).astype(x.dtype), shapes))
    state = agent.begin_iterations(started(agent))
    seen = {name: np.asarray(value) for name, value in shown(agent, 4).observations.items()}
    chunks, record = agent.decide(
        agent.published(state, base), seen, jax.random.split(jax.random.key(0), 4), explore=True
    )
    assert chunks.shape == (4, 3, 2)
    assert {value.shape for name, value in record.items() if name not in ("step", "log_prob")} == {(4, 3, 6)}
    rows = uncredited(seen, {name: np.asarray(value) for name, value in record.items()}, np.ones((4, 3), np.float32))
    for free, device in ((100, None), (None, 100)):
        assert agent.with_contexts(base, rows, free, device) is rows
    of_contexts = agent.with_contexts(base, rows, None, None)
    prepared, other = (agent.prepare(state, base, of) for of in (rows, of_contexts))
    assert max(prepared.get("logp_gap", prepared.get("deviation"))) < 1e-3
    assert close(other, prepared)
    of_contexts = agent.credit(state, base, of_contexts, EPISODES, other)[1]
    _, rows, _ = agent.credit(state, base, rows, EPISODES, prepared)
    before, frozen = jax.tree.map(np.array, (state.policy, base))
    same_step, _ = agent.update_rows(jax.tree.map(jnp.copy, state), base, rows)
    monkeypatch.setattr(agent.net, "context", lambda *_: pytest.fail("a context is computed again"))
    state, metrics = agent.update_rows(state, base, of_contexts)
    assert close(state.policy, same_step.policy)
    if rule == "ppo":
        assert float(metrics["actor/ratio"]) == pytest.approx(1, abs=1e-5)
    assert float(metrics["actor/grad_norm"]) > 0
    assert same(frozen, base)
    assert not same(before, state.policy)
    trained = {path for path in tree.leaves(model) if tree.trains(model, path)}
    for kept in (state.policy, agent.policy_params(state)["policy"], *([state.reference] if agent.refers else [])):
        assert set(tree.flat(kept["pi0"])) == trained < set(tree.leaves(model))
