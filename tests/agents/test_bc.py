"""Behaviour cloning, the averaged policy, and the noise its chunks start from."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import bandit, bandit_error, build, config_of, make_batches, named, on_device, policy_gradient, same

from serl_chunk.agents.policies import FlowPolicy
from serl_chunk.agents.spec import AgentSpec, BatchSpec
from serl_chunk.agents.state import Context
from serl_chunk.config.agents import FlowConfig


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


def test_a_network_of_chunks_is_trained_on_them_and_followed_to_them():
    """The loss, the steps of Euler's method, and the end of a path, by hand."""
    flow = FlowConfig(hidden=(8,), steps=3, predicts="chunk")
    policy = FlowPolicy(flow, AgentSpec(4, 2, 3, 3, (), 0.9))
    batch = jax.tree.map(lambda x: x[0], on_device(policy.spec))._replace(bc_weight=jnp.ones((8, 3)))
    context = Context(batch.observations["state"])
    params = policy.init(jax.random.key(0), context.features)
    predicted = lambda x, t: policy.field.apply(  # noqa: E731
        {"params": params}, context.features, x, jnp.broadcast_to(t, 8)
    )
    draws, chunks = policy.draws(jax.random.key(1), batch), batch.actions.reshape(8, 6)
    loss = lambda actions: float(  # noqa: E731
        policy.loss(params, context, actions, batch.bc_weight, jnp.zeros((8, 3)), draws).mean()
    )
    t = draws["t"]
    x = (1 - t)[:, None] * draws["x0"] + t[:, None] * chunks
    error = ((predicted(x, t) - chunks) ** 2).mean()
    assert loss(batch.actions) == pytest.approx(float(error), rel=1e-5)

    far = 20 * batch.actions  # of an arm that was pushed away: no policy commands it
    assert loss(far) == loss(jnp.clip(far, -1, 1))

    x = draws["x0"]
    for at, left in ((0.0, 3), (1 / 3, 2)):
        x = x + (predicted(x, at) - x) / left
    end = predicted(x, 2 / 3).reshape(8, 1, 3, 2)  # what the last step predicts, without noise
    np.testing.assert_allclose(policy.sample(params, context, draws["x0"][:, None]), end, atol=1e-5)


def test_a_network_of_chunks_follows_long_ones_that_one_of_velocities_does_not():
    """A layer with half as many units as a chunk has numbers cannot take the noise out, and need not."""
    errors = {}
    for predicts in ("velocity", "chunk"):
        flow = FlowConfig(hidden=(32,), steps=5, predicts=predicts)
        agent = build(config_of("bc", flow=flow), horizon=32)
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
        errors[predicts] = float(jnp.abs(samples - wanted[0]).mean())
    assert errors["chunk"] < min(0.1, errors["velocity"] / 2), errors


def flow_policy(dim: int, noise_low: float, noise_alone: float = 0.0) -> FlowPolicy:
    """A policy of single actions."""
    flow = FlowConfig(hidden=(4,), noise_low=noise_low, noise_alone=noise_alone)
    return FlowPolicy(flow, AgentSpec(3, dim, 1, 1, (), 0.9))


@pytest.mark.parametrize(("low", "scales"), [(0.2, [0.2, 0.4, 0.6, 0.8, 1.0]), (1.0, [1.0] * 5)])
def test_candidates_start_from_growing_noise(low, scales):
    observation = {"state": jnp.zeros(3)}
    keys = jax.random.split(jax.random.key(0), 300)
    draw = lambda k: flow_policy(4, low).candidate_noise(k, observation, 5, explore=True)  # noqa: E731
    noise = np.asarray(jax.vmap(draw)(keys))
    np.testing.assert_allclose(noise.std((0, 2)), scales, rtol=0.1)


@pytest.mark.parametrize(("low", "alone", "explores", "rests"), [(0.0, 0.5, 0.5, 0.0), (0.7, 0.5, 0.7, 0.7)])
def test_a_candidate_alone_has_noise_of_its_own_where_it_explores(low, alone, explores, rests):
    policy = flow_policy(4, low, noise_alone=alone)
    see = lambda k: {"state": jax.random.normal(k, (3,))}  # noqa: E731

    def spread(count, **how):
        draw = lambda k: policy.candidate_noise(k, see(k), count, **how)  # noqa: E731
        return np.asarray(jax.vmap(draw)(jax.random.split(jax.random.key(0), 400))).std((0, 2))

    np.testing.assert_allclose(spread(1, explore=True), [explores], rtol=0.1)
    np.testing.assert_allclose(spread(1, explore=False), [rests], rtol=0.1)
    np.testing.assert_allclose(spread(2, explore=True), [low, 1.0], rtol=0.1)
    np.testing.assert_allclose(spread(2, explore=True, alone=jnp.asarray(True)), [explores, 1.0], rtol=0.1)
    np.testing.assert_allclose(spread(2, explore=False, alone=jnp.asarray(True)), [rests, 1.0], rtol=0.1)


def test_while_the_critic_has_seen_no_failure_the_one_that_acts_explores_alone():
    config = config_of("acfql", candidates=3)
    agent = build(dataclasses.replace(config, flow=dataclasses.replace(config.flow, noise_low=0.0, noise_alone=0.5)))
    state, observation = agent.init(jax.random.key(0)), {"state": jnp.ones(4)}
    noise = {
        pretrained: np.asarray(
            agent.acting_noise(
                agent.policy_params(state, pretrained=pretrained), jax.random.key(1), observation, explore=True
            )
        )
        for pretrained in (False, True)
    }
    assert not noise[False][0].any()
    assert noise[True][0].any()
    np.testing.assert_array_equal(noise[True][1:], noise[False][1:])


def test_without_exploration_the_noise_depends_on_the_observation_alone():
    def noise(key: int, state: list[float]) -> np.ndarray:
        observation = {"state": jnp.array(state)}
        return np.asarray(flow_policy(3, 0.5).candidate_noise(jax.random.key(key), observation, 2, explore=False))

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
