"""Which of the candidates acts: the best, or the first few's best while the critic is not trusted."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from agent_tools import config_of

from serl_chunk.agents.action_selection import best_of_n, is_trusted

VALUES = jnp.array([0.1, 0.4, 0.2, 0.9])


@pytest.mark.parametrize(("trusted", "few", "best"), [(True, 1, 3), (False, 1, 0), (False, 3, 1), (False, 4, 3)])
def test_only_the_first_few_are_compared_while_the_critic_is_not_trusted(trusted, few, best):
    assert int(best_of_n(VALUES, jnp.asarray(trusted), few)) == best


@pytest.mark.parametrize(
    ("variant", "count", "trusted"),
    [
        ("acfql", {"candidates": 4}, False),
        ("acfql", {"candidates": 1}, False),
        ("published", {"actor_num_samples": 4}, True),
        ("published", {"actor_num_samples": 1}, False),
    ],
)
def test_a_pretrained_critic_is_trusted_where_it_compares_as_many_as_later(variant, count, trusted):
    config = config_of(variant, **count)
    assert bool(is_trusted(config, pretrained=True)) == trusted
    assert bool(is_trusted(config, pretrained=False))
