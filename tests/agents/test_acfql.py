"""Q-chunking and its decoupled form: losses by hand, what teaches what, the critic that acts, and that it learns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import (
    DISCOUNT,
    build,
    config_of,
    critic_gradient,
    drawn,
    fresh,
    one_batch,
    policy_gradient,
    same,
    seen_by,
    shaken,
)
from plain_networks import heads, mlp, sigmoid


def test_the_target_is_the_return_and_the_discounted_value_of_the_successor():
    agent, state = fresh("decoupled-lengths")
    batch = one_batch(agent)
    value = sigmoid(mlp(state.critic["v"], batch.next_observations["state"], norm="before")[:, 0])
    powers = DISCOUNT ** np.arange(agent.spec.critic_steps)
    wanted = (batch.rewards @ powers + batch.discount_n * batch.mask * value).mean()
    metrics = critic_gradient(agent, state, batch)[1]
    assert float(metrics["critic/target_qs"]) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("variant", ["acfql", "decoupled-lengths"])
def test_values_of_what_a_human_did_are_told_from_others(variant):
    """Of windows whose scored steps are all a human's, without what a policy of its own or one arm's had a part in."""
    agent, state = fresh(variant)
    batch = one_batch(agent)
    weight = batch.valid.copy()
    weight[4], weight[5, 1:], weight[6] = 0.2, 0, 0
    batch = batch._replace(bc_weight=weight, bc_dims=np.ones_like(batch.actions))
    batch.bc_dims[7, 0, 1] = 0
    chunks = batch.actions[:, : agent.critic.steps].reshape(8, -1)
    q = sigmoid(heads(state.critic["q"], np.concatenate([batch.observations["state"], chunks], -1))).mean(0)
    metrics = critic_gradient(agent, state, batch)[1]
    assert float(metrics["critic/human_share"]) == 0.5
    assert float(metrics["critic/q_human"]) == pytest.approx(q[:4].mean(), abs=1e-6)


def test_the_distilled_loss_is_its_equation():
    """Head by head and length by length: the teacher is the online critic's head of the same number."""
    agent, state = fresh("decoupled-lengths")
    batch = one_batch(agent, weight=np.array([0.0, 2.0] * 4, np.float32))
    observation, wanted = batch.observations["state"], []
    teacher = sigmoid(heads(state.critic["q"], observation, batch.actions.reshape(8, -1)))
    for m in (1, 2):
        mask = np.tile(np.arange(2) < m, (8, 1))
        shown = (batch.actions[:, :2] * mask[..., None]).reshape(8, -1)
        output = heads(state.critic["prefix"], observation, shown, mask)
        entropy = np.logaddexp(0.0, output) - teacher * output
        wanted.append((np.where(teacher < sigmoid(output), 0.2, 0.8) * batch.weight * entropy).mean())
    metrics = critic_gradient(agent, state, batch)[1]
    assert float(metrics["critic/prefix_loss"]) == pytest.approx(np.mean(wanted), abs=1e-6)


def test_what_teaches_is_a_constant_and_what_is_taught_does_not_teach_it():
    agent, state = fresh("decoupled-lengths")
    batch = one_batch(agent)
    moved = lambda batch=batch, **trees: critic_gradient(agent, state.replace(**trees), batch)[0]  # noqa: E731
    of = lambda tree, name: {**tree, name: shaken(tree[name])}  # noqa: E731
    plain = moved()
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(plain["prefix"]))
    by_prefix, by_long = (moved(critic=of(state.critic, name)) for name in ("prefix", "q"))
    assert same(plain["q"], by_prefix["q"])  # the long critic's gradient does not go through the prefix critic
    assert not same(plain["prefix"], by_prefix["prefix"])
    assert not same(plain["prefix"], by_long["prefix"])  # by the online heads
    by_target = moved(target=of(state.target, "prefix"))  # which V follows
    assert not same(plain["v"], by_target["v"])
    assert same((plain["q"], plain["prefix"]), (by_target["q"], by_target["prefix"]))
    ended = (batch.mask == 0)[:, None]
    after = batch.next_observations["state"]
    beyond = batch._replace(next_observations={"state": np.where(ended, np.float32(100), after)})
    assert same(plain, moved(beyond))  # nothing follows a termination
    assert not same(plain, moved(beyond._replace(mask=np.ones_like(batch.mask))))
    # Actions behind it count as the sampler filled them in.
    filled = np.where(batch.valid[..., None] > 0, batch.actions, np.float32(0.5))
    assert not same(plain, moved(batch._replace(actions=filled)))
    # V enters Q's target as a number: another successor changes Q's gradient and leaves V's as it was.
    later = moved(batch._replace(next_observations=shaken(batch.next_observations, 1)))
    assert same(plain["v"], later["v"])
    assert not same(plain["q"], later["q"])


def test_the_prefix_critic_alone_has_a_target_travels_and_chooses():
    agent, state = fresh("decoupled-lengths", replan_spread=0.0)  # heads always differ by more
    assert set(state.target) == {"encoder", "prefix"}
    params, observation = agent.policy_params(state), seen_by(agent)
    assert same(params["critic"], {k: state.target[k] for k in ("encoder", "prefix")})
    for alone, steps in ((False, 1), (True, 2)):  # where the critic has no say, nothing is planned anew on its advice
        chunk, record = agent.sample(params, observation, jax.random.key(1), explore=True, alone=alone)
        value = sigmoid(heads(params["critic"]["prefix"], observation["state"], chunk[:2].reshape(-1), np.ones(2)))
        assert float(record["q"]) == pytest.approx(value.mean(), abs=1e-6)
        assert int(record["steps"]) == steps


def test_the_policy_is_taught_its_own_actions_alone():
    """What the batch holds behind the policy's horizon moves nothing in it."""
    agent, state = fresh("decoupled-lengths")
    batch = one_batch(agent)
    later, own = ((np.arange(5) >= 3).astype(np.float32), (np.arange(5) == 2).astype(np.float32))
    step = lambda b: policy_gradient(agent, state, b)[0]  # noqa: E731
    behind = batch._replace(
        actions=batch.actions + 0.5 * later[:, None],
        bc_weight=batch.bc_weight * (1 - later),
        valid=batch.valid * (1 - later),
    )
    assert same(step(batch), step(behind))
    assert not same(step(batch), step(batch._replace(actions=batch.actions + 0.5 * own[:, None])))


def test_a_decision_asks_to_be_followed_where_the_heads_disagree_about_the_rest():
    """An offset of a whole head, its opinion of the state, changes nothing."""
    agent = build(config_of("decoupled-lengths"), critic_steps=5, prefix_steps=2)
    params = agent.policy_params(drawn(agent))
    chunk = np.random.default_rng(0).uniform(-1, 1, (3, 2)).astype(np.float32)
    values = []
    for m in (1, 2):
        shown = np.where(np.arange(2)[:, None] < m, chunk[:2], 0).ravel()
        values.append(sigmoid(heads(params["critic"]["prefix"], np.ones(4), shown, np.arange(2) < m)))
    wanted = np.std(values[1] - values[0])
    assert wanted > 1e-4
    for threshold, steps in ((wanted * 0.9, 1), (wanted * 1.1, 2)):
        agent.short_critic.replan_spread = threshold
        record = jax.jit(lambda p: agent.short_critic.plan(p, jnp.ones(4), chunk))(params["critic"])
        np.testing.assert_allclose(record["spread"], [0, wanted], atol=1e-6)
        assert (int(record["steps"]), record["steps"].dtype) == (steps, jnp.int32)


def test_steps_end_at_the_first_length_that_is_not_agreed_on():
    """A later length on which the heads agree again does not count."""
    config = config_of("decoupled", prefix_lengths=4, replan_spread=0.2)
    agent = build(config, horizon=4, critic_steps=5, prefix_steps=4)
    opinions = np.zeros((2, 4), np.float32)  # of the four lengths
    agent.short_critic.values = lambda params, features, shown: jnp.asarray(opinions)
    for opinions[1], steps in (
        ([0, 0, 0, 0], 4), ([0, 0, 1, 0], 2), ([0, 1, 0, 0], 1), ([0.9] * 4, 4), ([0, 0.3, 0.3, 1], 3),
    ):  # fmt: skip
        heard, unheard = (
            agent.short_critic.plan({}, jnp.ones(4), jnp.zeros((4, 2)), alone=alone) for alone in (False, True)
        )
        assert (int(heard["steps"]), int(unheard["steps"])) == (steps, 4)
        np.testing.assert_array_equal(unheard["spread"], heard["spread"])
