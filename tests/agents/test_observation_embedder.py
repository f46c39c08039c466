"""Features that are computed beforehand are those that an update computes, and updates with them are the same."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import CAMERA, build, config_of, make_batches, named, on_device, same
from errors import naming

from serl_chunk.agents import vision
from serl_chunk.agents.base import Agent
from serl_chunk.agents.state import AgentState, Params
from serl_chunk.agents.vision import SIZES, ObservationEmbedder
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.models.encoder import Impala, make_backbone
from serl_chunk.types import CameraSpec, ChunkBatch, ConfigError

CACHED = EncoderConfig(kind="resnet10", pooling="spatial", latent=8, shift=0, frozen_backbone=True, cache_features=True)
PIXELS = dataclasses.replace(CACHED, cache_features=False)


@pytest.fixture(scope="module", autouse=True)
def small_backbone():
    """A frozen backbone that compiles at once; its place and its treatment are ResNet-10's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision, "make_backbone", lambda kind, features: Impala((2,), parent=None))
        yield


class Looking(NamedTuple):
    """An agent with cached features, its first state, its base, and what computes the features."""

    agent: Agent
    state: AgentState
    base: Params
    embed: ObservationEmbedder


@pytest.fixture(scope="module")
def acrlpd(small_backbone) -> Looking:
    """Built once; tests leave it as it is."""
    return looking("acrlpd", CACHED)


def looking(variant: str, encoder: EncoderConfig) -> Looking:
    agent = agent_of(variant, encoder)
    state, base = jax.jit(agent.init)(jax.random.key(0)), agent.new_base(jax.random.key(1))
    embed = agent.embedder(base)
    assert embed is not None
    return Looking(agent, state, base, embed)


def of_frames(embed: ObservationEmbedder, images: np.ndarray) -> np.ndarray:
    """Features of frames uint8[N, H, W, 3] of the camera, alone among the entries of an observation."""
    found = embed({f"images/{CAMERA.name}": images, "state": np.zeros((len(images), 3), np.float32)})
    assert set(found) == {f"features/{CAMERA.name}"}
    return found[f"features/{CAMERA.name}"]


def agent_of(variant: str, encoder: EncoderConfig = CACHED) -> Agent:
    return build(dataclasses.replace(config_of(f"{variant}-image"), encoder=encoder))


def embedded(it: Looking, batch: ChunkBatch) -> ChunkBatch:
    """The batch as a replay with features gives it: no pixels at all."""

    def seen(observation):
        out = dict(observation)
        for camera in it.agent.spec.cameras:
            images = np.asarray(out.pop(f"images/{camera.name}"))
            flat = of_frames(it.embed, images.reshape(-1, *images.shape[-3:]))
            out[f"features/{camera.name}"] = flat.reshape(*images.shape[:-3], *flat.shape[1:])
        return out

    return batch._replace(observations=seen(batch.observations), next_observations=seen(batch.next_observations))


@pytest.mark.slow
def test_updates_with_features_are_those_with_pixels_and_compiled_once():
    it = looking("acfql", dataclasses.replace(CACHED, trained_by="critic"))
    agent, state, base, _ = it
    pixels = make_batches(agent.spec)
    features = embedded(it, pixels)
    assert set(features.observations) == {"state", f"features/{CAMERA.name}"}
    expected, as_pixels = agent.update(jax.tree.map(jnp.copy, state), base, named(agent, jax.device_put(pixels)))
    compiled = agent.update._cache_size()
    after, metrics = agent.update(state, base, named(agent, jax.device_put(features)))
    for name in ("critic", "target", "policy"):
        jax.tree.map(_assert_close, getattr(after, name), getattr(expected, name))
    assert metrics.keys() == as_pixels.keys()
    for key in metrics:
        np.testing.assert_allclose(metrics[key], as_pixels[key], rtol=1e-2, atol=1e-4, err_msg=key)
    for seed in (1, 2):
        after, _ = agent.update(
            after, base, named(agent, jax.device_put(embedded(it, make_batches(agent.spec, seed=seed))))
        )
    assert agent.update._cache_size() == compiled + 1


def _assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_steps_with_given_draws_are_the_same_and_depend_on_the_features(acrlpd):
    agent, state, base, _ = acrlpd
    pixels = jax.tree.map(lambda x: x[0], make_batches(agent.spec))
    features, other = embedded(acrlpd, pixels), jax.tree.map(lambda x: x[0], make_batches(agent.spec, seed=1))
    foreign = features._replace(observations=embedded(acrlpd, other).observations)
    draws = agent.critic_draws(jax.random.key(1), pixels), agent.policy_draws(jax.random.key(2), pixels)

    @jax.jit
    def steps(state, batch, draws):
        batch = agent.seen(state, base, batch)
        critic, _ = agent.step(state, base, batch, {"critic": draws[0]})
        policy, _ = agent.step(state, base, batch, {"policy": draws[1]})
        return critic.critic, policy.policy

    a, b, c = (steps(state, batch, draws) for batch in (features, pixels, foreign))
    jax.tree.map(_assert_close, a, b)
    assert not same(a[0], c[0])
    assert not same(a[1], c[1])


def test_features_do_not_depend_on_how_many_frames_there_are(acrlpd):
    embed = acrlpd.embed
    images = np.random.default_rng(0).integers(0, 256, (2 * SIZES[0] + 11, 32, 32, 3), np.uint8)
    whole = of_frames(embed, images)
    (spec,) = embed.features.values()
    assert spec.reads == (f"images/{CAMERA.name}",)
    assert acrlpd.agent.cached_features() == embed.features
    assert (whole.dtype, whole.shape[1:]) == (np.float16, spec.shape)
    for n in (1, 7, 8, 9, 63, 64, 65, 80, len(images)):
        np.testing.assert_allclose(of_frames(embed, images[:n]), whole[:n], rtol=2e-3, atol=2e-3)
    assert embed._embed._cache_size() == len(SIZES)
    assert not np.allclose(whole[0], whole[1], atol=2e-3)


def test_the_base_is_not_consumed_by_the_updates_that_read_it(acrlpd):
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    before = of_frames(acrlpd.embed, images)
    acrlpd.agent.update_policy(jax.tree.map(jnp.copy, acrlpd.state), acrlpd.base, on_device(acrlpd.agent.spec))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(acrlpd.base))
    np.testing.assert_array_equal(of_frames(acrlpd.embed, images), before)


def test_a_policy_that_learns_from_features_acts_on_pixels(acrlpd):
    agent, state, base, embed = acrlpd
    params = agent.published(state, base)
    observation = {k: v[0, 0] for k, v in make_batches(agent.spec).observations.items()}
    chunk, _ = agent.sample(params, observation, jax.random.key(0), explore=False)
    one = {
        "state": observation["state"],
        "features/top": of_frames(embed, observation["images/top"][None])[0],
    }
    from_features, _ = agent.sample(params, one, jax.random.key(0), explore=False)
    np.testing.assert_allclose(chunk, from_features, rtol=1e-3, atol=1e-3)
    black = observation | {"images/top": np.zeros_like(observation["images/top"])}
    assert not np.allclose(chunk, agent.sample(params, black, jax.random.key(0), explore=False)[0], atol=1e-3)


def test_there_is_nothing_to_keep_unless_asked_for(acrlpd):
    pixels = agent_of("acrlpd", PIXELS)
    assert (pixels.embedder(acrlpd.base), pixels.cached_features()) == (None, {})
    assert build(config_of("acrlpd")).embedder(acrlpd.base) is None


@pytest.mark.slow
def test_resnet10s_features_are_those_of_an_update(monkeypatch):
    monkeypatch.setattr(vision, "make_backbone", make_backbone)
    agent = build(AcrlpdConfig(encoder=CACHED, image_keys=(CAMERA.name,)))
    base = agent.vision.random(jax.random.key(0))
    embed = ObservationEmbedder(agent.vision, base)
    assert agent.vision.feature_shape(CameraSpec("large", 128, 100)) == (4, 4, 512)
    images = on_device(agent.spec).observations["images/top"][0]
    inside = jax.jit(jax.vmap(agent.vision.embed, in_axes=(None, 0)))(base, images[None])[0]
    outside = of_frames(embed, np.asarray(images))
    np.testing.assert_allclose(outside, inside, rtol=2e-3, atol=2e-3)
    assert np.abs(outside).max() > 0.1


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda: EncoderConfig(cache_features=True, shift=0),
            ("agent.encoder.cache_features", "True", "agent.encoder.frozen_backbone"),
        ),
        (
            lambda: EncoderConfig(kind="resnet10", frozen_backbone=True, cache_features=True, shift=3),
            ("agent.encoder.cache_features", "True", "agent.encoder.shift", 3, 0),
        ),
        (lambda: AcrlpdConfig(encoder=CACHED), ("agent.encoder.cache_features", "True", "agent.image_keys")),
    ],
)
def test_settings_that_cannot_work_are_named(make, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        make()
