"""pi0 behind the interface of chunk policies: clones, partitions, bases and samples."""

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
from serl_chunk.agents.state import flatten_params
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.agents.pi0 import ExpertConfig, Pi0Config, SiglipConfig, VlmConfig
from serl_chunk.models.pi0 import tree, weights
from serl_chunk.types import PROMPT, PROMPT_MASK, CameraSpec, ConfigError

SIZE = (24, 24)
SMALL = Pi0Config(
    image_size=SIZE, action_dim=6, vocabulary=258, depth=2, heads=2, head_dim=8, feature_grid=1, steps=3,
    siglip=SiglipConfig(width=16, depth=2, mlp=32, heads=2, patch=12), vlm=VlmConfig(width=16, mlp=32),
    expert=ExpertConfig(width=16, mlp=32), dtype="float32", frozen_dtype="float32", remat=False,
)  # fmt: skip
CAMERAS = (CameraSpec("top", *SIZE), CameraSpec("wrist", *SIZE))
SPEC = AgentSpec(4, 2, 3, 3, CAMERAS, 0.9, bounded=False)


def agent_of(**changes) -> Bc:
    pi0 = dataclasses.replace(SMALL, **changes)
    config = BcConfig(
        policy="pi0", pi0=pi0, image_keys=("top", "wrist"), lr=3e-3, policy_ema=0.0, policy_updates=1,
        encoder=EncoderConfig(frame_size=SIZE, shift=0), language=LanguageConfig("bytes", 16),
    )  # fmt: skip
    return Bc(config, SPEC)


def lora(rank=2) -> dict:
    ranks = {"attention_rank": rank, "mlp_rank": rank}
    return {"vlm": VlmConfig(width=16, mlp=32, **ranks), "expert": ExpertConfig(width=16, mlp=32, **ranks)}


def write(file, params):
    with weights.Writer(file) as writer:
        for path, leaf in params.items():
            writer.add(path, np.asarray(leaf))


def batches(agent, seed=0):
    made = make_batches(agent.spec, updates=1, seed=seed)
    rng = np.random.default_rng(seed)
    prompts = {PROMPT: rng.integers(1, 258, (1, 8, 16)).astype(np.int32), PROMPT_MASK: np.ones((1, 8, 16), bool)}
    return jax.device_put(made._replace(observations={**made.observations, **prompts}, next_observations={}))


def one(agent):
    return {k: jnp.asarray(v[0, 0]) for k, v in batches(agent).observations.items()}


def test_a_clone_learns_its_data_and_acts_near_them():
    agent = agent_of()
    state = agent.init(jax.random.key(0))
    batch = batches(agent)._replace(actions=jnp.full((1, 8, 3, 2), 0.4), bc_weight=jnp.ones((1, 8, 3)))
    losses = []
    for _ in range(150):
        state, metrics = agent.update(state, {}, {"policy": batch})
        losses.append(float(metrics["actor/bc_loss"]))
    assert np.mean(losses[-20:]) < 0.3 * np.mean(losses[:10])
    chunk, _ = agent.sample(agent.policy_params(state), one(agent), jax.random.key(1), explore=False)
    assert chunk.shape == (3, 2)
    np.testing.assert_allclose(chunk, 0.4, atol=0.35)


TRAINED = {
    "full": ({}, {"siglip", "vlm", "expert", "projections"}),
    "expert": ({}, {"expert", "projections"}),
    "lora": (lora(), {"vlm_lora", "expert_lora", "projections"}),
    "lora_expert": (lora(), {"expert_lora", "projections"}),
}


@pytest.mark.parametrize("trainable", TRAINED)
def test_only_trained_leaves_are_state_travel_and_change(trainable):
    changes, groups = TRAINED[trainable]
    agent = agent_of(trainable=trainable, **changes)
    state, base = agent.init(jax.random.key(0)), agent.new_base(jax.random.key(0))
    paths = tree.flat(state.policy["pi0"])
    assert {tree.group_of(path) for path in paths} == groups
    every = set(tree.leaves(agent.config.pi0))
    assert set(paths) | set(tree.flat(base.get("pi0", {}))) == every
    before = jax.tree.map(np.array, base)
    start = jax.tree.map(np.array, state.policy)
    state, _ = agent.update(state, base, {"policy": batches(agent)})
    assert same(before, base)
    assert not same(start, state.policy)
    params = agent.published(state, base)
    travelled = agent.load_params(flatten_params(params))
    a, _ = agent.sample(travelled, one(agent), jax.random.key(1), explore=False)
    b, _ = agent.sample(params, one(agent), jax.random.key(1), explore=False)
    np.testing.assert_array_equal(a, b)


def test_a_base_with_a_file_stays_at_home_and_is_read_on_both_sides(tmp_path):
    whole = tree.flat(tree.initial(SMALL, jax.random.key(7)))
    file = tmp_path / "weights.npz"
    write(file, whole)
    agent = agent_of(trainable="expert", weights=str(file))
    state = agent.pretrained(agent.init(jax.random.key(0)))
    for path, leaf in {**tree.flat(state.policy["pi0"]), **tree.flat(agent.source_base["pi0"])}.items():
        np.testing.assert_array_equal(leaf, whole[path])
    published = agent.published(state, agent.source_base)
    assert "base" not in published
    assert agent.base_digest
    acting = agent.load_params(flatten_params(published))
    chunk, _ = agent.sample(acting, one(agent), jax.random.key(1), explore=False)
    assert np.isfinite(chunk).all()


def test_a_file_of_another_model_is_named(tmp_path):
    file = tmp_path / "weights.npz"
    whole = tree.flat(tree.initial(SMALL, jax.random.key(7)))
    write(file, {path: leaf for path, leaf in whole.items() if "state_proj" not in path})
    agent, state = agent_of(trainable="expert", weights=str(file)), agent_of().init(jax.random.key(0))
    with pytest.raises(ConfigError, match="state_proj") as caught:
        agent.pretrained(state)
    assert caught.value.parameter == "agent.pi0.weights"
    other = agent_of(trainable="expert", weights=str(file), vocabulary=300)
    with pytest.raises(ConfigError, match="embedder"):
        _ = other.source_base


def test_training_images_change_at_random_and_are_not_shifted(monkeypatch):
    observation = batches(agent_of()).observations
    first = jax.tree.map(lambda x: x[0], observation)

    def refuse(*_):
        raise AssertionError("shifted")

    monkeypatch.setattr("serl_chunk.agents.perception.random_shift", refuse)
    for augment in (True, False):
        config = agent_of(augment=augment, cameras=("base", "wrist", "other")).config
        agent = Bc(dataclasses.replace(config, encoder=EncoderConfig(frame_size=SIZE, shift=4)), SPEC)
        state = agent.init(jax.random.key(0))
        batch = make_batches(SPEC, updates=1)._replace(observations=first, next_observations={})
        seen = agent.seen(state, {}, batch).observations
        for name in ("images/top", "images/wrist"):
            assert np.array_equal(seen[name], first[name]) != augment
        for name in set(first) - {"images/top", "images/wrist"}:
            np.testing.assert_array_equal(seen[name], first[name])
        _, metrics = agent.update(state, {}, {"policy": batches(agent)})
        assert np.isfinite(float(metrics["actor/bc_loss"]))


def test_committed_actions_come_out_as_they_are_and_the_rest_follows():
    agent = agent_of()
    params = agent.policy_params(agent.init(jax.random.key(0)))
    committed = np.array([[0.3, -0.2], [0, 0], [0, 0]], np.float32), np.array([1, 0, 0], np.float32)
    chunk, _ = agent.sample(params, one(agent), jax.random.key(1), explore=True, committed=committed)
    np.testing.assert_allclose(chunk[0], committed[0][0], atol=1e-6)


def test_a_robot_with_more_numbers_than_the_model_is_refused():
    many, wide = dataclasses.replace(SPEC, action_dim=7), dataclasses.replace(SPEC, state_dim=7)
    for spec in (many, wide):
        with pytest.raises(ConfigError, match=naming("agent.pi0.action_dim=7", 6)) as caught:
            Bc(agent_of().config, spec)
        assert caught.value.parameter == "agent.pi0.action_dim"
    # Its state is in the prompt.
    agent = Bc(agent_of(pi05=True).config, wide)
    shown = {**one(agent), "state": jnp.zeros(7)}
    chunk, _ = agent.sample(agent.policy_params(agent.init(jax.random.key(0))), shown, jax.random.key(1), explore=False)
    assert np.isfinite(chunk).all()


def test_another_base_than_a_checkpoints_is_refused(tmp_path):
    for seed in (1, 2):
        write(tmp_path / f"{seed}.npz", tree.flat(tree.initial(SMALL, jax.random.key(seed))))
    first, other = (agent_of(trainable="expert", weights=str(tmp_path / f"{seed}.npz")) for seed in (1, 2))
    first.check_base(first.base_digest)
    first.check_base("")  # of before, or without a base
    with pytest.raises(ConfigError, match=naming(first.base_digest, other.base_digest, "2.npz")) as caught:
        other.check_base(first.base_digest)
    assert caught.value.parameter == "agent.pi0.weights"


WRONG = [
    ({"encoder": EncoderConfig()}, "agent.encoder.frame_size"),
    ({"image_keys": tuple("abcd")}, "agent.image_keys"),
    ({"language": LanguageConfig("bytes"), "pi0": dataclasses.replace(SMALL, vocabulary=9)}, "agent.pi0.vocabulary"),
    ({"pi0": dataclasses.replace(SMALL, trainable="none")}, "agent.pi0.trainable"),
    ({"use_state": False}, "agent.use_state"),
    ({"encoder": EncoderConfig(frame_size=SIZE, latent=99)}, "agent.encoder.latent"),
    ({"encoder": EncoderConfig("resnet10", frame_size=SIZE, frozen_backbone=True)}, "agent.encoder.kind"),
    ({"pi0": dataclasses.replace(SMALL, pi05=True)}, "agent.language.tokenizer"),
    (
        {"pi0": dataclasses.replace(SMALL, pi05=True), "language": LanguageConfig("bytes"), "bc_joint_noise": 0.1},
        "agent.bc_joint_noise",
    ),
]


@pytest.mark.parametrize(("changes", "field"), WRONG)
def test_what_does_not_fit_is_named(changes, field):
    base = {"policy": "pi0", "pi0": SMALL, "image_keys": ("top",), "encoder": EncoderConfig(frame_size=SIZE)}
    with pytest.raises(ConfigError) as caught:
        BcConfig(**{**base, **changes})
    assert caught.value.parameter == field
