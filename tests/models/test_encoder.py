"""Feature shapes, shared camera weights, and the random shift."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.models.encoder import ObservationEncoder, SpatialEmbeddings, _patches, random_shift


def observe(batch: int = 6, size: int = 12, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    frame = rng.integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
    return {"state": rng.normal(size=(batch, 5)).astype(np.float32), "images/a": frame, "images/b": frame.copy()}


@pytest.mark.parametrize(("keys", "use_state", "width"), [((), True, 5), (("a", "b"), False, 8)])
def test_features_are_the_state_beside_one_embedding_per_camera(keys, use_state, width):
    encoder, observation = ObservationEncoder(keys, use_state, EncoderConfig(features=(4,), latent=4)), observe()
    variables = jax.jit(encoder.init)(jax.random.key(0), observation)
    apply = jax.jit(encoder.apply)
    features = apply(variables, observation)
    assert (features.shape, features.dtype) == ((6, width), jnp.float32)
    if use_state:
        np.testing.assert_array_equal(features[:, :5], observation["state"])
    # One convolutional encoder, whatever the number of cameras.
    assert len(variables.get("params", {})) == bool(keys)
    if keys:
        assert float(jnp.abs(features[:, -4:]).max()) <= 1
        np.testing.assert_array_equal(features[:, -4:], features[:, -8:-4] if len(keys) > 1 else features[:, -4:])
    single = apply(variables, {k: v[2] for k, v in observation.items()})  # which needs no batch
    np.testing.assert_allclose(single, features[2], atol=1e-5)


def test_a_product_over_patches_is_a_strided_convolution():
    height, width = 7, 10
    x = jax.random.normal(jax.random.key(0), (2, height, width, 3))
    kernel = jax.random.normal(jax.random.key(1), (27, 4))
    convolved = jax.lax.conv_general_dilated(
        x,
        kernel.reshape(3, 3, 3, 4),
        (2, 2),
        ((1, 1 + height % 2), (1, 1 + width % 2)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    rows, columns = (height + 1) // 2, (width + 1) // 2
    np.testing.assert_allclose(_patches(x) @ kernel, convolved[:, :rows, :columns], atol=1e-4)


@pytest.mark.parametrize(("kind", "pooling"), [("conv", "spatial"), ("impala", "flatten")])
def test_every_encoder_gives_one_embedding_per_camera_of_weights_of_its_own(kind, pooling):
    config = EncoderConfig(kind, (4,), pooling, 6, share_cameras=False, state_latent=3)
    encoder = ObservationEncoder(("a", "b"), True, config)
    observation = observe(batch=2)
    variables = jax.jit(encoder.init)(jax.random.key(0), observation)
    assert set(variables["params"]) == {"camera_a", "camera_b", "state_dense", "state_norm"}
    apply = jax.jit(encoder.apply)
    features = apply(variables, observation)
    assert (features.shape, features.dtype) == ((2, 3 + 2 * 6), jnp.float32)
    assert float(jnp.abs(features).max()) <= 1
    assert not np.array_equal(features[:, 3:9], features[:, 9:])  # equal frames


TEXT = {
    "prompt": np.array([[1, 5, 6, 7], [1, 6, 5, 7], [1, 5, 0, 0]], np.int32),
    "prompt_mask": np.array([4 * [True], 4 * [True], [True, True, False, False]]),
}


def test_a_text_is_embedded_next_to_the_state_and_its_order_counts():
    encoder = ObservationEncoder((), True, EncoderConfig(), LanguageConfig("bytes", 4))
    observation = {"state": np.zeros((3, 5), np.float32), **TEXT}
    variables = jax.jit(encoder.init)(jax.random.key(0), observation)
    assert set(variables["params"]) == {"language"}
    apply = jax.jit(encoder.apply)
    features = apply(variables, observation)
    assert (features.shape, features.dtype) == ((3, 5 + 64), jnp.float32)
    assert float(jnp.abs(features).max()) <= 1
    different = [float(jnp.abs(features[i] - features[j]).max()) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert min(different) > 0.05
    single = apply(variables, {k: v[2] for k, v in observation.items()})
    np.testing.assert_allclose(single, features[2], atol=1e-6)
    blank = TEXT["prompt"].copy()
    blank[2, 2:] = 99  # behind its end
    np.testing.assert_array_equal(apply(variables, observation | {"prompt": blank}), features)


def test_spatial_embeddings_weigh_places_by_channel():
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 5))
    params = SpatialEmbeddings().init(jax.random.key(1), x)
    kernel = params["params"]["kernel"]
    expected = jnp.sum(x[..., None] * kernel[None], axis=(1, 2)).reshape(2, -1)
    np.testing.assert_allclose(SpatialEmbeddings().apply(params, x), expected, atol=1e-5)


def test_a_shift_moves_the_content_by_one_offset_per_sample_for_all_cameras():
    pixels, observation = 2, observe(batch=40)
    shifted = {k: np.asarray(v) for k, v in random_shift(jax.random.key(1), observation, pixels).items()}
    np.testing.assert_array_equal(shifted["state"], observation["state"])
    np.testing.assert_array_equal(shifted["images/a"], shifted["images/b"])
    assert shifted["images/a"].dtype == np.uint8
    padded = np.pad(observation["images/a"], ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)), mode="edge")
    found = set()
    for i in range(40):
        matches = [
            (dy, dx)
            for dy in range(2 * pixels + 1)
            for dx in range(2 * pixels + 1)
            if np.array_equal(shifted["images/a"][i], padded[i, dy : dy + 12, dx : dx + 12])
        ]
        assert len(matches) == 1
        found.add(matches[0])
    still = random_shift(jax.random.key(0), observation, 0)
    assert all(np.array_equal(still[key], value) for key, value in observation.items())
    assert len(found) > 10  # offsets differ between samples, and
    assert {dy for dy, _ in found} == {dx for _, dx in found} == set(range(5))  # reach the limits in both directions
