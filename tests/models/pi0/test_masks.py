"""What tokens see, where they stand, and what a batch need not compute."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from serl_chunk.models.pi0.masks import attention_mask, positions, suffix_opens


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
