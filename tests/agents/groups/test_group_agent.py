"""The agent of groups: what it samples, what a step of each rule trains, and the policy that it compares with."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from agent_tools import drawn, output_bias, same
from group_agents import EPISODES, HEAD, ODE, credited, group_agent, iterating, sampled_rows

from serl_chunk.agents.groups.rows import Episodes, minibatches, uncredited
from serl_chunk.agents.optimiser import gradient

RULES = {
    "sde": ({}, {}),
    "tick": (HEAD, {"policy": "gaussian"}),
    "flow_ipo": (ODE, {"rule": "flow_ipo"}),
    "filtered_bc": ({}, {"rule": "filtered_bc"}),
}


def of_rule(name):
    sampling, changes = RULES[name]
    agent = group_agent(sampling, **changes)
    return agent, iterating(agent)


def row_gradient(agent, state, rows, parts=1):
    draws = agent.row_draws(jax.random.key(5), rows)

    @jax.jit
    def run(policy, rows, draws):
        of = lambda p, cut: agent.rows_loss(p, state.reference, {}, *cut)  # noqa: E731
        return gradient(of, policy, (rows, draws), parts)

    return run(state.policy, rows, draws)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_trains_the_policy_and_nothing_else(rule):
    agent, state = of_rule(rule)
    rows = credited(agent, state, sampled_rows(agent, state))
    before, reference = jax.tree.map(np.array, (state.policy, state.reference))
    (block,) = minibatches(np.random.default_rng(0), rows, 8)
    state, metrics = agent.update_rows(state, {}, block)
    assert all(np.isfinite(float(value)) for value in metrics.values()), metrics
    assert same(reference, state.reference)
    assert not any(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, state.policy)), strict=True))
    if agent.config.rule == "ppo":  # before the first step old and new policy are one
        found = [float(metrics[f"actor/{name}"]) for name in ("ratio", "approx_kl", "clip_fraction")]
        np.testing.assert_allclose(found, [1, 0, 0], atol=1e-6)


@pytest.mark.parametrize("rule", ["sde", "tick"])
def test_groups_of_equal_outcomes_train_nothing(rule):
    agent, state = of_rule(rule)
    rows = credited(agent, state, sampled_rows(agent, state), EPISODES._replace(reward=np.array([1, 1, 0, 0.0])))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(row_gradient(agent, state, rows)[0]))


@pytest.mark.parametrize("rule", ["tick", "flow_ipo"])
def test_actions_that_were_not_executed_train_nothing(rule):
    agent, state = of_rule(rule)
    rows = credited(agent, state, sampled_rows(agent, state))
    rows = rows._replace(executed=np.broadcast_to(np.array([1, 0, 1], np.float32), (8, 3)))
    moved = output_bias(row_gradient(agent, state, rows)[0], agent)
    assert (moved != 0).all(1).tolist() == [True, False, True]
    assert not moved[1].any()


@pytest.mark.parametrize("rule", ["tick", "flow_ipo"])
def test_micro_batches_add_up(rule):
    agent, state = of_rule(rule)
    rows = credited(agent, state, sampled_rows(agent, state))
    whole, metrics, _ = row_gradient(agent, state, rows)
    grads, others, _ = row_gradient(agent, state, rows, 4)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(grads), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)
    numbers = [{name: float(value) for name, value in each.items()} for each in (others, metrics)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


@pytest.mark.parametrize("rule", ["sde", "tick"])
def test_decisions_for_many_are_those_of_each_and_what_the_learner_scores(rule):
    agent, state = of_rule(rule)
    rows, params = sampled_rows(agent, state), {"policy": state.policy}
    keys = jax.random.split(jax.random.key(0), 8)
    for i in (0, 3):
        seen = {"state": rows.observations["state"][i]}
        chunk, record = agent.sample(params, seen, keys[i], explore=True)
        for name, value in record.items():
            np.testing.assert_allclose(value, rows.record[name][i], atol=1e-5, err_msg=name)
        assert np.abs(chunk).max() <= 1
        mean, nothing = agent.sample(params, seen, keys[i], explore=False)
        assert not nothing
        assert not np.allclose(mean, chunk, atol=1e-3)
    assert agent.prepare(state, {}, rows)["logp_gap"].max() < 1e-4


@pytest.mark.parametrize("kept", ["device", "host"])
def test_a_reference_follows_once_an_iteration_from_where_it_is_kept(kept):
    agent = group_agent(ODE | {"reference_on": kept}, rule="flow_ipo", flow_ipo_beta_ref=0.75)
    imitated = drawn(agent)
    average = jax.tree.map(np.array, imitated.policy_average)
    state = agent.begin_iterations(imitated)
    assert same(average, jax.tree.map(np.asarray, state.policy))  # what acted is what is trained, and what travels
    assert same(state.policy, agent.policy_params(state)["policy"])
    assert not state.policy_average
    rows = credited(agent, state, sampled_rows(agent, state))
    np.testing.assert_allclose(rows.target, 0.5, atol=0.01)
    state, _ = agent.update_rows(state, {}, rows)
    state = agent.end_iteration(state)
    kinds = {isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state.reference)}
    assert kinds == {kept == "host"}
    for old, new, between in zip(*map(jax.tree.leaves, (average, state.policy, state.reference)), strict=True):
        np.testing.assert_allclose(between, 0.75 * old + 0.25 * np.asarray(new), atol=1e-6)
    # A moved policy is preferred or not by how far its decisions moved.
    assert np.ptp(credited(agent, state, sampled_rows(agent, state, 1)).target) > 0.01


@pytest.mark.parametrize("baseline", ["mean", "value"])
def test_a_learned_baseline_needs_no_group(baseline):
    agent = group_agent({"baseline": baseline, "size": 1})
    state = iterating(agent)
    rows = sampled_rows(agent, state)
    after, rows, _ = agent.credit(state, {}, rows, EPISODES, agent.prepare(state, {}, rows))
    assert not same(after.critic, state.critic)
    success = EPISODES.reward[EPISODES.of_rows] > 0
    assert rows.advantage[success].min() > rows.advantage[~success].max() or baseline == "value"


def test_what_succeeds_becomes_more_likely():
    """Single decisions of one observation, in groups of 8, succeed where their first number is above a threshold."""
    agent, state = of_rule("sde")
    seen, one = {"state": np.ones((8, 4), np.float32)}, Episodes(np.zeros(8), np.zeros(8), np.ones(8, int))
    threshold, found = None, []
    for i in range(60):
        keys = jax.random.split(jax.random.key(i), 8)
        _, record = agent.decide({"policy": state.policy}, seen, keys, explore=True)
        record = {name: np.asarray(value) for name, value in record.items()}
        threshold = np.median(record["sample"][:, 0]) if threshold is None else threshold
        reward = (record["sample"][:, 0] > threshold).astype(np.float32)
        rows = credited(
            agent, state, uncredited(seen, record, np.ones((8, 3), np.float32)), one._replace(reward=reward)
        )
        state, _ = agent.update_rows(state, {}, rows)
        found.append(reward.mean())
    assert np.mean(found[:10]) < 0.75 < 0.9 < np.mean(found[-10:])


@pytest.mark.parametrize(
    ("rule", "outcomes", "learns"),
    [("sde", (1, 1), False), ("sde", (0, 0), False), ("sde", (0, 1), True), ("flow_ipo", (0, 0), True),
     ("filtered_bc", (0, 0), False), ("filtered_bc", (1, 1), True)],
)  # fmt: skip
def test_a_group_is_trained_on_where_its_outcomes_teach_the_rule_something(rule, outcomes, learns):
    assert of_rule(rule)[0].learns_from(outcomes) is learns
