"""Behaviour cloning, the averaged policy, and the noise its chunks start from."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import bandit, bandit_error, build, config_of, make_batches, named, on_device, policy_gradient, same

from serl_chunk.agents.policies.flow import ALONE, WIDEST, FlowPolicy
from serl_chunk.agents.spec import AgentSpec, BatchSpec
from serl_chunk.agents.state import Context
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.models.flow import linear_share


def test_only_marked_steps_are_cloned():
    config = config_of("bc", flow=FlowConfig(hidden=(32,), steps=4))
    agent = build(config, horizon=2, actions=1)
    state = agent.init(jax.random.key(0))
    untrained = bandit_error(agent, state)
    for i in range(20):
        batch, best = bandit(agent.spec, 20, 64, i)
        shown = np.arange(64) < 16  # a quarter is demonstrated; the rest is noise that must not be imitated
        actions = np.where(shown[:, None, None], best, batch.actions)
        bc = np.broadcast_to(shown[:, None].astype(np.float32), batch.bc_weight.shape)
        state, _ = agent.update_policy(state, {}, jax.device_put(batch._replace(actions=actions, bc_weight=bc)))
    assert bandit_error(agent, state) < min(0.1, untrained / 2)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_policy_that_acts_is_an_average_of_the_newest(decay):
    agent = build(config_of("bc", policy_ema=decay))
    state = agent.init(jax.random.key(0))
    leaf = lambda tree: np.asarray(tree["flow"]["Mlp_0"]["Dense_1"]["bias"])  # noqa: E731
    average = leaf(state.policy)
    step = jax.jit(lambda s, b: agent._policy_steps(s, {}, b, 1, bc_only=True))
    for n in range(4):
        state, _ = step(state, jax.tree.map(lambda x: x[0], on_device(agent.spec, n)))
        keep = min(decay, (1 + n) / (10 + n))
        average = keep * average + (1 - keep) * leaf(state.policy)
        np.testing.assert_allclose(leaf(agent.policy_params(state)["policy"]), average, atol=1e-6)
    assert np.allclose(average, leaf(state.policy), atol=1e-7) == (decay == 0)


def test_the_linear_part_follows_long_chunks_that_a_network_alone_does_not():
    """A layer with half as many units as a chunk has numbers cannot take the noise out, and need not."""
    errors = {}
    for published in (False, True):
        agent = build(config_of("bc", flow=FlowConfig(hidden=(32,), steps=5)), horizon=32)
        agent.net.published = published
        state = agent.init(jax.random.key(0))
        for i in range(30):
            batch = make_batches(agent.spec, size=64, seed=i)
            wanted = 0.2 * np.sin(batch.observations["state"][:, :, None, :2] + 0.1 * np.arange(32)[:, None])
            shown = batch._replace(actions=wanted, bc_weight=np.ones_like(batch.valid))
            state, _ = agent.update_policy(state, {}, jax.device_put(shown))
        noise = jax.random.normal(jax.random.key(1), (64, 1, 64))
        seen = jax.tree.map(lambda x: jnp.asarray(x[0]), batch.observations)
        context = agent.policy_context(state.policy, {}, {}, seen)
        samples = agent.bounded(agent.net.sample(state.policy["flow"], context, noise))[:, 0]
        errors[published] = float(jnp.abs(samples - wanted[0]).mean())
    assert errors[False] < min(0.2, errors[True] / 2), errors  # of the noise, the spread of 0.2 stays


def flow_policy(dim: int, *, spread: float = 0.2, steps: int = 5, published: bool = False) -> FlowPolicy:
    """A policy of single actions."""
    flow = FlowConfig(hidden=(4,), steps=steps, spread=spread)
    return FlowPolicy(flow, AgentSpec(3, dim, 1, 1, (), 0.9), published=published)


@pytest.mark.parametrize("published", [False, True])
def test_candidates_start_from_growing_noise_and_as_published_from_the_same(published):
    observation = {"state": jnp.zeros(3)}
    keys = jax.random.split(jax.random.key(0), 300)
    draw = lambda k: flow_policy(4, published=published).candidate_noise(k, observation, 5, explore=True)  # noqa: E731
    noise = np.asarray(jax.vmap(draw)(keys))
    np.testing.assert_allclose(noise.std((0, 2)), [1.0] * 5 if published else np.linspace(0, WIDEST, 5), rtol=0.1)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_without_a_network_noise_becomes_chunks_of_the_spread(spread):
    """The field k(t) x alone takes N(0, 1) to N(0, s^2): it is the flow of such data."""
    policy, context = flow_policy(4, spread=spread, steps=400), Context(jnp.zeros(3))
    params = jax.tree.map(jnp.zeros_like, policy.init(jax.random.key(0), context.features))
    noise = jax.random.normal(jax.random.key(1), (500, 4))
    chunks = np.asarray(policy.sample(params, context, noise))
    assert chunks.std() == pytest.approx(spread, rel=0.05)
    assert np.corrcoef(chunks.ravel(), np.asarray(noise).ravel())[0, 1] > 0.999


def test_a_published_field_is_the_network_alone():
    context, x, t = Context(jnp.ones((6, 3))), jnp.linspace(-1, 1, 24).reshape(6, 4), jnp.linspace(0, 1, 6)
    for published in (True, False):
        policy = flow_policy(4, published=published)
        params = policy.init(jax.random.key(0), context.features)
        net = policy.field.apply({"params": params}, context.features, x, t)
        velocity = policy.velocity(params, context, x, t, jnp.zeros((6, 1)))
        wanted = net if published else net + linear_share(t, 0.2)[:, None] * x
        np.testing.assert_allclose(velocity, wanted, atol=1e-6)


def test_a_candidate_alone_has_noise_of_its_own_where_it_explores():
    policy = flow_policy(4)
    see = lambda k: {"state": jax.random.normal(k, (3,))}  # noqa: E731

    def spread(count, **how):
        draw = lambda k: policy.candidate_noise(k, see(k), count, **how)  # noqa: E731
        return np.asarray(jax.vmap(draw)(jax.random.split(jax.random.key(0), 400))).std((0, 2))

    np.testing.assert_allclose(spread(1, explore=True), [ALONE], rtol=0.1)
    np.testing.assert_allclose(spread(1, explore=False), [0.0], rtol=0.1)
    np.testing.assert_allclose(spread(2, explore=True), [0.0, WIDEST], rtol=0.1)
    np.testing.assert_allclose(spread(2, explore=True, alone=jnp.asarray(True)), [ALONE, WIDEST], rtol=0.1)
    np.testing.assert_allclose(spread(2, explore=False, alone=jnp.asarray(True)), [0.0, WIDEST], rtol=0.1)


def test_the_one_that_acts_alone_explores():
    agent = build(config_of("acfql", candidates=3))
    params, observation = agent.policy_params(agent.init(jax.random.key(0))), {"state": jnp.ones(4)}
    noise = {
        alone: np.asarray(agent.acting_noise(params, jax.random.key(1), observation, explore=True, alone=alone))
        for alone in (False, True)
    }
    assert not noise[False][0].any()
    assert noise[True][0].any()
    np.testing.assert_array_equal(noise[True][1:], noise[False][1:])


def test_without_exploration_the_noise_depends_on_the_observation_alone():
    def noise(key: int, state: list[float]) -> np.ndarray:
        observation = {"state": jnp.array(state)}
        return np.asarray(flow_policy(3).candidate_noise(jax.random.key(key), observation, 2, explore=False))

    np.testing.assert_array_equal(noise(0, [1.0, 2.0]), noise(1, [1.0, 2.0]))
    assert not np.array_equal(noise(0, [1.0, 2.0]), noise(0, [1.0, 2.001]))
    assert not np.array_equal(noise(0, [1.0, 2.0]), noise(0, [2.0, 1.0]))


def test_a_gaussian_clone_is_fitted_by_likelihood_and_acts_with_its_mode():
    agent = build(config_of("bc-gaussian", hidden=(32,)), horizon=2, actions=1)
    state = agent.init(jax.random.key(0))
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    dist = agent.net.distribution(state.policy["net"], Context(batch.observations["state"]))
    shown = np.asarray(dist.log_prob(batch.actions.reshape(8, 2))).reshape(8, 2, 1)[np.asarray(batch.bc_weight) > 0]
    _, metrics = policy_gradient(agent, state, batch, {})
    assert float(metrics["value"]) == pytest.approx(-shown.mean(), abs=1e-5)
    for i in range(20):
        batch, best = bandit(agent.spec, 20, 64, i)
        state, _ = agent.update_policy(state, {}, jax.device_put(batch._replace(actions=best.astype(np.float32))))
    assert bandit_error(agent, state) < 0.1
    observation = {"state": np.full(4, 0.3, np.float32)}
    params = agent.policy_params(state)
    mean = agent.sample(params, observation, jax.random.key(0), explore=False)[0]
    mode = agent.net.distribution(state.policy["net"], Context(jnp.asarray(observation["state"]))).mode()
    np.testing.assert_allclose(mean.reshape(-1), mode, atol=1e-6)
    assert not np.allclose(agent.sample(params, observation, jax.random.key(0), explore=True)[0], mean, atol=1e-3)


@pytest.mark.parametrize("policy", [pytest.param("bc", marks=pytest.mark.slow), "bc-gaussian"])
def test_imitation_trains_the_image_encoder(policy):
    """Every layer of it, in pretraining and online, and what is not imitated leaves it alone."""
    agent = build(config_of(f"{policy}-image"), horizon=2, actions=1)
    shown = np.ones((2, 8, 2), np.float32)
    for update in (agent.update_policy, agent.update):
        for weight, moves in ((shown, True), (0 * shown, False)):
            state = agent.init(jax.random.key(0))
            before = jax.tree.map(np.array, state.policy["encoder"])
            batches = on_device(agent.spec, bc_weight=weight, valid=shown)
            state, _ = update(state, {}, named(agent, batches) if update is agent.update else batches)
            after = jax.tree.map(np.array, state.policy["encoder"])
            changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
            assert set(jax.tree.leaves(changed)) == {moves}, changed
            acting = agent.policy_params(state)["policy"]["encoder"]  # what travels is the trained one
            assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), after, acting))


def test_no_batch_is_asked_for_that_nothing_is_learnt_from():
    assert build(config_of("bc")).wants() == {"policy": BatchSpec(each=False, next_observations=False)}
    assert build(config_of("acfql")).wants() == {"critic": BatchSpec()}


def test_a_batch_of_the_policys_own_is_asked_for_and_trained_on():
    config = config_of("acfql")
    agent = type(build(config))(config, dataclasses.replace(build(config).spec, policy_batch=16))
    assert agent.wants()["policy"] == BatchSpec(16, each=False, next_observations=False)
    critic, state = on_device(agent.spec), agent.init(jax.random.key(0))
    larger = jax.device_put(make_batches(agent.spec, updates=1, size=16, seed=4)._replace(next_observations={}))
    shown = jax.tree.map(jnp.copy, state)
    alone, _ = agent.update(shown, {}, {"critic": critic})
    apart, metrics = agent.update(state, {}, {"critic": critic, "policy": larger})
    # Two programs, so equal to rounding.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), alone.critic, apart.critic)
    assert not same(alone.policy, apart.policy)
    assert np.isfinite(metrics["actor/bc_loss"])
