"""What holds for every agent: it trains, travels, acts, is saved and goes on, and what an update may touch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import (
    ENCODER,
    FROZEN,
    critic_gradient,
    drawn,
    fresh,
    made,
    make_batches,
    named,
    one_batch,
    policy_gradient,
    sac_critic,
    same,
    seen_by,
)
from errors import naming

from serl_chunk.agents import perception
from serl_chunk.agents.base import Agent
from serl_chunk.agents.state import AgentState
from serl_chunk.config.agents.gripper import GripperConfig, SacGripperConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.data.prompts import ByteTokenizer, Prompts
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.types import PROMPT, PROMPT_MASK, ConfigError

GRIPPERS = {"horizon": 4, "actions": 5, "grippers": (1, 4)}
CHOSEN = {"gripper": GripperConfig(choices=(-1.0, 1.0), penalty=-0.1)}
EACH = {"gripper": SacGripperConfig(choices=(-1.0, 1.0), joint=False)}
FIXED = {"gripper": GripperConfig(mode="fixed", fixed_value=0.5)}
STATES = {"encoder": dataclasses.replace(ENCODER, trained_by="critic", state_latent=4)}
RECORDED = {"train_delay": "recorded"}
RARE_LIVES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # variant, sizes, changes
    "published-gaussian": ("published-gaussian", {}, {}),
    "Gaussian, choices for each gripper": ("acrlpd", GRIPPERS, EACH),
    "fixed gripper, a critic of more actions than the chunk": ("decoupled", GRIPPERS | {"critic_steps": 7}, FIXED),
    "one-step policy, choices, a camera, the critic's encoder": ("published-distill-image", GRIPPERS, CHOSEN | STATES),
    "clone with choices, trained with recorded delays": ("bc", GRIPPERS, CHOSEN | RECORDED),
}
HALVES = ("acrlpd-entropy-grasp", *RARE_LIVES)  # halves are compiled for these alone: all agents make them alike
POLICYS = ("policy", "policy_average", "policy_opt", "policy_updates")
CRITICS = ("critic", "critic_opt", "target", "critic_updates")


@pytest.mark.parametrize("name", [*FROZEN, *(pytest.param(name, marks=pytest.mark.slow) for name in RARE_LIVES)])
def test_trains_travels_acts_is_saved_and_goes_on(name, tmp_path):
    variant, sizes, changes = RARE_LIVES.get(name, (name, {}, {}))
    agent, state = fresh(variant, sizes=sizes, **changes)
    spec, kept = agent.spec, (state.policy, state.policy_average, state.critic, state.target, state.grasp)
    first = jax.tree.map(np.array, kept)
    halves = (agent.update_policy, agent.update_critic)[: 1 + agent.has_critic] if name in HALVES else ()
    updates = (*halves, agent.update)
    # What an update of one half leaves as it is.
    others = {agent.update_policy: CRITICS, agent.update_critic: () if "encoder" in changes else POLICYS}
    compiled = [program._cache_size() for program in (*updates, agent._sample)]

    def updated(state, update, seed):
        batches = make_batches(spec, seed=seed)
        return update(state, {}, named(agent, batches) if update is agent.update else batches)

    for seed in range(2):
        for update in updates:
            rest = others.get(update, ())
            untouched = jax.tree.map(np.array, ([getattr(state, name) for name in rest], state.grasp))
            counts = int(state.critic_updates), int(state.policy_updates)
            before, (state, metrics) = state, updated(state, update, seed)
            assert same([getattr(state, name) for name in rest], untouched[0])
            assert all(same(state.grasp[name], untouched[1][name]) for name in set(rest) & set(state.grasp))
            if update is agent.update:
                policys = 2 if variant.startswith("published") else getattr(agent.config, "policy_updates", 1)
                assert (int(state.critic_updates), int(state.policy_updates)) == (
                    counts[0] + 2 * agent.has_critic,
                    counts[1] + policys,
                )
            assert all(np.isfinite(value) for value in metrics.values()), metrics
            trees = (before.policy, before.policy_opt, before.critic, before.critic_opt, before.target)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(trees))  # the state is donated
    trees = (state.policy, state.policy_average, state.critic, state.target, state.grasp)
    resting = [
        jax.tree_util.keystr(path)
        for (path, new), old in zip(jax.tree_util.tree_leaves_with_path(trees), jax.tree.leaves(first), strict=True)
        if np.array_equal(new, old)
    ]
    assert not resting  # every parameter is trained by something
    assert any(name.startswith("critic/") for name in metrics) == agent.has_critic
    assert "actor/bc_loss" in metrics

    observation, length = seen_by(agent), max(spec.critic_steps, spec.horizon)
    prefix = np.full((length, spec.action_dim), 0.3, np.float32), np.eye(1, length, dtype=np.float32)[0]
    for pretrained in (False, True):
        own = agent.policy_params(state, pretrained=pretrained)
        assert same(own["policy"], state.policy_average or own["policy"])
        assert (
            not state.policy_average
            or "gripper" not in own
            or same(own["gripper"]["policy"], state.grasp["policy_average"])
        )
        flat = agent.flatten_params(own)
        assert all(isinstance(value, np.ndarray) for value in flat.values())
        assert all(f"{path}{value.shape}" in agent.network_shape() for path, value in flat.items())
        loaded = agent.load_params(flat)  # without what is empty
        assert same(agent.flatten_params(loaded), flat)
        draws = []
        rows = [(k, True, None) for k in range(8)] + [(1, True, prefix), (2, False, prefix), (3, False, prefix)]
        for key, explore, committed in rows:
            chunk, record = agent.sample(loaded, observation, jax.random.key(key), explore=explore, committed=committed)
            draws.append(np.asarray(chunk))
            assert (chunk.shape, chunk.dtype) == ((spec.horizon, spec.action_dim), jnp.float32)
            assert np.abs(chunk).max() <= 1
            if committed is not None:
                np.testing.assert_allclose(chunk[0], 0.3, atol=1e-6)
                assert not np.allclose(chunk[1:], 0.3)
        np.testing.assert_array_equal(draws[9], draws[10])  # not exploring, the key does not matter
        # The best of several is at times the first one, which does not explore.
        assert len({chunk.tobytes() for chunk in draws[:8]}) > 1
        if agent.has_critic:
            assert record["values"].shape == (agent.config.candidates,)
            assert float(record["q"]) == np.max(record["values"])
            assert float(record["q_std"]) > 0

    store = CheckpointStore(tmp_path)
    store.save(1, state, flat, {"mean": np.zeros(2, np.float32)}, {"env_steps": 0})
    store.close()
    restored = CheckpointStore(tmp_path).restore_state(drawn(agent, 5))
    assert restored is not None
    assert same(restored.state, state)
    assert same(*(updated(s, agent.update, 7)[0] for s in (restored.state, state)))
    now = [program._cache_size() for program in (*updates, agent._sample)]
    # Sampling: with exploration and without.
    assert all(n - b <= most for n, b, most in zip(now, compiled, [*(1 for _ in updates), 2], strict=True))


def received(agent: Agent, state: AgentState) -> Any:
    """What an actor has of a state."""
    return agent.load_params(agent.flatten_params(agent.policy_params(state)))


@pytest.mark.parametrize(("variant", "rows"), [("decoupled-lengths", 4), ("bc-image", 1)])
def test_one_call_decides_for_each_with_its_own_key_and_committed_actions(variant, rows):
    agent, state = fresh(variant)
    assert agent.rows == rows  # an image for nothing would cost as much as the one that is wanted
    params, count, spec = received(agent, state), 8, agent.spec
    observations = {k: v[0, :count] for k, v in make_batches(spec).observations.items()}
    keys, rng = jax.random.split(jax.random.key(1), count), np.random.default_rng(0)
    mask = (np.arange(spec.horizon) < rng.integers(0, 3, (count, 1))).astype(np.float32)
    committed = rng.uniform(-1, 1, (count, spec.horizon, spec.action_dim)).astype(np.float32), mask
    alone = np.arange(count) % 2 > 0
    chunks, record = agent.decide(params, observations, keys, explore=True, committed=committed, alone=alone)
    for i in range(count):
        one, given = {k: v[i] for k, v in observations.items()}, (committed[0][i], committed[1][i])
        chunk, of_one = agent.sample(params, one, keys[i], explore=True, committed=given, alone=alone[i])
        np.testing.assert_allclose(chunks[i], chunk, atol=1e-5)
        assert set(record) == set(of_one)
        for name in record:
            np.testing.assert_allclose(record[name][i], of_one[name], atol=1e-5)
    whole = None
    for order in (np.arange(8), np.array([6, 1, 3])):  # with others, at another place, in another number
        padded = np.resize(order, 8)
        given, each = tuple(part[padded] for part in committed), {k: v[padded] for k, v in observations.items()}
        some, _ = agent.decide(
            params, each, keys[padded], explore=True, committed=given, alone=alone[padded], rows=len(order)
        )
        whole = some if whole is None else whole
        np.testing.assert_array_equal(some[: len(order)], whole[order])
    np.testing.assert_allclose(whole, chunks, atol=1e-5)


@pytest.mark.parametrize("variant", ["decoupled-lengths", "acrlpd-entropy-grasp"])
def test_the_best_candidate_acts_or_the_first_one_alone(variant):
    agent, state = fresh(variant)
    params, chosen = received(agent, state), set()
    for seed in range(12):
        # Exploring, a flow's lone candidate would start from more noise.
        chunk, record = agent.sample(params, seen_by(agent, seed), jax.random.key(seed), explore=False)
        head, alone = agent.sample(params, seen_by(agent, seed), jax.random.key(seed), explore=False, alone=True)
        np.testing.assert_array_equal(record["values"], alone["values"])
        assert float(alone["q"]) == float(record["values"][0])
        chosen.add(best := int(np.argmax(record["values"])))
        assert np.array_equal(chunk, head) == (best == 0)
    assert len(chosen) > 1


def test_a_fresh_target_and_a_fresh_average_are_what_they_follow():
    state = jax.jit(made("acrlpd-entropy-grasp").init)(jax.random.key(0))
    assert same(state.target, {name: state.critic[name] for name in ("encoder", "q")})
    assert same(state.policy_average, state.policy)
    assert same(state.grasp["target"], state.grasp["critic"])
    assert same(state.grasp["policy_average"], state.grasp["policy"])


def test_a_target_follows_its_critic_slowly():
    agent, state = fresh("acfql")
    tau, still = agent.config.critic.tau, jax.tree.map(jnp.zeros_like, state.critic)
    after = agent._apply_critic_gradient(state, still)  # a fresh optimiser: the critic stays
    for name, target in state.target.items():
        expected = jax.tree.map(lambda online, old: tau * online + (1 - tau) * old, state.critic[name], target)
        jax.tree.map(lambda new, one: np.testing.assert_allclose(new, one, atol=1e-6), after.target[name], expected)
        assert not target or not same(after.target[name], target)  # a state without an encoder


@pytest.mark.parametrize(("variant", "waits"), [("acfql", True), ("acrlpd", False), ("published", False)])
def test_a_critic_that_has_seen_no_failure_chooses_where_the_agent_is_published_so(variant, waits):
    agent, state = fresh(variant)
    chooses = [bool(agent.policy_params(state, pretrained=p)["critic_chooses"]) for p in (False, True)]
    assert chooses == [True, not waits]


def test_images_are_shifted_by_keys_of_their_own(monkeypatch):
    """Offsets drawn from a key that a loss draws from as well would go hand in hand with its noise."""
    agent, state = fresh("acfql-image")
    keys = lambda k: tuple(np.asarray(jax.random.key_data(k)).tolist())  # noqa: E731
    offsets: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        perception, "random_shift", lambda key, observation, pixels: offsets.append(keys(key)) or observation
    )
    agent.seen(state, {}, one_batch(agent))
    used = [state.rng, *jax.random.split(state.rng)]
    drawn = {keys(k) for u in used for n in (2, 3) for k in (u, *jax.random.split(u, n))}
    assert len(set(offsets)) == 2
    assert not drawn & set(offsets)


def test_parameters_of_another_network_are_refused():
    agent, state = fresh("acfql")
    flat = agent.flatten_params(agent.policy_params(state))
    path = next(k for k in flat if k.endswith("kernel"))
    for changed, named_so in (
        ({k: v for k, v in flat.items() if k != path}, [path]),
        ({**flat, path: flat[path][..., :-1]}, [path, flat[path][..., :-1].shape, flat[path].shape, "--exp_name"]),
        ({**flat, path: flat[path].astype(np.float64)}, [path, "float64", "float32"]),
        ({**flat, "ghost": np.zeros(1)}, ["ghost"]),
    ):
        with pytest.raises(ConfigError, match=naming(*named_so)):
            agent.load_params(changed)


def test_a_single_head_keeps_rows_apart():
    """The published code's mean over heads is one over the batch where there is one head."""
    agent, state = fresh("acrlpd", critic=sac_critic(ensemble=1, target_aggregate="mean"))
    batch = one_batch(agent)
    draws = agent.critic_draws(jax.random.key(1), batch)
    target = jax.jit(lambda b: agent.critic_target(state, {}, b, draws))
    other = np.array(batch.next_observations["state"])
    other[4] += 1
    moved = np.asarray(target(batch)) != target(batch._replace(next_observations={"state": other}))
    assert moved.tolist() == [i == 4 for i in range(8)]


@pytest.mark.parametrize(
    ("variant", "bounded"), [("bc-delay", True), ("bc-delay", False), ("published-distill-image", True)]
)
def test_chunks_are_clipped_by_the_bounds_of_model_space(variant, bounded):
    agent, state = fresh(variant, **({} if bounded else {"sizes": {"bounded": False}}))
    params = received(agent, state)
    params = params | {"policy": jax.tree.map(lambda x: 5 * x, params["policy"])}
    assert ("flow" in params["policy"]) != variant.startswith("published")  # whose one-step policy needs no teacher
    chunk = agent.sample(params, seen_by(agent), jax.random.key(1), explore=True)[0]
    assert (np.abs(chunk).max() <= 1) == bounded


@pytest.mark.parametrize("own", [0, 16])
def test_a_batch_of_the_policys_own_is_asked_for_and_trained_on(monkeypatch, own):
    agent = made("acfql", {"policy_batch": own})
    batches, trained = {"critic": make_batches(agent.spec)}, []
    wanted = agent.wants()
    assert wanted.keys() == ({"critic", "policy"} if own else {"critic"})
    if own:
        assert (wanted["policy"].size, wanted["policy"].each, wanted["policy"].next_observations) == (16, False, False)
        batches["policy"] = make_batches(agent.spec, updates=1, size=16)._replace(next_observations={})
    steps = lambda state, base, batch, updates: (state, trained.append((len(batch.mask), updates)) or {})  # noqa: E731
    monkeypatch.setattr(agent, "_policy_steps", steps)
    jax.eval_shape(agent._update, drawn(agent), {}, batches)
    assert trained == [(own or 8, 2)]
    assert made("bc").wants().keys() == {"policy"}


@pytest.mark.parametrize("variant", ["decoupled-lengths", "acrlpd"])
def test_imitation_sees_moved_joints_and_critics_do_not(variant):
    """`bc_joint_noise`: what a loss sees is the batch with the shifts added."""
    agent, state = fresh(variant)
    rng, plain = np.random.default_rng(3), one_batch(agent)
    of_state, of_actions = (
        rng.normal(size=x.shape).astype(np.float32) for x in (plain.observations["state"], plain.actions)
    )
    moved = plain._replace(bc_state_shift=of_state, bc_action_shift=of_actions)
    added = plain._replace(
        observations={"state": plain.observations["state"] + of_state}, actions=plain.actions + of_actions
    )
    found, wanted, before = (policy_gradient(agent, state, b, bc_only=True) for b in (moved, added, plain))
    assert float(found[1]["value"]) == pytest.approx(float(wanted[1]["value"]), rel=1e-6)
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert float(found[1]["value"]) != pytest.approx(float(before[1]["value"]), rel=1e-3)
    if agent.has_critic:
        assert same(*(critic_gradient(agent, state, batch)[0] for batch in (moved, plain)))


LANGUAGE, PROMPTS = LanguageConfig("bytes", 8), Prompts(ByteTokenizer(), 8)
READERS = {
    "published-distill": {},
    "acfql-shared": {"encoder": dataclasses.replace(ENCODER, trained_by="critic")},
    "bc-grasp": {"gripper": GripperConfig(choices=(-1.0, 1.0))},
}


@pytest.mark.parametrize("variant", READERS)
def test_agents_learn_from_texts_and_act_by_them(variant):
    agent, state = fresh(variant, language=LANGUAGE, **READERS[variant])
    tokens, mask = (np.stack(part) for part in zip(*map(PROMPTS, ["left", "right"] * 4), strict=True))
    text, batch = {PROMPT: tokens, PROMPT_MASK: mask}, one_batch(agent)
    batch = batch._replace(observations=batch.observations | text, next_observations=batch.next_observations | text)
    inner = getattr(agent, "inner", agent)
    grads = [policy_gradient(inner, state, agent.arm_batch(state, batch) if inner is not agent else batch)[0]]
    if agent.has_critic:
        grads.append(critic_gradient(agent, state, batch)[0])
    found = [leaf for path, leaf in jax.tree.leaves_with_path(grads) if "tokens" in str(path)]
    assert len(found) == (3 if variant == "published-distill" else 1)
    assert all(leaf.shape == (258, 64) and np.any(leaf) for leaf in found)
    params = agent.policy_params(state)

    def chunk(row):
        seen = {"state": np.zeros(4, np.float32), PROMPT: tokens[row], PROMPT_MASK: mask[row]}
        return np.asarray(agent.sample(params, seen, jax.random.key(1), explore=True)[0]).tobytes()

    assert chunk(0) == chunk(2) != chunk(1)
    plain = made(variant, **READERS[variant])
    assert ["language" in a.network_shape() for a in (plain, agent)] == [False, True]
    assert [{PROMPT, PROMPT_MASK} <= set(a.perception.seen_example()) for a in (plain, agent)] == [False, True]
