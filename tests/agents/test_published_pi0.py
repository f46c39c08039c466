"""pi0 in openpi's conventions: the loss of all numbers, what it computes in addition, and its training."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import make_batches, same
from errors import naming

from serl_chunk.agents.bc import Bc
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.agents.pi0 import ExpertConfig, Pi0Config, SiglipConfig, VlmConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.presets import configured
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.models.pi0.pi0 import interpolate
from serl_chunk.types import PROMPT, PROMPT_MASK, STATE, CameraSpec, ConfigError

SIZE = (24, 24)
SMALL = Pi0Config(
    cameras=("base", "left", "right"), image_size=SIZE, action_dim=6, vocabulary=258, depth=2, heads=2, head_dim=8,
    feature_grid=1, steps=3, siglip=SiglipConfig(width=16, depth=2, mlp=32, heads=2, patch=12),
    vlm=VlmConfig(width=16, mlp=32), expert=ExpertConfig(width=16, mlp=32), dtype="float32", frozen_dtype="float32",
    remat=False, augment=False,
)  # fmt: skip
CONFIG = BcConfig(
    policy="pi0", pi0=SMALL, image_keys=("top",), policy_ema=0.0, policy_updates=1,
    encoder=EncoderConfig(frame_size=SIZE, shift=0), language=LanguageConfig("bytes", 16),
)  # fmt: skip
SPEC = AgentSpec(4, 2, 3, 3, (CameraSpec("top", *SIZE),), 0.9, bounded=False)


def agent_of(*, published: bool) -> Bc:
    return Bc(dataclasses.replace(CONFIG, pi0=dataclasses.replace(SMALL, published=published)), SPEC)


@pytest.fixture(scope="module")
def state():
    return agent_of(published=True).init(jax.random.key(0))


def batch(rows=4, prompt=16):
    made = jax.tree.map(lambda x: x[0], make_batches(SPEC, updates=1))
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 258, (len(made.actions), prompt)).astype(np.int32)
    seen = {**made.observations, PROMPT: tokens, PROMPT_MASK: np.arange(prompt) < rng.integers(1, 9, (len(tokens), 1))}
    made = made._replace(observations=seen, next_observations={})
    return jax.tree.map(lambda x: jnp.asarray(x[:rows]), made)


def loss(agent, state, shown, key=1):
    made = agent.policy_draws(jax.random.key(key), shown)
    [term] = agent.policy_loss(state.policy, state, {}, shown, made, bc_only=True).terms
    return float(term.mean()), made


def test_the_loss_is_the_mean_over_all_numbers_and_steps_of_a_window(state):
    agent, shown = agent_of(published=True), batch()
    # The second window ends after its first step; the third was not to be imitated.
    weight = jnp.ones((4, 3)).at[1, 1:].set(0).at[2].set(0)
    shown = shown._replace(bc_weight=weight)
    found, draws = loss(agent, state, shown)
    whole, context = agent.shown(state.policy, {}, shown.observations)
    actions = jnp.pad(shown.actions, ((0, 0), (0, 0), (0, 4)))
    t = 1 - draws["t"]
    x, velocity = interpolate(draws["x0"], t, actions)
    predicted = agent.net.model.velocity(whole, context.cache, x[:, None], t[:, None])[:, 0]
    errors = jnp.mean(jnp.square(predicted - velocity), axis=(1, 2))
    assert found == pytest.approx(float(jnp.mean(errors[jnp.array([0, 1, 3])])), rel=1e-5)
    ours, _ = loss(agent_of(published=False), state, shown)
    assert abs(ours - found) > 0.01 * found


def test_no_token_attends_to_what_is_computed_in_addition(state):
    shown = batch(prompt=48).observations
    short = {**shown, PROMPT: shown[PROMPT][:, :16], PROMPT_MASK: shown[PROMPT_MASK][:, :16]}
    noise = jax.random.normal(jax.random.key(3), (4, 2, 3, 6))
    chunks = []
    for published, seen in ((True, shown), (False, short)):
        agent = agent_of(published=published)
        whole, context = agent.shown(state.policy, {}, seen)
        assert context.cache.mask.shape[-1] == (4 * 3 + 48 if published else 4 + 16)
        chunks.append(agent.net.sample(whole, context, noise))
    np.testing.assert_allclose(*chunks, atol=2e-5)


def test_a_camera_that_the_robot_lacks_needs_no_batch(state):
    agent, shown = agent_of(published=True), batch().observations
    one = {name: value[0] for name, value in shown.items()}
    whole, context = agent.shown(state.policy, {}, one)
    rows, several = agent.shown(state.policy, {}, shown)
    assert same(whole, rows)
    np.testing.assert_allclose(context.cache.keys, several.cache.keys[:, 0], atol=1e-5)
    assert context.cache.state.shape == (6,)
    np.testing.assert_array_equal(context.cache.state[:4], one[STATE])


def test_an_update_trains_as_openpi_does(state):
    experiment = ExperimentConfig("x", FakeAlohaConfig(image_size=24), CONFIG)
    config = configured(experiment, compat="openpi")
    of = config.agent
    assert isinstance(of, BcConfig)
    assert of.pi0.published
    assert of.optimiser() == (2.5e-5, 2.5e-5, 1000, 30000, 1e-10, 1.0, 0.95)
    assert (of.policy_ema, config.learner.batch_size, config.compat) == (0.99, 32, "openpi")
    agent = Bc(of, SPEC)
    first = agent.init(jax.random.key(0))
    before = jax.tree.map(np.array, first.policy)  # an update may use its memory
    after, _ = agent.update(first, {}, {"policy": jax.tree.map(lambda x: x[None], batch())})
    # Of leaves that begin at 0, where float32 is fine enough.
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after.policy), strict=True)
    moved = max(float(jnp.max(jnp.abs(b))) for a, b in pairs if not a.any())
    # Adam's first step is the rate, which begins at lr / 1001, whatever the gradient is.
    assert moved == pytest.approx(2.5e-5 / 1001, rel=0.05)


@pytest.mark.parametrize(
    ("trainable", "ranks", "average", "start"),
    [("full", 0, 0.99, "zero"), ("expert", 0, 0.0, "zero"), ("lora", 2, 0.0, "openpi")],
)
def test_what_is_trained_decides_the_average_and_how_lora_begins(trainable, ranks, average, start):
    lora = {"attention_rank": ranks, "mlp_rank": ranks}
    vlm, expert = VlmConfig(width=16, mlp=32, **lora), ExpertConfig(width=16, mlp=32, **lora)
    model = dataclasses.replace(SMALL, trainable=trainable, vlm=vlm, expert=expert)
    experiment = ExperimentConfig("x", FakeAlohaConfig(image_size=24), dataclasses.replace(CONFIG, pi0=model))
    of = configured(experiment, compat="openpi").agent
    assert isinstance(of, BcConfig)
    assert (of.policy_ema, of.pi0.lora_init) == (average, start)


def test_an_override_says_what_is_trained():
    overrides = [("agent.pi0.trainable", "lora"), ("agent.pi0.vlm.attention_rank", "2")]
    experiment = ExperimentConfig("x", FakeAlohaConfig(image_size=24), CONFIG)
    of = configured(experiment, overrides, compat="openpi").agent
    assert isinstance(of, BcConfig)
    assert (of.policy_ema, of.pi0.lora_init, of.pi0.vlm.attention_rank) == (0.0, "openpi", 2)
    of = configured(experiment, [*overrides, ("agent.policy_ema", "0.5")], compat="openpi").agent
    assert of.policy_ema == 0.5


@pytest.mark.parametrize("preset", [None, "qc", "bc"])
def test_openpi_has_conventions_for_pi0_alone(preset):
    with pytest.raises(ConfigError, match=naming("agent.policy=pi0")) as caught:
        configured(ExperimentConfig("x", FakeAlohaConfig()), preset=preset, compat="openpi")
    assert caught.value.parameter == "compat"
