"""pi0 behind the interface of chunk policies: clones, partitions, bases and samples; and openpi's conventions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import same
from errors import naming
from pi0_agents import CONFIG, SIZE, SMALL, SPEC, lora, pi0_agent, shown, started

from serl_chunk.agents.bc import Bc
from serl_chunk.agents.state import flatten_params
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.presets import configured
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.models.pi0 import tree, weights
from serl_chunk.models.pi0.pi0 import interpolate
from serl_chunk.types import PROMPT, PROMPT_MASK, STATE, ConfigError

ONE_CAMERA = dataclasses.replace(SPEC, cameras=SPEC.cameras[:1])  # of three slots


def one_step(batch):
    return {"policy": jax.tree.map(lambda x: x[None], batch)}


def seen(agent):
    return {k: v[0] for k, v in shown(agent).observations.items()}


def write(file, params):
    with weights.Writer(file) as writer:
        for path, leaf in params.items():
            writer.add(path, np.asarray(leaf))
    return str(file)


def whole_tree(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in tree.leaves(SMALL).items()}


TRAINED = {
    "expert": ({}, {"expert", "projections"}),
    "lora": (lora(), {"vlm_lora", "expert_lora", "projections"}),
    "lora_expert": (lora(), {"expert_lora", "projections"}),
}


@pytest.mark.parametrize("trainable", TRAINED)
def test_only_trained_leaves_are_state(trainable):
    changes, groups = TRAINED[trainable]
    agent = pi0_agent(trainable=trainable, **changes)
    state, base = (jax.eval_shape(of, jax.random.key(0)) for of in (agent.init, agent.new_base))
    paths = tree.flat(state.policy["pi0"])
    assert {tree.group_of(path) for path in paths} == groups
    assert set(paths) | set(tree.flat(base.get("pi0", {}))) == set(tree.leaves(agent.config.pi0))


def test_only_trained_leaves_change_and_all_travel():
    agent = pi0_agent(trainable="lora", **lora())
    rng, shapes = np.random.default_rng(0), jax.eval_shape(agent.new_base, jax.random.key(0))
    base = jax.tree.map(lambda x: (0.1 * rng.normal(size=x.shape)).astype(x.dtype), shapes)
    state, base = started(agent), jax.device_put(base)
    before, start = jax.tree.map(np.array, (base, state.policy))
    state, _ = agent.update(state, base, one_step(shown(agent)))
    assert same(before, base)
    assert not same(start, state.policy)
    params = agent.published(state, base)
    loaded = agent.load_params(flatten_params(params))
    assert same(loaded, params)
    assert np.isfinite(agent.sample(loaded, seen(agent), jax.random.key(1), explore=False)[0]).all()


def test_a_base_with_a_file_stays_at_home_and_is_read_on_both_sides(tmp_path):
    whole = whole_tree(7)
    agent = pi0_agent(trainable="expert", weights=write(tmp_path / "weights.npz", whole))
    state = agent.pretrained(started(agent))
    for path, leaf in {**tree.flat(state.policy["pi0"]), **tree.flat(agent.source_base["pi0"])}.items():
        np.testing.assert_array_equal(leaf, whole[path])
    published = agent.published(state, agent.source_base)
    assert "base" not in published
    assert agent.base_digest
    assert same(agent.load_params(flatten_params(published))["base"], agent.source_base)


def test_a_file_of_another_model_and_another_base_than_a_checkpoints_are_named(tmp_path):
    lacking = {path: leaf for path, leaf in whole_tree(1).items() if "state_proj" not in path}
    agent = pi0_agent(trainable="expert", weights=write(tmp_path / "w.npz", lacking))
    with pytest.raises(ConfigError, match="state_proj") as caught:
        agent.pretrained(started(pi0_agent()))
    assert caught.value.parameter == "agent.pi0.weights"
    with pytest.raises(ConfigError, match="embedder"):
        _ = pi0_agent(trainable="expert", weights=str(tmp_path / "w.npz"), vocabulary=300).source_base
    first, other = (
        pi0_agent(trainable="expert", weights=write(tmp_path / f"{seed}.npz", whole_tree(seed))) for seed in (1, 2)
    )
    first.check_base(first.base_digest)
    first.check_base("")  # of before, or without a base
    with pytest.raises(ConfigError, match=naming(first.base_digest, other.base_digest, "2.npz")) as caught:
        other.check_base(first.base_digest)
    assert caught.value.parameter == "agent.pi0.weights"


def test_training_images_change_at_random_and_are_not_shifted(monkeypatch):
    monkeypatch.setattr("serl_chunk.agents.perception.random_shift", None)
    config = pi0_agent(augment=True, cameras=("base", "wrist", "other")).config
    agent = Bc(dataclasses.replace(config, encoder=EncoderConfig(frame_size=SIZE, shift=4)), SPEC)
    batch = shown(agent)
    found = jax.jit(lambda state: agent.seen_by_policy(state, {}, batch))(started(agent)).observations
    for name, array in batch.observations.items():
        assert np.array_equal(found[name], array) != (name in ("images/top", "images/wrist"))


def test_a_robot_with_more_numbers_than_the_model_is_refused():
    many, wide = dataclasses.replace(SPEC, action_dim=7), dataclasses.replace(SPEC, state_dim=7)
    for spec in (many, wide):
        with pytest.raises(ConfigError, match=naming("agent.pi0.action_dim=7", 6)) as caught:
            pi0_agent(spec)
        assert caught.value.parameter == "agent.pi0.action_dim"
    agent = pi0_agent(wide, pi05=True)  # its state is in the prompt
    params, observation = jax.eval_shape(lambda: agent.policy_params(agent.init(jax.random.key(0)))), seen(agent)
    act = lambda p, k: agent._sample_chunk(p, observation, k, agent._committed(None, np.bool_(False)), explore=False)  # noqa: E731
    assert jax.eval_shape(act, params, jax.random.key(0))[0].shape == (3, 2)


def test_a_model_that_reads_fewer_numbers_of_the_state_acts_as_one_without_the_others():
    wide = dataclasses.replace(SPEC, state_dim=7)
    few, plain = pi0_agent(wide, state_dims=SPEC.state_dim), pi0_agent()
    params, observation = plain.policy_params(started(plain)), seen(plain)
    longer = {**observation, STATE: jnp.concatenate([observation[STATE], jnp.ones(7 - SPEC.state_dim)])}
    act = lambda agent, o: agent.sample(params, o, jax.random.key(0), explore=True)[0]  # noqa: E731
    assert np.array_equal(act(few, longer), act(plain, observation))
    with pytest.raises(ConfigError, match=naming("has 7 numbers", 8)):
        pi0_agent(wide, state_dims=8)


# -- openpi's conventions ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published():
    return pi0_agent(ONE_CAMERA, cameras=("base", "left", "right"), augment=False, published=True)


@pytest.fixture(scope="module")
def ours():
    return pi0_agent(ONE_CAMERA, cameras=("base", "left", "right"), augment=False)


@pytest.fixture(scope="module")
def state(published):
    return started(published)


def test_the_published_loss_is_the_mean_over_all_numbers_and_steps_of_a_window(published, ours, state):
    # The second window ends after its first step; the third was not to be imitated.
    batch = shown(published, 4)._replace(bc_weight=jnp.ones((4, 3)).at[1, 1:].set(0).at[2].set(0))
    draws = published.policy_draws(jax.random.key(1), batch)

    @jax.jit
    def losses(policy):
        return [a.policy_loss(policy, state, {}, batch, draws, bc_only=True).terms[0].mean() for a in (published, ours)]

    @jax.jit
    def predicted(policy, x, t):
        whole, context = published.net.network(policy, {}), published.net.context(policy, {}, batch.observations)
        return published.net.model.velocity(whole, context.cache, x[:, None], t[:, None])[:, 0]

    actions, t = jnp.pad(batch.actions, ((0, 0), (0, 0), (0, 4))), 1 - draws["t"]
    x, velocity = interpolate(draws["x0"], t, actions)
    errors = np.mean((np.asarray(predicted(state.policy, x, t)) - np.asarray(velocity)) ** 2, axis=(1, 2))
    found, other = map(float, losses(state.policy))
    assert found == pytest.approx(errors[[0, 1, 3]].mean(), rel=1e-5)
    assert abs(other - found) > 0.01 * found


def test_no_token_attends_to_what_is_computed_in_addition(published, ours, state):
    observations = shown(published, 4, prompt=48).observations
    short = {**observations, **{name: observations[name][:, :16] for name in (PROMPT, PROMPT_MASK)}}
    noise, chunks = jax.random.normal(jax.random.key(3), (4, 2, 3, 6)), []
    for agent, given, length in ((published, observations, 4 * 3 + 48), (ours, short, 4 + 16)):

        @jax.jit
        def sampled(policy, agent=agent, given=given):
            whole, context = agent.net.network(policy, {}), agent.net.context(policy, {}, given)
            return agent.net.sample(whole, context, noise), context.cache.mask

        chunk, mask = sampled(state.policy)
        assert mask.shape[-1] == length
        chunks.append(chunk)
    np.testing.assert_allclose(*chunks, atol=2e-5)


def openpi(pi0, *overrides):
    experiment = ExperimentConfig("x", FakeAlohaConfig(image_size=24), dataclasses.replace(CONFIG, pi0=pi0))
    return configured(experiment, list(overrides), compat="openpi")


def test_an_update_trains_as_openpi_does(published):
    config = openpi(dataclasses.replace(published.config.pi0, published=False))
    of = dataclasses.replace(config.agent, image_keys=("top",))
    assert isinstance(of, BcConfig)
    assert of.pi0.published
    assert of.optimiser() == (2.5e-5, 2.5e-5, 1000, 30000, 1e-10, 1.0, 0.95)
    assert (of.policy_ema, config.learner.batch_size, config.compat) == (0.99, 32, "openpi")
    agent = Bc(of, ONE_CAMERA)
    first = started(agent)
    # Of leaves that begin at 0, where float32 is fine enough.
    first = first.replace(policy=jax.tree.map(lambda x: 0 * x if x.ndim == 1 else x, first.policy))
    resting = [not np.any(x) for x in jax.tree.leaves(first.policy)]
    gradient = jax.tree.map(np.ones_like, first.policy)
    after, _ = jax.jit(lambda state: agent._apply_policy_gradient(state, gradient, {}))(first)
    moved = max(np.abs(x).max() for x, zero in zip(jax.tree.leaves(after.policy), resting, strict=True) if zero)
    # Adam's first step is the rate, which begins at lr / 1001, whatever the gradient is.
    assert moved == pytest.approx(2.5e-5 / 1001, rel=0.05)


def test_what_is_trained_decides_the_average_and_how_lora_begins():
    chosen = {"full": {}, "expert": {}, "lora": lora()}
    found = {name: openpi(dataclasses.replace(SMALL, trainable=name, **of)).agent for name, of in chosen.items()}
    assert {name: (of.policy_ema, of.pi0.lora_init) for name, of in found.items()} == {
        "full": (0.99, "zero"),
        "expert": (0.0, "zero"),
        "lora": (0.0, "openpi"),
    }
    by_override = ("agent.pi0.trainable", "lora"), ("agent.pi0.vlm.attention_rank", "2")
    of = openpi(SMALL, *by_override).agent
    assert (of.policy_ema, of.pi0.lora_init, of.pi0.vlm.attention_rank) == (0.0, "openpi", 2)
    assert openpi(SMALL, *by_override, ("agent.policy_ema", "0.5")).agent.policy_ema == 0.5


def test_draws_share_a_prefix_and_given_actions_are_seen_as_they_are_and_are_no_targets():
    config = dataclasses.replace(CONFIG, pi0=dataclasses.replace(SMALL, flow_draws=2), train_delay="recorded")
    agent = Bc(config, SPEC)
    state, batch = started(agent), shown(agent)._replace(delay=np.array([0, 1, 2, 3] * 2, np.int32))
    draws = agent.policy_draws(jax.random.key(1), batch)
    assert (draws["x0"].shape, draws["t"].shape) == ((8, 2, 3, 6), (8, 2))

    @jax.jit
    def loss(batch, draws):
        [found] = agent.policy_loss(state.policy, state, {}, batch, draws, bc_only=True).terms
        return found.mean()

    given = np.arange(3)[None] < batch.delay[:, None]
    noise = draws["x0"] + 5 * given[:, None, :, None]
    assert float(loss(batch, draws | {"x0": noise})) == pytest.approx(float(loss(batch, draws)), rel=1e-5)
    moved = batch._replace(actions=batch.actions + 2 * given[..., None])
    assert float(loss(moved, draws)) != pytest.approx(float(loss(batch, draws)), rel=1e-3)
    each = [loss(batch, jax.tree.map(lambda x, k=k: jnp.repeat(x[:, k : k + 1], 2, 1), draws)) for k in range(2)]
    assert float(loss(batch, draws)) == pytest.approx(float(sum(each)) / 2, rel=1e-5)
