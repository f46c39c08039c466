"""QC-FQL: the one-step policy between its teacher and the critic."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import (
    bandit,
    bandit_error,
    build,
    config_of,
    critic,
    critic_gradient,
    fresh,
    make_batches,
    named,
    on_device,
    policy_gradient,
    same,
)

VARIANT = "acfql-policy-distill"


def setting(**changes):
    agent = build(config_of(VARIANT, **changes))
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    return agent, agent.init(jax.random.key(0)), batch, agent.policy_draws(jax.random.key(1), batch)


def gradients(agent, state, batch, draws, **changes):
    return jax.jit(lambda s: policy_gradient(agent, s, batch, draws, **changes)[0])(state)


@pytest.mark.slow
def test_the_one_step_policy_climbs_the_critic_while_the_flow_imitates():
    config = config_of(
        VARIANT, lr=5e-3, alpha=0.05, candidates=1, policy_updates=1, critic=critic(hidden=(32,), loss="bounded")
    )
    config = dataclasses.replace(config, flow=dataclasses.replace(config.flow, hidden=(32,)))
    agent = build(config, horizon=2, actions=1)
    state = agent.init(jax.random.key(0))
    for i in range(120):
        state, _ = agent.update(state, {}, named(agent, jax.device_put(bandit(agent.spec, 4, 64, i)[0])))
    before = bandit_error(agent, state)
    for i in range(80):
        state, _ = agent.update(state, {}, named(agent, jax.device_put(bandit(agent.spec, 4, 64, 200 + i)[0])))
    assert bandit_error(agent, state) < min(0.25, before + 0.05)  # imitation alone is beyond 0.35


def test_its_loss_by_hand():
    agent, state, batch, draws = setting(critic=critic(loss="squared"))
    _, metrics = policy_gradient(agent, state, batch, draws)
    noise = draws["distill"]
    observation = batch.observations["state"]
    raw = agent.one_step.net.apply(
        {"params": state.policy["onestep"]["net"]}, jnp.concatenate([observation, noise], -1)
    )
    context = agent.encode(state.policy["encoder"], {}, batch.observations)
    taught = agent.flow.sample(state.policy["flow"], context, noise[:, None]).reshape(8, 6)
    distance = float(((raw - jnp.clip(taught, -1, 1)) ** 2).mean())  # the teacher is clipped, the student is not
    q = agent.critic.outputs(state.critic["q"], observation, jnp.clip(raw, -1, 1)).mean()
    given = jnp.zeros((8, 3))
    flow = agent.flow.loss(state.policy["flow"], context, batch.actions, batch.bc_weight, given, draws).mean()
    assert float(metrics["actor/distill_loss"]) == pytest.approx(distance, abs=1e-5)
    assert float(metrics["value"]) == pytest.approx(float(flow + 3.0 * distance - q), abs=1e-4)


def test_what_each_part_of_the_loss_trains():
    grads = {}
    for alpha in (0.0, 3.0):
        agent, state, batch, draws = setting(alpha=alpha)
        grads[alpha] = gradients(agent, state, batch, draws)
    assert same(grads[0.0]["flow"], grads[3.0]["flow"])  # the teacher is not drawn towards its pupil
    assert not same(grads[0.0]["onestep"], grads[3.0]["onestep"])
    other = state.replace(critic=jax.tree.map(lambda x: x * 2, state.critic))
    assert same(gradients(agent, other, batch, draws)["flow"], grads[3.0]["flow"])
    assert not same(gradients(agent, other, batch, draws)["onestep"], grads[3.0]["onestep"])
    pretraining = [gradients(agent, s, batch, draws, bc_only=True) for s in (state, other)]
    assert same(*pretraining)  # no critic in it
    assert any(np.abs(g).max() > 0 for g in jax.tree.leaves(pretraining[0]["onestep"]))


def test_the_critics_loss_reads_the_policy_without_training_it():
    agent, state, batch, _ = setting()
    draws = agent.critic_draws(jax.random.key(1), batch)
    value = lambda **read: critic_gradient(agent, state.replace(**read), batch, draws)[1]["value"]  # noqa: E731
    by_policy, by_target = (lambda p: value(policy=p)), (lambda t: value(target=t))
    for gradient in (jax.grad(by_policy)(state.policy), jax.grad(by_target)(state.target)):
        assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradient))


def test_a_target_of_the_one_step_policy():
    agent, state, batch, _ = setting(critic=critic(loss="squared", target_subset=2, target_aggregate="mean"))
    draws = agent.critic_draws(jax.random.key(1), batch)
    assert draws["next"].shape == (8, 1, 6)  # one sample, whatever target_candidates says
    following = batch.next_observations["state"]
    raw = agent.one_step.net.apply(
        {"params": state.policy["onestep"]["net"]}, jnp.concatenate([following, draws["next"][:, 0]], -1)
    )
    value = agent.critic.outputs(state.target["q"], following, jnp.clip(raw, -1, 1)).mean(0)
    wanted = batch.rewards @ np.array([1, 0.9, 0.81], np.float32) + batch.discount_n * batch.mask * value
    np.testing.assert_allclose(agent.critic_target(state.critic, state, {}, batch, draws), wanted, atol=1e-5)


def test_only_the_one_step_policy_travels_and_its_best_sample_acts():
    agent, state = fresh(VARIANT)
    params = agent.policy_params(state)
    assert list(params["policy"]) == ["onestep"]
    observation = {k: v[0, 0] for k, v in make_batches(agent.spec).observations.items()}
    noise = agent.acting_noise(params, jax.random.key(3), observation, explore=True)
    chunk, record = agent.sample(params, observation, jax.random.key(3), explore=True)
    features = jnp.broadcast_to(observation["state"], (3, 4))
    raw = agent.one_step.net.apply({"params": state.policy["onestep"]["net"]}, jnp.concatenate([features, noise], -1))
    best = int(np.argmax(record["values"]))
    np.testing.assert_allclose(chunk.reshape(-1), jnp.clip(raw[best], -1, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("aggregate", "variant"),
    [
        ("mean", "acfql-policy-image"),
        ("min", f"{VARIANT}-image"),
        pytest.param("min", "acrlpd-image", marks=pytest.mark.slow),
    ],
)
def test_candidates_are_compared_by_the_mean_or_the_least_head(variant, aggregate):
    agent = build(config_of(variant, critic=critic(loss="bounded", target_aggregate=aggregate), candidates=5))
    state = agent.init(jax.random.key(0))
    params, act = agent.policy_params(state), jax.jit(agent.act)
    observation = {k: jnp.asarray(v[0, 0]) for k, v in make_batches(agent.spec).observations.items()}
    noise = agent.acting_noise(params, jax.random.key(3), observation, explore=True)
    free = (np.zeros((3, 2), np.float32), np.zeros(3, np.float32))
    _, record = act(params, {}, observation, noise, free)
    alone = jnp.stack([act(params, {}, observation, noise[n : n + 1], free)[0].reshape(-1) for n in range(5)])
    features = jnp.broadcast_to(agent.critic_context(state.critic, {}, observation).features, (5, 12))
    heads = np.asarray(agent.critic.values(state.critic, features, alone))
    wanted = heads.mean(0) if aggregate == "mean" else heads.min(0)
    np.testing.assert_allclose(record["values"], wanted, atol=1e-5)
