"""Who trains an encoder, what a frozen backbone takes part in, and where pretrained weights go."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import CAMERA, DISCOUNT, build, config_of, make_batches, named, on_device, same
from errors import naming
from flax.traverse_util import flatten_dict

from serl_chunk.agents import vision
from serl_chunk.agents.acrlpd import Acrlpd
from serl_chunk.agents.base import Agent
from serl_chunk.agents.discrete_gripper import with_gripper
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState, Context
from serl_chunk.agents.vision import Vision
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.encoder import EncoderConfig, resnet10_leaves
from serl_chunk.config.agents.gripper import SacGripperConfig
from serl_chunk.models.encoder import Impala
from serl_chunk.types import CameraSpec, ConfigError

FROZEN = EncoderConfig(kind="resnet10", pooling="mean", latent=8, shift=2, frozen_backbone=True)


def agent_of(variant: str, encoder: EncoderConfig, **changes: object) -> Agent:
    config = config_of(f"{variant}-image", **changes)
    return build(dataclasses.replace(config, encoder=encoder))


def by_critic(variant: str, **changes: object) -> Agent:
    return agent_of(variant, EncoderConfig(features=(4,), latent=8, shift=2, trained_by="critic"), **changes)


def zeros(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


@pytest.fixture
def small_backbone(monkeypatch):
    """A frozen backbone that compiles at once; its place and its treatment are ResNet-10's."""
    monkeypatch.setattr(vision, "make_backbone", lambda kind, features: Impala((2,), parent=None))


@pytest.mark.parametrize(("variant", "acting"), [("acfql", "target"), ("acrlpd", "critic")])
def test_policies_have_no_encoder_of_their_own_and_read_the_acting_critics(variant, acting):
    agent = by_critic(variant)
    shapes = jax.eval_shape(agent.init, jax.random.key(0))
    assert not [k for k in flatten_dict(shapes.policy, sep="/") if "encoder" in k]
    optimised = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes.policy_opt)]
    assert optimised
    assert not [k for k in optimised if "encoder" in k]
    marked, read = shapes.replace(**{name: {"encoder": name} for name in ("critic", "target")}), []
    agent.encode = lambda encoder, base, observation: read.append(encoder) or Context(jnp.zeros(1))
    for policy in (shapes.policy, shapes.policy.get("onestep", shapes.policy)):
        agent.policy_context(policy, agent.choosing_params(marked), {}, {})
    assert set(read) == {acting}
    agent = by_critic(variant)
    travelling = flatten_dict(jax.eval_shape(agent.policy_params, shapes), sep="/")
    assert {k.split("/encoder/")[0] for k in travelling if "encoder" in k} == {"critic"}  # once


def test_the_critic_alone_trains_the_shared_encoder():
    agent = by_critic("acrlpd")
    state = jax.jit(agent.init)(jax.random.key(0))
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    draws = agent.policy_draws(jax.random.key(1), batch)

    def both(state: AgentState) -> tuple[AgentState, AgentState]:
        after_policy, _ = agent.step(state, {}, batch, {"policy": draws}, bc_only=True)
        after_critic, _ = agent.step(state, {}, batch, {"critic": agent.critic_draws(jax.random.key(2), batch)})
        return after_policy, after_critic

    after_policy, after_critic = jax.jit(both)(state)
    assert same(after_policy.critic, state.critic)
    assert not same(after_policy.policy, state.policy)
    assert same(after_critic.policy, state.policy)
    layers = zip(*(jax.tree.leaves(s.critic["encoder"]) for s in (after_critic, state)), strict=True)
    assert all(not np.array_equal(new, old) for new, old in layers)


@pytest.mark.slow
def test_a_policy_keeps_what_it_imitated_while_the_critic_trains_the_encoder_alone():
    shared = EncoderConfig(features=(4,), latent=8, shift=0, trained_by="critic")
    agent = agent_of("acrlpd", shared)

    def bright(seed: int):
        """Windows whose actions are the image's brightness."""
        light = np.random.default_rng(seed).uniform(size=(20, 32)).astype(np.float32)
        batch = make_batches(agent.spec, 20, 32, seed)
        image = (255 * light[..., None, None, None] * np.ones((32, 32, 3))).astype(np.uint8)
        actions = np.broadcast_to((1.6 * light - 0.8)[..., None, None], batch.actions.shape)
        seen = {**batch.observations, f"images/{CAMERA.name}": image}
        return jax.device_put(batch._replace(observations=seen, actions=actions))

    state, losses = agent.init(jax.random.key(0)), []
    for i in range(10):
        state, metrics = agent.update_policy(state, {}, bright(i))
        losses.append(float(metrics["actor/bc_loss"]))
    for i in range(10):
        state, _ = agent.update_critic(state, {}, bright(100 + i))
    _, metrics = agent.update_policy(state, {}, bright(7))
    assert losses[-1] < losses[0] - 0.5
    assert float(metrics["actor/bc_loss"]) < losses[-1] + 0.2  # it would be a whole unit worse


@pytest.mark.slow
def test_a_policy_that_never_imitated_does_not_begin_to_while_the_critic_trains():
    agent = by_critic("acrlpd", bc_alpha=0.0)
    state = agent.init(jax.random.key(0))
    before = jax.tree.map(jnp.copy, state)
    after, _ = agent.update_critic(state, {}, on_device(agent.spec))
    assert same(after.policy, before.policy)
    assert not same(after.critic, before.critic)


@pytest.mark.parametrize("trained_by", ["each", pytest.param("critic", marks=pytest.mark.slow)])
def test_critic_updates_leave_a_policy_alone_that_sees_with_eyes_of_its_own(trained_by):
    for variant, moved in (("acfql-image", trained_by == "critic"), ("acfql", False)):
        encoder = EncoderConfig(features=(4,), latent=8, shift=2, trained_by=trained_by)
        agent = build(dataclasses.replace(config_of(variant), encoder=encoder))
        state = agent.init(jax.random.key(0))
        before = jax.tree.map(jnp.copy, state)
        after, _ = agent.update_critic(state, {}, on_device(agent.spec))
        assert same(after.policy, before.policy) != moved
        assert int(after.policy_updates) == (2 if moved else 0)
        assert int(after.critic_updates) == 2


def test_an_actor_sees_through_the_encoder_that_travelled():
    agent = by_critic("acrlpd")
    params = jax.jit(lambda key: agent.policy_params(agent.init(key)))(jax.random.key(0))
    received = agent.load_params(agent.flatten_params(params))
    observation = {k: v[0, 0] for k, v in make_batches(agent.spec).observations.items()}
    chunk, _ = agent.sample(received, observation, jax.random.key(0), explore=False)
    other = {**received, "critic": {**received["critic"], "encoder": zeros(received["critic"]["encoder"])}}
    blind, _ = agent.sample(other, observation, jax.random.key(0), explore=False)
    assert chunk.shape == (3, 2)
    assert not np.array_equal(chunk, blind)


@pytest.mark.slow
def test_a_frozen_backbone_is_one_for_all_networks_and_no_optimiser_has_it(small_backbone):
    agent = agent_of("acrlpd", FROZEN)
    state = jax.jit(agent.init)(jax.random.key(0))
    base = agent.new_base(jax.random.key(1))
    before = jax.tree.map(np.array, base)
    assert len(jax.tree.leaves(before)) == 10  # five convolutions
    for name in ("policy", "policy_opt", "critic", "critic_opt", "target"):
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(getattr(state, name))]
        assert not [p for p in paths if "backbone" in p], name
    policy = jax.tree.map(np.array, state.policy)
    after, metrics = agent.update(state, base, named(agent, on_device(agent.spec)))
    assert all(np.isfinite(v) for v in metrics.values())
    assert same(jax.tree.map(np.asarray, base), before)
    assert not same(jax.tree.map(np.asarray, after.policy), policy)
    params = agent.published(after, base)
    assert same(params["base"], base)
    observation = {k: v[0, 0] for k, v in make_batches(agent.spec).observations.items()}
    seen, _ = agent.sample(params, observation, jax.random.key(0), explore=False)
    unseen, _ = agent.sample({**params, "base": zeros(base)}, observation, jax.random.key(0), explore=False)
    assert not np.array_equal(seen, unseen)


def test_features_that_an_observation_brings_are_not_computed_again(small_backbone):
    looks = Vision(AcrlpdConfig(encoder=FROZEN, image_keys=(CAMERA.name,)), (CAMERA,))
    base = looks.random(jax.random.key(0))
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    seen = looks.encode_images(base, {"state": jnp.zeros((3, 4)), "images/top": images})
    assert set(seen) == {"state", "features/top"}
    assert (seen["features/top"].shape, seen["features/top"].dtype) == ((3, 4, 4, 2), jnp.float16)
    assert looks.encode_images(base, seen)["features/top"] is seen["features/top"]
    alone = looks.encode_images(base, {"images/top": images[1]})["features/top"]
    np.testing.assert_allclose(alone, seen["features/top"][1], atol=2e-3)


@pytest.mark.parametrize("kind", ["published-distill", "acrlpd", pytest.param("bc", marks=pytest.mark.slow)])
@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_resnet10_keeps_the_shapes_of_a_state(kind, frozen):
    agent = agent_of(kind, dataclasses.replace(FROZEN, frozen_backbone=frozen, pooling="spatial", state_latent=6))
    state = jax.eval_shape(agent.init, jax.random.key(0))
    base = jax.eval_shape(agent.new_base, jax.random.key(0))
    new, _ = jax.eval_shape(agent._update, state, base, named(agent, make_batches(agent.spec)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    found = {k for k in agent.network_shape().split(";") if "conv_init" in k}
    where = {"base"} if frozen else {"policy", "critic"} - ({"critic"} if kind == "bc" else set())
    assert {k.split("/")[0] for k in found} == where


@pytest.mark.parametrize("frozen", [True, False])
def test_pretrained_weights_reach_every_backbone(tmp_path, frozen):
    rng = np.random.default_rng(0)
    weights = {k: rng.random(s, np.float32) for k, s in resnet10_leaves().items()}
    np.savez(tmp_path / "w.npz", **weights)
    encoder = dataclasses.replace(FROZEN, frozen_backbone=frozen, weights=str(tmp_path / "w.npz"))
    agent = agent_of("acrlpd", encoder, policy_ema=0.9)
    state = zeros_state(agent)
    filled = agent.pretrained(state)
    names = () if frozen else ("policy", "policy_average", "critic", "target")
    trees = {name: getattr(filled, name)["encoder"]["cameras"]["backbone"] for name in names}
    trees = trees or {"base": agent.source_base["backbone"]}
    for name, tree in trees.items():
        flat = flatten_dict(tree, sep="/")
        assert flat.keys() == weights.keys()
        assert all(np.array_equal(flat[k], weights[k]) for k in flat), name
    assert jax.tree.structure(filled) == jax.tree.structure(state)
    assert same(filled.critic["q"], state.critic["q"])


@pytest.mark.slow
def test_pretrained_weights_reach_the_grasp_critics_backbones(tmp_path):
    np.savez(tmp_path / "w.npz", **{k: np.ones(s, np.float32) for k, s in resnet10_leaves().items()})
    encoder = dataclasses.replace(FROZEN, frozen_backbone=False, weights=str(tmp_path / "w.npz"))
    gripper = SacGripperConfig(choices=(-1.0, 1.0))
    config = config_of("acrlpd", image_keys=(CAMERA.name,), encoder=encoder, gripper=gripper, policy_ema=0.9)
    spec = AgentSpec(4, 2, 3, 3, (CAMERA,), DISCOUNT, grippers=(1,))
    agent = with_gripper(config, spec, functools.partial(Acrlpd, config))
    filled = agent.pretrained(zeros_state(agent)).grasp
    for name in ("policy", "policy_average", "critic", "target"):
        backbone = filled[name]["encoder"]["cameras"]["backbone"]
        assert all(np.all(leaf == 1) for leaf in jax.tree.leaves(backbone)), name
        assert not np.any(jax.tree.leaves(filled[name]["net"])[0])


def test_a_shared_encoder_without_parameters_needs_not_travel():
    agent = build(config_of("acfql", encoder=EncoderConfig(trained_by="critic")))
    flat = {k: np.zeros(v.shape, v.dtype) for k, v in flatten_dict(agent._abstract_params, sep="/").items()}
    received = agent.load_params(flat)
    assert "encoder" not in received["critic"]
    chunk, _ = agent.sample(received, {"state": np.zeros(4, np.float32)}, jax.random.key(0), explore=False)
    assert chunk.shape == (3, 2)


def zeros_state(agent: Agent) -> AgentState:
    shapes = jax.eval_shape(agent.init, jax.random.key(0)).replace(rng=jnp.zeros(2))
    return zeros(shapes)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    np.savez(tmp_path / "w.npz", **{"conv_init/kernel": np.zeros((3, 3, 3, 64), np.float32)})
    agent = agent_of("bc", dataclasses.replace(FROZEN, weights=str(tmp_path / "w.npz")))
    with pytest.raises(ConfigError, match=naming("w.npz", "conv_init/kernel", "float32(3, 3, 3, 64)", "(7, 7, 3, 64)")):
        agent.new_base(jax.random.key(0))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: EncoderConfig(kind="vit"), ("agent.encoder.kind", "vit", "conv", "impala", "resnet10")),
        (lambda: EncoderConfig(pooling="max"), ("agent.encoder.pooling", "max", "flatten", "mean", "spatial")),
        (lambda: EncoderConfig(trained_by="actor"), ("agent.encoder.trained_by", "actor", "each", "critic")),
        (lambda: EncoderConfig(state_latent=-1), ("agent.encoder.state_latent", -1, 0)),
        (
            lambda: EncoderConfig(frozen_backbone=True),
            ("agent.encoder.frozen_backbone", "agent.encoder.kind", "resnet10", "conv"),
        ),
        (
            lambda: EncoderConfig(kind="impala", weights="w.npz"),
            ("agent.encoder.weights", "agent.encoder.kind", "resnet10", "impala"),
        ),
        (
            lambda: BcConfig(encoder=EncoderConfig(trained_by="critic")),
            ("agent.encoder.trained_by", "critic", "each", "bc"),
        ),
    ],
)
def test_settings_that_cannot_work_are_named(make, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        make()


def test_cameras_of_different_sizes_share_weights_only_where_these_fit():
    cameras = (CameraSpec("top", 32, 32), CameraSpec("wrist", 16, 24))
    config = AcrlpdConfig(image_keys=("top", "wrist"))
    with pytest.raises(
        ConfigError,
        match=naming("top 32x32", "wrist 16x24", "agent.encoder.pooling", "flatten", "agent.encoder.share_cameras"),
    ):
        Vision(config, cameras)
    for encoder in (EncoderConfig(pooling="mean"), EncoderConfig(share_cameras=False)):
        Vision(dataclasses.replace(config, encoder=encoder), cameras)
