"""What tokens see, where they stand, and what a batch need not compute."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from serl_chunk.models.pi0.masks import attention_mask, positions, suffix_opens, without_unused


def test_a_group_sees_itself_and_those_before_it():
    opens = jnp.array([0, 0, 1, 1, 0], bool)  # a prefix of two, a state, two actions
    seen = attention_mask(jnp.array([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1]], bool), opens)
    whole = np.array([[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    np.testing.assert_array_equal(seen[0], whole)
    real = np.array([1, 0, 1, 1, 1], bool)
    np.testing.assert_array_equal(seen[1], whole & real[None] & real[:, None])


def test_padding_takes_no_place():
    np.testing.assert_array_equal(positions(jnp.array([[1, 0, 1, 1, 0]], bool)), [[0, 0, 1, 2, 2]])


def test_a_suffix_has_a_group_for_the_state_and_one_for_the_actions():
    np.testing.assert_array_equal(suffix_opens(3, state=True), [True, True, False, False])
    np.testing.assert_array_equal(suffix_opens(3, state=False), [True, False, False])


def test_missing_cameras_and_empty_slots_are_left_out():
    rows, slots = 2, 48
    observation = {
        "state": np.zeros((rows, 3)),
        "images/front": np.zeros((rows, 4, 4, 3)),
        "images/wrist": np.zeros((rows, 4, 4, 3)),
        "image_masks/front": np.array([True, False]),
        "image_masks/wrist": np.array([False, False]),
        "prompt": np.arange(rows * slots).reshape(rows, slots),
        "prompt_mask": np.arange(slots)[None] < np.array([[5], [17]]),
    }
    kept = without_unused(observation)
    assert set(kept) == set(observation) - {"images/wrist", "image_masks/wrist"}
    assert kept["prompt"].shape == kept["prompt_mask"].shape == (rows, 32)
    np.testing.assert_array_equal(kept["prompt"], observation["prompt"][:, :32])
    assert kept["images/front"] is observation["images/front"]


def test_a_prompt_is_never_longer_than_its_slots_and_may_be_empty():
    full = {"prompt": np.ones((1, 20)), "prompt_mask": np.ones((1, 20), bool)}
    assert without_unused(full)["prompt"].shape == (1, 20)
    assert without_unused(full | {"prompt_mask": np.zeros((1, 20), bool)})["prompt"].shape == (1, 0)
    assert without_unused({"state": np.zeros((1, 3))}).keys() == {"state"}
