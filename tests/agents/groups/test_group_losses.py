"""Numbers of the rules' losses and of credit, worked out by hand; and what holds for any outcomes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serl_chunk.agents.groups.advantages import FirstValue, RunningMean, decision_weights, leave_one_out
from serl_chunk.agents.groups.losses import compute_flow_ipo_weights, flow_ipo_loss, ppo_loss
from serl_chunk.agents.groups.rows import Episodes, minibatches, uncredited

outcomes = st.lists(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 9)), min_size=2, max_size=8), min_size=1, max_size=5
)


@settings(max_examples=50, deadline=None)
@given(outcomes)
def test_the_advantages_of_a_group_sum_to_nothing(groups):
    rewards, lengths = (np.array([e[i] for g in groups for e in g]) for i in (0, 1))
    number = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
    episodes = Episodes(rewards.astype(np.float32), number, lengths)
    advantage = leave_one_out(episodes)
    np.testing.assert_allclose(np.bincount(number, advantage), 0, atol=1e-5)
    weighted = decision_weights(episodes, "episode") * advantage[episodes.of_rows]
    np.testing.assert_allclose(np.bincount(number[episodes.of_rows], weighted), 0, atol=1e-5)
    assert (decision_weights(episodes, "decision") == 1).all()


def test_a_ratio_is_clipped_where_it_went_far_enough():
    ratio = np.array([[1.5, 0.5], [1.5, 0.5], [1.1, 9.0]], np.float32)
    advantage, weight = np.array([2.0, -2.0, 1.0], np.float32), np.array([[1, 1], [1, 1], [1, 0]], np.float32)
    found = ppo_loss(jnp.log(ratio) + 3, jnp.full((3, 2), 3.0), advantage, weight, 0.2)
    by_hand = [-2 * 1.2, -2 * 0.5, 2 * 1.5, 2 * 0.8, -1.1]
    assert float(found.terms[0].mean()) == pytest.approx(np.mean(by_hand), abs=1e-6)
    metrics = {name.removeprefix("actor/"): float(value.mean()) for name, value in found.metrics.items()}
    assert metrics["clip_fraction"] == pytest.approx(4 / 5)
    assert metrics["ratio"] == pytest.approx((2 * 1.5 + 2 * 0.5 + 1.1) / 5)
    kl = np.array([1.5, 0.5, 1.5, 0.5, 1.1])
    assert metrics["approx_kl"] == pytest.approx(np.mean(kl - 1 - np.log(kl)), abs=1e-6)


def test_weights_by_the_deviation_within_an_episode():
    # A success of deviations 1, 2, 3 and a failure of 0, 4: means 2 and 2, deviations (2/3)^0.5 and 2.
    episodes = Episodes(np.array([1, 0], np.float32), np.zeros(2), np.array([3, 2]))
    found = compute_flow_ipo_weights(np.array([1, 2, 3, 0, 4], np.float32), episodes, 2.0)
    advantage = np.array([-(1.5**0.5), 0, 1.5**0.5, 1, -1])
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-2 * advantage)), atol=2e-3)
    # A partial outcome counts as that much of one.
    halves = compute_flow_ipo_weights(
        np.array([1, 2, 3, 0, 4], np.float32), episodes._replace(reward=np.full(2, 0.5)), 2
    )
    np.testing.assert_allclose(halves, 0.5)
    rounding = np.random.default_rng(0).uniform(0, 1e-5, 5)
    np.testing.assert_allclose(compute_flow_ipo_weights(rounding, episodes, 2.0), 0.5, atol=0.01)


def test_a_velocity_is_drawn_between_the_samples_and_the_references():
    velocity, weight = np.zeros((2, 2, 1), np.float32), np.array([[1, 1], [1, 0]], np.float32)
    straight, reference = velocity + 2, velocity - 4
    target = np.array([0.5, 0.25], np.float32)
    loss = flow_ipo_loss(velocity, reference, straight, target, weight)
    assert float(loss.terms[0].mean()) == pytest.approx((1 + 1 + 2.5**2) / 3)
    assert float(loss.metrics["actor/velocity_mse"].mean()) == pytest.approx(4)
    of_reference = jax.grad(lambda r: flow_ipo_loss(velocity, r, straight, target, weight).terms[0].mean())(reference)
    assert not of_reference.any()


def test_a_running_mean_is_of_earlier_iterations():
    mean, critic, opt, features = RunningMean(), *RunningMean().init(jax.random.key(0), jnp.zeros((1, 2))), np.zeros(0)
    critic, opt, advantage = mean.used(critic, opt, features, np.array([1, 0, 0, 0], np.float32))
    np.testing.assert_allclose(advantage, [0.75, -0.25, -0.25, -0.25])
    critic, opt, advantage = mean.used(critic, opt, features, np.array([1, 1], np.float32))
    np.testing.assert_allclose(advantage, 0.75)
    _, _, advantage = mean.used(critic, opt, features, np.array([0], np.float32))
    np.testing.assert_allclose(advantage, -(0.5 * 0.5 + 2) / (0.5 * 0.5 * 4 + 2 + 0.0) * 1.0, atol=0.2)


def test_a_value_is_used_before_it_learns_what_it_is_used_on():
    value, rng = FirstValue(), np.random.default_rng(0)
    features = rng.normal(size=(64, 4)).astype(np.float32)
    reward = (features[:60, 0] > 0).astype(np.float32)
    critic, opt = jax.jit(value.init)(jax.random.key(0), features)
    found = []
    for _ in range(5):
        critic, opt, advantage = value.used(critic, opt, features, reward)
        found.append(float((advantage**2).mean()))
    assert advantage.shape == (60,)
    assert found[0] > 0.2 > 0.05 > found[-1]


def test_a_pass_has_every_row_once_and_fills_up_with_rows_that_count_nothing():
    rows = uncredited({"state": np.arange(10.0)[:, None]}, {}, np.ones((10, 3), np.float32))
    rows = rows._replace(weight=np.ones(10, np.float32))
    blocks = list(minibatches(np.random.default_rng(0), rows, 4))
    assert [float(block.weight.sum()) for block in blocks] == [4, 3, 3]
    assert all(len(block.weight) == len(block.executed) == 4 for block in blocks)
    shown = np.concatenate([block.observations["state"][block.weight > 0, 0] for block in blocks])
    assert sorted(shown) == list(range(10))
