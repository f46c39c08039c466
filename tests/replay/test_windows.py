import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.replay.episode import human_segments
from serl_chunk.replay.windows import IndexSet, eligible_starts, imitation_weights
from serl_chunk.types import Outcome, Source

P, U, H = Source.POLICY, Source.HUMAN, Source.HOLD
ALL = np.ones(11, bool)  # ten steps and a final observation


def starts(recent=ALL, **kw):
    return eligible_starts(recent, **{"first": 0, "last": 10, "returned": 4, "keep_terminal": True} | kw)


def test_full_windows_of_a_truncated_episode():
    ticks, excluded = starts(terminated=False)
    np.testing.assert_array_equal(ticks, range(7))
    assert excluded == 0


def test_a_termination_adds_the_shorter_windows_unless_dropped():
    np.testing.assert_array_equal(starts(terminated=True)[0], range(10))
    np.testing.assert_array_equal(starts(terminated=True, keep_terminal=False)[0], range(7))


def test_an_episode_shorter_than_the_critic():
    for terminated, expected in ((True, [0, 1]), (False, [])):
        ticks, _ = eligible_starts(ALL[:3], first=0, last=2, terminated=terminated, returned=4, keep_terminal=True)
        np.testing.assert_array_equal(ticks, expected)


def test_incremental_calls_add_up():
    seen = []
    for last in range(11):
        first = max(0, last - 4)
        seen += starts(first=first, last=last, terminated=False)[0].tolist()
    assert seen == list(range(7))


def test_images_are_needed_where_something_is_bootstrapped():
    recent = ALL.copy()
    recent[[2, 10]] = False
    ticks, excluded = starts(recent, terminated=False)
    np.testing.assert_array_equal(ticks, [0, 1, 3, 4, 5])  # 6 would bootstrap from 10
    assert excluded == 2
    ticks, excluded = starts(recent, terminated=True)
    np.testing.assert_array_equal(ticks, [0, 1, 3, 4, 5, 6, 7, 8, 9])  # nothing is bootstrapped from 10
    assert excluded == 1


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


SOURCE = np.array([P, P, P, P, H, U, H, U, P, Source.RANDOM], np.uint8)


@pytest.mark.parametrize(
    ("bc_on", "demonstration", "outcome", "expected"),
    [
        ("all", False, Outcome.FAILURE, "1111010111"),
        ("all", True, Outcome.FAILURE, "0000000000"),
        ("demo", False, Outcome.SUCCESS, "0000000000"),
        ("demo", True, Outcome.SUCCESS, "1111010111"),
        ("demo", True, Outcome.UNKNOWN, "1111010111"),
        ("demo", True, Outcome.FAILURE, "0000000000"),
        ("demo+interventions", False, Outcome.FAILURE, "0000010100"),
        ("+successes", False, Outcome.UNKNOWN, "0000010100"),
        ("+successes", False, Outcome.SUCCESS, "1110010110"),  # two ticks before the intervention at 5 are left out
        ("interventions", True, Outcome.SUCCESS, "0000010100"),
        ("interventions", False, Outcome.SUCCESS, "0000010100"),
    ],
)
def test_imitation_weights(bc_on, demonstration, outcome, expected):
    weights = imitation_weights(SOURCE, bc_on=bc_on, demonstration=demonstration, outcome=outcome, exclude_ticks=2)
    assert weights.dtype == np.float32
    assert "".join(str(int(w)) for w in weights) == expected


@pytest.mark.parametrize(
    ("bc_on", "demonstration", "outcome", "expected"),
    [
        ("all", False, Outcome.FAILURE, "1111010111"),
        ("all", True, Outcome.FAILURE, "0000000000"),
        ("demo", False, Outcome.SUCCESS, "0000000000"),
        ("demo", True, Outcome.SUCCESS, "1111010111"),
        ("demo+interventions", False, Outcome.SUCCESS, "0000000100"),
        ("demo+interventions", True, Outcome.SUCCESS, "1111010111"),
        ("+successes", False, Outcome.UNKNOWN, "0000000100"),
        ("+successes", False, Outcome.SUCCESS, "1110010110"),  # its part began the intervention, and is its own
        ("interventions", True, Outcome.SUCCESS, "0000000100"),
        ("interventions", False, Outcome.SUCCESS, "0000000100"),
    ],
)
def test_the_policys_part_of_a_human_step_weighs_as_its_own(bc_on, demonstration, outcome, expected):
    """The human had a part of tick 5 and all of tick 7."""
    assert SOURCE[[5, 7]].tolist() == [U, U]
    weights = imitation_weights(
        SOURCE, bc_on=bc_on, demonstration=demonstration, outcome=outcome, exclude_ticks=2,
        shared=np.arange(10) == 5,
    )  # fmt: skip
    assert "".join(str(int(w)) for w in weights) == expected


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
