"""Who trains an encoder, what a frozen backbone takes part in, and where pretrained weights go."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import (
    CAMERA,
    ENCODER,
    build,
    config_of,
    critic_gradient,
    drawn,
    fresh,
    make_batches,
    one_batch,
    policy_gradient,
    same,
    seen_by,
)
from errors import naming
from flax.traverse_util import flatten_dict

from serl_chunk.agents.base import Agent
from serl_chunk.agents.state import AgentState, Context
from serl_chunk.agents.vision import Vision
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.encoder import EncoderConfig, resnet10_leaves
from serl_chunk.config.agents.gripper import SacGripperConfig
from serl_chunk.types import CameraSpec, ConfigError

FROZEN = EncoderConfig(kind="resnet10", pooling="mean", latent=8, shift=2, frozen_backbone=True)
SHARED = dataclasses.replace(ENCODER, trained_by="critic")
OF_STATES = dataclasses.replace(SHARED, state_latent=4)


def agent_of(variant: str, encoder: EncoderConfig, sizes: dict | None = None, **changes: object) -> Agent:
    """One of this test alone, because its backbone may be a patched one."""
    return build(config_of(f"{variant}-image", **{"encoder": encoder, **changes}), **(sizes or {}))


@pytest.mark.parametrize(("variant", "acting"), [("acfql", "target"), ("acrlpd", "critic")])
def test_policies_have_no_encoder_of_their_own_and_read_the_acting_critics(variant, acting):
    agent = agent_of(variant, SHARED)
    shapes = jax.eval_shape(agent.init, jax.random.key(0))
    for tree in (shapes.policy, shapes.policy_opt):
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        assert paths
        assert not [path for path in paths if "encoder" in path]
    travelling = flatten_dict(jax.eval_shape(agent.policy_params, shapes), sep="/")
    assert {k.split("/encoder/")[0] for k in travelling if "encoder" in k} == {"critic"}  # once
    marked, read = shapes.replace(**{name: {"encoder": name} for name in ("critic", "target")}), []
    agent.perception.encode = lambda encoder, base, observation: read.append(encoder) or Context(jnp.zeros(1))
    agent.perception.policy_context(shapes.policy, agent.choosing_params(marked), {}, {})
    assert read == [acting]


def test_the_critic_alone_trains_the_shared_encoder_and_actors_see_through_it():
    agent, state = fresh("acrlpd", encoder=OF_STATES)
    batch = one_batch(agent)
    assert "encoder" not in policy_gradient(agent, state, batch)[0]
    assert all(np.any(g) for g in jax.tree.leaves(critic_gradient(agent, state, batch)[0]["encoder"]))
    received = agent.load_params(agent.flatten_params(agent.policy_params(state)))
    chunk, blind = (
        agent.sample(params, seen_by(agent), jax.random.key(0), explore=False)[0]
        for params in (
            received,
            {**received, "critic": {**received["critic"], "encoder": blank(state.critic["encoder"])}},
        )
    )
    assert not np.array_equal(chunk, blind)


@pytest.mark.slow
def test_a_policy_keeps_what_it_imitated_while_the_critic_trains_the_encoder_alone():
    agent = agent_of("acrlpd", dataclasses.replace(SHARED, shift=0))

    def bright(seed: int):
        """Windows whose actions are the image's brightness."""
        light = np.random.default_rng(seed).uniform(size=(20, 32)).astype(np.float32)
        batch = make_batches(agent.spec, 20, 32, seed)
        image = (255 * light[..., None, None, None] * np.ones((32, 32, 3))).astype(np.uint8)
        actions = np.broadcast_to((1.6 * light - 0.8)[..., None, None], batch.actions.shape)
        return batch._replace(observations={**batch.observations, f"images/{CAMERA.name}": image}, actions=actions)

    state, losses = agent.init(jax.random.key(0)), []
    for i in range(10):
        state, metrics = agent.update_policy(state, {}, bright(i))
        losses.append(float(metrics["actor/bc_loss"]))
    for i in range(10):
        state, _ = agent.update_critic(state, {}, bright(100 + i))
    _, metrics = agent.update_policy(state, {}, bright(7))
    assert losses[-1] < losses[0] - 0.5
    assert float(metrics["actor/bc_loss"]) < losses[-1] + 0.2  # it would be a whole unit worse


@pytest.mark.parametrize(("variant", "encoder", "changes", "follows"), [
    ("acfql", OF_STATES, {}, True), ("acfql", SHARED, {}, False),  # without an encoder there is nothing to follow
    ("acrlpd-image", SHARED, {"bc_alpha": 0.0}, False),  # a policy that never imitated does not begin to
])  # fmt: skip
def test_a_policy_imitates_while_the_critic_trains_where_they_share_an_encoder(variant, encoder, changes, follows):
    agent, state = fresh(variant, encoder=encoder, **changes)
    after = jax.eval_shape(agent._update_critic, state, {}, make_batches(agent.spec))[1]
    assert ("actor/bc_loss" in after) == follows
    if not follows:
        return
    state, _ = agent.update_critic(state, {}, make_batches(agent.spec))
    before = drawn(agent)
    assert not same(state.policy, before.policy)
    assert (int(state.policy_updates), int(state.critic_updates)) == (2, 2)


def blank(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


@pytest.mark.parametrize("frozen", [True, False])
def test_pretrained_weights_reach_every_backbone(tmp_path, frozen):
    rng = np.random.default_rng(0)
    weights = {k: rng.random(s, np.float32) for k, s in resnet10_leaves().items()}
    np.savez(tmp_path / "w.npz", **weights)
    encoder = dataclasses.replace(FROZEN, frozen_backbone=frozen, weights=str(tmp_path / "w.npz"))
    gripper = SacGripperConfig(choices=(-1.0, 1.0))
    agent = agent_of("acrlpd", encoder, {"grippers": (1,)}, gripper=gripper, policy_ema=0.9)
    state: AgentState = blank(jax.eval_shape(agent.init, jax.random.key(0)).replace(rng=jnp.zeros(2)))
    filled = agent.pretrained(state)
    names = ("policy", "policy_average", "critic", "target")
    networks = {name: getattr(filled, name) for name in names} | {f"grasp {k}": filled.grasp[k] for k in names}
    backbones = {name: net["encoder"]["cameras"]["backbone"] for name, net in networks.items()} if not frozen else {}
    for name, tree in (backbones or {"base": agent.source_base["backbone"]}).items():
        flat = flatten_dict(tree, sep="/")
        assert flat.keys() == weights.keys()
        assert all(np.array_equal(flat[k], weights[k]) for k in flat), name
    assert jax.tree.structure(filled) == jax.tree.structure(state)
    assert same(filled.critic["q"], state.critic["q"])
    assert same(filled.grasp["critic"]["net"], state.grasp["critic"]["net"])


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    np.savez(tmp_path / "w.npz", **{"conv_init/kernel": np.zeros((3, 3, 3, 64), np.float32)})
    agent = agent_of("bc", dataclasses.replace(FROZEN, weights=str(tmp_path / "w.npz")))
    with pytest.raises(ConfigError, match=naming("w.npz", "conv_init/kernel", "float32(3, 3, 3, 64)", "(7, 7, 3, 64)")):
        agent.new_base(jax.random.key(0))


def test_cameras_of_different_sizes_share_weights_only_where_these_fit():
    cameras = CAMERA, CameraSpec("wrist", 16, 24)
    config = AcrlpdConfig(image_keys=("top", "wrist"))
    named_so = "top 32x32", "wrist 16x24", "agent.encoder.pooling", "flatten", "agent.encoder.share_cameras"
    with pytest.raises(ConfigError, match=naming(*named_so)):
        Vision(config, cameras)
    for encoder in (EncoderConfig(pooling="mean"), EncoderConfig(share_cameras=False)):
        Vision(dataclasses.replace(config, encoder=encoder), cameras)
