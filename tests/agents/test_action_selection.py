"""Chunks that climb the critic: the climb by itself, in decisions, and what the policy learns from it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import bandit, build, config_of, critic, make_batches, marked_numbers, on_device, one_batch, same

from serl_chunk.agents.action_selection import Score, critic_score, gradient_ascent, improve
from serl_chunk.config.agents import FlowConfig, ImproveConfig

PEAK = 0.5


def hill(chunks):
    """Both the mean and the rank fall with the distance to a chunk of PEAK."""
    value = -jnp.sum((chunks - PEAK) ** 2, axis=(-2, -1))
    return Score(value, value)


def starts(count=4, horizon=3, actions=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).uniform(-1, 1, (count, horizon, actions)), jnp.float32)


def test_a_long_climb_reaches_the_top():
    end, rank = gradient_ascent(hill, starts(), jnp.ones((4, 3)), steps=400, rate=0.01, radius=2.0)
    np.testing.assert_allclose(end, np.full(end.shape, PEAK), atol=0.02)
    np.testing.assert_allclose(rank, np.zeros(4), atol=1e-2)


def test_a_step_is_as_long_as_the_rate_whatever_the_critics_scale():
    start = starts()
    ends = []
    for scale in (1e-6, 1.0, 1e6):

        def scaled(x, scale=scale):
            return Score(scale * hill(x).mean, scale * hill(x).rank)  # fmt: skip

        end, _ = gradient_ascent(scaled, start, jnp.ones((4, 3)), steps=1, rate=0.05, radius=2.0)
        ends.append(np.asarray(end))
        moved = np.abs(ends[-1] - start).max((1, 2))
        np.testing.assert_allclose(moved, np.full(4, 0.05), atol=1e-5)
    np.testing.assert_allclose(ends[0], ends[2], atol=1e-5)


def test_no_action_leaves_the_radius_or_the_unit_box():
    uphill = lambda x: Score(jnp.sum(x, axis=(-2, -1)), jnp.sum(x, axis=(-2, -1)))  # noqa: E731
    start = starts().at[0, 0, 0].set(0.98)
    end, _ = gradient_ascent(uphill, start, jnp.ones((4, 3)), steps=20, rate=0.05, radius=0.1)
    np.testing.assert_allclose(end, np.minimum(np.asarray(start) + 0.1, 1.0), atol=1e-6)


def test_committed_actions_do_not_move_and_the_others_do():
    free = jnp.broadcast_to(jnp.array([0.0, 1.0, 1.0]), (4, 3))
    start = starts().at[:, 0].set(1.7)  # outside the box: a human's action may be
    end, _ = gradient_ascent(hill, start, free, steps=5, rate=0.05, radius=0.2)
    np.testing.assert_array_equal(end[:, 0], start[:, 0])
    assert (np.abs(end[:, 1:] - start[:, 1:]).max((1, 2)) > 0.1).all()


def test_no_rank_gets_worse_where_steps_overshoot_or_the_heads_disagree():
    start = starts(16)
    before = hill(start).rank
    end, rank = gradient_ascent(hill, start, jnp.ones((16, 3)), steps=7, rate=0.9, radius=2.0)
    assert (rank >= before).all()
    np.testing.assert_allclose(hill(end).rank, rank, atol=1e-6)
    # the mean leads away from what ranks
    against = lambda x: Score(-hill(x).mean, hill(x).rank)  # noqa: E731
    end, _ = gradient_ascent(against, start, jnp.ones((16, 3)), steps=5, rate=0.05, radius=2.0)
    np.testing.assert_array_equal(end, start)


def test_a_flat_critic_moves_nothing():
    end, _ = gradient_ascent(lambda x: Score(0 * hill(x).mean, 0 * hill(x).rank), starts(), jnp.ones((4, 3)),
                   steps=3, rate=0.1, radius=1.0)  # fmt: skip
    np.testing.assert_array_equal(end, starts())


def test_only_the_best_candidates_climb_and_each_row_keeps_its_own():
    chunks = jnp.stack([starts(6, seed=s) for s in range(3)])  # [B, N, H, A]
    values = hill(chunks).rank
    far = ImproveConfig(steps=300, top=6, rate=0.02, radius=2.0)
    near = dataclasses.replace(far, top=2, radius=0.05)
    reached, rank = improve(hill, chunks, values, jnp.ones((3, 3)), far)
    np.testing.assert_allclose(reached, np.full((3, 3, 2), PEAK), atol=0.03)
    reached, rank = improve(hill, chunks, values, jnp.ones((3, 3)), near)
    two = np.argsort(-np.asarray(values), axis=1)[:, :2]
    for b in range(3):
        distance = np.abs(np.asarray(chunks[b]) - np.asarray(reached[b])).max((1, 2))
        assert distance.argmin() in two[b]
        assert distance.min() <= 0.05 + 1e-6
        assert rank[b] > values[b].max()


def test_more_asked_to_climb_than_there_are_is_all_of_them():
    chunks = starts(2)[None]
    chunk, _ = improve(hill, chunks, hill(chunks).rank, jnp.ones((1, 3)), ImproveConfig(steps=1, top=9))
    assert chunk.shape == (1, 3, 2)


IMPROVE = ImproveConfig(steps=4, top=2, rate=0.05, radius=0.1)


@pytest.mark.parametrize(
    "variant", ["acfql", *(pytest.param(v, marks=pytest.mark.slow) for v in ("acfql-policy-distill", "acrlpd"))]
)
def test_a_decision_is_better_than_its_best_candidate_and_keeps_what_is_committed(variant):
    plain, agent = (build(config_of(variant, improve=i)) for i in (ImproveConfig(), IMPROVE))
    state = agent.init(jax.random.key(0))
    params, first = agent.policy_params(state), agent.policy_params(state, pretrained=True)
    prefix = (np.full((3, 2), 0.3, np.float32), np.array([1, 0, 0], np.float32))
    for seed in range(4):
        observation = {"state": make_batches(agent.spec).observations["state"][0, seed]}
        key = jax.random.key(seed)
        _, record = plain.sample(params, observation, key, explore=True, prefix=prefix)
        after, improved = agent.sample(params, observation, key, explore=True, prefix=prefix)
        np.testing.assert_allclose(improved["values"], record["values"], atol=1e-6)
        assert float(improved["q"]) > float(record["q"])
        np.testing.assert_array_equal(after[0], prefix[0][0])
        score = critic_score(agent.critic, params["critic"], observation)
        assert float(score(after[None]).rank[0]) == pytest.approx(float(improved["q"]), abs=1e-5)
        assert float(jnp.abs(after).max()) <= 1
        # a critic that has seen no failure is not climbed
        unimproved, _ = agent.sample(first, observation, key, explore=True, prefix=prefix)
        alone, _ = plain.sample(first, observation, key, explore=True, prefix=prefix)
        np.testing.assert_allclose(unimproved, alone, atol=1e-6)
        if variant == "acrlpd":
            dist = agent.gaussian.distribution(state.policy, observation)
            own = dist.log_prob(after.reshape(-1)).reshape(3, 2)[1:].mean()
            assert float(improved["log_prob"]) == pytest.approx(float(own), abs=1e-3)
    assert agent._sample._cache_size() == 1


@pytest.mark.parametrize("candidates", [1, 3])
def test_whether_a_pretrained_critic_is_climbed_follows_pretrain_candidates(candidates):
    for few, climbed in ((1, False), (3, True)):
        agent = build(config_of("acfql", improve=IMPROVE, candidates=candidates, pretrain_candidates=few))
        state = agent.init(jax.random.key(0))
        assert (int(agent.policy_params(state, pretrained=True)["candidates"]) == 0) == climbed
        assert int(agent.policy_params(state)["candidates"]) == 0


def imitating(imitate: float, **changes):
    return build(config_of("acfql", improve=dataclasses.replace(IMPROVE, imitate=imitate, candidates=5), **changes))


@pytest.mark.slow
def test_what_is_imitated_is_the_policys_best_chunk_after_its_climb():
    agent = imitating(0.5)
    state = agent.init(jax.random.key(0))
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    draws = agent.policy_draws(jax.random.key(1), batch)
    loss, metrics = agent._policy_loss(state.policy, state, batch, draws, bc_only=False)
    target = agent.improved_chunks(state.policy, state, batch, draws["improve"], jnp.zeros((8, 3)))
    candidates = agent.flow.sample(state.policy, batch.observations, draws["improve"])
    value = lambda c: critic_score(agent.critic, state.critic, batch.observations)(c).rank  # noqa: E731
    assert (value(target[:, None])[:, 0] > value(candidates).max(1)).all()
    improved = agent.flow.loss(
        state.policy,
        batch._replace(actions=target, bc_weight=jnp.ones((8, 3))),
        {"x0": draws["improve_x0"], "t": draws["improve_t"]},
    )
    assert float(metrics["actor/improve_loss"]) == pytest.approx(float(improved), abs=1e-5)
    assert float(loss) == pytest.approx(float(metrics["actor/bc_loss"] + 0.5 * improved), abs=1e-5)
    plain = build(config_of("acfql"))
    assert float(metrics["actor/bc_loss"]) == pytest.approx(float(plain.flow.loss(state.policy, batch, draws)))


@pytest.mark.slow
def test_no_gradient_flows_through_the_climb():
    """The improved chunks are numbers: with them held fixed, the loss has the same gradient."""
    agent = imitating(0.5)
    state = agent.init(jax.random.key(0))
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    draws = agent.policy_draws(jax.random.key(1), batch)
    target = agent.improved_chunks(state.policy, state, batch, draws["improve"], jnp.zeros((8, 3)))
    points = {"x0": draws["improve_x0"], "t": draws["improve_t"]}

    def by_hand(policy):
        fixed = batch._replace(actions=target, bc_weight=jnp.ones((8, 3)))
        return agent.flow.loss(policy, batch, draws) + 0.5 * agent.flow.loss(policy, fixed, points)

    got = jax.grad(lambda p: agent._policy_loss(p, state, batch, draws, bc_only=False)[0])(state.policy)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.grad(by_hand)(state.policy)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_pretraining_imitates_the_data_alone():
    agent, plain = imitating(0.5), build(config_of("acfql"))
    state = agent.init(jax.random.key(0))
    a, _ = agent.update_policy(jax.tree.map(jnp.copy, state), on_device(agent.spec))
    b, _ = plain.update_policy(jax.tree.map(jnp.copy, state), on_device(agent.spec))
    assert same(a.policy, b.policy)
    for _ in range(2):
        state, metrics = agent.update(state, on_device(agent.spec))
    assert np.isfinite(metrics["actor/improve_loss"])
    assert agent.update._cache_size() == 1


@pytest.mark.slow  # learns for a while
def test_imitating_improved_chunks_makes_the_first_sample_better():
    """Data are uniform chunks: their clone is no better than chance; the policy that imitates improved ones is."""
    errors = {}
    for imitate in (0.0, 4.0):
        improvement = ImproveConfig(steps=5, top=2, rate=0.1, radius=0.3, imitate=imitate, candidates=8)
        config = config_of(
            "acfql", critic=critic(hidden=(32,), loss="bounded", target_aggregate="mean"), improve=improvement,
            flow=FlowConfig(hidden=(32,), steps=3, noise_low=1.0), candidates=1,
        )  # fmt: skip
        agent = build(config, horizon=2, actions=1)
        state = jax.jit(agent.init)(jax.random.key(0))
        for i in range(60):  # of one shape: compilation takes longer than training
            state, _ = agent.update(state, jax.device_put(bandit(agent.spec, 20, 64, i)[0]))
        batch, best = bandit(agent.spec, 1, 64, 10_000)
        noise = jax.random.normal(jax.random.key(5), (64, 1, 2))
        chunks = jax.jit(agent.flow.sample)(state.policy, {"state": batch.observations["state"][0]}, noise)[:, 0]
        errors[imitate] = float(np.abs(np.asarray(chunks) - best[0]).mean())
    assert errors[0.0] > 0.35
    assert errors[4.0] < 0.6 * errors[0.0]


def test_chunks_that_climbed_the_critic_are_imitated_whole():
    agent = imitating(0.5)
    state, found = agent.init(jax.random.key(0)), []
    for changes in ({}, {"bc_dims": marked_numbers(agent.spec, 0)}):
        batch = one_batch(agent, **changes)
        draws = agent.policy_draws(jax.random.key(1), batch)
        found.append(agent._policy_loss(state.policy, state, batch, draws, bc_only=False)[1])
    assert float(found[0]["actor/improve_loss"]) == pytest.approx(float(found[1]["actor/improve_loss"]), rel=1e-5)
    assert float(found[0]["actor/bc_loss"]) != pytest.approx(float(found[1]["actor/bc_loss"]), rel=1e-3)
