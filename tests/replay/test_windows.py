import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.replay.episode import human_segments
from serl_chunk.replay.windows import IndexSet
from serl_chunk.types import Source

P, U, H = Source.POLICY, Source.HUMAN, Source.HOLD


def test_segments_go_on_through_idle_ticks_but_do_not_start_on_them():
    np.testing.assert_array_equal(human_segments(np.array([P, H, U, U, H, U, H, P, H, P, U])), [[2, 7], [10, 11]])
    assert human_segments(np.array([P, H, H])).shape == (0, 2)
    assert human_segments(np.array([], np.uint8)).shape == (0, 2)


def test_a_robot_that_waits_for_its_chunk_is_not_a_humans():
    """Decided on tick 5, when the human had let go, and executed from tick 7 on."""
    source = np.array([P, P, U, H, U, H, H, P, P, U, H, P], np.uint8)
    for decided, end in (
        (5, 5),
        (6, 6),
        (7, 7),
        (0, 5),
        (-1, 7),
    ):  # never less than the human's own, and all where it is not known
        decisions = np.array([0, 0, -1, -1, -1, -1, -1, decided, decided, -1, -1, 11], np.int32)
        np.testing.assert_array_equal(human_segments(source, decisions), [[2, end], [9, 11]])
    np.testing.assert_array_equal(human_segments(source), [[2, 7], [9, 11]])


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
