"""A critic on pi0's features: what updates read and change, stored features, and edited candidates."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import critic, make_batches, marked_numbers, same
from pi0_agents import CONFIG, SMALL, SPEC, lora, shown, started

from serl_chunk.agents.acfql import Acfql
from serl_chunk.agents.small_actors import acfql
from serl_chunk.agents.spec import POLICY_FEATURES, AgentSpec, BatchSpec
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.types import PROMPT, PROMPT_MASK

IMAGES = ("images/top", "images/wrist")


def acting(trainable: str, sizes: AgentSpec = SPEC, pi0: dict | None = None, **changes) -> Acfql:
    """pi0 with a critic on its features; `changes` of its AcfqlConfig."""
    common = {name: getattr(CONFIG, name) for name in ("policy", "image_keys", "encoder", "language", "policy_ema")}
    own = dataclasses.replace(SMALL, trainable=trainable, **(pi0 or {}))
    return acfql(AcfqlConfig(pi0=own, critic=critic(), candidates=4, policy_updates=1, **common, **changes), sizes)


def batches(agent: Acfql):
    """As the replay gives them: a critic's without pixels but for `target=policy`, the policy's with them."""
    of_critic = make_batches(SPEC, updates=2)
    if agent.wants()["critic"].frames:
        seen = {name: np.stack([value] * 2) for name, value in shown(agent).observations.items()}
    else:
        features = np.random.default_rng(0).normal(size=(2, 8, 3, 16)).astype(np.float16)
        seen = {"state": of_critic.observations["state"], POLICY_FEATURES: features}
    out = {"critic": of_critic._replace(observations=seen, next_observations=seen)}
    return out | {name: jax.tree.map(lambda x: x[None], shown(agent)) for name in agent.wants() if name == "policy"}


@pytest.mark.parametrize("trainable", ["none", "expert"])
def test_each_loss_changes_its_own_network_by_its_own_batch(trainable):
    agent = acting(trainable)
    wants = agent.wants()
    assert (wants["critic"].frames, list(wants)) == (False, ["critic", "policy"][: 1 + (trainable == "expert")])
    if trainable == "expert":
        assert wants["policy"] == BatchSpec(None, each=False, next_observations=False, frames=True, imitated=True)
    state, base = started(agent), agent.new_base(jax.random.key(0))
    before = jax.tree.map(np.array, (state.critic, state.policy, base))
    after, metrics = agent.update(state, base, batches(agent))
    assert not same(before[0], after.critic)
    assert same(before[1], after.policy) == (trainable == "none")
    assert same(before[2], base)
    assert ("actor/bc_loss" in metrics) == (trainable == "expert")
    assert (int(after.critic_updates), int(after.policy_updates)) == (2, trainable == "expert")


@pytest.mark.parametrize("trainable", ["lora", "lora_expert"])
def test_stored_features_are_those_that_a_decision_computes_of_the_imported_leaves(trainable):
    """Also with LoRA of the first expert among what is not trained."""
    agent = acting(trainable, pi0=lora())
    state = started(agent)
    base = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), agent.new_base(jax.random.key(0))
    )
    seen = {name: np.asarray(value) for name, value in shown(agent).observations.items()}
    assert set(agent.cached_features()[POLICY_FEATURES].reads) == {*IMAGES, PROMPT, PROMPT_MASK}
    stored = agent.embedder(base)({name: seen[name] for name in (*IMAGES, PROMPT, PROMPT_MASK)})[POLICY_FEATURES]
    assert (stored.shape, stored.dtype) == ((8, 3, 16), np.float16)

    @jax.jit
    def decided(policy):
        return agent.net.described(agent.net.context(policy, base, seen), base, seen)[POLICY_FEATURES]

    for scale in (1.0, 2.0):  # what is trained changes none of them
        found = decided(jax.tree.map(lambda x, s=scale: s * x, state.policy))
        np.testing.assert_allclose(np.float32(found), np.float32(stored), atol=2e-3)
    assert np.abs(np.float32(stored)).std(axis=0).max() > 0.01


RULES = {
    "q_gradient": {"trainable": "expert", "target": "policy"},
    "edit": {"trainable": "none", "target": "policy", "edit_scale": 0.1},
    "rlt": {"trainable": "none", "target": "policy", "edit_scale": 0.1, "bc_weight": 0.5},
    "dsrl": {"trainable": "none", "target": "policy"},
}


def of_rule(rule: str, parts: int = 1, **changes):
    """The agent of a rule, a state, its base, and a batch of each network with its draws."""
    sizes = dataclasses.replace(SPEC, micro_batches=parts)
    agent = acting(**RULES[rule], improve_by=rule, sizes=sizes, **changes)
    state, base, given = started(agent), agent.new_base(jax.random.key(0)), batches(agent)
    assert agent.wants()["policy"] == BatchSpec(None, each=False, next_observations=False, frames=True)
    rows = {name: jax.tree.map(lambda x: x[0], given[name]) for name in ("critic", "policy")}
    draws = {
        "critic": agent.critic_draws(state.rng, rows["critic"]),
        "policy": agent.policy_draws(state.rng, rows["policy"]),
    }
    return agent, state, base, given, rows, draws


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_teaches_its_own_network_alone_by_constants_and_is_compiled_once(rule):
    agent, state, base, given, rows, draws = of_rule(rule)

    @jax.jit
    def leaked(state, base):
        """Gradients with respect to what teaches."""

        def critic(policy, target):
            taught = state.replace(policy=policy, target=target)
            return agent.critic_loss(state.critic, taught, base, rows["critic"], draws["critic"]).terms[0].total

        def policy(critic, target):
            taught = state.replace(critic=critic, target=target)
            loss = agent.policy_loss(state.policy, taught, base, rows["policy"], draws["policy"], bc_only=False)
            return sum(term.total for term in loss.terms)

        return jax.grad(critic, (0, 1))(state.policy, state.target), jax.grad(policy, (0, 1))(
            state.critic, state.target
        )

    assert not any(np.any(leaf) for leaf in jax.tree.leaves(leaked(state, base)))
    before = jax.tree.map(np.array, (state.critic, state.policy, base))
    for _ in range(2):
        state, metrics = agent.update(state, base, given)
    assert agent.update._cache_size() == 1
    moved = [not same(old, new) for old, new in zip(before, (state.critic, state.policy, base), strict=True)]
    assert moved == [True, True, False]
    assert np.isfinite(metrics["actor/q"])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_parts_of_a_batch_add_up_to_the_whole_by_every_rule(rule):
    found = []
    for parts in (1, 2, 4):
        agent, state, base, _, rows, draws = of_rule(
            rule, parts, critic_sees="state"
        )  # float16 features may round otherwise

        @jax.jit
        def gradients(state, base, agent=agent, rows=rows, draws=draws):
            return (
                agent._critic_gradient(state, base, rows["critic"], draws["critic"])[0],
                agent._policy_gradient(state, base, rows["policy"], draws["policy"], False)[0],
            )

        found.append(jax.tree.map(np.asarray, gradients(state, base)))
    for other in found[1:]:
        for whole, summed in zip(jax.tree.leaves(found[0]), jax.tree.leaves(other), strict=True):
            assert np.linalg.norm(summed - whole) <= 1e-5 * np.linalg.norm(whole) + 1e-9


def test_a_whole_chunk_stays_near_what_the_human_had_a_part_in_and_comes_back_from_beyond_the_bounds():
    sizes = dataclasses.replace(SPEC, bounded=True)
    agent = acting(**RULES["rlt"], improve_by="rlt", sizes=sizes, critic_sees="state")
    state, base, batch = started(agent), agent.new_base(jax.random.key(0)), shown(agent)
    draws = agent.policy_draws(state.rng, batch)

    @jax.jit
    def loss(policy, weight, dims, moved):
        seen = batch._replace(actions=batch.actions + moved, bc_weight=weight * batch.valid, bc_dims=dims)
        found = agent.policy_loss(policy, state, base, seen, draws, bc_only=False)
        return sum(term.mean() for term in found.terms), found.metrics["actor/distance"].mean()

    part, whole = marked_numbers(SPEC, 0), marked_numbers(SPEC, 0, 1)
    for weight, dims, reads in ((1.0, whole, (True, True)), (1.0, part, (True, False)), (0.2, whole, (False, False))):
        before = loss(state.policy, weight, dims, np.float32([0, 0]))[1]
        after = [loss(state.policy, weight, dims, moved)[1] for moved in np.float32([[1, 0], [0, 1]])]
        assert tuple(float(distance) != float(before) for distance in after) == reads
    beyond = jax.tree.map(lambda x: x + 9.0 * (x.shape == (6,)), state.policy)  # the last layer's, of 3 actions of 2
    gradients = jax.grad(lambda policy: loss(policy, 1.0, whole, 0.0)[0])(beyond)
    assert [float(leaf.min()) > 0 for leaf in jax.tree.leaves(gradients) if leaf.shape == (6,)] == [True]


def test_candidates_are_the_first_ones_chunk_and_its_edits_and_the_best_acts():
    agent = acting("none", edit_scale=0.1)
    params = agent.policy_params(started(agent)) | {"base": agent.new_base(jax.random.key(0))}
    one = {name: value[0] for name, value in shown(agent).observations.items()}
    decide = lambda key, **how: agent.sample(params, one, jax.random.key(key), **how)  # noqa: E731
    first = decide(0, explore=True, alone=True)[0]
    assert not same(first, decide(1, explore=True, alone=True)[0])
    chunk, record = decide(0, explore=True)
    assert record["values"].shape == (4,)
    assert float(record["q"]) == float(jnp.max(record["values"]))
    step = np.asarray(chunk - first)
    np.testing.assert_allclose(step, np.broadcast_to(step[:1], step.shape), atol=1e-6)
    assert (np.abs(step).max() > 0) == (int(jnp.argmax(record["values"])) > 0)
    assert same(decide(0, explore=False)[0], decide(1, explore=False)[0])
    assert len(set(np.asarray(record["values"]).tolist())) == 4


class TwoModes:
    """A chunk of one number that goes left or right, as demonstrated, and a pi0 that was cloned of both."""

    spec = AgentSpec(2, 1, 2, 2, (), 0.9, (0.0, 1.0))

    def __init__(self) -> None:
        self.rng, text = np.random.default_rng(0), np.tile(np.int32([1, 5, 6]), (64, 1))
        self.text = {PROMPT: text, PROMPT_MASK: np.ones((64, 3), bool)}
        self.seen = {"state": np.zeros((64, 2), np.float32), **self.text}
        self.pi0 = dataclasses.replace(SMALL, trainable="expert", action_dim=2, steps=4)
        self.agent = self.agent_of(improve_by="distil")
        self.base, state = self.agent.new_base(jax.random.key(0)), self.agent.new_state(jax.random.key(0))
        for _ in range(8):
            state, _ = self.agent.update_policy(state, self.base, self.batch(self.seen))
        self.state = state
        features = self.agent.embedder(self.base)(self.text)[POLICY_FEATURES]
        self.described = {"state": self.seen["state"], POLICY_FEATURES: features}

    def agent_of(self, **changes) -> Acfql:
        common = {"policy": "pi0", "pi0": self.pi0, "language": LanguageConfig("bytes", 16), "critic": critic()}
        own = {"lr": 3e-3, "policy_ema": 0.0, "policy_updates": 1, "candidates": 8}
        return acfql(AcfqlConfig(**{**common, **own, **changes}), self.spec)

    def batch(self, shown, rewarded=lambda a: a > 0, spread: float = 0.0, updates: int = 50):
        """Of one number an action, and a reward at once where `rewarded`; nothing follows."""
        side = self.rng.choice(np.float32([-0.6, 0.6]), size=(updates, 64, 1, 1))
        side = side if not spread else self.rng.uniform(-spread, spread, side.shape).astype(np.float32)
        of = make_batches(AgentSpec(2, 1, 2, 2, (), 0.9), updates, 64)
        actions = side + self.rng.normal(0, 0.02, (updates, 64, 2, 1)).astype(np.float32)
        rewards = np.concatenate([rewarded(side[..., 0]), np.zeros_like(side[..., 0])], -1).astype(np.float32)
        ones = np.ones((updates, 64, 2), np.float32)
        shown = jax.tree.map(lambda x: np.broadcast_to(x, (updates, *x.shape)), shown)
        return of._replace(observations=shown, next_observations=shown, actions=actions, rewards=rewards, valid=ones,
                           bc_weight=ones, mask=np.zeros((updates, 64), np.float32))  # fmt: skip

    def valued(self, state, **batch):
        """The state after its critic learnt from `batch`; what it was stays."""
        state = jax.tree.map(jnp.copy, state)
        for _ in range(4):
            state, _ = self.agent.update_critic(state, self.base, self.batch(self.described, **batch))
        return state

    def constant(self, valued, **changes):
        """An agent with pi0 as it is now, all of it base, and a state with the critic of `valued`."""
        agent = self.agent_of(pi0=dataclasses.replace(self.pi0, trainable="none"), **changes)
        base = {"pi0": self.agent.net.network(valued.policy, self.base)}
        fresh = agent.new_state(jax.random.key(1))
        same = {name: jax.tree.map(jnp.copy, getattr(valued, name)) for name in ("critic", "target", "critic_opt")}
        return agent, fresh.replace(**same), base

    def share(self, agent, state, base, wanted=lambda a: a > 0, *, alone: bool) -> float:
        """Of decisions that explore, those whose actions are `wanted` on average."""
        params = agent.policy_params(state) | {"base": base}
        keys = jax.random.split(jax.random.key(3), 64)
        chunks, _ = agent.decide(params, self.seen, keys, explore=True, alone=alone)
        return float(wanted(np.asarray(chunks).mean((1, 2))).mean())


@pytest.fixture(scope="module")
def modes() -> TwoModes:
    return TwoModes()


def test_of_two_modes_the_best_of_some_samples_and_then_one_sample_is_the_rewarded_one(modes):
    agent, base, state = modes.agent, modes.base, modes.valued(modes.state)
    right = lambda *, alone: modes.share(agent, state, base, alone=alone)  # noqa: E731
    assert 0.25 < right(alone=True) < 0.75
    assert right(alone=False) > 0.9
    for k in range(5):
        one = jax.tree.map(lambda x: x[0], modes.batch(modes.seen, updates=1))
        chunks, metrics = agent.relabel(state, base, one, jax.random.key(k))
        assert float(metrics["relabel/q_best"]) >= float(metrics["relabel/q_first"])
        again = one._replace(actions=np.asarray(chunks))
        state, _ = agent.update_policy(state, base, jax.tree.map(lambda x: np.broadcast_to(x, (50, *x.shape)), again))
    assert right(alone=True) > 0.9


def test_of_two_modes_an_actor_of_noise_learns_the_rewarded_one(modes):
    agent, state, base = modes.constant(modes.valued(modes.state), improve_by="dsrl")
    for _ in range(6):
        state, _ = agent.update_policy(state, base, modes.batch(modes.seen))
    assert 0.25 < modes.share(agent, state, base, alone=True) < 0.75
    assert modes.share(agent, state, base, alone=False) > 0.9


def between(actions: np.ndarray) -> np.ndarray:
    """A target that no sample of either mode reaches."""
    return np.abs(actions) < 0.25


def test_of_random_edits_the_best_reaches_a_target_between_two_modes(modes):
    valued = modes.valued(modes.state, rewarded=between, spread=1.0)
    agent, state, base = modes.constant(valued, edit_scale=0.4)
    assert modes.share(agent, state, base, between, alone=True) < 0.1
    assert modes.share(agent, state, base, between, alone=False) > 0.6


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "scale"), [("edit", 0.9), ("rlt", 0.05)])
def test_a_small_actor_learns_a_target_between_two_modes(modes, rule, scale):
    """One edit, of two candidates, or its whole chunk."""
    valued = modes.valued(modes.state, rewarded=between, spread=1.0)
    agent, state, base = modes.constant(valued, improve_by=rule, candidates=2, edit_scale=scale, bc_weight=0.1)
    own = np.zeros((50, 64, 2), np.float32)  # nothing is a human's
    for _ in range(6):
        state, _ = agent.update_policy(state, base, modes.batch(modes.seen)._replace(bc_weight=own))
    assert modes.share(agent, state, base, between, alone=True) < 0.1
    assert modes.share(agent, state, base, between, alone=False) > 0.9
