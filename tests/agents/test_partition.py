"""Trees of trained leaves and of the base."""

from __future__ import annotations

import pytest

from serl_chunk.agents.partition import Partition


def test_a_partition_splits_a_tree_and_puts_it_together_again():
    a, b, c = object(), object(), object()
    whole = {"net": {"a": a, "b": b}, "c": c}
    trained, base = Partition(lambda path: path in ("net/a", "c")).split(whole)
    assert (trained, base) == ({"net": {"a": a}, "c": c}, {"net": {"b": b}})
    assert Partition.merge(trained, base) == whole


def test_a_leaf_in_both_trees_is_refused():
    with pytest.raises(ValueError, match="a/b"):
        Partition.merge({"a": {"b": 1}}, {"a": {"b": 2}})
