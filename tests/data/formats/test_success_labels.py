"""Labels of states, and episodes cut at successes."""

from __future__ import annotations

import numpy as np
import pytest
from errors import naming
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.data.formats.success_labels import cut_at_successes, label_states
from serl_chunk.types import DataError


@pytest.mark.parametrize(
    ("success", "keep", "expected"),
    [
        ("...", False, [(0, 2, False)]),
        ("..S", False, [(0, 2, True)]),
        (".S.", False, [(0, 1, True)]),  # the last step begins in a success
        (".SS..", False, [(0, 1, True), (3, 4, False)]),
        ("S..S", False, [(1, 3, True)]),
        (".S.S", False, [(0, 1, True), (2, 3, True)]),
        ("SSS", False, []),
        ("S.", False, []),
        ("S", False, []),
        # what leaves a success begins what follows
        (".SSS..S.", True, [(0, 1, True), (1, 2, True), (2, 3, True), (3, 6, True), (6, 7, False)]),
    ],
)
def test_cuts(success: str, keep: bool, expected: list[tuple[int, int, bool]]) -> None:
    assert cut_at_successes(np.array([c == "S" for c in success]), keep_solved=keep) == expected


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.booleans())
def test_every_step_outside_a_success_is_in_one_episode(flags: list[bool], keep: bool) -> None:
    """Which ends at its first success; with `keep` those that begin in a success are too."""
    success = np.array(flags)
    stretches = cut_at_successes(success, keep_solved=keep)
    steps = [t for s in stretches for t in range(s.start, s.stop)]
    assert steps == [t for t in range(len(flags) - 1) if keep or not flags[t]]
    for s in stretches:
        assert not success[s.start + 1 : s.stop].any()
        assert s.success == success[s.stop]
        assert s.success or s.stop == len(flags) - 1


def test_which_states_are_successes_and_what_the_others_lack() -> None:
    def judged(rewards: list[float], masks: list[float] | None = None) -> tuple[list[bool], list[float] | None]:
        out = label_states("f", np.array(rewards, np.float32), None if masks is None else np.array(masks))
        return out.success.tolist(), None if out.missing is None else out.missing.tolist()

    assert judged([-2, -1, 0], [1, 1, 0]) == ([False, False, True], [2, 1, 0])
    assert judged([-2, -1, 0]) == ([False, False, True], [2, 1, 0])
    assert judged([0, 1, 0]) == ([False, True, False], [1, 0, 1])
    assert judged([0, 1, 0], [1, 0, 1]) == ([False, True, False], [1, 0, 1])
    assert judged([0, 0], [1, 1]) == ([False, False], [1, 1])
    assert judged([0, 0], [0, 0]) == ([True, True], [0, 0])
    for shaped in ([0, 0, 0], [0.5, 0.25, 0]):  # masks tell a success from the rest, and nothing tells more
        assert judged(shaped, [1, 0, 1]) == ([False, True, False], None)
    for unclear in ([0, 0], [0.5, 0], [-1, 1]):
        with pytest.raises(DataError, match=naming("f", "rewards", min(unclear), max(unclear), "masks", "env")):
            judged(unclear)
    with pytest.raises(DataError, match=naming("f", "masks", 0, 1, 2)):
        judged([-2, -1, 0], [1, 2, 0])
