"""The published agents by hand, and the order of updates. Recorded numbers of that code: test_parity_qc.py."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import (
    close,
    critic_gradient,
    drawn,
    fresh,
    made,
    make_batches,
    named,
    one_batch,
    policy_gradient,
    same,
    seen_by,
    shaken,
)
from plain_networks import gelu, heads, log_density, mlp, tanh_normal

from serl_chunk.agents.published_qc import EDGE

VARIANTS = ("published", "published-distill", "published-gaussian")
POWERS = np.array([1, 0.9, 0.81])
BY_HAND = pytest.mark.parametrize(
    ("variant", "aggregate"), [*((v, "mean") for v in VARIANTS), ("published", "min"), ("published-gaussian", "min")]
)


def q_values(variant: str, critic: Any, seen: np.ndarray, flat: np.ndarray) -> np.ndarray:
    layers = {} if "gaussian" in variant else {"norm": "after", "activation": gelu}
    return heads(critic["q"], np.broadcast_to(seen, (*flat.shape[:-1], 4)), flat, **layers)


def velocity(state: Any, seen: np.ndarray, x: np.ndarray, t: np.ndarray) -> np.ndarray:
    seen = np.broadcast_to(seen, (*x.shape[:-1], 4))
    return mlp(state.policy["flow"]["Mlp_0"], seen, x, np.broadcast_to(t, (*x.shape[:-1], 1)), activation=gelu)


def integrated(state: Any, seen: np.ndarray, x: np.ndarray) -> np.ndarray:
    for t in (0.0, 0.5):
        x = x + 0.5 * velocity(state, seen, x, np.array([t]))
    return x.clip(-1, 1)


def one_step(state: Any, seen: np.ndarray, noise: np.ndarray) -> np.ndarray:
    return mlp(state.policy["onestep"]["net"], seen, noise, activation=gelu)


@BY_HAND
def test_the_target_and_the_critics_loss_by_hand(variant, aggregate):
    agent, state = fresh(variant, q_agg=aggregate)
    batch = one_batch(agent, weight=np.array([1.0] * 6 + [0.0] * 2, np.float32))
    fold = {"min": np.min, "mean": np.mean}[aggregate]
    draws = agent.critic_draws(jax.random.key(1), batch)
    later, noise = batch.next_observations["state"], np.asarray(draws["next"])
    assert noise.shape == (8, 3 if variant == "published" else 1, 6)
    if variant == "published":
        samples = integrated(state, later[:, None], noise)
        best = np.argmax(fold(q_values(variant, state.critic, later[:, None], samples), axis=0), axis=1)
        chosen = samples[np.arange(8), best]
    elif variant == "published-distill":
        chosen = one_step(state, later, noise[:, 0]).clip(-1, 1)
    else:
        mean, std = tanh_normal(state.policy["net"], later, norm="none")
        chosen = np.tanh(mean + std * noise[:, 0])
    value = fold(q_values(variant, state.target, later, chosen), axis=0)
    y = batch.rewards @ POWERS + batch.discount_n * batch.mask * value
    q = q_values(variant, state.critic, batch.observations["state"], batch.actions.reshape(8, 6))
    metrics = critic_gradient(agent, state, batch, draws)[1]
    assert float(metrics["critic/target_qs"]) == pytest.approx(y.mean(), abs=1e-5)
    assert float(metrics["value"]) == pytest.approx((batch.weight * (q - y) ** 2).mean(), rel=1e-4)


@pytest.mark.parametrize("variant", ["published", "published-distill"])
def test_the_flows_loss_by_hand(variant):
    """Steps beyond an episode's end count in the divisor alone."""
    agent, state = fresh(variant)
    batch = one_batch(agent)
    draws = jax.tree.map(np.asarray, agent.policy_draws(jax.random.key(1), batch))
    seen, flat, t = batch.observations["state"], batch.actions.reshape(8, 6), draws["t"][:, None]
    error = velocity(state, seen, (1 - t) * draws["x0"] + t * flat, t) - (flat - draws["x0"])
    expected = (error.reshape(8, 3, 2) ** 2 * batch.valid[..., None]).mean()
    metrics = policy_gradient(agent, state, batch, draws)[1]
    assert float(metrics["actor/bc_loss"]) == pytest.approx(expected, rel=1e-4)
    if variant == "published-distill":
        student, taught = one_step(state, seen, draws["distill"]), integrated(state, seen, draws["distill"])
        q = q_values(variant, state.critic, seen, student.clip(-1, 1)).mean()
        expected += 3.0 * ((student - taught) ** 2).mean() - q
    assert float(metrics["value"]) == pytest.approx(expected, rel=1e-4)


def test_the_gaussians_loss_by_hand():
    """Every row is imitated; densities are of whole chunks; the critics' mean is climbed whatever `q_agg` is."""
    agent, state = fresh("published-gaussian", q_agg="min")
    batch = one_batch(agent, bc_weight=np.zeros((8, 3), np.float32))
    draws, seen = agent.policy_draws(jax.random.key(1), batch), batch.observations["state"]
    mean, std = tanh_normal(state.policy["net"], seen, norm="none")
    u = mean + std * np.asarray(draws["pi"])
    log_prob = log_density(mean, std, u).sum(-1).mean()
    taught = log_density(mean, std, np.arctanh(batch.actions.reshape(8, 6))).sum(-1).mean()
    q = q_values("gaussian", state.critic, seen, np.tanh(u)).mean()
    metrics = policy_gradient(agent, state, batch, draws)[1]
    assert float(metrics["value"]) == pytest.approx(np.exp(-2) * log_prob - q - 0.5 * taught, rel=1e-4)
    alpha_loss = agent.temperature_loss(state.temperature, metrics["actor/entropy"])
    assert float(alpha_loss) == pytest.approx(np.exp(-2) * (-log_prob + 0.5 * 6), rel=1e-4)
    at_edge = batch._replace(actions=np.sign(batch.actions))
    inside = batch._replace(actions=np.sign(batch.actions) * np.float32(1 - EDGE))
    limits = [policy_gradient(agent, state, b, draws) for b in (at_edge, inside)]
    assert same(*limits)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(limits[0]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_imitation_alone_needs_no_critic_and_every_number_is_imitated(variant):
    agent, state = fresh(variant)
    batch = one_batch(agent)
    marked = batch._replace(bc_dims=np.zeros_like(batch.actions))
    one, other, unmarked = (
        policy_gradient(agent, s, b, bc_only=True)[0]
        for s, b in ((state, batch), (state.replace(critic=shaken(state.critic)), batch), (state, marked))
    )
    assert same(one, other)
    assert close(one, unmarked)
    trained = {jax.tree_util.keystr(p)[:6] for p, g in jax.tree_util.tree_leaves_with_path(one) if np.any(g)}
    assert trained == {"published": {"['flow"}, "published-distill": {"['flow", "['ones"}}.get(variant, {"['net'"})


def test_the_teacher_is_not_drawn_towards_its_pupil():
    (agent, state), alone = fresh("published-distill"), made("published-distill", alpha=0.0)
    batch = one_batch(agent)
    plain, undistilled = (policy_gradient(a, state, batch)[0] for a in (agent, alone))
    other = policy_gradient(agent, state.replace(critic=shaken(state.critic)), batch)[0]
    for found in (undistilled, other):
        assert close(found["flow"], plain["flow"])
        assert not close(found["onestep"], plain["onestep"])


@BY_HAND
def test_of_the_samples_that_act_the_critics_choose(variant, aggregate):
    agent, state = fresh(variant, q_agg=aggregate)
    seen = seen_by(agent)["state"]
    params = agent.policy_params(state)  # the critics choose from the first step on: test_agents.py
    noise = np.asarray(agent.acting_noise(params, jax.random.key(3), {"state": jnp.asarray(seen)}, explore=True))
    if variant == "published":
        samples = integrated(state, seen, noise)
    elif variant == "published-distill":
        samples = one_step(state, seen[None], noise).clip(-1, 1)
        assert set(params["policy"]) == {"onestep"}  # the teacher does not travel
    else:
        mean, std = tanh_normal(state.policy["net"], seen, norm="none")
        samples = np.tanh(mean + std * noise)
    heads = q_values(variant, state.critic, seen, samples)
    q = {"min": np.min, "mean": np.mean}[aggregate](heads, axis=0)
    assert q.shape == (3 if variant == "published" else 1,)
    chunk, record = agent.sample(params, {"state": seen}, jax.random.key(3), explore=True)
    np.testing.assert_allclose(record["values"], q, atol=1e-5)
    np.testing.assert_allclose(record["q_std"], heads[:, np.argmax(q)].std(), atol=1e-5)
    np.testing.assert_allclose(chunk.reshape(-1), samples[np.argmax(q)], atol=1e-5)


def test_settings_shape_the_networks():
    def shapes(variant, **changes):
        state = jax.eval_shape(made(variant, **changes).init, jax.random.key(0))
        norms = tuple("LayerNorm" in str(jax.tree.structure(tree)) for tree in (state.critic, state.policy))
        flow = state.policy.get("flow")
        return norms, flow and flow["Mlp_0"]["Dense_0"]["kernel"].shape[0] - 4 - 6

    assert shapes("published") == ((True, False), 1)
    assert shapes("published", use_fourier_features=True, fourier_feature_dim=8)[1] == 8
    plain, normed = ({"layer_norm": on, "actor_layer_norm": on} for on in (False, True))
    for variant in ("published", "published-distill"):
        assert [shapes(variant, **on)[0] for on in (plain, normed)] == [(False, False), (True, True)]
    normed.pop("actor_layer_norm")
    assert shapes("published-gaussian", **normed)[0] == (True, False)
    assert shapes("published-gaussian", layer_norm=False)[0] == (False, False)


@pytest.mark.parametrize("variant", ["published-distill", "published-gaussian"])
def test_together_each_gradient_is_taken_at_the_parameters_before_the_step(variant):
    agent, state = fresh(variant, lr=0.1)
    batch = one_batch(agent)
    draws = agent.critic_draws(jax.random.key(1), batch), agent.policy_draws(jax.random.key(2), batch)
    step = jax.jit(lambda s, **d: agent.step(s, {}, batch, d)[0])
    joint = step(state, critic=draws[0], policy=draws[1])
    critic_alone, policy_alone = step(state, critic=draws[0]), step(state, policy=draws[1])
    for name in ("critic", "critic_opt", "target", "critic_updates"):
        assert close(getattr(joint, name), getattr(critic_alone, name)), name
    for name in ("policy", "policy_opt", "policy_average", "temperature", "policy_updates"):
        assert close(getattr(joint, name), getattr(policy_alone, name)), name
    # Against the new critic it would be another step.
    assert not close(joint.policy, step(critic_alone, policy=draws[1]).policy)


@pytest.mark.parametrize("variant", ["acfql", "published"])
def test_the_target_moves_towards_the_critic_after_the_step_and_as_published_before_it(variant):
    agent, state = fresh(variant)
    after = agent._apply_critic_gradient(state, jax.tree.map(np.ones_like, state.critic))
    followed = (state if variant == "published" else after).critic
    assert close(after.target["q"], jax.tree.map(lambda c, t: 0.1 * c + 0.9 * t, followed["q"], state.target["q"]))
    assert not close(after.critic["q"], state.critic["q"])


@pytest.mark.parametrize("variant", ["acfql", "acrlpd", "published-gaussian"])
def test_a_row_of_no_weight_teaches_the_critic_nothing_and_counts_in_the_divisor(variant):
    agent, state = fresh(variant)
    batch, half = one_batch(agent), np.array([1.0] * 4 + [0.0] * 4, np.float32)
    draws = agent.critic_draws(jax.random.key(1), batch)
    twice = lambda x: np.concatenate([x[:4], x[:4]])  # noqa: E731
    same_draws = {k: v if k == "heads" else twice(v) for k, v in draws.items()}
    weighted = batch._replace(weight=half)
    spoiled = weighted._replace(rewards=batch.rewards + 9 * (1 - half)[:, None], mask=batch.mask * half)
    plain, other = (critic_gradient(agent, state, b, draws)[0] for b in (weighted, spoiled))
    alone = critic_gradient(agent, state, jax.tree.map(twice, batch), same_draws)[0]
    assert close(plain, other)
    assert close(plain, jax.tree.map(lambda g: g / 2, alone))


@pytest.mark.parametrize("variant", ["acfql", "acrlpd", "published-distill"])
def test_returns_of_more_steps_than_the_chunk(variant):
    """n-step returns: the batch brings R rewards and the discount of after them."""
    agent, state = fresh(variant)
    rewards = np.arange(40, dtype=np.float32).reshape(8, 5) / 40
    batch = one_batch(agent, rewards=rewards, mask=np.zeros(8, np.float32))
    target = critic_gradient(agent, state, batch)[1]["critic/target_qs"]
    assert float(target) == pytest.approx((rewards @ 0.9 ** np.arange(5)).mean(), abs=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the compiler of other devices places copies otherwise")
@pytest.mark.parametrize("variant", ["published-distill", "published"])
@pytest.mark.slow
def test_no_network_is_copied_between_updates(variant):
    """By default the compiler copies each parameter that one update both reads and replaces."""
    agent = made(variant, value_hidden_dims=(44, 44), actor_hidden_dims=(44, 44))
    compiled = agent.update.lower(drawn(agent), {}, named(agent, make_batches(agent.spec))).compile()
    updates = [part for part in compiled.as_text().split("\n\n") if not part.startswith("ENTRY") and "44,44" in part]
    assert updates
    assert not [line for part in updates for line in part.splitlines() if re.search(r"\[(2,)?44,44\]\S* copy\(", line)]
