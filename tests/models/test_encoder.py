"""Feature shapes, shared camera weights, and the random shift."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serl_chunk.models.encoder import ObservationEncoder, _patches, random_shift


def observe(batch: int = 6, size: int = 12, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    frame = rng.integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
    return {"state": rng.normal(size=(batch, 5)).astype(np.float32), "images/a": frame, "images/b": frame.copy()}


@pytest.mark.parametrize(
    ("keys", "use_state", "width"), [((), True, 5), (("a",), True, 9), (("a", "b"), True, 13), (("a", "b"), False, 8)]
)
def test_features_are_the_state_beside_one_embedding_per_camera(keys, use_state, width):
    encoder = ObservationEncoder(keys, use_state, (4,), 4)
    observation = observe()
    variables = encoder.init(jax.random.key(0), observation)
    features = encoder.apply(variables, observation)
    assert (features.shape, features.dtype) == ((6, width), jnp.float32)
    if use_state:
        np.testing.assert_array_equal(features[:, :5], observation["state"])
    if keys:
        assert float(jnp.abs(features[:, -4:]).max()) <= 1
        assert len(variables["params"]) == 1  # one convolutional encoder, whatever the number of cameras
    else:
        assert "params" not in variables


def test_cameras_share_weights_and_a_single_observation_needs_no_batch():
    encoder = ObservationEncoder(("a", "b"), False, (4,), 4)
    observation = observe()
    variables = encoder.init(jax.random.key(0), observation)
    features = encoder.apply(variables, observation)
    np.testing.assert_array_equal(features[:, :4], features[:, 4:])  # equal frames
    single = encoder.apply(variables, {k: v[2] for k, v in observation.items()})
    assert single.shape == (8,)
    np.testing.assert_allclose(single, features[2], atol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(12, 12), (7, 10), (1, 5)])
def test_a_product_over_patches_is_a_strided_convolution(height, width):
    x = jax.random.normal(jax.random.key(0), (2, height, width, 3))
    kernel = jax.random.normal(jax.random.key(1), (27, 4))
    convolved = jax.lax.conv_general_dilated(
        x, kernel.reshape(3, 3, 3, 4), (2, 2), ((1, 1 + height % 2), (1, 1 + width % 2)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    rows, columns = (height + 1) // 2, (width + 1) // 2
    np.testing.assert_allclose(_patches(x) @ kernel, convolved[:, :rows, :columns], atol=1e-4)


def test_no_shift_changes_nothing():
    observation = observe()
    shifted = random_shift(jax.random.key(0), observation, 0)
    assert shifted.keys() == observation.keys()
    for key, value in observation.items():
        assert shifted[key] is value


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
    assert len(found) > 10  # offsets differ between samples, and
    assert {dy for dy, _ in found} == {dx for _, dx in found} == set(range(5))  # reach the limits in both directions
