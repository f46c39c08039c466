import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.replay.index_sets import IndexSet

CAPACITY = 24
rows = st.lists(st.integers(0, CAPACITY - 1), unique=True, max_size=CAPACITY)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.booleans(), rows), max_size=12))
def test_behaves_like_a_set(calls):
    view, model = IndexSet(CAPACITY), set()
    for add, values in calls:
        array = np.array(values, np.int64)
        (view.add if add else view.discard)(array)
        model = model | set(values) if add else model - set(values)
        assert len(view) == len(model)
        assert sorted(view.rows.tolist()) == sorted(model)
        assert set(np.flatnonzero(view.contains(np.arange(CAPACITY)))) == model


def test_draws_every_member_alike_and_nothing_else():
    view = IndexSet(100)
    view.add(np.arange(0, 100, 2))
    view.discard(np.arange(0, 50))
    drawn = view.draw(np.random.default_rng(0), (100, 250))
    assert drawn.shape == (100, 250)
    members, counts = np.unique(drawn, return_counts=True)
    np.testing.assert_array_equal(members, np.arange(50, 100, 2))
    assert abs(counts - 1000).max() < 6 * 1000**0.5
