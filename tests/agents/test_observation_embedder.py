"""Features that are computed beforehand are those that an update computes, and updates with them are the same."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import CAMERA, build, close, config_of, drawn, make_batches, named, seen_by
from small_bases import use_small_backbones

from serl_chunk.agents.vision import SIZES, ObservationEmbedder
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.types import ChunkBatch

CACHED = EncoderConfig(kind="resnet10", pooling="spatial", latent=8, shift=0, frozen_backbone=True, cache_features=True)
IMAGE, FEATURE = f"images/{CAMERA.name}", f"features/{CAMERA.name}"


@pytest.fixture(scope="module", autouse=True)
def small_backbone():
    with pytest.MonkeyPatch.context() as patch:
        use_small_backbones(patch)
        yield


def looking(variant: str, encoder: EncoderConfig):
    """An agent with cached features, its first state, its base, and what computes the features."""
    agent = build(config_of(f"{variant}-image", encoder=encoder))
    base = agent.new_base(jax.random.key(1))
    return agent, drawn(agent), base, agent.perception.embedder(base)


@pytest.fixture(scope="module")
def acrlpd(small_backbone):
    return looking("acrlpd", CACHED)


def of_frames(embed: ObservationEmbedder, images: np.ndarray) -> np.ndarray:
    """Features of frames uint8[N, H, W, 3] of the camera, alone among the entries of an observation."""
    found = embed({IMAGE: images, "state": np.zeros((len(images), 3), np.float32)})
    assert set(found) == {FEATURE}
    return found[FEATURE]


def embedded(embed: ObservationEmbedder, batch: ChunkBatch) -> ChunkBatch:
    """The batch as a replay with features gives it: no pixels at all."""

    def seen(observation):
        images = observation[IMAGE]
        flat = of_frames(embed, images.reshape(-1, *images.shape[-3:]))
        return {"state": observation["state"], FEATURE: flat.reshape(*images.shape[:-3], *flat.shape[1:])}

    return batch._replace(observations=seen(batch.observations), next_observations=seen(batch.next_observations))


@pytest.mark.slow
def test_updates_with_features_are_those_with_pixels_and_compiled_once():
    agent, state, base, embed = looking("acfql", dataclasses.replace(CACHED, trained_by="critic"))
    pixels = make_batches(agent.spec)
    expected, as_pixels = agent.update(state, base, named(agent, pixels))
    compiled = agent.update._cache_size()
    after, metrics = agent.update(drawn(agent), base, named(agent, embedded(embed, pixels)))
    for name in ("critic", "target", "policy"):
        jax.tree.map(_assert_close, getattr(after, name), getattr(expected, name))
    assert metrics.keys() == as_pixels.keys()
    for key in metrics:
        np.testing.assert_allclose(metrics[key], as_pixels[key], rtol=1e-2, atol=1e-4, err_msg=key)
    for seed in (1, 2):
        after, _ = agent.update(after, base, named(agent, embedded(embed, make_batches(agent.spec, seed=seed))))
    assert agent.update._cache_size() == compiled + 1


def _assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_features_do_not_depend_on_how_many_frames_there_are(acrlpd):
    agent, _, _, embed = acrlpd
    images = np.random.default_rng(0).integers(0, 256, (2 * SIZES[0] + 11, 32, 32, 3), np.uint8)
    whole = of_frames(embed, images)
    (spec,) = embed.features.values()
    assert spec.reads == (IMAGE,)
    assert agent.cached_features() == embed.features
    assert (whole.dtype, whole.shape[1:]) == (np.float16, spec.shape)
    for n in (1, 8, 9, 64, 80, len(images)):
        np.testing.assert_allclose(of_frames(embed, images[:n]), whole[:n], rtol=2e-3, atol=2e-3)
    assert embed._embed._cache_size() == len(SIZES)
    assert not np.allclose(whole[0], whole[1], atol=2e-3)


def test_a_policy_that_learns_from_features_acts_on_pixels(acrlpd):
    agent, state, base, embed = acrlpd
    params, seen = agent.published(state, base), seen_by(agent)
    one = {"state": seen["state"], FEATURE: of_frames(embed, seen[IMAGE][None])[0]}
    chunk, of_features, blind = (
        agent.sample(params, observation, jax.random.key(0), explore=False)[0]
        for observation in (seen, one, seen | {IMAGE: np.zeros_like(seen[IMAGE])})
    )
    np.testing.assert_allclose(chunk, of_features, rtol=1e-3, atol=1e-3)
    assert not np.allclose(chunk, blind, atol=1e-3)


def test_features_that_an_observation_brings_are_not_computed_again(acrlpd):
    looks, base = acrlpd[0].perception.vision, acrlpd[2]
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    encode = jax.jit(looks.encode_images)
    seen = encode(base, {"state": jnp.zeros((3, 4)), IMAGE: images})
    assert set(seen) == {"state", FEATURE}
    assert (seen[FEATURE].shape, seen[FEATURE].dtype) == ((3, 4, 4, 2), jnp.float16)
    assert looks.encode_images(base, seen)[FEATURE] is seen[FEATURE]
    assert close(encode(base, {IMAGE: images[1]})[FEATURE], seen[FEATURE][1], 2e-3)
