"""What holds for every agent: compilations, donation, what an update may touch, sampling, snapshots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import build, config_of, critic, fresh, make_batches, named, on_device, sac_critic, same
from errors import naming

from serl_chunk.agents import perception
from serl_chunk.types import ConfigError

VARIANTS = [  # compiled, run
    "acfql", "acrlpd-entropy", "bc", "bc-gaussian",
    "decoupled-lengths", "published-image", "published-distill", "published-gaussian",
]  # fmt: skip
TRACED = [  # only traced: cheap
    *VARIANTS, "acfql-image",
    "acrlpd-image", "bc-image", "bc-gaussian-image", "published", "published-distill-image",
    "decoupled-image", "decoupled-lengths-image",
]  # fmt: skip
STATE_ONLY = ["acfql", "acrlpd", "bc", "bc-gaussian"]
WITH_CRITIC = [v for v in VARIANTS if not v.startswith("bc")]
COMPILED_OFTEN = ["acfql", "published-distill", "bc"]


def some(variants, often=COMPILED_OFTEN):
    """Of `variants` those in `often`; the others are slow."""
    marked = [v if v in often else pytest.param(v, marks=pytest.mark.slow) for v in variants]
    return pytest.mark.parametrize("variant", marked)


every = some(VARIANTS)
with_critic = some(WITH_CRITIC, [*COMPILED_OFTEN, "decoupled-lengths"])
OURS = [v for v in VARIANTS if not v.startswith("published")]  # see test_published_qc.py
ours_with_critic = some([v for v in OURS if v in WITH_CRITIC], [*COMPILED_OFTEN, "decoupled-lengths"])


@every
def test_one_compilation_per_shape_whatever_the_data(variant):
    agent, state = fresh(variant)
    for seed in range(3):
        batches = on_device(agent.spec, seed)
        state, _ = agent.update_policy(state, {}, batches)
        if agent.has_critic:
            state, _ = agent.update_critic(state, {}, batches)
        state, metrics = agent.update(state, {}, named(agent, batches))
        assert all(np.isfinite(v) for v in metrics.values())
    params = agent.policy_params(state)
    for seed in range(3):
        observation = {k: v[0, seed] for k, v in make_batches(agent.spec).observations.items()}
        agent.sample(params, observation, jax.random.key(seed), explore=True)
    assert agent.update_policy._cache_size() == 1
    assert agent.update_critic._cache_size() == int(agent.has_critic)
    assert agent.update._cache_size() == 1
    assert agent._sample._cache_size() <= 2  # with and without exploration


@every
def test_an_update_consumes_the_state_it_is_given(variant):
    agent, state = fresh(variant)
    agent.update(state, {}, named(agent, on_device(agent.spec)))
    leaves = jax.tree.leaves((state.policy, state.policy_opt, state.critic, state.critic_opt, state.target))
    assert all(leaf.is_deleted() for leaf in leaves)


@every
def test_a_policy_update_leaves_the_critic_alone(variant):
    agent, before = fresh(variant)
    after, _ = agent.update_policy(jax.tree.map(jnp.copy, before), {}, on_device(agent.spec))
    assert not same(after.policy, before.policy)
    assert int(after.policy_updates) == 2
    for name in ("critic", "critic_opt", "target", "temperature", "temperature_opt", "critic_updates"):
        assert same(getattr(after, name), getattr(before, name)), name


@with_critic
def test_a_critic_update_leaves_the_policy_alone(variant):
    agent, before = fresh(variant)
    after, _ = agent.update_critic(jax.tree.map(jnp.copy, before), {}, on_device(agent.spec))
    assert int(after.critic_updates) == 2
    for name in ("policy", "policy_average", "policy_opt", "temperature", "temperature_opt", "policy_updates"):
        assert same(getattr(after, name), getattr(before, name)), name
    assert not same(after.critic, before.critic)
    assert not same(after.target, before.target)
    moved = jax.tree.map(lambda c, t: jnp.abs(c - t).max(), {k: after.critic[k] for k in after.target}, after.target)
    assert max(jax.tree.leaves(moved)) > 0  # the target lags behind


@ours_with_critic
def test_an_update_is_the_critics_updates_then_the_policys(variant):
    agent, state = fresh(variant)
    critic_only, _ = agent.update_critic(jax.tree.map(jnp.copy, state), {}, on_device(agent.spec))
    after, metrics = agent.update(state, {}, named(agent, on_device(agent.spec)))
    assert int(after.critic_updates) == 2
    assert int(after.policy_updates) == getattr(agent.config, "policy_updates", 1)
    for x, y in zip(jax.tree.leaves(after.critic), jax.tree.leaves(critic_only.critic), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert {"critic/critic_loss", "actor/bc_loss"} <= metrics.keys()


def test_a_clones_update_is_its_policys():
    agent, state = fresh("bc")
    after, metrics = agent.update(state, {}, named(agent, on_device(agent.spec)))
    assert (int(after.critic_updates), int(after.policy_updates)) == (0, agent.config.policy_updates)
    assert "actor/bc_loss" in metrics
    assert not any(name.startswith("critic/") for name in metrics)


@pytest.mark.parametrize("variant", ["acfql", "acrlpd-entropy"])
def test_a_scan_over_updates_equals_as_many_single_updates(variant):
    agent, state = fresh(variant)
    batches = on_device(agent.spec)
    single, one = jax.tree.map(jnp.copy, state), jax.jit(agent._critic_step)
    for u in range(2):
        single, _ = one(single, {}, jax.tree.map(lambda x, u=u: x[u], batches))
    scanned, _ = agent.update_critic(state, {}, batches)
    for x, y in zip(jax.tree.leaves(scanned.critic), jax.tree.leaves(single.critic), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert same(scanned.rng, single.rng)


@with_critic
def test_what_follows_a_termination_does_not_reach_the_critic(variant):
    agent, state = fresh(variant)
    batches = make_batches(agent.spec)
    ended = batches.mask == 0
    other = {k: np.array(v) for k, v in batches.next_observations.items()}
    for value in other.values():
        value[ended] = 100
    changed = batches._replace(next_observations=other)
    a, _ = agent.update_critic(jax.tree.map(jnp.copy, state), {}, jax.device_put(batches))
    b, _ = agent.update_critic(jax.tree.map(jnp.copy, state), {}, jax.device_put(changed))
    assert same(a.critic, b.critic)
    still_running = changed._replace(mask=np.ones_like(batches.mask))
    c, _ = agent.update_critic(state, {}, jax.device_put(still_running))
    assert not same(a.critic, c.critic)


@with_critic
def test_the_critics_tail_after_a_termination(variant):
    agent, state = fresh(variant)
    batches = make_batches(agent.spec)
    changed = batches._replace(actions=np.where(batches.valid[..., None] > 0, batches.actions, 0.5).astype(np.float32))
    a, _ = agent.update_critic(jax.tree.map(jnp.copy, state), {}, jax.device_put(batches))
    b, _ = agent.update_critic(state, {}, jax.device_put(changed))
    assert not same(a.critic, b.critic)  # scored as the sampler filled it in


# Distillation asks for no action.
@some([v for v in OURS if "distill" not in v], ["acfql", "acrlpd-entropy", "bc"])
def test_nothing_to_imitate_means_no_step_of_the_policy(variant):
    agent, before = fresh(variant)
    batches = on_device(agent.spec)
    after, metrics = agent.update_policy(
        jax.tree.map(jnp.copy, before), {}, batches._replace(bc_weight=jnp.zeros_like(batches.bc_weight))
    )
    assert same(after.policy, before.policy)
    assert float(metrics["actor/bc_loss"]) == 0


@every
def test_a_sampled_chunk(variant):
    agent, state = fresh(variant)
    observation = {k: v[0, 0] for k, v in make_batches(agent.spec).observations.items()}
    params = agent.policy_params(state)

    def draw(key, explore, prefix=None, p=params):
        chunk, record = agent.sample(p, observation, jax.random.key(key), explore=explore, committed=prefix)
        assert (chunk.shape, chunk.dtype) == ((3, 2), jnp.float32)
        assert float(jnp.abs(chunk).max()) <= 1
        return np.asarray(chunk), record

    (mean, record), (again, _) = draw(0, False), draw(1, False)
    np.testing.assert_array_equal(mean, again)  # the key does not matter
    # The best of several is at times the first one, which does not explore.
    assert len({draw(k, True)[0].tobytes() for k in range(8)}) > 1
    np.testing.assert_array_equal(draw(5, True)[0], draw(5, True)[0])
    if variant in WITH_CRITIC:
        values = np.asarray(record["values"])
        assert values.shape == (agent.config.candidates,)
        assert float(record["q"]) == values.max()
        assert float(record["q_std"]) > 0
    else:
        assert "q_std" not in record
    committed = np.zeros((3, 2), np.float32)
    committed[0] = (0.25, -0.5)
    for explore in (True, False):
        chunk, _ = draw(2, explore, (committed, np.array([1, 0, 0], np.float32)))
        np.testing.assert_array_equal(chunk[0], committed[0])
        assert not np.array_equal(chunk[1:], committed[1:])


@ours_with_critic
def test_the_best_candidate_acts_or_the_first_one_alone(variant):
    agent, state = fresh(variant)
    params = agent.policy_params(state)
    chosen = set()
    for seed in range(12):
        # Exploring, a flow's lone candidate would start from more noise.
        observation = {k: v[0, 0] for k, v in make_batches(agent.spec, seed=seed).observations.items()}
        chunk, record = agent.sample(params, observation, jax.random.key(seed), explore=False)
        head, alone = agent.sample(params, observation, jax.random.key(seed), explore=False, alone=True)
        np.testing.assert_array_equal(record["values"], alone["values"])
        assert float(alone["q"]) == float(record["values"][0])
        best = int(np.argmax(record["values"]))
        chosen.add(best)
        assert np.array_equal(chunk, head) == (best == 0)
    assert len(chosen) > 1
    assert agent._sample._cache_size() <= 2  # with exploration and without: no arm compiles anything


@pytest.mark.parametrize(("variant", "waits"), [("acfql", True), ("acrlpd", False), ("published", False)])
def test_a_critic_that_has_seen_no_failure_chooses_where_the_agent_is_published_so(variant, waits):
    agent, state = fresh(variant)
    chooses = [bool(agent.policy_params(state, pretrained=p)["critic_chooses"]) for p in (False, True)]
    assert chooses == [True, not waits]


@pytest.mark.parametrize("variant", ["acfql", "acrlpd-entropy"])
def test_an_evaluation_may_set_another_number_of_candidates(variant):
    """`--config.agent.candidates` of an evaluation, with parameters published by a run of 3."""
    _, state = fresh(variant)
    trained, more = build(config_of(variant)), build(config_of(variant, candidates=8))
    observation = {k: v[0, 0] for k, v in make_batches(more.spec).observations.items()}
    chosen = set()
    for seed in range(24):
        _, record = more.sample(trained.policy_params(state), observation, jax.random.key(seed), explore=True)
        assert record["values"].shape == (8,)
        assert float(record["q"]) == float(record["values"].max())
        chosen.add(int(np.argmax(record["values"])))
    assert max(chosen) >= 3


@pytest.mark.parametrize("variant", ["acfql-image", "acrlpd-image"])
def test_images_are_shifted_by_keys_of_their_own(variant):
    """Offsets drawn from a key that a loss draws from as well would go hand in hand with its noise."""
    agent = build(config_of(variant))
    state = agent.init(jax.random.key(0))
    keys = lambda k: tuple(np.asarray(jax.random.key_data(k)).tolist())  # noqa: E731
    offsets: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        shift = lambda key, observation, pixels: offsets.append(keys(key)) or observation  # noqa: E731
        patch.setattr(perception, "random_shift", shift)
        agent.seen(state, {}, jax.tree.map(lambda x: x[0], make_batches(agent.spec)))
    used = [state.rng, *jax.random.split(state.rng)]
    drawn = {keys(k) for u in used for n in (2, 3) for k in (u, *jax.random.split(u, n))}
    assert len(set(offsets)) == 2
    assert not drawn & set(offsets)


@every
def test_parameters_survive_the_journey_to_an_actor(variant):
    agent, state = fresh(variant)
    observation = {k: v[0, 0] for k, v in make_batches(agent.spec).observations.items()}
    params = agent.policy_params(state)
    flat = agent.flatten_params(params)
    assert all(isinstance(v, np.ndarray) for v in flat.values())
    loaded = agent.load_params(flat)
    assert agent.flatten_params(loaded).keys() == flat.keys()
    here, there = (agent.sample(p, observation, jax.random.key(4), explore=False)[0] for p in (params, loaded))
    np.testing.assert_allclose(here, there, atol=1e-6)
    for path, value in flat.items():
        assert f"{path}{value.shape}" in agent.network_shape()


@pytest.mark.parametrize("variant", STATE_ONLY)
def test_parameters_of_another_network_are_refused(variant):
    agent, state = fresh(variant)
    flat = agent.flatten_params(agent.policy_params(state))
    path = next(k for k in flat if k.endswith("kernel"))
    with pytest.raises(ConfigError, match=naming(path)):
        agent.load_params({k: v for k, v in flat.items() if k != path})
    with pytest.raises(ConfigError, match=naming(path, flat[path][..., :-1].shape, flat[path].shape, "--exp_name")):
        agent.load_params({**flat, path: flat[path][..., :-1]})
    with pytest.raises(ConfigError, match=naming(path, "float64", "float32")):
        agent.load_params({**flat, path: flat[path].astype(np.float64)})
    with pytest.raises(ConfigError, match=naming("ghost")):
        agent.load_params({**flat, "ghost": np.zeros(1)})


@some(TRACED, [*COMPILED_OFTEN, "published-image", "decoupled-lengths-image", "bc-gaussian-image"])
def test_no_ranks_are_promoted_silently(variant):
    agent, state = fresh(variant)
    observation = {k: v[0, 0] for k, v in make_batches(agent.spec).observations.items()}
    prefix = (np.zeros((3, 2), np.float32), np.zeros(3, np.float32))
    with jax.numpy_rank_promotion("raise"):
        new, _ = jax.eval_shape(agent._update, state, {}, named(agent, make_batches(agent.spec)))
        alone = make_batches(agent.spec)._replace(next_observations={})  # as a learner gives them
        jax.eval_shape(agent._update_policy, state, {}, alone)
        chunk, _ = jax.eval_shape(
            lambda s, k: agent._sample_chunk(agent.policy_params(s), observation, k, prefix, explore=True),
            state,
            jax.random.key(0),
        )
    assert chunk.shape == (3, 2)
    kept = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), new, state)
    assert all(jax.tree.leaves(kept))  # an update that changed a shape or a type would compile again


@pytest.mark.parametrize("variant", [v for v in TRACED if not v.startswith("bc")])
def test_the_critics_loss_mixes_no_types(variant):
    agent, state = fresh(variant)
    batch = jax.tree.map(lambda x: x[0], make_batches(agent.spec))
    with jax.numpy_dtype_promotion("strict"):
        draws = jax.eval_shape(agent.critic_draws, jax.random.key(0), batch)
        loss = jax.eval_shape(agent.critic_loss, state.critic, state, {}, batch, draws)
    assert {(x.shape, x.dtype) for x in jax.tree.leaves(loss)} == {((), jnp.dtype("float32"))}


@pytest.mark.parametrize("horizon", [1, 4])
@pytest.mark.parametrize("variant", STATE_ONLY)
def test_other_lengths_and_a_single_head(variant, horizon):
    alone = {"acfql": {"critic": critic(ensemble=1)}, "acrlpd": {"critic": sac_critic(ensemble=1)}}
    critic_steps = (horizon + 1) // 2
    agent = build(config_of(variant, **alone.get(variant, {})), horizon=horizon, critic_steps=critic_steps)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    new, metrics = jax.eval_shape(agent._update, state, {}, named(agent, make_batches(agent.spec)))
    assert jax.tree.map(lambda x: x.shape, new) == jax.tree.map(lambda x: x.shape, state)
    assert {m.shape for m in metrics.values()} == {()}
    if not variant.startswith("bc"):
        kernel = state.critic["q"]["VmapMlp_0"]["Dense_0"]["kernel"]
        assert kernel.shape == (1, 4 + 2 * critic_steps, 16)
    prefix = (np.zeros((horizon, 2), np.float32), np.zeros(horizon, np.float32))
    observation = {"state": np.zeros(4, np.float32)}
    chunk, _ = jax.eval_shape(
        lambda s, k: agent._sample_chunk(agent.policy_params(s), observation, k, prefix, explore=False),
        state,
        jax.random.key(0),
    )
    assert chunk.shape == (horizon, 2)


@pytest.mark.parametrize("aggregate", ["mean", pytest.param("min", marks=pytest.mark.slow)])
def test_a_single_head_keeps_rows_apart(aggregate):
    """The published code's mean over heads is one over the batch where there is one head."""
    agent = build(config_of("acrlpd", critic=sac_critic(ensemble=1, target_aggregate=aggregate)))
    state = agent.init(jax.random.key(0))
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    draws = agent.critic_draws(jax.random.key(1), batch)

    def target(rows):
        args = jax.tree.map(lambda x: x[rows], (batch, draws))
        return agent.critic_target(state, {}, *args)

    together = np.asarray(target(slice(None)))
    alone = np.concatenate([target(slice(i, i + 1)) for i in range(len(together))])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    value = ((together - batch.rewards @ 0.9 ** np.arange(3)) / batch.discount_n)[batch.mask > 0]
    assert np.ptp(value) > 0.01  # the rows' next values differ


@pytest.mark.slow
def test_weight_decay_shrinks_the_networks_by_lr_times_decay_and_not_the_temperature():
    after = []
    for decay in (0.0, 0.5):
        agent = build(config_of("published-gaussian", weight_decay=decay))
        one = jax.tree.map(lambda x: x[:1], on_device(agent.spec))
        after.append(agent.update(agent.init(jax.random.key(0)), {}, named(agent, one))[0])
    plain, decayed = after
    assert same(plain.temperature, decayed.temperature)
    start = agent.init(jax.random.key(0))
    for name in ("policy", "critic"):
        trees = (getattr(state, name) for state in (plain, decayed, start))
        for p, d, s in zip(*map(jax.tree.leaves, trees), strict=True):
            np.testing.assert_allclose(p - d, 1e-2 * 0.5 * s, atol=2e-4)
